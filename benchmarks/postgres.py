"""The store on PostgreSQL, on a server of its own that syncs each commit.

What a lease costs beside the same statements in bare psycopg, what many scopes
gain over one, and our LangGraph saver beside LangGraph's own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING

from agent_checkpoint import StateStore
from agent_checkpoint.ledger.events import RECORD
from agent_checkpoint.ledger.leases import SAVE, STANDING
from benchmarks.floor import OWNER, SUM, TTL_NS
from benchmarks.harness import Figures, Finding, Note, Plan, Row, Target, interleave, shuffled, timed

if TYPE_CHECKING:
    from tests.postgres import Server

    from benchmarks.langgraph_sides import Driven

BENCHMARK = "postgres"
SCOPE = "release"
TTL_SECONDS = 3600

# Acquire and release, so often in a step, so many steps in a round.
CYCLES = 5
STEPS = 4
ROUNDS = 20
LEASE_TARGET = Target("≥", 0.7)

WRITERS = 20
WRITE_ROUNDS = 3
WRITE_SECONDS = 5.0
QUICK_SECONDS = 1.0
START_SECONDS = 120.0
SCOPES_TARGET = Target("≥", 2.0)

# Steps of a growing thread; its puts are judged a part of the thread at a time.
LENGTHS = (200, 1_000)
QUICK_LENGTHS = (40,)
PARTS = 20
OURS, PREPARED, PEER = "ours", "ours, prepared", "PostgresSaver"
# Whole states cost by their length: what is to be reached, is at this one. 1.5 times as fast, a tenth of the size.
JUDGED = 1_000
PUT_TARGET = Target("≤", round(1 / 1.5, 3))
SIZE_TARGET = Target("≤", 0.1)

_everybody: Barrier


def measure(plan: Plan) -> Iterator[Finding]:
    """All of it; nothing where the packages are not installed."""
    try:
        from tests.postgres import Server

        import agent_checkpoint_postgres  # noqa: F401 -- whether it is there
    except ModuleNotFoundError as missing:
        yield Note(BENCHMARK, f"not measured: {missing.name} is not installed (`uv sync` does it)")
        return
    server = Server().start()
    try:
        for prepared in ("off", "on"):
            yield _leases(plan, server.url(f"leases_{prepared}", f"prepared_statements={prepared}"), prepared)
        yield _scopes(plan, server)
        for steps in QUICK_LENGTHS if plan.quick else LENGTHS:
            yield from _savers(server, steps)
    finally:
        server.remove()


# A lease, beside the same statements


class Bare:
    """The statements of a grant and a release, sent by psycopg and nothing else. Nothing may be added to it."""

    def __init__(self, url: str) -> None:
        import psycopg

        from agent_checkpoint_postgres import address, statements
        from agent_checkpoint_postgres.links import PREPARE_AFTER

        place = address.parse(url, 10)
        self._connection = psycopg.connect(
            "",
            **place.parameters,
            autocommit=True,
            prepare_threshold=PREPARE_AFTER if place.prepared else None,
            cursor_factory=psycopg.RawCursor,
        )
        self._cursor = psycopg.RawCursor(self._connection)
        self._begin = statements.begin_write(place.schema, (f"scope:{SCOPE}",), durable=True, patience_ms=10_000)
        self._standing, self._save, self._record = map(statements.numbered, (STANDING, SAVE, RECORD))
        self._token = 0

    def acquire(self) -> None:
        """Write what a grant writes."""
        self._token += 1
        self._operate("live", "lease.acquired", '{"ttl_seconds":60.0,"slot":0}')

    def release(self) -> None:
        """Write what a release writes."""
        self._operate("released", "lease.released", "{}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _operate(self, state: str, kind: str, detail: str) -> None:
        execute, token = self._cursor.execute, self._token
        execute(self._begin)
        while self._cursor.nextset():
            pass
        ((wall, _, transaction),) = self._cursor.fetchall()
        now = wall * 1000
        execute(self._standing, (SCOPE,), binary=True).fetchall()
        row = (SCOPE, 0, OWNER, token, state, TTL_NS, now, now, now + TTL_NS, "postgresql", now, "{}", "")
        execute(self._save, (*row, SUM))
        execute(self._record, (transaction << 16, now, kind, SCOPE, OWNER, token, None, None, detail, SUM))
        execute(b"COMMIT")


def _leases(plan: Plan, url: str, prepared: str) -> Row:
    with StateStore(url) as empty:
        empty.initialize()
    own = url.replace("schema=", "schema=own_")
    with StateStore(own) as store, closing(Bare(url)) as bare:
        store.initialize()
        seconds = interleave(timed(lambda: _ours(store)), timed(lambda: _theirs(bare)), plan.rounds(ROUNDS), STEPS)
    ours, theirs = (tuple(2 * CYCLES / each for each in figures) for figures in seconds)
    case = f"acquire+release, prepared statements {prepared}"
    return Row(BENCHMARK, case, "operations/s", "psycopg", ours, theirs, LEASE_TARGET)


def _ours(store: StateStore) -> None:
    for _ in range(CYCLES):
        store.release(*store.acquire(SCOPE, OWNER).fence)


def _theirs(bare: Bare) -> None:
    for _ in range(CYCLES):
        bare.acquire()
        bare.release()


# Many scopes, beside one


def _scopes(plan: Plan, server: Server) -> Row:
    """Each writer is a process that extends a lease of its own, in a scope of its own or in one that all share."""
    seconds = QUICK_SECONDS if plan.quick else WRITE_SECONDS
    context = multiprocessing.get_context("spawn")
    url = server.url("scopes")
    with StateStore(url) as store:
        store.initialize()
        store.set_limit(SCOPE, WRITERS)
    many: list[float] = []
    one: list[float] = []
    with ProcessPoolExecutor(WRITERS, context, _inherit, (context.Barrier(WRITERS),)) as pool:
        for _ in range(WRITE_ROUNDS):
            for rates, name in ((many, "scope-{}"), (one, SCOPE)):
                running = [pool.submit(_extend, url, name.format(n), f"writer-{n}", seconds) for n in range(WRITERS)]
                rates.append(sum(each.result() for each in running) / seconds)
    case = f"{WRITERS} writers on {WRITERS} scopes"
    return Row(BENCHMARK, case, "operations/s", "on one scope", tuple(many), tuple(one), SCOPES_TARGET)


def _inherit(everybody: Barrier) -> None:
    global _everybody
    _everybody = everybody


def _extend(url: str, scope: str, owner: str, seconds: float) -> int:
    """How often a lease was extended in this time."""
    limit = WRITERS if scope == SCOPE else 1
    with StateStore(url, busy_timeout_seconds=START_SECONDS) as store:
        fence = store.acquire(scope, owner, TTL_SECONDS, limit=limit).fence
        _everybody.wait(START_SECONDS)
        end = time.perf_counter() + seconds
        done = 0
        while time.perf_counter() < end:
            store.heartbeat(*fence)
            done += 1
        store.release(*fence)
        return done


# The saver, beside LangGraph's


def _savers(server: Server, steps: int) -> Iterator[Row]:
    """A thread that grows by a message of 1 KB a step in all of them, a step of each in turn."""
    from benchmarks import langgraph_postgres
    from benchmarks.langgraph_sides import growing, human_message

    peer = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"
    with ExitStack() as stack:
        sides = {
            OURS: stack.enter_context(_saver(server, "off")),
            PREPARED: stack.enter_context(_saver(server, "on")),
            PEER: stack.enter_context(langgraph_postgres.postgres(peer, server.folder)),
        }
        puts: dict[str, list[float]] = {name: [] for name in sides}
        for number, step in enumerate(growing(steps, human_message)):
            for name in shuffled(sides, number):
                puts[name].append(sides[name].put(step))
        sizes = {name: float(side.size()) for name, side in sides.items() if side.size is not None}
    for name in (OURS, PREPARED):
        case = f"put, {steps:,} messages{name.removeprefix(OURS)}"
        target = PUT_TARGET if steps == JUDGED else None
        yield Row(BENCHMARK, case, "s", PEER, _parts(puts[name]), _parts(puts[PEER]), target)
    target = SIZE_TARGET if steps == JUDGED else None
    yield Row(BENCHMARK, f"size, {steps:,} messages", "bytes", PEER, (sizes[OURS],), (sizes[PEER],), target)


def _parts(figures: list[float]) -> Figures:
    size = len(figures) // PARTS
    return tuple(statistics.median(figures[at : at + size]) for at in range(0, size * PARTS, size))


@contextmanager
def _saver(server: Server, prepared: str) -> Iterator[Driven]:
    """Our saver, with a lease held: each write is fenced and leaves an audit event."""
    from agent_checkpoint_langgraph import AgentCheckpointSaver
    from benchmarks.langgraph_postgres import SIZE
    from benchmarks.langgraph_sides import THREAD, Driven, held

    schema = f"saver_{uuid.uuid4().hex}"
    url = server.url(schema, f"prepared_statements={prepared}")
    with AgentCheckpointSaver.from_conn_string(url) as saver, held(saver, THREAD) as lease:
        saver.bind(lease)
        yield Driven(saver, lambda: _size(server, SIZE.replace("%s", f"'{schema}'")))


def _size(server: Server, sql: str) -> int:
    ((size,),) = server.sql(sql)
    return int(str(size))
