"""The port on SQLite: one file, what must be known of it before it is used, and its parts."""

from __future__ import annotations

import os
import sqlite3
import weakref

from agent_checkpoint.database import ORDINARY, Database, Terms
from agent_checkpoint.errors import InvalidInputError, schema_version_error
from agent_checkpoint.records import Moment
from agent_checkpoint.sqlite import filesystem
from agent_checkpoint.sqlite.connections import Connections
from agent_checkpoint.sqlite.gate import gate_at, leave_later, leave_unused
from agent_checkpoint.sqlite.opening import patiently
from agent_checkpoint.sqlite.transactions import SqliteRead, SqliteTransaction
from agent_checkpoint.sqlite.translate import FAILURES, is_busy, translate, translate_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from agent_checkpoint.clock import Clock
    from agent_checkpoint.database import Bell, Parameters, Row, Transaction
    from agent_checkpoint.process import ProcessTable
    from agent_checkpoint.records import Check
    from agent_checkpoint.sqlite.gate import Gate
    from agent_checkpoint.sqlite.opening import Connection

VERSION = "SELECT version FROM components WHERE component = 'core'"
FREE_PAGES = "SELECT freelist_count, page_size FROM pragma_freelist_count, pragma_page_size"
# What is given back in one transaction: a few milliseconds of work.
PAGES_AT_ONCE = 500
# What nobody is told of, and can be done again: no flush.
UNHURRIED = Terms(durable=False)
MIGRATIONS = os.path.join(os.path.dirname(__file__), "migrations")


class SqliteDatabase(Database):
    """One SQLite file."""

    dialect = "sqlite"

    def __init__(
        self, path: str, *, busy_timeout_seconds: float, synchronous: str, clock: Clock, processes: ProcessTable
    ) -> None:
        self.name = self.address = path
        self.busy_seconds = self.patience_seconds = busy_timeout_seconds
        self.synchronous = synchronous
        self.clock = clock
        self.processes = processes
        self.core_migrations = {self.dialect: _migrations()}
        self._version = len(self.core_migrations[self.dialect])
        self.connections = Connections(path, busy_timeout_seconds, synchronous)
        self.gate: Gate | None = None
        self.writers: set[int] = set()
        """The threads that are inside a transaction; a call from there would wait for itself."""
        self._leaving: weakref.finalize[..., SqliteDatabase] | None = None
        self.one_kernel = False
        self._right_version = False

    def create(self) -> None:
        from agent_checkpoint.sqlite import schema

        filesystem.check(self.name)
        schema.create(self.name, self.busy_seconds)

    def transaction(self, locks: Sequence[str], terms: Terms = ORDINARY) -> SqliteTransaction:  # noqa: ARG002
        # SQLite has one write lock for the whole file, so the names are not needed.
        return SqliteTransaction(self, terms)

    def read(self) -> SqliteRead:
        return SqliteRead(self)

    def glance(self, sql: str, parameters: Parameters = ()) -> tuple[list[Row], Moment]:
        connection, rows = self._ask(sql, parameters)
        self.connections.give_back(connection)
        return rows, self.moment()

    def moment(self) -> Moment:
        """The time as leases are judged by it."""
        clock = self.clock
        return Moment._make((clock.wall_ns(), clock.ticks_ns(), clock.domain, self.one_kernel))

    def _ask(self, sql: str, parameters: Parameters = ()) -> tuple[Connection, list[Row]]:
        """The rows of one statement that is its own transaction, and the connection that they are from."""
        connection = self.borrow()
        try:
            try:
                return connection, connection.run(sql, parameters).fetchall()
            except sqlite3.OperationalError as error:
                if not is_busy(error):  # only the recovery after a crash is in the way of a read
                    raise
                return connection, patiently(self.busy_seconds, lambda: connection.run(sql, parameters).fetchall())
        except BaseException as error:
            connection.close()
            if isinstance(error, FAILURES):
                raise translate(error, self.name) from error
            raise

    def stamp(self) -> object:
        connection, ((version,),) = self._ask("PRAGMA data_version")
        # A connection does not see its own commits in its data_version.
        found = (connection.number, version, connection.commits)
        self.connections.give_back(connection)
        return found

    def bell(self) -> Bell | None:
        if self.clock.by_hand:
            return None  # time that is turned by hand passes in sleep alone
        from agent_checkpoint.sqlite.bell import bell

        return bell()

    def identify(self, pid: int | None = None, **more: object) -> str:
        return self.processes.identify(pid, **more)

    def alive(self, process: str) -> bool | None:
        return self.processes.alive(process)

    def copy_to(self, path: str) -> int:
        from agent_checkpoint.sqlite import copying

        self.connections.give_back(self.borrow(migrating=True))  # that it is a store, of whatever version
        return copying.copy(self.name, path, self.busy_seconds)

    def opened_copy(self, path: str) -> AbstractContextManager[Callable[[Transaction], None]]:
        from agent_checkpoint.sqlite import copying

        if os.path.exists(path) and os.path.exists(self.name) and os.path.samefile(path, self.name):
            raise InvalidInputError(f"file: {path} is the store itself", field="file")
        return copying.opened(path, self.busy_seconds, self._version)

    def shrink(self) -> int:
        given = 0
        while pages := self._shrink_a_little():
            given += pages
        return given

    def _shrink_a_little(self) -> int:
        connection, ((free, size),) = self._ask(FREE_PAGES)
        self.connections.give_back(connection)
        if not free:
            return 0
        with self.transaction((), UNHURRIED) as transaction:
            # Each row that is fetched is a page that was given back.
            transaction.rows(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
            ((left,),) = transaction.rows("PRAGMA freelist_count")
        return int(max(0, free - left) * size)

    def health(self) -> Iterable[Check]:
        from agent_checkpoint.sqlite.health import checks

        return checks(self)

    def close(self) -> None:
        self.connections.close()
        self._forget_gate()

    def borrow(self, migrating: bool = False) -> Connection:
        """A connection to a store whose tables this package knows."""
        connection, fresh = self.connections.borrow()
        if fresh:
            self._forget_gate()
            self._right_version = False
        if not (self._right_version or migrating):
            self._look_at(connection)
        return connection

    def _look_at(self, connection: Connection) -> None:
        """What has to be known of a file before it is used the first time."""
        try:
            self.one_kernel = filesystem.is_one_kernel(filesystem.check(self.name))
            self._refuse_other_version(connection)
        except BaseException:
            connection.close()
            raise
        self._right_version = True

    def open_gate(self) -> Gate | None:
        """Where writers queue; None when the sidecar cannot be opened."""
        gate = self.gate
        if gate is None:
            gate = gate_at(self.name)
            if gate is not None:
                self._leaving = weakref.finalize(self, leave_later, gate)
            self.gate = gate
        return gate

    def _forget_gate(self) -> None:
        gate, self.gate = self.gate, None
        if gate is not None and self._leaving is not None and self._leaving.detach():
            leave_unused(gate)

    def _refuse_other_version(self, connection: Connection) -> None:
        try:
            found = patiently(self.busy_seconds, lambda: connection.run(VERSION).fetchone())
        except FAILURES as error:
            raise translate(error, self.name) from error
        version = int(found[0]) if found else 0
        if version != self._version:
            raise schema_version_error("core", version, self._version)


def _migrations() -> list[str]:
    try:
        return [entry.path for entry in os.scandir(MIGRATIONS)]
    except OSError as error:  # no descriptor is left
        raise translate_os(error, str(MIGRATIONS)) from error
