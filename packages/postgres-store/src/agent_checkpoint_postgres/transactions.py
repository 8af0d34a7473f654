"""Reads of one state, and changes that hold their locks until they end."""

from __future__ import annotations

import os
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, TypeVar, cast

import psycopg

from agent_checkpoint.database import Reader, Transaction
from agent_checkpoint.errors import ReentrancyError, StorageError
from agent_checkpoint_postgres import event_ids, statements, tables
from agent_checkpoint_postgres.event_ids import FIRST, next_id, settled
from agent_checkpoint_postgres.outcome import Sent, find_out
from agent_checkpoint_postgres.translate import ended, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from agent_checkpoint.database import Parameters, Row, Table, Terms
    from agent_checkpoint_postgres.database import PostgresDatabase
    from agent_checkpoint_postgres.links import Link

T = TypeVar("T")

# Between two tries to begin, while the server is away.
PAUSE_SECONDS = 0.02

# The server or the connection went away: what became of the commit it does not say.
LOST = ("57P", "08")
MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'execute')"
WHERE = """
SELECT 'cluster ' || system_identifier || ', database ' || current_database() || ', schema ' || current_schema()
FROM pg_control_system()
"""
IN_TRANSACTION = psycopg.pq.TransactionStatus.INTRANS


def begun(database: PostgresDatabase, deadline: float, migrating: bool, step: Callable[[Link], T]) -> tuple[Link, T]:
    """A connection, and what the first step on it answered.

    Nothing has happened yet, so a server that is away is waited for.
    """
    while True:
        link = None
        try:
            link = database.borrow(deadline, migrating)
            return link, step(link)
        except psycopg.Error as error:
            if link is not None:
                database.links.discard(link)
            failed = translate(error, database.name)
            if not _may_pass(failed) or monotonic() >= deadline:
                raise failed from error
        except StorageError as error:
            if not error.undone or monotonic() >= deadline:
                raise
        except BaseException:
            if link is not None:
                database.links.discard(link)
            raise
        sleep(PAUSE_SECONDS)


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StorageError) and error.undone


class PostgresRead(Reader):
    """A read of one state."""

    _link: Link | None = None

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._pid = os.getpid()

    def __enter__(self) -> PostgresRead:
        database = self._database
        until = monotonic() + database.busy_seconds
        self._link, (wall, oldest) = begun(database, until, False, lambda link: link.ask(database.read_message))
        # The state was fixed before the clock was read: by the snapshot of the statement that read it.
        self.moment = database.moment(wall)
        self.horizon = settled(oldest, self._link.ahead)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._pid != os.getpid():
            raise ReentrancyError("this process was forked inside a read of the store, which is its parent's to end")
        link = self._link
        assert link is not None
        try:
            link.own.execute(b"COMMIT")
        except psycopg.Error:
            # Nothing was written: what was read is good.
            self._let_go(self._database.links.discard)
        except BaseException:
            self._let_go(self._database.links.discard)
            raise
        else:
            self._let_go(self._database.links.give_back)

    def __del__(self) -> None:
        # Where an interrupt struck before the end could do its work: its place in the pool must not be lost with it.
        if self._link is not None and self._pid == os.getpid():
            self._let_go(self._database.links.discard)

    def _let_go(self, how: Callable[[Link], None]) -> None:
        # Not ours any more before it may be another's.
        link, self._link = cast("Link", self._link), None
        how(link)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        if self._pid != os.getpid():
            raise ReentrancyError("this process was forked inside a read of the store, which is its parent's to use")
        if self._link is None:
            raise StorageError(f"{self._database.name}: the read has ended")
        return fetch(self._link, sql, parameters, self._database.name)

    def tables(self) -> list[Table]:
        return tables.tables(self.rows)


class PostgresTransaction(Transaction):
    """A change in the making."""

    _link: Link | None = None

    def __init__(self, database: PostgresDatabase, locks: Sequence[str], terms: Terms) -> None:
        self._database = database
        self._locks = locks
        self._migrating, _, within, durable = terms
        self._told = durable
        self._durable = durable and database.synchronous == "full"
        self._busy_seconds = database.busy_seconds if within is None else min(within, database.busy_seconds)
        self._pid = os.getpid()
        self._writer = (self._pid, get_ident())
        self._events = FIRST

    def __enter__(self) -> PostgresTransaction:
        database = self._database
        deadline = monotonic() + self._busy_seconds
        if self._writer in database.writers:
            raise ReentrancyError(
                "the body of a store transaction called the store: it would wait for itself",
                hint="use the transaction's own methods inside its block, the store after it",
            )
        database.writers.add(self._writer)
        try:
            self._link, answer = begun(
                database, deadline, self._migrating, lambda link: link.ask(self._message(deadline))
            )
        except BaseException:
            database.writers.discard(self._writer)
            raise
        wall, oldest, self._id = answer
        self.moment = database.moment(wall)
        self.horizon = settled(oldest, self._link.ahead)
        return self

    def _message(self, deadline: float) -> bytes:
        # 0 would mean: wait for ever.
        patience = max(1, int((deadline - monotonic()) * 1000))
        return statements.begin_write(
            self._database.schema,
            self._locks,
            durable=self._durable,
            patience_ms=patience,
            idle_ms=statements.MIGRATING_IDLE_MS if self._migrating else statements.IDLE_MS,
        )

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._pid != os.getpid():
            self._link = None
            raise ReentrancyError("this process was forked inside a store transaction, which is its parent's to end")
        link = self._link
        assert link is not None
        lost = None
        try:
            if kind is None:
                lost = _commit(link, self._database.name)
            elif link.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                link.own.execute(b"ROLLBACK")
        except psycopg.Error as failed:
            self._let_go(self._database.links.discard)
            if kind is None:
                raise translate(failed, self._database.name) from failed
        except BaseException:
            self._let_go(self._database.links.discard)
            raise
        else:
            self._let_go(self._database.links.give_back)  # first: it may be the only one
            if lost is not None:
                find_out(self._database, self._sent(link), lost)

    def __del__(self) -> None:
        self.leave()

    def leave(self) -> None:
        if self._link is not None and self._pid == os.getpid():
            self._let_go(self._database.links.discard)

    def _let_go(self, how: Callable[[Link], None]) -> None:
        self._database.writers.discard(self._writer)
        # Not ours any more before it may be another's.
        link, self._link = cast("Link", self._link), None
        how(link)

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        return fetch(self._open(), sql, parameters, self._database.name)

    def run(self, sql: str, parameters: Parameters = ()) -> int:
        try:
            return self._open().own.execute(statements.numbered(sql), parameters).rowcount
        except psycopg.Error as error:
            raise translate(error, self._database.name) from error

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        try:
            own = self._open().own
            own.executemany(statements.numbered(sql), parameters)
            # What psycopg sends behind it ends the server's wait for the next statement, and with
            # that the limit of how long a transaction may idle. A statement of its own begins it anew.
            own.execute(b"SELECT")
        except psycopg.Error as error:
            raise translate(error, self._database.name) from error

    def event_id(self) -> int:
        link = self._open()
        self._events += 1
        return next_id(self._id, link.ahead, self._events)

    def ring(self, bells: Iterable[str]) -> None:
        for bell in bells:
            channel, _, name = bell.partition("/")
            self.rows("SELECT pg_notify(?, ?)", (channel, name))

    def tables(self) -> list[Table]:
        return tables.tables(self.rows)

    def seal(self, names: Iterable[str], moved_to: str) -> None:
        for statement in tables.sealing(names, moved_to):
            self.run(statement)

    def unseal(self, names: Iterable[str]) -> None:
        for statement in tables.unsealing(names):
            self.run(statement)

    def count_on(self) -> None:
        for statement in tables.counting_on(self.rows(tables.COUNTERS)):
            self.rows(statement)
        link = self._open()
        ahead, last, _ = link.ask(event_ids.LOOK.encode())
        # What was copied may be from transactions of this cluster that began after this one.
        if event_ids.is_behind(ahead, last, self._id):
            (link.ahead,) = link.ask(event_ids.GO_AHEAD.encode())

    def skip(self, ahead: int) -> None:
        for statement in tables.skipping(self.rows(tables.COUNTERS), ahead):
            self.rows(statement)

    def where(self) -> str:
        """The cluster, database and schema; a name may come from libpq's environment, or lead through a tunnel."""
        if not self.rows(MAY_ASK)[0][0]:
            return ""
        return str(self.rows(WHERE)[0][0])

    def script(self, text: str) -> None:
        try:
            self._open().own.execute(text.encode())
        except psycopg.Error as error:
            raise translate(error, self._database.name) from error

    def _open(self) -> Link:
        """The connection, while the transaction lasts: a statement after its end would be committed alone."""
        if self._pid != os.getpid():
            raise ReentrancyError("this process was forked inside a store transaction, which is its parent's to use")
        link = self._link
        if link is None or link.info.transaction_status != IN_TRANSACTION:
            raise ended(self._database.name)
        return link

    def _sent(self, link: Link) -> Sent:
        event = None if self._events == FIRST else next_id(self._id, link.ahead, 0)
        return Sent(self._id, event, self.moment.wall_ns, link.timeline, link.life, self._told)


def _commit(link: Link, place: str) -> psycopg.Error | None:
    """Commit; the error where the answer was lost, raised where the server answered that it did not."""
    if link.info.transaction_status != IN_TRANSACTION:
        raise ended(place)
    try:
        link.own.execute(b"COMMIT")
    except psycopg.OperationalError as error:
        if link.closed or (error.sqlstate or "").startswith(LOST):
            return error
        raise
    if link.own.statusmessage != "COMMIT":
        raise ended(place)
    return None


def fetch(link: Link, sql: str, parameters: Parameters, place: str) -> list[Row]:
    """All rows of a statement."""
    try:
        return link.own.execute(statements.numbered(sql), parameters, binary=True).fetchall()
    except psycopg.Error as error:
        raise translate(error, place) from error
