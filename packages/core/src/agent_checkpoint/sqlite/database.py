"""The port on SQLite: transactions behind the gate, reads beside it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import contextmanager
from time import monotonic

from agent_checkpoint.database import Database, Reader, Transaction
from agent_checkpoint.errors import ReentrancyError, StorageBusyError, StorageError, schema_version_error
from agent_checkpoint.records import Moment
from agent_checkpoint.sqlite import filesystem, forks, schema
from agent_checkpoint.sqlite.blockers import blocker
from agent_checkpoint.sqlite.connections import Connections, leak
from agent_checkpoint.sqlite.gate import gate_at
from agent_checkpoint.sqlite.translate import translate, translate_commit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from agent_checkpoint.clock import Clock
    from agent_checkpoint.database import Parameters, Row
    from agent_checkpoint.records import Check
    from agent_checkpoint.sqlite.connections import Connection
    from agent_checkpoint.sqlite.gate import Gate

VERSION = "SELECT version FROM components WHERE component = 'core'"
MIGRATIONS = os.path.join(os.path.dirname(__file__), "migrations")
# Every event is settled: SQLite has one writer at a time, so ids are in commit order.
ALL_SETTLED = 2**63 - 1


class SqliteDatabase(Database):
    """One SQLite file."""

    dialect = "sqlite"

    def __init__(self, path: str, *, busy_timeout_seconds: float, synchronous: str, clock: Clock) -> None:
        self.name = path
        self.busy_seconds = busy_timeout_seconds
        self.synchronous = synchronous
        self.clock = clock
        self.core_migrations = {self.dialect: [entry.path for entry in os.scandir(MIGRATIONS)]}
        self._version = len(self.core_migrations[self.dialect])
        self._connections = Connections(path, busy_timeout_seconds, synchronous)
        self.gate: Gate | None = None
        self._one_kernel = False
        self._right_version = False

    def create(self) -> None:
        filesystem.check(self.name)
        schema.create(self.name, self.busy_seconds)

    def transaction(self, locks: Sequence[str], migrating: bool = False) -> SqliteTransaction:  # noqa: ARG002
        # SQLite has one write lock for the whole file, so the names are not needed.
        return SqliteTransaction(self, migrating)

    def read(self) -> SqliteRead:
        return SqliteRead(self)

    def health(self) -> Iterable[Check]:
        from agent_checkpoint.sqlite.health import checks

        return checks(self)

    def close(self) -> None:
        self._connections.close()

    def moment(self) -> Moment:
        """Now; called by a writer once it holds the write lock."""
        clock = self.clock
        return Moment(clock.wall_ns(), clock.ticks_ns(), clock.domain, self._one_kernel)

    def borrow(self, migrating: bool = False) -> Connection:
        """A connection to a store whose tables this package knows."""
        connection, fresh = self._connections.borrow()
        if fresh or not (self._right_version or migrating):
            self._look_at(connection, migrating)
        return connection

    def _look_at(self, connection: Connection, migrating: bool) -> None:
        """What has to be known of a file before it is used the first time."""
        self.gate = None
        try:
            self._one_kernel = filesystem.is_one_kernel(filesystem.check(self.name))
            self._right_version = not migrating
            if not migrating:
                self._refuse_other_version(connection)
        except BaseException:
            self._right_version = False
            connection.close()
            raise

    def give_back(self, connection: Connection) -> None:
        """The end of a ``borrow``."""
        self._connections.give_back(connection)

    def open_gate(self) -> Gate | None:
        """Where writers queue; None when the sidecar cannot be opened."""
        if self.gate is None:
            self.gate = gate_at(self.name + "-gate", os.stat(self.name).st_mode & 0o666)
        return self.gate

    def _refuse_other_version(self, connection: Connection) -> None:
        try:
            found = connection.execute(VERSION).fetchone()
        except sqlite3.Error as error:
            raise translate(error, self.name) from error
        version = int(found[0]) if found else 0
        if version != self._version:
            raise schema_version_error("core", version, self._version)


class SqliteRead(Reader):
    """A read of one state."""

    horizon = ALL_SETTLED

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def __enter__(self) -> SqliteRead:
        self._connection = self._database.borrow()
        try:
            self._connection.execute("BEGIN")
        except sqlite3.Error as error:
            self._connection.close()
            raise translate(error, self._database.name) from error
        self.moment = self._database.moment()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            self._connection.close()  # nothing was written: what was read is good
        else:
            self._database.give_back(self._connection)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise translate(error, self._database.name) from error


class SqliteTransaction(Transaction):
    """A change in the making, behind the gate and SQLite's write lock."""

    horizon = ALL_SETTLED

    def __init__(self, database: SqliteDatabase, migrating: bool) -> None:
        self._database = database
        self._migrating = migrating
        self._lent: Connection | None = None
        self._gated: Gate | None = None
        self._generation = forks.generation

    def __enter__(self) -> SqliteTransaction:
        database = self._database
        gate = database.gate
        started = monotonic()
        try:
            if gate is None:
                # What is at the path is looked at before a sidecar is put beside it.
                self._lent = database.borrow(self._migrating)
                gate = database.open_gate()
            if gate is not None and gate.enter(database.busy_seconds / 2):
                self._gated = gate
            if self._lent is None:
                self._lent = database.borrow(self._migrating)
            self._begin(self._lent, started)
        except BaseException:
            self._leave()
            raise
        self.moment = database.moment()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if forks.generation != self._generation:
            if self._lent is not None:
                leak(self._lent)
            raise ReentrancyError("this process was forked inside a store transaction, which is its parent's to end")
        try:
            if kind is None:
                self._commit()
            elif self._lent is not None and self._lent.in_transaction:
                self._lent.execute("ROLLBACK")
        finally:
            self._leave()

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        connection = self._lent
        if connection is None or not connection.in_transaction:
            raise self._ended()
        try:
            return connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise translate(error, self._database.name) from error

    def run(self, sql: str, parameters: Parameters = ()) -> int:
        connection = self._lent
        if connection is None or not connection.in_transaction:
            raise self._ended()
        try:
            return connection.execute(sql, parameters).rowcount
        except sqlite3.Error as error:
            raise translate(error, self._database.name) from error

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        connection = self._lent
        if connection is None or not connection.in_transaction:
            raise self._ended()
        try:
            connection.executemany(sql, parameters)
        except sqlite3.Error as error:
            raise translate(error, self._database.name) from error

    def script(self, text: str) -> None:
        for statement in schema.statements(text):
            self.run(statement)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        self.run("SAVEPOINT part")
        try:
            yield
        except BaseException:
            if self._lent is not None and self._lent.in_transaction:
                self.run("ROLLBACK TO part")
                self.run("RELEASE part")
            raise
        self.run("RELEASE part")

    def _ended(self) -> StorageError:
        """A statement after the end would be committed alone, so none is run."""
        return StorageError(f"{self._database.name}: the transaction has ended, nothing of it was written")

    def _begin(self, connection: Connection, started: float) -> None:
        whole = self._database.busy_seconds
        waited = monotonic() - started
        # The time that is left; a PRAGMA only where the wait at the gate was a real one.
        busy_ms = int(1000 * (whole if waited < 0.01 else max(0.0, whole - waited)))
        try:
            if connection.busy_ms != busy_ms:
                connection.execute(f"PRAGMA busy_timeout={busy_ms}")
                connection.busy_ms = busy_ms
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._explained(error) from error

    def _commit(self) -> None:
        connection = self._lent
        if connection is None or not connection.in_transaction:
            raise self._ended()
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise translate_commit(error, self._database.name) from error

    def _leave(self) -> None:
        if self._lent is not None:
            self._database.give_back(self._lent)
            self._lent = None
        if self._gated is not None:
            self._gated.leave()
            self._gated = None

    def _explained(self, error: sqlite3.Error) -> StorageError:
        found = translate(error, self._database.name)
        if not isinstance(found, StorageBusyError):
            return found
        blocked_by = blocker(self._database.name)
        who = "another connection"
        if blocked_by is not None:
            frozen = ", which is stopped (SIGCONT lets it go on)" if blocked_by["stopped"] else ""
            who = f"process {blocked_by['pid']} ({blocked_by['command']}){frozen}"
        return StorageBusyError(
            f"{self._database.name}: no write lock within {self._database.busy_seconds:g} s, held by {who}",
            database=self._database.name,
            blocker=blocked_by,
        )
