"""Many writers at once: how fair the gate is, and what SQLite's own busy handler does.

Each writer is a process that extends a lease of its own as fast as it can, so
nobody refuses anybody: all waiting is for the write lock. The peer writes the
same rows with a plain busy timeout.
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

from agent_checkpoint import StateStore, StorageBusyError
from benchmarks.floor import OWNER, Floor
from benchmarks.harness import Plan, Row, Target

WRITERS = 8
ROUNDS = 3
SECONDS = 8.0
QUICK_SECONDS = 2.0
BUSY_TIMEOUT_SECONDS = 10.0
# Longer than any run: no lease may expire while its writer waits.
TTL_SECONDS = 3600
# How long writers wait for each other, so that one that died ends the run.
START_SECONDS = 60.0

Heartbeats = Callable[[Path, int, float], tuple[int, float]]

_everybody: Barrier


@dataclass(frozen=True, slots=True)
class Round:
    """What the writers of one side did: operations a second, longest wait in seconds, slowest/fastest."""

    rate: float
    longest: float
    fairness: float


def measure(plan: Plan) -> Iterator[Row]:
    """Rate, longest wait and fairness at each place, at FULL."""
    seconds = QUICK_SECONDS if plan.quick else SECONDS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WRITERS, context, _inherit, (context.Barrier(WRITERS),)) as pool:
        for place, folder in plan.places.items():
            ours, theirs = [], []
            for number in range(ROUNDS):
                ours.append(_round(pool, _ours, folder / f"writers-{number}.db", seconds))
                theirs.append(_round(pool, _floor, folder / f"writers-{number}-floor.db", seconds))
            yield from _rows(place, ours, theirs)


def _rows(place: str, ours: list[Round], theirs: list[Round]) -> Iterator[Row]:
    def figures(get: Callable[[Round], float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return tuple(map(get, ours)), tuple(map(get, theirs))

    peer = "busy_timeout"
    waits = figures(lambda each: each.longest)
    shares = figures(lambda each: each.fairness)
    yield Row("writers", f"rate, {place}", "operations/s", peer, *figures(lambda each: each.rate))
    yield Row("writers", f"longest wait, {place}", "s", peer, *waits, Target("≤", 0.5), "ours")
    yield Row("writers", f"wait against peer, {place}", "s", peer, *waits, Target("≤", 0.1))
    yield Row("writers", f"slowest/fastest, {place}", "", peer, *shares, Target("≥", 0.5), "ours")


def _round(pool: ProcessPoolExecutor, heartbeats: Heartbeats, path: Path, seconds: float) -> Round:
    with StateStore(path) as store:
        store.initialize()
    running = [pool.submit(heartbeats, path, number, seconds) for number in range(WRITERS)]
    done, longest = zip(*(each.result() for each in running), strict=True)
    return Round(sum(done) / seconds, max(longest), min(done) / max(done))


def _inherit(everybody: Barrier) -> None:
    global _everybody
    _everybody = everybody


def _ours(path: Path, number: int, seconds: float) -> tuple[int, float]:
    with StateStore(path, busy_timeout_seconds=BUSY_TIMEOUT_SECONDS) as store:
        fence = store.acquire(f"scope-{number}", OWNER, TTL_SECONDS).fence
        return _as_fast_as_it_can(lambda: store.heartbeat(*fence), seconds)


def _floor(path: Path, number: int, seconds: float) -> tuple[int, float]:
    with closing(Floor(path, f"scope-{number}", "full", BUSY_TIMEOUT_SECONDS)) as floor:
        floor.acquire()
        return _as_fast_as_it_can(floor.heartbeat, seconds)


def _as_fast_as_it_can(operation: Callable[[], object], seconds: float) -> tuple[int, float]:
    """How many operations were done in this time, and the longest that one of them took."""
    done, longest = 0, 0.0
    _everybody.wait(START_SECONDS)
    now = time.perf_counter()
    end = now + seconds
    while now < end:
        started = now
        try:
            operation()
            done += 1
        except StorageBusyError:
            pass  # a wait for nothing: it counts as a wait
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
        now = time.perf_counter()
        longest = max(longest, now - started)
    return done, longest
