"""Whether a store that has grown for a year is as fast as an empty one, and how that changes on the way.

All stores get the same calls in turn, on scopes drawn from all over the biggest
one, so that what they touch is not always in SQLite's cache.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median

from agent_checkpoint import Lease, StateStore
from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.checkpoints import SAVE as SAVE_CHECKPOINT
from agent_checkpoint.ledger.events import RECORD
from agent_checkpoint.ledger.leases import SAVE as SAVE_LEASE
from benchmarks.floor import DOMAIN, OWNER, TTL_NS
from benchmarks.harness import Curve, Figures, Finding, Plan, Row, Target, in_turn

TARGET = Target("≤", 1.3)
ROUNDS = 10
# Scopes of the big store, each with its workflow: 10^4 scopes make 10^5 checkpoints and 10^6 events.
SCOPES = 10_000
QUICK_SCOPES = 1_000
GRANTS = 10
HEARTBEATS = 7
# Events of a scope: of each grant one at its start, one at its end, and one for its checkpoint.
EVENTS = GRANTS * (HEARTBEATS + 3)
# Between two events: 10^6 of them are a year.
PACE_NS = 30 * 10**9
# Scopes that a round calls on, and how many of them in one step.
DRAWN = 200
AT_ONCE = 10
EVENTS_SHOWN = 50
# Longer than any run.
TTL_SECONDS = 3600
DATA = {"stage": "tests-passed", "branch": "main", "done": ["build", "lint", "unit"], "notes": "all green; " * 20}
STORED = json.dumps(DATA)


def measure(plan: Plan) -> Iterator[Finding]:
    """Seconds a call on stores of every size and on an empty one, at FULL."""
    scopes = QUICK_SCOPES if plan.quick else SCOPES
    drawn = random.Random(scopes).sample(range(scopes), DRAWN)
    sizes = [10**power for power in range(len(str(scopes * EVENTS)))]
    for place, folder in plan.places.items():
        with ExitStack() as stack:
            calls = {0: _calls(stack, folder / "growth-empty.db", drawn)}
            for size in sizes:
                path = folder / f"growth-{size}.db"
                _fill(path, size)
                calls[size] = _calls(stack, path, drawn)
            yield from _compare(plan, place, calls)


def _calls(stack: ExitStack, path: Path, drawn: list[int]) -> Calls:
    store = stack.enter_context(StateStore(path))
    store.initialize()
    return Calls(store, drawn)


def _compare(plan: Plan, place: str, stores: dict[int, Calls]) -> Iterator[Finding]:
    *_, biggest = stores
    for what, call in (
        ("acquire", Calls.acquire),
        ("put", Calls.put),
        ("get", Calls.get),
        (f"events, {EVENTS_SHOWN}", Calls.events),
    ):
        seconds = _seconds_each(stores, call, plan.rounds(ROUNDS))
        yield Row("growth", f"{what}, {place}", "s", "empty", seconds[biggest], seconds[0], TARGET)
        points = tuple((float(size), median(seconds[size]) * 1e3) for size in stores if size)
        yield Curve("growth", "growth", "A call on a store that grows", place, what, "events", "ms", points)


def _seconds_each(stores: dict[int, Calls], call: Callable[[Calls], float], rounds: int) -> dict[int, Figures]:
    """The seconds of a call on each store, round by round; a round calls on all of the drawn scopes."""
    steps = DRAWN // AT_ONCE
    found = in_turn({str(size): partial(call, calls) for size, calls in stores.items()}, rounds * steps)
    return {
        int(size): tuple(sum(each[at : at + steps]) / steps for at in range(0, rounds * steps, steps))
        for size, each in found.items()
    }


class Calls:
    """What is called on one store: each method calls for the next few scopes, and returns the seconds of one call."""

    def __init__(self, store: StateStore, drawn: list[int]) -> None:
        self._store = store
        self._next = itertools.cycle(drawn)

    def acquire(self) -> float:
        """Grant the scopes."""
        leases: list[Lease] = []
        numbers = self._some()
        seconds = _seconds(numbers, lambda number: leases.append(self._grant(number)))
        self._release(leases)
        return seconds

    def put(self) -> float:
        """Save checkpoints of their workflows, each under its scope's lease."""
        numbers = self._some()
        leases = {number: self._grant(number) for number in numbers}
        put = self._store.put_checkpoint
        seconds = _seconds(numbers, lambda number: put(_workflow(number), DATA, lease=leases[number]))
        self._release(leases.values())
        return seconds

    def get(self) -> float:
        """Read the latest checkpoints of their workflows."""
        return _seconds(self._some(), lambda number: self._store.get_checkpoint(_workflow(number)))

    def events(self) -> float:
        """Read the end of the audit log, as often."""
        return _seconds(self._some(), lambda _: self._store.events(EVENTS_SHOWN))

    def _some(self) -> list[int]:
        return list(itertools.islice(self._next, AT_ONCE))

    def _grant(self, number: int) -> Lease:
        return self._store.acquire(_scope(number), OWNER, TTL_SECONDS)

    def _release(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._store.release(*lease.fence)


def _seconds(numbers: list[int], call: Callable[[int], object]) -> float:
    started = time.perf_counter()
    for number in numbers:
        call(number)
    return (time.perf_counter() - started) / len(numbers)


def _scope(number: int) -> str:
    return f"release/service-{number}"


def _workflow(number: int) -> str:
    return f"deploy/service-{number}"


def _fill(path: Path, size: int) -> None:
    """A store with so many events, in which every scope was granted, used and released again and again over a year."""
    scopes = max(1, size // EVENTS)
    with StateStore(path) as store:
        store.initialize()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(SAVE_LEASE, _leases(scopes))
        connection.executemany(SAVE_CHECKPOINT, _checkpoints(scopes))
        connection.executemany(RECORD, itertools.islice(_events(scopes), size))
        connection.execute("COMMIT")


def _grants(scopes: int) -> Iterator[tuple[int, int, int]]:
    """Scope, token and wall time of every grant in the order of time, the last one a moment ago."""
    a_grant_ns = PACE_NS * (HEARTBEATS + 3)
    at = time.time_ns() - a_grant_ns * scopes * GRANTS
    for token in range(1, GRANTS + 1):
        for number in range(scopes):
            yield number, token, at
            at += a_grant_ns


def _leases(scopes: int) -> Iterator[tuple[object, ...]]:
    for number, token, at in _grants(scopes):
        if token == GRANTS:
            yield _summed(
                _scope(number), 0, OWNER, token, "released", TTL_NS, at, at, at + TTL_NS, DOMAIN, at, "{}", ""
            )


def _checkpoints(scopes: int) -> Iterator[tuple[object, ...]]:
    for number, token, at in _grants(scopes):
        facts = _workflow(number), token, len(STORED), at, _scope(number), OWNER, token
        yield *_summed(*facts, sums.of_text(STORED)), STORED


def _events(scopes: int) -> Iterator[tuple[object, ...]]:
    for number, token, at in _grants(scopes):
        fence = _scope(number), OWNER, token
        yield None, *_summed(at, "lease.acquired", *fence, None, None, '{"ttl_seconds":60.0,"slot":0}')
        for beat in range(1, HEARTBEATS + 1):
            yield None, *_summed(at + beat * PACE_NS, "lease.heartbeat", *fence, None, None, "{}")
        at += (HEARTBEATS + 1) * PACE_NS
        yield (
            None,
            *_summed(at, "checkpoint.saved", *fence, _workflow(number), token, f'{{"size_bytes":{len(STORED)}}}'),
        )
        yield None, *_summed(at + PACE_NS, "lease.released", *fence, None, None, "{}")


def _summed(*row: object) -> tuple[object, ...]:
    return (*row, sums.of(row))
