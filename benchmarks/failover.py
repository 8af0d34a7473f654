"""How long after its holder was killed a scope is granted to the next in line.

The peer is what a lease can do that is bound to no process: its holder renews
it while it lives, and its ttl has to run out. That is a second here, about as
short as is sane; ours is 300 s, and does not matter.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks.harness import Figures, Plan, Row, Target, interleave

ROUNDS = 50
TARGET = Target("≤", 0.1)
SCOPE = "release"
OWNER = "worker-a"
TTL_SECONDS = 300
PEER_TTL_SECONDS = 1
# The peer's holder renews its lease after this part of its ttl, as ours does.
BEATS = 3
# The kill comes so long after the waiter has queued up, at random: its looks must not be in step with it.
MOST_WAITED_SECONDS = 0.2
# How long anything may take, so that a process that died ends the run.
PATIENCE_SECONDS = 30.0


def measure(plan: Plan) -> Iterator[Row]:
    """Seconds from the kill to the next grant at each place, at FULL."""
    for place, folder in plan.places.items():
        with ExitStack() as lines:
            bound = lines.enter_context(Line(folder / "failover.db", _hold))
            unbound = lines.enter_context(Line(folder / "failover-unbound.db", _renew))
            ours, theirs = interleave(bound.fail_over, unbound.fail_over, plan.rounds(ROUNDS))
        peer = f"ttl of {PEER_TTL_SECONDS} s"
        yield Row("failover", place, "s", peer, ours, theirs)
        yield Row("failover", f"95th percentile, {place}", "s", peer, (_p95(ours),), (_p95(theirs),), TARGET, "ours")


def _p95(figures: Figures) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]


class Contender:
    """A process that waits for the scope, and has it until it is killed."""

    def __init__(self, path: Path, contend: Callable[[Path, Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._news, teller = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(target=contend, args=(path, teller), daemon=True)
        self._process.start()
        teller.close()

    def granted_at(self) -> float:
        """When it was granted the scope, by the clock that all processes share."""
        if not self._news.poll(PATIENCE_SECONDS):
            raise AssertionError("the scope was not granted")
        return float(self._news.recv())

    def kill(self) -> float:
        """Kill it; when that was."""
        killed_at = time.monotonic()
        self._process.kill()
        return killed_at

    def bury(self) -> None:
        """Let nothing be left of it."""
        self._process.kill()
        self._process.join()
        self._news.close()


class Line:
    """A holder, and a waiter that becomes the holder when that one is killed."""

    def __init__(self, path: Path, contend: Callable[[Path, Connection], None]) -> None:
        self._path = path
        self._contend = contend
        self._random = random.Random(0)

    def __enter__(self) -> Line:
        self._store = StateStore(self._path)
        self._store.initialize()
        self._holder = Contender(self._path, self._contend)
        self._holder.granted_at()
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.bury()
        self._store.close()

    def fail_over(self) -> float:
        """Kill the holder; the seconds until the waiter has the scope."""
        holder, self._holder = self._holder, Contender(self._path, self._contend)
        try:
            self._await_queue()
            time.sleep(self._random.uniform(0, MOST_WAITED_SECONDS))
            killed_at = holder.kill()
            return self._holder.granted_at() - killed_at
        finally:
            holder.bury()

    def _await_queue(self) -> None:
        started = time.monotonic()
        while not self._store.status().queues:
            if time.monotonic() > started + PATIENCE_SECONDS:
                raise AssertionError("nobody waits for the scope")
            time.sleep(0.01)


def _hold(path: Path, news: Connection) -> None:
    with StateStore(path) as store, store.hold(SCOPE, OWNER, TTL_SECONDS, wait_seconds=math.inf):
        news.send(time.monotonic())
        _parent_ends()


def _renew(path: Path, news: Connection) -> None:
    with StateStore(path) as store:
        fence = store.acquire(SCOPE, OWNER, PEER_TTL_SECONDS, wait_seconds=math.inf).fence
        news.send(time.monotonic())
        while not _parent_ends(PEER_TTL_SECONDS / BEATS):
            store.heartbeat(*fence)


def _parent_ends(seconds: float | None = None) -> bool:
    """Wait for the end of the benchmark; whether it came."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(seconds)
    return not parent.is_alive()
