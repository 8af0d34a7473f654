"""What it costs to have an action done once: *begun* before it and *done* after it, each a commit of its own.

The floor writes the same rows by hand: per step BEGIN IMMEDIATE, the lease, the
effect, one upsert, one event INSERT, COMMIT. ``once`` as a process has beside
it the least that a Python command needs, followed by the same child.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from agent_checkpoint import Lease, StateStore
from agent_checkpoint.ledger.effects import FIND, SAVE
from agent_checkpoint.ledger.events import RECORD
from agent_checkpoint.ledger.leases import OF_SCOPE
from benchmarks.cli import COMMAND, LEAST
from benchmarks.floor import OWNER, SUM
from benchmarks.harness import Plan, Row, interleave, process, timed

SCOPE = "release"
# Longer than any run.
TTL_SECONDS = 3600
ROUNDS = 30
STEPS = 10
# Effects in a step: a few milliseconds at either place.
EFFECTS = {"disk": 5, "tmpfs": 10}
PROCESS_ROUNDS = 15
REQUEST = {"order": 42, "amount": "12.50"}
RESULT = {"refund": "re_42"}
# As long as what ours stores.
PROCESS = '{"pid":12345,"started":1234567,"boot":"b7a1c3d5-0000-4000-8000-00005eedf100","pid_ns":1,"time_ns":1}'
DIGEST = "b" * 64

Level = Literal["full", "normal"]


class Floor:
    """An effect kept by hand in a store's own tables. Nothing may be added to it."""

    def __init__(self, path: Path, synchronous: Level) -> None:
        self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)
        self._connection.execute(f"PRAGMA synchronous={synchronous}")

    def act(self, key: str, token: int) -> None:
        """Begin, and be done."""
        begun_at = time.time_ns()
        started = (key, SCOPE, OWNER, token, "begun", DIGEST, None, begun_at, None, 0, PROCESS)
        self._write(started, "effect.begun", json.dumps({"key": key, "request_digest": DIGEST}), begun_at)
        now = time.time_ns()
        ended = (key, SCOPE, OWNER, token, "done", DIGEST, json.dumps(RESULT), begun_at, now, 0, PROCESS)
        self._write(ended, "effect.done", json.dumps({"key": key}), now)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _write(self, row: tuple[object, ...], kind: str, detail: str, now: int) -> None:
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            execute(OF_SCOPE, (SCOPE,)).fetchone()
            execute(FIND, (row[0],)).fetchone()
            execute(SAVE, (*row[:6], SUM, *row[7:], SUM, row[6]))
            execute(RECORD, (None, now, kind, *row[1:4], None, None, detail, SUM))
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise


def measure(plan: Plan) -> Iterator[Row]:
    """Effects a second at each place, with and without a sync at every commit; then ``once`` as a process."""
    for place, folder in plan.places.items():
        for synchronous in ("full", "normal"):
            yield _compare(plan, place, folder, synchronous)
    yield from _once(plan)


def _compare(plan: Plan, place: str, folder: Path, synchronous: Level) -> Row:
    path, floor_path = folder / f"effects-{synchronous}.db", folder / f"effects-{synchronous}-floor.db"
    with StateStore(floor_path) as empty:
        empty.initialize()
        empty.acquire(SCOPE, OWNER, TTL_SECONDS)
    numbers = itertools.count()
    count = EFFECTS[place]
    with StateStore(path, synchronous=synchronous) as store, closing(Floor(floor_path, synchronous)) as floor:
        store.initialize()
        lease = store.acquire(SCOPE, OWNER, TTL_SECONDS)

        def theirs() -> None:
            for _ in range(count):
                floor.act(f"refund-{next(numbers)}", lease.token)

        figures = interleave(
            timed(lambda: _act(store, lease, count, numbers)), timed(theirs), plan.rounds(ROUNDS), plan.steps(STEPS)
        )
    rates = [tuple(count / seconds for seconds in each) for each in figures]
    return Row("effects", f"begun+done, {synchronous.upper()}, {place}", "operations/s", "floor", rates[0], rates[1])


def _act(store: StateStore, lease: Lease, count: int, numbers: Iterator[int]) -> None:
    for _ in range(count):
        with store.effect(f"refund-{next(numbers)}", lease=lease, request=REQUEST) as effect:
            effect.done(RESULT)


def _once(plan: Plan) -> Iterator[Row]:
    folder = plan.places["disk"]
    path, bytecode = folder / "effects-once.db", folder / "bytecode"
    with StateStore(path) as store:
        store.initialize()
    numbers = itertools.count()
    once = (str(COMMAND), "--db", str(path), "once")
    least, child = process((sys.executable, "-c", LEAST), bytecode), process(("true",), bytecode)

    def fresh() -> float:
        return process((*once, f"key-{next(numbers)}", "--", "true"), bytecode)()

    def both() -> float:
        return least() + child()

    rounds, peer = plan.rounds(PROCESS_ROUNDS), "bare imports, child"
    yield Row("effects", "once KEY -- true, FULL, disk", "s", peer, *interleave(fresh, both, rounds))
    again = process((*once, "key-0", "--", "true"), bytecode)
    yield Row("effects", "once, done already, disk", "s", "bare imports", *interleave(again, least, rounds))
