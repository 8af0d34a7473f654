"""A scope that goes from hand to hand: how much of the time its holders have it.

The peer is the least that it could cost: one process that writes the same rows
with bare sqlite3, before and after the same sleep. It works while it holds the
scope itself, so that the queue stands still meanwhile and goes on in its order.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.context import SpawnContext
from pathlib import Path
from statistics import median
from typing import Any

from agent_checkpoint import StateStore
from benchmarks.floor import Floor
from benchmarks.harness import Plan, Row, Target, interleave

WORKERS = 8
ROUNDS = 6
SLICE_SECONDS = 1.0
# Seconds a hold takes, the share of the ideal to reach, and the longest wait.
HOLDS = (
    (0.005, Target("≥", 0.7), Target("≤", 0.2)),
    (0.05, Target("≥", 0.95), None),
)
FAIR = Target("≥", 0.9)
SCOPE = "release"
TTL_SECONDS = 30
# Longer than a slice and a turn of everybody: whoever waits longer was forgotten.
WAIT_SECONDS = 60
NOBODY = 0

_witness: Witness


@dataclass(frozen=True, slots=True)
class Turn:
    """One hold of a worker, by the clock that all processes share: asked for, granted, at its end."""

    asked: float
    granted: float
    ended: float


class Witness:
    """Memory that all workers share: it sees two holders at once, whatever the store believes."""

    def __init__(self, context: SpawnContext) -> None:
        self._inside: Any = context.RawValue("q", NOBODY)
        self._turns: Any = context.RawValue("q", 0)
        self._over: Any = context.RawValue("b", False)

    @property
    def turns(self) -> int:
        """How many turns are over. Counted without a lock: two holders at once would lose one."""
        return int(self._turns.value)

    def enter(self, number: int) -> None:
        """This worker holds the scope now."""
        self._see(NOBODY)
        self._inside.value = number

    def leave(self, number: int) -> None:
        """It has held it alone."""
        self._see(number)
        self._turns.value += 1
        self._inside.value = NOBODY

    def is_over(self) -> bool:
        """Whether workers are to stop."""
        return bool(self._over.value)

    def end(self) -> None:
        """Let every worker stop after the turn it waits for."""
        self._over.value = True

    def _see(self, expected: int) -> None:
        found = int(self._inside.value)
        if found != expected:
            raise AssertionError(f"two hold the scope: worker {found} is inside, not {expected}")


def measure(plan: Plan) -> Iterator[Row]:
    """Holds a second, fairness and the longest wait at each place, at FULL."""
    for place, folder in plan.places.items():
        for seconds, share, longest in HOLDS:
            yield from _compare(plan, place, folder, seconds, share, longest)


def _compare(
    plan: Plan, place: str, folder: Path, hold_seconds: float, share: Target, longest: Target | None
) -> Iterator[Row]:
    what = f"{hold_seconds * 1e3:g} ms"
    path = folder / f"queue-{what}.db"
    floor_path = folder / f"queue-{what}-floor.db"
    for each in (path, floor_path):
        with StateStore(each) as store:
            store.initialize()
    context = multiprocessing.get_context("spawn")
    witness = Witness(context)
    with (
        ProcessPoolExecutor(WORKERS, context, _inherit, (witness,)) as pool,
        StateStore(path) as store,
        closing(Floor(floor_path, SCOPE, "full")) as floor,
    ):
        conductor = Conductor(store, floor, witness, hold_seconds)
        running = conductor.start(pool, path)
        ours, theirs = interleave(conductor.workers, conductor.ideal, plan.rounds(ROUNDS))
        conductor.stop()
        turns = [each.result() for each in running]
    if witness.turns != sum(map(len, turns)):
        raise AssertionError(f"{sum(map(len, turns))} turns were taken, but {witness.turns} were alone")
    wait = max(conductor.waited(turn) for each in turns for turn in each)
    fairness = min(map(len, turns)) / max(map(len, turns))
    peer = "one process"
    yield Row("queue", f"{what}, {place}", "holds/s", peer, ours, theirs, share)
    yield Row("queue", f"slowest/fastest, {what}, {place}", "", peer, (fairness,), (1.0,), FAIR, "ours")
    # The ideal hands over by writing the same rows.
    bare = 1 / median(theirs) - hold_seconds
    handed = conductor.handed(turn for each in turns for turn in each)
    yield Row("queue", f"hand-off, {what}, {place}", "s", peer, (median(handed),), (bare,))
    others = (WORKERS - 1) / min(theirs)
    yield Row("queue", f"longest wait, {what}, {place}", "s", peer, (wait,), (others,), longest, "ours")


class Conductor:
    """Lets the workers have the scope for a slice of time, then the ideal; it queues for it like everybody."""

    def __init__(self, store: StateStore, floor: Floor, witness: Witness, hold_seconds: float) -> None:
        self._store = store
        self._floor = floor
        self._witness = witness
        self._hold_seconds = hold_seconds
        self._since = 0.0
        self._pauses: list[tuple[float, float]] = []

    def start(self, pool: ProcessPoolExecutor, path: Path) -> list[Future[list[Turn]]]:
        """Start the workers: nobody is served before everybody waits."""
        with self._store.hold(SCOPE, "conductor", TTL_SECONDS):
            started = time.monotonic()
            running = [pool.submit(_work, path, number, self._hold_seconds) for number in range(1, WORKERS + 1)]
            while len(self._store.status().queues) < WORKERS:
                if any(each.done() for each in running) or time.monotonic() > started + WAIT_SECONDS:
                    raise AssertionError("a worker ended before it began")
                time.sleep(0.01)
        self._pause(started)
        return running

    def workers(self) -> float:
        """The holds a second of all workers, for a slice of time, up to the end of a turn."""
        since, turns = self._since, self._witness.turns
        time.sleep(SLICE_SECONDS)
        with self._store.hold(SCOPE, "conductor", TTL_SECONDS, wait_seconds=WAIT_SECONDS):
            started = time.monotonic()
            turns = self._witness.turns - turns
        self._pause(started)
        return turns / (started - since)

    def ideal(self) -> float:
        """The holds a second of the ideal, while the workers wait."""
        turns, floor, hold_seconds = 0, self._floor, self._hold_seconds
        with self._store.hold(SCOPE, "conductor", TTL_SECONDS, wait_seconds=WAIT_SECONDS):
            started = now = time.monotonic()
            while now < started + SLICE_SECONDS:
                floor.acquire()
                time.sleep(hold_seconds)
                floor.release()
                turns += 1
                now = time.monotonic()
        self._pause(started)
        return turns / (now - started)

    def stop(self) -> None:
        """Give every worker a last turn."""
        with self._store.hold(SCOPE, "conductor", TTL_SECONDS, wait_seconds=WAIT_SECONDS):
            started = time.monotonic()
            self._witness.end()
        self._pause(started)

    def waited(self, turn: Turn) -> float:
        """How long a worker waited for others like it."""
        pauses = (max(0.0, min(end, turn.granted) - max(start, turn.asked)) for start, end in self._pauses)
        return turn.granted - turn.asked - sum(pauses)

    def handed(self, turns: Iterable[Turn]) -> list[float]:
        """How long the scope was nobody's between two turns of the workers, the end of a pause left out."""
        ordered = sorted(turns, key=lambda turn: turn.granted)
        between = ((before.ended, after.granted) for before, after in pairwise(ordered))
        return [
            granted - ended
            for ended, granted in between
            if not any(start < granted and end > ended for start, end in self._pauses)
        ]

    def _pause(self, started: float) -> None:
        self._since = time.monotonic()
        self._pauses.append((started, self._since))


def _inherit(witness: Witness) -> None:
    global _witness
    _witness = witness


def _work(path: Path, number: int, hold_seconds: float) -> list[Turn]:
    """Hold the scope again and again."""
    turns = []
    with StateStore(path) as store:
        while not _witness.is_over():
            asked = time.monotonic()
            with store.hold(SCOPE, f"worker-{number}", TTL_SECONDS, wait_seconds=WAIT_SECONDS):
                granted = time.monotonic()
                _witness.enter(number)
                time.sleep(hold_seconds)
                _witness.leave(number)
                ended = time.monotonic()
            turns.append(Turn(asked, granted, ended))
    return turns
