"""A loss beside what else interrupts a thread: other losses, Prefect's timeouts, other people's signals."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prefect.utilities.timeout import timeout

from agent_checkpoint_prefect import FencedLock, LeaseLostError, current_lease

from .conftest import WATCHDOG_SECONDS, elsewhere, in_thread
from .losing import lose

Where = Callable[..., Any]


def at_home(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in this thread, the main one."""
    return call(*arguments)


@pytest.fixture(params=[at_home, elsewhere], ids=["main thread", "another thread"])
def where(request: pytest.FixtureRequest) -> Where:
    """Calls a function in the main thread, or in another one."""
    call: Where = request.param
    return call


@contextmanager
def heard(number: int) -> Iterator[list[int]]:
    """The signals that came to a handler of somebody else, which is there before and after."""
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)

    before = signal.signal(number, handler)
    try:
        yield came
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def wait_long() -> None:
    """Wait for what never comes, in steps of Python."""
    until = time.monotonic() + WATCHDOG_SECONDS
    while time.monotonic() < until:
        time.sleep(0.001)


def test_two_leases_that_are_lost_at_once_end_both_blocks(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("outer") as outer, lock.lease("inner") as inner:
            for lease in (inner, outer):
                in_thread(lose, lock, lease)
            wait_long()

    with pytest.raises(LeaseLostError) as lost:
        where(run)
    assert lost.value.scope in ("prefect/default/outer", "prefect/default/inner")
    assert lock.list_leases() == []


def test_the_loss_of_an_outer_lease_ends_the_wait_for_an_inner_one(lock: FencedLock, where: Where) -> None:
    taken = elsewhere(lock.acquire, "inner")

    def run() -> None:
        with lock.lease("outer") as outer:
            in_thread(lose, lock, outer)
            with lock.lease("inner"):
                pytest.fail("it was held by another one")

    with pytest.raises(LeaseLostError, match="outer"):
        where(run)
    taken.release()
    assert lock.list_leases() == []


def test_a_thread_can_be_interrupted_again_and_again(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        for _ in range(3):
            with pytest.raises(LeaseLostError, match="orders"), lock.lease("orders") as lease:
                in_thread(lose, lock, lease)
                wait_long()

    where(run)


def test_a_thread_that_starts_others_is_interrupted_and_they_are_not(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            in_thread(lose, lock, lease)
            until = time.monotonic() + WATCHDOG_SECONDS
            while time.monotonic() < until:
                other = threading.Thread(target=time.sleep, args=[0])
                started.append(other)
                other.start()
                time.sleep(0.001)

    for _ in range(5):
        started: list[threading.Thread] = []
        with pytest.raises(LeaseLostError, match="orders"):
            where(run)
        for other in started[:-1]:
            other.join(WATCHDOG_SECONDS)
            assert not other.is_alive()


class Dropped:
    """Runs Python when it is dropped: what is raised there reaches nobody."""

    def __del__(self) -> None:
        spin()


class Finalized:
    """The same by weakref."""

    def __init__(self) -> None:
        weakref.finalize(self, spin)


class Remembered:
    """The same by the set that knows it."""

    def __init__(self) -> None:
        REMEMBERED.add(self)


REMEMBERED: weakref.WeakSet[Remembered] = weakref.WeakSet()


def spin() -> None:
    for _ in range(2_000):
        pass


@pytest.mark.parametrize("kind", [Dropped, Finalized, Remembered])
def test_a_loss_interrupts_no_finaliser_where_it_would_be_lost(
    lock: FencedLock, where: Where, kind: Callable[[], object]
) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            in_thread(lose, lock, lease)
            until = time.monotonic() + WATCHDOG_SECONDS
            while time.monotonic() < until:
                kind()
            pytest.fail("it was not interrupted")

    for _ in range(3):
        with pytest.raises(LeaseLostError, match="orders"):
            where(run)


def test_a_timeout_of_prefect_is_not_taken_for_a_loss(lock: FencedLock, where: Where) -> None:
    def around() -> None:
        with timeout(0.2), lock.lease("orders"):
            wait_long()

    def inside() -> None:
        with lock.lease("orders"), timeout(0.2):
            wait_long()

    for run in (around, inside):
        with pytest.raises(TimeoutError):
            where(run)
        assert lock.inspect("orders") is None
        assert current_lease() is None


def test_a_loss_is_not_taken_for_a_timeout_of_prefect(lock: FencedLock, where: Where) -> None:
    alarm = signal.getsignal(signal.SIGALRM)

    def around() -> None:
        with timeout(WATCHDOG_SECONDS), lock.lease("orders") as lease:
            in_thread(lose, lock, lease)
            wait_long()

    def inside() -> None:
        with lock.lease("orders") as lease, timeout(WATCHDOG_SECONDS):
            in_thread(lose, lock, lease)
            wait_long()

    for run in (around, inside):
        with pytest.raises(LeaseLostError, match="orders"):
            where(run)
    assert signal.getsignal(signal.SIGALRM) is alarm
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_handler_of_before_hears_nothing_of_a_loss(lock: FencedLock) -> None:
    with heard(signal.SIGURG) as came, pytest.raises(LeaseLostError), lock.lease("orders") as lease:
        in_thread(lose, lock, lease)
        time.sleep(WATCHDOG_SECONDS)
    assert came == []


def test_a_body_that_takes_the_signal_for_itself_is_told_at_its_end(lock: FencedLock) -> None:
    with pytest.raises(LeaseLostError), lock.lease("orders") as lease:
        with heard(signal.SIGURG) as came:
            in_thread(lose, lock, lease)
            while not lease.lost:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGURG)
        assert came == [signal.SIGURG]


def test_blocks_that_end_in_another_order_leave_the_handler_of_before(lock: FencedLock) -> None:
    with heard(signal.SIGURG) as came:
        first, second = lock.lease("first"), lock.lease("second")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        signal.raise_signal(signal.SIGURG)
        second.__exit__(None, None, None)
    assert came == [signal.SIGURG]


def test_a_loss_leaves_no_thread_behind(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            in_thread(lose, lock, lease)
            wait_long()

    with pytest.raises(LeaseLostError):
        where(run)
    for thread in threading.enumerate():
        if thread.name == "agent-checkpoint-lost":
            thread.join(WATCHDOG_SECONDS)
            assert not thread.is_alive()
