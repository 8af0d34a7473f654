"""Our LangGraph saver beside LangGraph's own: a thread that grows, and what a lease adds to a run.

Ours always holds the thread's lease, is fenced, and leaves an audit event with
each write. All savers get the same steps in turn, each in a database of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from langchain_core.messages import HumanMessage

from agent_checkpoint_langgraph import AgentCheckpointSaver
from benchmarks import langgraph_graphs, langgraph_postgres, langgraph_sides
from benchmarks.harness import Curve, Finding, Note, Plan, Row, Side, Target, in_turn, interleave, shuffled, timed
from benchmarks.langgraph_sides import (
    TASK_PATH,
    THREAD,
    Awaited,
    Driven,
    Step,
    growing,
    held,
    human_message,
    plain_message,
)

MB = 1e6
SIZE = "size"
# What a growing thread is to reach: its bytes, and ratios to LangGraph's savers on SQLite.
TARGETS = {
    (SIZE, 200): Target("≤", 1.5 * MB),
    (SIZE, 1_000): Target("≤", 7.5 * MB),
    ("put", 200): Target("≤", 1.0),
    ("put", 1_000): Target("≤", 0.75),
    ("get_tuple", 200): Target("≤", 1.2),
    ("get_tuple", 1_000): Target("≤", 1.2),
    ("list(limit=10)", 200): Target("≤", 1.2),
    ("list(limit=10)", 1_000): Target("≤", 1.2),
    ("list(filter)", 1_000): Target("≤", 0.05),
}
WRITES_TARGET = Target("≥", 6.0)
CHECK_TARGET = Target("≤", 20e-6)

# Steps of a growing thread, and how many of them are grown.
LENGTHS = {200: 3, 1_000: 1}
QUICK_LENGTHS = {40: 1}
# The end of a thread, whose puts are shown on their own.
LAST = 20
# How often each read is done, and how often a database is opened anew and read.
GETS = 20
LISTS = 5
OPENINGS = 5
# Points of the curves.
SIZES = 40
POINTS = 40

COROUTINES = 50
# Writes of a coroutine in a round.
WRITES = 4
BURSTS = 20
CHECKS = 300
CHECK_ROUNDS = 20

OURS, OURS_AWAITED = "ours", "ours, awaited"
SQLITE, ASYNC_SQLITE, IN_MEMORY, POSTGRES = "SqliteSaver", "AsyncSqliteSaver", "InMemorySaver", "PostgresSaver"
# Who takes turns: ours, and its peers. A server's own work would disturb the others.
GROUPS = ((OURS, SQLITE, IN_MEMORY), (OURS_AWAITED, ASYNC_SQLITE), (OURS, POSTGRES))
DICTS_GROUP = (OURS, SQLITE)
# Whom the targets are about.
STOCK = (SQLITE, ASYNC_SQLITE)

Measured = dict[tuple[str, str], float]
"""A figure for each (what, saver)."""


@dataclass(slots=True)
class Grown:
    """One saver on one thread: the seconds of each put, and the bytes after some of the steps."""

    put: list[float] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=dict)


Opener = Callable[[Path], AbstractContextManager[Driven]]
Openers = Mapping[str, Opener]
OPENERS: Openers = {
    OURS: langgraph_sides.ours,
    SQLITE: langgraph_sides.sqlite,
    OURS_AWAITED: langgraph_sides.async_ours,
    ASYNC_SQLITE: langgraph_sides.async_sqlite,
    IN_MEMORY: langgraph_sides.in_memory,
}

READS: dict[str, tuple[Callable[[Driven], object], int]] = {
    "get_tuple": (methodcaller("get"), GETS),
    "list(limit=10)": (methodcaller("list", limit=10), LISTS),
    "list(filter)": (methodcaller("list", filter={"step": 5}), LISTS),
}


def measure(plan: Plan) -> Iterator[Finding]:
    """All of it at each place, at FULL, with the curves of the longest thread."""
    if missing := langgraph_postgres.missing():
        yield Note("langgraph", f"{POSTGRES} {missing}")
    for place, folder in plan.places.items():
        lengths = QUICK_LENGTHS if plan.quick else LENGTHS
        for steps, rounds in lengths.items():
            for group in GROUPS:
                # A server has a place of its own.
                if POSTGRES not in group or (place == "disk" and not missing):
                    threads = _threads(folder, group, human_message, steps, rounds)
                    figures = [figures for figures, _ in threads]
                    yield from _rows(f"{steps:,} messages, {place}", steps, group, figures)
                    if steps == max(lengths):
                        yield from _curves(place, group, threads[-1][1])
            threads = _threads(folder, DICTS_GROUP, plain_message, steps, rounds)
            yield from _rows(f"{steps:,} dicts, {place}", steps, DICTS_GROUP, [figures for figures, _ in threads])
        yield _bursts(plan, place, folder)
        yield from _checks(plan, place, folder)
        yield from langgraph_graphs.measure(plan, place, folder)


def _threads(
    folder: Path, group: tuple[str, ...], message: Callable[[int], Any], steps: int, rounds: int
) -> list[tuple[Measured, dict[str, Grown]]]:
    """What so many threads took with each saver of a group, one after the other."""
    with ExitStack() as stack:
        openers = OPENERS
        if POSTGRES in group:
            address = stack.enter_context(langgraph_postgres.server())
            openers = {**OPENERS, POSTGRES: partial(langgraph_postgres.postgres, address)}
        some = {name: openers[name] for name in group}
        return [_grown(folder, some, message, steps) for _ in range(rounds)]


def _curves(place: str, group: tuple[str, ...], grown: Mapping[str, Grown]) -> Iterator[Curve]:
    """Size and put time of each saver; ours is drawn once."""
    for name in group:
        if name == OURS and group != GROUPS[0]:
            continue
        put, size = grown[name].put, grown[name].size
        about = (place, name, "steps")
        if size:
            points = tuple((float(step), size / MB) for step, size in size.items())
            yield Curve("langgraph", "langgraph-size", "A LangGraph thread, 1 KB more a step", *about, "MB", points)
        width = max(1, len(put) // POINTS)
        starts = range(0, len(put) - width + 1, width)
        points = tuple((start + width / 2, median(put[start : start + width]) * 1e3) for start in starts)
        yield Curve("langgraph", "langgraph-put", "A put, medians", *about, "ms", points)


def _rows(case: str, steps: int, group: tuple[str, ...], threads: list[Measured]) -> Iterator[Row]:
    ours, *peers = group
    for what, peer in itertools.product(dict.fromkeys(what for what, _ in threads[0]), peers):
        if (what, peer) not in threads[0]:
            continue
        target = TARGETS.get((what, steps)) if peer in STOCK else None
        yield Row(
            "langgraph",
            f"{what}, {case}",
            "bytes" if what == SIZE else "s",
            peer,
            tuple(thread[what, ours] for thread in threads),
            tuple(thread[what, peer] for thread in threads),
            target,
            "ours" if what == SIZE and target else "ratio",
        )


def _grown(
    folder: Path, openers: Openers, message: Callable[[int], Any], steps: int
) -> tuple[Measured, dict[str, Grown]]:
    """What a thread took with each saver, and how that grew with it."""
    found: Measured = {}
    with TemporaryDirectory(prefix="langgraph-", dir=folder) as fresh:
        paths = {name: Path(fresh, f"{number}.db") for number, name in enumerate(openers)}
        with ExitStack() as stack:
            sides = {name: stack.enter_context(opener(paths[name])) for name, opener in openers.items()}
            curves = _drive(sides, message, steps)
            for name, curve in curves.items():
                found["put", name] = median(curve.put)
                found[f"put, last {LAST}", name] = median(curve.put[-LAST:])
            for what, (read, times) in READS.items():
                calls = {name: timed(partial(read, side)) for name, side in sides.items()}
                found.update(((what, name), median(seconds)) for name, seconds in in_turn(calls, times).items())
            for name, side in sides.items():
                if side.size is not None:
                    curves[name].size[steps] = found[SIZE, name] = side.size()
        stored = {name: path for name, path in paths.items() if path.exists()}
        gets = {name: partial(_first_get, openers[name], path) for name, path in stored.items()}
        for name, seconds in in_turn(gets, OPENINGS).items():
            found["get_tuple, reopened", name] = median(seconds)
        for name, curve in curves.items():
            if name in stored:
                curve.size[steps] = langgraph_sides.files_size(stored[name])
            if curve.size:
                found[SIZE, name] = curve.size[steps]
    return found, curves


def _drive(sides: Mapping[str, Driven], message: Callable[[int], Any], steps: int) -> dict[str, Grown]:
    """Grow a thread in all savers, a step of each in turn."""
    curves = {name: Grown() for name in sides}
    for number, step in enumerate(growing(steps, message)):
        puts: dict[str, Side] = {name: partial(side.put, step) for name, side in sides.items()}
        for name in shuffled(sides, number):
            curves[name].put.append(puts[name]())
        if number % (steps // SIZES) == 0:
            for name, side in sides.items():
                if side.size is not None:
                    curves[name].size[number] = side.size()
    return curves


def _first_get(opener: Opener, path: Path) -> float:
    """The seconds of the first read after a restart."""
    with opener(path) as side:
        side.warm()
        return timed(side.get)()


def _bursts(plan: Plan, place: str, folder: Path) -> Row:
    """Writes a second of many coroutines, as of a step that fans out."""
    with (
        langgraph_sides.async_ours(folder / "bursts.db") as mine,
        langgraph_sides.async_sqlite(folder / "bursts-sqlite.db") as theirs,
    ):
        (step,) = growing(0, human_message)
        for side in (mine, theirs):
            side.put(step)
        seconds = interleave(_burst(mine, step), _burst(theirs, step), plan.rounds(BURSTS))
    rates = [tuple(COROUTINES * WRITES / each for each in figures) for figures in seconds]
    case = f"put_writes × {COROUTINES}, {place}"
    return Row("langgraph", case, "operations/s", ASYNC_SQLITE, rates[0], rates[1], WRITES_TARGET)


def _burst(side: Awaited, step: Step) -> Side:
    config = langgraph_sides.thread_config(THREAD, step.checkpoint["id"])
    # Made beforehand: what is measured is the saver.
    messages = [[human_message(number) for number in range(WRITES)] for _ in range(COROUTINES)]
    numbers = itertools.count()

    async def write(mine: list[HumanMessage]) -> None:
        for message in mine:
            await side.saver.aput_writes(config, [("messages", [message])], f"task-{next(numbers)}", TASK_PATH)

    async def together() -> None:
        await asyncio.gather(*map(write, messages))

    return timed(lambda: side.loop.run_until_complete(together()))


def _checks(plan: Plan, place: str, folder: Path) -> Iterator[Row]:
    """The seconds of a check, against the shortest question that SQLite can be asked."""
    path = folder / "checks.db"
    with (
        AgentCheckpointSaver.from_conn_string(path) as saver,
        held(saver, THREAD) as lease,
        closing(sqlite3.connect(path)) as connection,
    ):
        least = partial(_median, lambda: connection.execute("SELECT 1").fetchone())
        ours, theirs = interleave(partial(_median, lease.check), least, plan.rounds(CHECK_ROUNDS))
    case = f"lease.check(), {place}"
    yield Row("langgraph", case, "s", "SELECT 1", ours, theirs, CHECK_TARGET, "ours")
    yield Row("langgraph", case, "s", "SELECT 1", ours, theirs)


def _median(call: Callable[[], object]) -> float:
    seconds = timed(call)
    return median(seconds() for _ in range(CHECKS))
