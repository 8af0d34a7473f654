"""A backup beside 8 writers: how long it takes, and how long the writers wait.

The peer's figure is the longest wait of the same writers while nobody copies anything.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks.harness import Plan, Row, Target

WRITERS = 8
ROUNDS = 3
SECONDS = 6.0
QUICK_SECONDS = 2.0
# Checkpoints of the store that is copied, each of so many letters: 100 MB in all.
CHECKPOINTS = 10_000
QUICK_CHECKPOINTS = 1_000
LETTERS = 10_000
# How long the writers have been writing when the copy begins.
BEFORE_SECONDS = 0.5
# How long writers wait for each other, so that one that died ends the run.
START_SECONDS = 60.0
LONGEST_WAIT = Target("≤", 0.5)

_everybody: Barrier


def measure(plan: Plan) -> Iterator[Row]:
    """Seconds, and the writers' longest wait, at each place, at FULL."""
    checkpoints = QUICK_CHECKPOINTS if plan.quick else CHECKPOINTS
    seconds = QUICK_SECONDS if plan.quick else SECONDS
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WRITERS, context, _inherit, (context.Barrier(WRITERS),)) as pool:
        for place, folder in plan.places.items():
            path = folder / "backup.db"
            _fill(path, checkpoints)
            yield from _rows(pool, place, path, seconds)


def _rows(pool: ProcessPoolExecutor, place: str, path: Path, seconds: float) -> Iterator[Row]:
    alone, beside, took, copied = [], [], [], []
    for number in range(ROUNDS):
        copy = path.with_name(f"backup-{number}.db")
        alone.append(_longest(pool, path, seconds, lambda: None))
        beside.append(_longest(pool, path, seconds, lambda: took.append(_backup(path, copy))))  # noqa: B023
        copied.append(_cp(copy, copy.with_suffix(".cp")))
        copy.unlink()
    case = f"{path.stat().st_size / 1e6:.0f} MB, {place}"
    yield Row("backup", case, "s", "cp, fsync", tuple(took), tuple(copied))
    waits = tuple(beside), tuple(alone)
    yield Row("backup", f"{case}, longest wait of {WRITERS} writers", "s", "alone", *waits, LONGEST_WAIT, "ours")


def _fill(path: Path, checkpoints: int) -> None:
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        for number in range(checkpoints):
            store.put_checkpoint(f"deploy-{number % 100}", "x" * LETTERS)


def _backup(path: Path, copy: Path) -> float:
    started = time.perf_counter()
    with StateStore(path) as store:
        store.backup(copy)
    return time.perf_counter() - started


def _cp(source: Path, target: Path) -> float:
    """What the disk takes for as many bytes, while nobody writes."""
    started = time.perf_counter()
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    took = time.perf_counter() - started
    target.unlink()
    return took


def _longest(pool: ProcessPoolExecutor, path: Path, seconds: float, beside: Callable[[], object]) -> float:
    """The longest wait of any writer, while something is done beside them."""
    running = [pool.submit(_write, path, number, seconds) for number in range(WRITERS)]
    time.sleep(BEFORE_SECONDS)
    beside()
    return max(each.result() for each in running)


def _inherit(everybody: Barrier) -> None:
    global _everybody
    _everybody = everybody


def _write(path: Path, number: int, seconds: float) -> float:
    """Save and extend a lease for so many seconds; the longest that one call took."""
    longest = 0.0

    def timed(call: Callable[[], object]) -> None:
        nonlocal longest
        started = time.perf_counter()
        call()
        longest = max(longest, time.perf_counter() - started)

    with StateStore(path) as store:
        lease = store.acquire(f"scope-{number}", "writer")
        _everybody.wait(START_SECONDS)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            timed(lambda: store.put_checkpoint(f"work-{number}", {"stage": "tests-passed"}, lease=lease))
            timed(lambda: store.heartbeat(*lease.fence))
        store.release(*lease.fence)
    return longest
