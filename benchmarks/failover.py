"""How long after its holder was killed a scope is granted to the next in line.

The peer is what a lease can do that is bound to no process: its holder renews
it while it lives, and its ttl has to run out. That is a second here, about as
short as is sane; ours is 300 s, and does not matter. Other locks beside it
have the same second, where they have one at all.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks import locks, redis_server
from benchmarks.harness import Figures, Finding, Plan, Row, Target, in_turn

ROUNDS = 50
# Beside a peer, which needs a second or more each time.
PEER_ROUNDS = 20
TARGET = Target("≤", 0.1)
OURS = "ours"
SCOPE = "release"
OWNER = "worker-a"
TTL_SECONDS = 300
PEER_TTL_SECONDS = 1
# The peer's holder renews its lease after this part of its ttl, as ours does.
BEATS = 3
# The kill comes so long after the waiter has asked, at random: its looks must not be in step with it.
LEAST_WAITED_SECONDS = 0.1
MOST_WAITED_SECONDS = 0.3
# How long anything may take, so that a process that died ends the run.
PATIENCE_SECONDS = 30.0


Contend = Callable[[str, Connection], None]


def measure(plan: Plan) -> Iterator[Finding]:
    """Seconds from the kill to the next grant at each place, at FULL; then that of other locks, on disk."""
    ttl = f"ttl of {PEER_TTL_SECONDS} s"
    for place, folder in plan.places.items():
        found = _fail_over(plan, {OURS: (_hold, _store(folder)), ttl: (_renew, _store(folder, "-ttl"))}, PEER_ROUNDS)
        ours, theirs = found.values()
        yield Row("failover", place, "s", ttl, ours, theirs)
        often = _fail_over(plan, {OURS: (_hold, _store(folder, "-often"))}, ROUNDS - PEER_ROUNDS)[OURS]
        p95 = (_p95((*ours, *often)),), (_p95(theirs),)
        yield Row("failover", f"95th percentile, {place}", "s", ttl, *p95, TARGET, "ours")
    yield from locks.absent("failover")
    folder = plan.places["disk"]
    with ExitStack() as servers:
        sides: dict[str, tuple[Contend, str]] = {OURS: (_hold, _store(folder, "-beside"))}
        for name in locks.PEERS:
            if locks.why_absent(name) is None:
                over_redis = name in locks.OVER_REDIS
                where = servers.enter_context(redis_server.server(folder, False)) if over_redis else str(folder)
                sides[name] = (partial(_lock, name), where)
        found = _fail_over(plan, sides, PEER_ROUNDS)
    for name, theirs in found.items():
        if name != OURS:
            yield Row("failover", "beside other locks, disk", "s", name, found[OURS], theirs)


def _store(folder: Path, suffix: str = "") -> str:
    path = folder / f"failover{suffix}.db"
    with StateStore(path) as store:
        store.initialize()
    return str(path)


def _fail_over(plan: Plan, sides: dict[str, tuple[Contend, str]], rounds: int) -> dict[str, Figures]:
    with ExitStack() as lines:
        kills = {name: lines.enter_context(Line(where, contend)).fail_over for name, (contend, where) in sides.items()}
        return in_turn(kills, plan.rounds(rounds))


def _p95(figures: Figures) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]


class Contender:
    """A process that waits for the scope, and has it until it is killed."""

    def __init__(self, where: str, contend: Contend) -> None:
        context = multiprocessing.get_context("spawn")
        self._news, teller = context.Pipe(duplex=False)
        self._process: SpawnProcess = context.Process(target=contend, args=(where, teller), daemon=True)
        self._process.start()
        teller.close()

    def asks(self) -> None:
        """Wait until it is about to ask for the scope."""
        self.granted_at()

    def granted_at(self) -> float:
        """When it was granted the scope, by the clock that all processes share."""
        if not self._news.poll(PATIENCE_SECONDS):
            raise AssertionError("nothing was heard of who asked for the scope")
        return float(self._news.recv())

    def kill(self) -> float:
        """Kill it, and let nothing be left that could look alive; when that was."""
        killed_at = time.monotonic()
        self._process.kill()
        self._process.join()
        return killed_at

    def bury(self) -> None:
        """Let nothing be left of it."""
        self._process.kill()
        self._process.join()
        self._news.close()


class Line:
    """A holder, and a waiter that becomes the holder when that one is killed."""

    def __init__(self, where: str, contend: Contend) -> None:
        self._where = where
        self._contend = contend
        self._random = random.Random(0)

    def __enter__(self) -> Line:
        self._holder = Contender(self._where, self._contend)
        self._holder.asks()
        self._holder.granted_at()
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.bury()

    def fail_over(self) -> float:
        """Kill the holder; the seconds until the waiter has the scope."""
        holder, self._holder = self._holder, Contender(self._where, self._contend)
        try:
            self._holder.asks()
            time.sleep(self._random.uniform(LEAST_WAITED_SECONDS, MOST_WAITED_SECONDS))
            killed_at = holder.kill()
            return self._holder.granted_at() - killed_at
        finally:
            holder.bury()


def _hold(path: str, news: Connection) -> None:
    with StateStore(path) as store:
        news.send(time.monotonic())
        with store.hold(SCOPE, OWNER, TTL_SECONDS, wait_seconds=math.inf):
            news.send(time.monotonic())
            _parent_ends()


def _renew(path: str, news: Connection) -> None:
    with StateStore(path) as store:
        news.send(time.monotonic())
        fence = store.acquire(SCOPE, OWNER, PEER_TTL_SECONDS, wait_seconds=math.inf).fence
        news.send(time.monotonic())
        while not _parent_ends(PEER_TTL_SECONDS / BEATS):
            store.heartbeat(*fence)


def _lock(name: str, where: str, news: Connection) -> None:
    lock = locks.make(name, where, PEER_TTL_SECONDS)
    news.send(time.monotonic())
    lock.acquire()
    news.send(time.monotonic())
    while not _parent_ends(PEER_TTL_SECONDS / BEATS):
        if lock.extend is not None:
            lock.extend()


def _parent_ends(seconds: float | None = None) -> bool:
    """Wait for the end of the benchmark; whether it came."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join(seconds)
    return not parent.is_alive()
