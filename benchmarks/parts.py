"""What the figures are made of: what the disk, SQLite, JSON and the interpreter take by themselves.

Each row is a part beside the whole that it is a part of, so its ratio is a
share. Parts without a whole of ours tell what this machine can do at all.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks.cli import COMMAND
from benchmarks.floor import OWNER, Floor
from benchmarks.growth import DATA
from benchmarks.harness import Figures, Plan, Row, Side, in_turn, process, timed

SCOPE = "release"
WORKFLOW = "deploy-v2"
ROUNDS = 40
PROCESS_ROUNDS = 20
# Calls in a step: a millisecond or more.
CALLS = {"disk": 10, "tmpfs": 40}
# A commit of one operation writes about so much to the log.
PAGE = b"\0" * 4096
# What a checkpoint of some size costs to encode.
BIG = {f"file-{number}": {"lines": number, "state": "reviewed"} for number in range(2_000)}
TTL_SECONDS = 3600

PROCESSES = {
    "python -c pass": "pass",
    "import sqlite3, json": "import sqlite3, json",
    "import argparse, json, sqlite3": "import argparse, json, sqlite3",
    "import agent_checkpoint": "import agent_checkpoint",
}


def measure(plan: Plan) -> Iterator[Row]:
    """Parts of a lease operation at each place, of a checkpoint, and of a command."""
    for place, folder in plan.places.items():
        yield from _operation(plan, place, folder)
    yield from _checkpoint(plan)
    yield from _command(plan)


def _operation(plan: Plan, place: str, folder: Path) -> Iterator[Row]:
    """A heartbeat at FULL, and what of it a bare program would pay as well."""
    path, calls = folder / "parts.db", CALLS[place]
    with StateStore(path) as store, (folder / "parts.log").open("wb", buffering=0) as file:
        store.initialize()
        fence = store.acquire(SCOPE, OWNER, TTL_SECONDS).fence
        with (
            closing(_connect(path)) as reading,
            closing(Floor(_copy(path, "full"), SCOPE, "full")) as full,
            closing(Floor(_copy(path, "normal"), SCOPE, "normal")) as normal,
        ):
            found = _per_call(
                {
                    "a heartbeat": lambda: store.heartbeat(*fence),
                    "fsync of 4 KB": lambda: _synced(file.fileno()),
                    "bare sqlite3, the same rows": full.heartbeat,
                    "bare sqlite3, not synced": normal.heartbeat,
                    "a SELECT": lambda: reading.execute("SELECT * FROM leases").fetchall(),
                },
                calls,
                plan.rounds(ROUNDS),
            )
    yield from _shares(found, "a heartbeat", place)


def _checkpoint(plan: Plan) -> Iterator[Row]:
    """A checkpoint of 400 bytes and one of 100 KB, and what JSON takes of them."""
    folder = next(iter(plan.places.values()))
    with StateStore(folder / "parts-checkpoints.db") as store:
        store.initialize()
        for what, data in (("a checkpoint of 0.4 KB", DATA), ("a checkpoint of 100 KB", BIG)):
            found = _per_call(
                {
                    what: lambda: store.put_checkpoint(WORKFLOW, data),  # noqa: B023 -- called in this turn
                    "json.dumps": lambda: json.dumps(data),  # noqa: B023
                },
                CALLS["disk"],
                plan.rounds(ROUNDS),
            )
            yield from _shares(found, what, next(iter(plan.places)))


def _command(plan: Plan) -> Iterator[Row]:
    """``lease show`` from start to end, and what of it starting Python takes."""
    folder = plan.places["disk"]
    path, bytecode = folder / "parts-command.db", folder / "bytecode"
    with StateStore(path) as store:
        store.initialize()
        store.acquire(SCOPE, OWNER, TTL_SECONDS)
    sides = {"lease show": process((str(COMMAND), "--db", str(path), "lease", "show", SCOPE), bytecode)}
    for name, code in PROCESSES.items():
        sides[name] = process((sys.executable, "-c", code), bytecode)
    yield from _shares(in_turn(sides, plan.rounds(PROCESS_ROUNDS)), "lease show", "disk")


def _per_call(calls: dict[str, Callable[[], object]], times: int, rounds: int) -> dict[str, Figures]:
    sides: dict[str, Side] = {name: timed(partial(_often, call, times)) for name, call in calls.items()}
    return {name: tuple(each / times for each in figures) for name, figures in in_turn(sides, rounds).items()}


def _often(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def _shares(found: dict[str, Figures], whole: str, place: str) -> Iterator[Row]:
    for name, figures in found.items():
        if name != whole:
            yield Row("parts", f"{name}, {place}", "s", whole, figures, found[whole])


def _synced(descriptor: int) -> None:
    os.pwrite(descriptor, PAGE, 0)
    os.fsync(descriptor)


def _copy(path: Path, name: str) -> Path:
    floor = path.with_name(f"parts-{name}.db")
    with StateStore(floor) as store:
        store.initialize()
    with closing(Floor(floor, SCOPE, name)) as first:
        first.acquire()
    return floor


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)
