"""What it costs to hold leases, and to wait for one: CPU time, and lines in the audit log.

The peer does the same by hand: it renews each lease by a call of its own, and
asks again and again for what it waits for. All of them run at the same time,
each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from agent_checkpoint import LeaseHeldError, StateStore, WaitTimeoutError, heart
from benchmarks.harness import Plan, Row, Target

LEASES = 100
TTL_SECONDS = 30.0
# By hand a lease is renewed after this part of its ttl, as ours is.
BEATS = 3
# A minute, and the heartbeat after it, which puts the others on record.
SECONDS = 65.0
# With --quick holders live so many times faster: the same happens in less time.
HASTE = 10
# By hand a waiter asks as often as ours looks at most.
TRY_SECONDS = 0.05
SHARE = Target("≤", 0.02)
EVENTS = Target("≤", LEASES)
OWNER = "worker-a"
LONG_JOB = "long-job"
# Longer than any run.
LONG_SECONDS = 3600
# More events than anybody writes here.
ALL_EVENTS = 100_000


@dataclass(frozen=True, slots=True)
class Cost:
    """What leases cost in ``SECONDS``, or what they would: CPU seconds, and audit events."""

    cpu: float
    events: int = 0


def measure(plan: Plan) -> Iterator[Row]:
    """Shares of a core, and events, at each place, at FULL; all places at the same time."""
    haste = HASTE if plan.quick else 1
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        workers = 4 * len(plan.places)
        pool = stack.enter_context(ProcessPoolExecutor(workers, context, _hurry, (haste,)))
        running = {place: _start(stack, pool, folder, haste) for place, folder in plan.places.items()}
        for place, costs in running.items():
            yield from _rows(place, *(each.result() for each in costs))


def _start(stack: ExitStack, pool: ProcessPoolExecutor, folder: Path, haste: int) -> list[Future[Cost]]:
    path, by_hand = folder / "holding.db", folder / "holding-by-hand.db"
    for each in (path, by_hand):
        store = stack.enter_context(StateStore(each))
        store.initialize()
        store.acquire(LONG_JOB, "conductor", LONG_SECONDS)
    tasks = ((_hold, path), (_renew, by_hand), (_wait, path), (_try, by_hand))
    return [pool.submit(task, each, haste) for task, each in tasks]


def _rows(place: str, held: Cost, renewed: Cost, waited: Cost, tried: Cost) -> Iterator[Row]:
    for what, ours, theirs in ((f"{LEASES} leases", held, renewed), ("a waiter", waited, tried)):
        shares = (ours.cpu / SECONDS,), (theirs.cpu / SECONDS,)
        yield Row("holding", f"{what}, {place}", "of a core", "by hand", *shares, SHARE, "ours")
    events = (float(held.events),), (float(renewed.events),)
    yield Row("holding", f"events a minute, {place}", "events", "by hand", *events, EVENTS, "ours")


def _hurry(haste: int) -> None:
    heart.MINUTE_NS //= haste


def _hold(path: Path, haste: int) -> Cost:
    with StateStore(path) as store, ExitStack() as leases:
        for number in range(LEASES):
            leases.enter_context(store.hold(f"scope-{number}", OWNER, TTL_SECONDS / haste))
        return _cost(store, lambda: time.sleep(SECONDS / haste))


def _renew(path: Path, haste: int) -> Cost:
    with StateStore(path) as store:
        granted = [store.acquire(f"scope-{number}", OWNER, TTL_SECONDS / haste) for number in range(LEASES)]

        def renew() -> None:
            end = time.monotonic() + SECONDS / haste
            while (now := time.monotonic()) < end:
                time.sleep(min(TTL_SECONDS / haste / BEATS, end - now))
                for lease in granted:
                    store.heartbeat(*lease.fence)

        return _cost(store, renew)


def _wait(path: Path, haste: int) -> Cost:
    def wait() -> None:
        with suppress(WaitTimeoutError):
            store.acquire(LONG_JOB, OWNER, wait_seconds=SECONDS / haste)

    with StateStore(path) as store:
        return Cost(_cpu(wait) * haste)


def _try(path: Path, haste: int) -> Cost:
    def ask() -> None:
        end = time.monotonic() + SECONDS / haste
        while time.monotonic() < end:
            with suppress(LeaseHeldError):
                store.acquire(LONG_JOB, OWNER)
            time.sleep(TRY_SECONDS)

    with StateStore(path) as store:
        return Cost(_cpu(ask) * haste)


def _cost(store: StateStore, work: Callable[[], object]) -> Cost:
    cursor = store.events(1)[-1].cursor
    cpu = _cpu(work)
    events = store.events(ALL_EVENTS, after=cursor)
    return Cost(cpu, len([event for event in events if event.owner == OWNER]))


def _cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
