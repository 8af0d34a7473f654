"""Leases that are lost at any moment around the end of their blocks, in real threads: nothing ever lands outside."""

from __future__ import annotations

import random
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseLostError, LeaseStore, current_lease

from .conftest import WATCHDOG_SECONDS, in_thread, wait_until
from .losing import hear

ROUNDS = 30
# A body takes so long at most, and its lease is lost before or after it.
LONGEST_SECONDS = 0.003
# What would come late would come within so long, while the thread runs Python.
AFTERWARDS_SECONDS = 0.002


def spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0)  # or nobody else would get to run within so short a time


def lose_after(seconds: float, leases: list[FencedLease]) -> None:
    spin(seconds)
    for lease in leases:
        hear(lease, "expired")


def one_block(lock: FencedLock, names: list[str], chance: random.Random) -> tuple[bool, Future[None]]:
    """Whether blocks, one in the other, told that they lost their leases; who loses them."""
    body, loss = chance.uniform(0, LONGEST_SECONDS), chance.uniform(0, LONGEST_SECONDS)
    go: Future[list[FencedLease]] = Future()
    losing = in_thread(lambda: lose_after(loss, go.result(WATCHDOG_SECONDS)))
    try:
        with lock.lease(names[0]) as outer:
            if names[1:]:
                with lock.lease(names[1]) as inner:
                    go.set_result([outer, inner])
                    spin(body)
            else:
                go.set_result([outer])
                spin(body)
    except LeaseLostError:
        return True, losing
    return False, losing


def many_blocks(lock: FencedLock, kind: str, nested: bool, seed: int) -> list[bool]:
    """Run them one after the other; what lands outside of one is raised."""
    told, chance = [], random.Random(seed)
    for number in range(ROUNDS):
        names = [f"{kind}-{number}", f"{kind}-inner-{number}"]
        lost, losing = one_block(lock, names if nested else names[:1], chance)
        told.append(lost)
        spin(AFTERWARDS_SECONDS)
        losing.result(WATCHDOG_SECONDS)
        spin(AFTERWARDS_SECONDS)
        assert current_lease() is None
    return told


@pytest.mark.parametrize("nested", [False, True], ids=["one lease", "two at once"])
def test_a_loss_near_the_end_of_a_block_never_lands_outside_of_it(path: Path, nested: bool) -> None:
    lock, handler = FencedLock(store=LeaseStore(path=path, synchronous="normal")), signal.getsignal(signal.SIGURG)
    others = [in_thread(many_blocks, lock, f"thread-{seed}", nested, seed) for seed in range(2)]
    told = [many_blocks(lock, "main", nested, 99), *(each.result(WATCHDOG_SECONDS) for each in others)]

    assert all(any(each) for each in told)
    assert lock.list_leases() == []
    assert signal.getsignal(signal.SIGURG) is handler
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "agent-checkpoint-lost"])
    lock.store.open().close()
