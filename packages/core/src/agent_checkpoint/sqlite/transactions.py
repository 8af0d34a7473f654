"""Reads of one state, and changes behind the gate and SQLite's write lock."""

from __future__ import annotations

from _thread import get_ident
from time import monotonic

from agent_checkpoint import forks
from agent_checkpoint.database import Reader, Transaction
from agent_checkpoint.errors import ReentrancyError, StorageBusyError, StorageError, StorageReadOnlyError
from agent_checkpoint.sqlite.gate import refuse_reentrancy
from agent_checkpoint.sqlite.opening import leak, patiently
from agent_checkpoint.sqlite.translate import FAILURES, is_busy, translate, translate_commit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import NoReturn

    from agent_checkpoint.database import Parameters, Row, Table, Terms
    from agent_checkpoint.sqlite.database import SqliteDatabase
    from agent_checkpoint.sqlite.gate import Gate
    from agent_checkpoint.sqlite.opening import Connection

# Every event is settled: SQLite has one writer at a time, so ids are in commit order.
ALL_SETTLED = 2**63 - 1
# Seconds from which on a wait for the gate or the lock was a real one.
A_WAIT = 0.01
# Tables whose numbers must never come again: sqlite_sequence is there, for core has one.
NOTE_UNUSED = """
INSERT INTO sqlite_sequence (name, seq)
SELECT name, 0 FROM sqlite_schema
WHERE type = 'table' AND sql LIKE '%AUTOINCREMENT%' AND name NOT IN (SELECT name FROM sqlite_sequence)
"""
SKIP = "UPDATE sqlite_sequence SET seq = seq + ?"
FIRST_ROW = "SELECT 1 FROM components LIMIT 1"


class SqliteRead(Reader):
    """A read of one state."""

    horizon = ALL_SETTLED

    _lent: Connection | None = None

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def __enter__(self) -> SqliteRead:
        database = self._database
        self._lent = connection = database.borrow()
        try:
            connection.run("BEGIN")
            # The state is fixed before the clock is read: a reader that slept between
            # the two would take a lease that was extended meanwhile for another boot's.
            # Only this first row may have to wait, for the recovery after a crash.
            patiently(database.busy_seconds, lambda: connection.run(FIRST_ROW).fetchall())
            self.moment = database.moment()
        except BaseException as error:
            connection.close()
            if isinstance(error, FAILURES):
                raise translate(error, database.name) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        connection, self._lent = self._lent, None
        if connection is None or connection.note.generation != forks.generation():
            return  # the parent's, which ends it
        try:
            connection.run("COMMIT")
        except FAILURES:
            # Nothing was written: what was read is good.
            connection.close()
        else:
            self._database.connections.give_back(connection)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        connection = self._lent
        if connection is None:
            raise StorageError(f"{self._database.name}: the read has ended")
        if connection.note.generation != forks.generation():
            raise ReentrancyError("this process was forked inside a read of the store, which is its parent's to use")
        try:
            return connection.run(sql, parameters).fetchall()
        except FAILURES as error:
            raise translate(error, self._database.name) from error

    def tables(self) -> list[Table]:
        from agent_checkpoint.sqlite import tables

        return list(tables.tables(self.rows))


class SqliteTransaction(Transaction):
    """A change in the making, behind the gate and SQLite's write lock."""

    horizon = ALL_SETTLED

    # What an interrupted construction leaves, and the end of it finds.
    _lent: Connection | None = None
    _gate: Gate | None = None
    _generation = -1

    def __init__(self, database: SqliteDatabase, terms: Terms) -> None:
        self._database = database
        self._terms = terms
        self._thread = get_ident()
        self._generation = forks.settled()
        self._bells: list[str] = []

    def __enter__(self) -> SqliteTransaction:
        database = self._database
        migrating, patience, within, durable = self._terms
        busy_seconds = database.busy_seconds
        if within is not None and within < busy_seconds:
            busy_seconds = within
        half = busy_seconds / 2
        started = monotonic()
        if database.writers:
            refuse_reentrancy(database.writers)
        try:
            if database.gate is None:
                # What is at the path is looked at before a sidecar is put beside it.
                database.connections.give_back(database.borrow(migrating))
            gate = database.gate or database.open_gate()
            if gate is not None:
                if gate.inside:
                    gate.refuse_reentrancy()
                self._gate = gate  # noted before entering: an interrupt may come between the two
                gate.enter(half if patience is None or patience > half else patience)
            self._lent = connection = database.borrow(migrating)
            level = database.synchronous if durable else "normal"
            if connection.level != level:  # SQLite ignores it inside a transaction
                self._set_level(connection, level)
            self._begin(connection, started, busy_seconds)
            database.writers.add(self._thread)
            self.moment = database.moment()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if forks.generation() != self._generation:
            if self._lent is not None:
                leak(self._lent)
            self._lent = self._gate = None
            raise ReentrancyError("this process was forked inside a store transaction, which is its parent's to end")
        try:
            if kind is None:
                self._commit()
            elif self._lent is not None:
                _roll_back(self._lent)
                if issubclass(kind, StorageReadOnlyError):
                    # Opened while the disk was read-only, it stays so for ever.
                    self._lent.close()
                    self._lent = None
        finally:
            self._end()
        if self._bells and kind is None:
            from agent_checkpoint.sqlite.bell import ring

            ring(self._bells)

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        if (self._lent is not None or self._gate is not None) and forks.generation() == self._generation:
            self._end()

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        connection = self._lent
        if forks.generation() != self._generation or connection is None or not connection.raw.in_transaction:
            self._refuse()
        try:
            return connection.run(sql, parameters).fetchall()
        except FAILURES as error:
            raise translate(error, self._database.name) from error

    def run(self, sql: str, parameters: Parameters = ()) -> int:
        connection = self._lent  # ``_open`` without the call: there are three of these in every change
        if forks.generation() != self._generation or connection is None or not connection.raw.in_transaction:
            self._refuse()
        try:
            return connection.run(sql, parameters).rowcount
        except FAILURES as error:
            raise translate(error, self._database.name) from error

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        connection = self._open()
        try:
            connection.raw.executemany(sql, parameters)
        except FAILURES as error:
            raise translate(error, self._database.name) from error

    def tables(self) -> list[Table]:
        from agent_checkpoint.sqlite import tables

        return list(tables.tables(self.rows))

    def seal(self, names: Iterable[str], moved_to: str) -> None:
        from agent_checkpoint.sqlite import tables

        for statement in tables.sealing(names, moved_to):
            self.run(statement)

    def unseal(self, names: Iterable[str]) -> None:
        from agent_checkpoint.sqlite import tables

        for statement in tables.unsealing(names):
            self.run(statement)

    def count_on(self) -> None:
        """SQLite looks at the rows."""

    def skip(self, ahead: int) -> None:
        self.run(NOTE_UNUSED)
        self.run(SKIP, (ahead,))

    def event_id(self) -> None:
        return None  # SQLite counts: one writer at a time is the order of the commits

    def ring(self, bells: Iterable[str]) -> None:
        self._bells += bells

    def script(self, text: str) -> None:
        from agent_checkpoint.sqlite import schema

        for statement in schema.statements(text):
            self.run(statement)

    def _open(self) -> Connection:
        """The connection, while the transaction lasts: a statement after its end would be committed alone."""
        connection = self._lent
        if forks.generation() != self._generation or connection is None or not connection.raw.in_transaction:
            self._refuse()
        return connection

    def _refuse(self) -> NoReturn:
        """Say why nothing can be done in this transaction any more."""
        if forks.generation() != self._generation:
            raise ReentrancyError("this process was forked inside a store transaction, which is its parent's to use")
        raise StorageError(f"{self._database.name}: the transaction has ended, nothing of it was written")

    def _set_level(self, connection: Connection, level: str) -> None:
        try:
            connection.run(f"PRAGMA synchronous={level}")
        except FAILURES as error:
            raise translate(error, self._database.name) from error
        connection.level = level

    def _begin(self, connection: Connection, started: float, busy_seconds: float) -> None:
        try:
            connection.run("BEGIN IMMEDIATE")
        except FAILURES as error:
            if not is_busy(error):
                raise translate(error, self._database.name) from error
            self._begin_late(connection, started, busy_seconds)
        if monotonic() - started > A_WAIT and not self._database.connections.is_current(connection):
            raise StorageBusyError(
                f"{self._database.name} was replaced while this call waited for it; nothing was written",
                hint="try again: the call will work on the file that is there now",
                database=self._database.name,
                blocker=None,
            )

    def _begin_late(self, connection: Connection, started: float, busy_seconds: float) -> None:
        """Somebody went around the gate, or sits on the lock."""
        try:
            patiently(started + busy_seconds - monotonic(), lambda: connection.run("BEGIN IMMEDIATE"))
        except FAILURES as error:
            raise translate(error, self._database.name, busy_seconds) from error

    def _commit(self) -> None:
        connection = self._lent
        if connection is None or not connection.raw.in_transaction:
            self._refuse()
        try:
            connection.run("COMMIT")
        except FAILURES as error:
            _roll_back(connection)
            raise translate_commit(error, self._database.name) from error
        connection.commits += 1

    def _end(self) -> None:
        """Give everything back; harmless when it is called again after an interrupt."""
        try:
            # Not ours any more before it may be another's: called twice, this must not give it back twice.
            lent, self._lent = self._lent, None
            if lent is not None:
                self._database.connections.give_back(lent)
        finally:
            self._database.writers.discard(self._thread)
            if self._gate is not None:
                self._gate.leave(self._thread)
                self._gate = None


def _roll_back(connection: Connection) -> None:
    try:
        if connection.raw.in_transaction:
            connection.run("ROLLBACK")
    except FAILURES:
        pass  # a connection that cannot even do that is closed when it is given back
