"""Archiving the audit log's older part while somebody writes: how long it takes, and how long the writer waits.

The peer's figure is the longest wait of the same writer before anything is archived.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks.harness import Plan, Row, Target

EVENTS = 1_000_000
QUICK_EVENTS = 100_000
# Events that are written in one transaction while the log is filled.
AT_ONCE = 20_000
# How long the writer writes alone.
ALONE_SECONDS = 3.0
# Between two writes: somebody who works, and no benchmark of its own.
PAUSE_SECONDS = 0.005
SECONDS = Target("≤", 60)
LONGEST_WAIT = Target("≤", 0.5)


def measure(plan: Plan) -> Iterator[Row]:
    """Seconds, and a writer's longest wait, at each place, at FULL."""
    events = QUICK_EVENTS if plan.quick else EVENTS
    for place, folder in plan.places.items():
        path = folder / "archive.db"
        _fill(path, events)
        alone, took, beside = _archive(path, folder / "archive.jsonl")
        case = f"{events:,} events, {place}"
        nothing = (0.0,)
        yield Row("archive", case, "s", "nothing", (took,), nothing, SECONDS, "ours")
        yield Row("archive", f"{case}, writer's longest wait", "s", "alone", (beside,), (alone,), LONGEST_WAIT, "ours")


def _fill(path: Path, events: int) -> None:
    """Events of the size that leases and checkpoints leave."""
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        store.put_checkpoint("deploy", 1)
        for start in range(0, events, AT_ONCE):
            with store.transaction(component="benchmark", action="benchmark.fill") as part:
                for number in range(start, min(start + AT_ONCE, events)):
                    part.event("benchmark.happened", {"ttl_seconds": 30.0, "slot": 0, "number": number})


def _archive(path: Path, file: Path) -> tuple[float, float, float]:
    """The longest wait alone, the seconds that archiving took, the longest wait beside it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write, args=(path, theirs))
    writer.start()
    try:
        ours.recv()
        time.sleep(ALONE_SECONDS)
        alone = _asked(ours)
        started = time.perf_counter()
        with StateStore(path) as store:
            store.archive_events(datetime.now(timezone.utc), file)
        took = time.perf_counter() - started
        return alone, took, _asked(ours)
    finally:
        ours.send(None)
        writer.join()


def _asked(writer: Connection) -> float:
    """The writer's longest wait since it was asked last."""
    writer.send("how long")
    return float(writer.recv())


def _write(path: Path, asked: Connection) -> None:
    with StateStore(path) as store:
        store.put_checkpoint("beside", 0)
        asked.send("ready")
        longest = 0.0
        while True:
            started = time.perf_counter()
            store.put_checkpoint("beside", 1)
            longest = max(longest, time.perf_counter() - started)
            if asked.poll(PAUSE_SECONDS):
                if asked.recv() is None:
                    return
                asked.send(longest)
                longest = 0.0
