"""The port on PostgreSQL: what must be known of a server before it is used, and its parts."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import psycopg

from agent_checkpoint.clock import Clock
from agent_checkpoint.database import ORDINARY, Database, Terms
from agent_checkpoint.errors import InvalidInputError, schema_version_error
from agent_checkpoint.process import ProcessTable
from agent_checkpoint.records import Moment
from agent_checkpoint_postgres import schema, statements
from agent_checkpoint_postgres.address import parse
from agent_checkpoint_postgres.links import Links
from agent_checkpoint_postgres.listening import Listener
from agent_checkpoint_postgres.transactions import PostgresRead, PostgresTransaction, begun
from agent_checkpoint_postgres.translate import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from threading import Condition
    from typing import NoReturn

    from agent_checkpoint.database import Bell, Parameters, Row, Transaction
    from agent_checkpoint.records import Check
    from agent_checkpoint_postgres.links import Link

MIGRATIONS = Path(__file__).parent / "migrations"
# What Moment calls the clock that leases are judged by here: the server's.
SERVER = "postgresql"
# The holder's clock counts while its machine sleeps, a wait does not: so it waits in slices.
SLICE_NS = 1_000_000_000


class BootClock(Clock):
    """This machine's clock with the time in suspend: the server's time has gone on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        if hasattr(time, "CLOCK_BOOTTIME"):
            self.ticks_ns = _boot_ns
            self.wait = _wait


def _boot_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _wait(condition: Condition, until: int) -> bool:
    while (left := until - _boot_ns()) > 0:
        if condition.wait(min(left, SLICE_NS) / 1e9):
            return True
    return False


class PostgresDatabase(Database):
    """One schema of one PostgreSQL database."""

    dialect = "postgresql"
    knows_processes = False
    outlived = True

    def __init__(self, url: str, *, busy_timeout_seconds: float, synchronous: str, clock: Clock) -> None:
        address = parse(url, busy_timeout_seconds)
        self.name = address.shown
        self.address = address.url
        self.schema = address.schema
        self.busy_seconds = self.patience_seconds = busy_timeout_seconds
        self.synchronous = synchronous
        self.clock = clock if clock.by_hand else BootClock()
        self.core_migrations = {self.dialect: [str(path) for path in MIGRATIONS.glob("*.sql")]}
        self._processes = ProcessTable(self.clock.domain)
        self.links = Links(address, busy_timeout_seconds)
        self.writers: set[tuple[int, int]] = set()
        """The processes and threads that are inside a transaction; a call from there would wait for itself."""
        self.read_message = statements.begin_read(self.schema)
        self._version = len(self.core_migrations[self.dialect])
        self._listener = Listener(self.links) if address.listening else None

    def create(self) -> None:
        schema.create(self)

    def transaction(self, locks: Sequence[str], terms: Terms = ORDINARY) -> PostgresTransaction:
        return PostgresTransaction(self, locks, terms)

    def read(self) -> PostgresRead:
        return PostgresRead(self)

    def glance(self, sql: str, parameters: Parameters = ()) -> tuple[list[Row], Moment]:
        until = monotonic() + self.busy_seconds
        link, (rows, ((wall,),)) = begun(
            self, until, False, lambda link: link.tables(statements.glance(self.schema, sql, parameters, link))
        )
        self.links.give_back(link)
        return rows, self.moment(wall)

    def moment(self, wall_us: int) -> Moment:
        """The time as leases are judged by it: the server's, unless a test turns it by hand."""
        if self.clock.by_hand:
            return Moment(self.clock.wall_ns(), self.clock.ticks_ns(), self.clock.domain, False)
        wall_ns = wall_us * 1000
        return Moment(wall_ns, wall_ns, SERVER, False)

    def stamp(self) -> object:
        return object()

    def bell(self) -> Bell | None:
        if self.clock.by_hand or self._listener is None:
            return None
        return self._listener.bell()

    def identify(self, pid: int | None = None, **more: object) -> str:
        return self._processes.identify(pid, host=socket.gethostname(), **more)

    def alive(self, process: str) -> bool | None:  # noqa: ARG002
        return None  # a copied machine has the same ids: nothing of a process proves anything here

    def copy_to(self, path: str) -> int:  # noqa: ARG002
        _refuse_copies()

    def opened_copy(self, path: str) -> AbstractContextManager[Callable[[Transaction], None]]:  # noqa: ARG002
        _refuse_copies()

    def shrink(self) -> int:
        return 0  # that is autovacuum's

    def health(self) -> Iterable[Check]:
        from agent_checkpoint_postgres.health import checks

        return checks(self)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.links.close()

    def borrow(self, deadline: float, migrating: bool = False) -> Link:
        """A connection to a store whose tables this package knows."""
        link = self.links.borrow(deadline)
        if link.version != self._version:
            try:
                link.version = schema.look_at(link, self)
                if link.version != self._version and not migrating:
                    raise schema_version_error("core", link.version, self._version)
            except BaseException as error:
                self.links.discard(link)
                if isinstance(error, psycopg.Error):
                    raise translate(error, self.name) from error
                raise
        return link


def _refuse_copies() -> NoReturn:
    raise InvalidInputError(
        "database: a store on PostgreSQL is backed up with the server's own means, not with a file copy",
        field="database",
        hint="use pg_dump and pg_restore, then 'agent-checkpoint doctor --restored' (docs/postgres.md)",
    )


def open_database(url: str, *, busy_timeout_seconds: float, synchronous: str, clock: Clock) -> PostgresDatabase:
    """What ``StateStore`` opens a URL with: the entry point."""
    return PostgresDatabase(url, busy_timeout_seconds=busy_timeout_seconds, synchronous=synchronous, clock=clock)
