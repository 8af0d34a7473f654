"""Connections to one server: lent to one user at a time, looked at before their first use, never used after a fork.

The pool is psycopg's. It connects in a thread of its own and keeps trying in
silence; here whoever asks hears at once why there is no connection.
"""

from __future__ import annotations

import logging
import os
import weakref
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import RawCursor
from psycopg_pool import ConnectionPool, PoolTimeout

from agent_checkpoint.errors import InvalidInputError, StorageBusyError, StorageError
from agent_checkpoint_postgres.translate import translate_connect

if TYPE_CHECKING:
    from agent_checkpoint_postgres.address import Address

    Pool = ConnectionPool["Link"]

# How long to wait for the pool before looking why it has nothing.
SLICE_SECONDS = 0.1
# How long the first connection may take at least, however little the busy timeout is.
FIRST_SECONDS = 2.0
# A connection that nobody wanted for so long is closed, and one that lived for so long is made anew.
IDLE_SECONDS = 60.0
LIFE_SECONDS = 1800.0
# How long the pool's threads get to end.
CLOSE_SECONDS = 1.0
# psycopg prepares a statement when it runs for the sixth time; behind a pooling proxy it must not.
PREPARE_AFTER = 5

# The pool's name. What it says of a lost server, twice for each try, is ours to say; other pools say what they like.
NAME = "agent-checkpoint"
logging.getLogger("psycopg.pool").addFilter(
    lambda record: not any(each == NAME or isinstance(each, Link) for each in record.args or ())
)

# What a forked child has of its parent's: not its to close, nor to collect.
_abandoned: list[object] = []
_all: weakref.WeakSet[Links] = weakref.WeakSet()


class Link(psycopg.Connection[tuple[Any, ...]]):
    """A connection, with a cursor of its own: one for each statement would be a tenth of its cost.

    ``version`` is that of core's tables, None before the connection was looked
    at; ``ahead`` how far the store's transaction numbers are ahead of the
    cluster's; ``timeline`` which history the server writes, "" if it does not tell;
    ``life`` since when it has run without a crash; ``pid`` the process whose connection it is.
    """

    version: int | None = None
    ahead = 0
    timeline = ""
    life = ""
    pid: int
    own: RawCursor[tuple[Any, ...]]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.own = RawCursor(self)
        self.pid = os.getpid()

    def tables(self, message: bytes) -> list[list[tuple[Any, ...]]]:
        """Send a message of several statements; the rows of each that has any to give."""
        cursor, found = self.own.execute(message), []
        while True:
            if cursor.description is not None:
                found.append(cursor.fetchall())
            if not cursor.nextset():
                return found

    def ask(self, message: bytes) -> tuple[Any, ...]:
        """Send a message of several statements; the first row of the last of them."""
        return self.tables(message)[-1][0]


class Links:
    """The connections of one store in this process."""

    def __init__(self, address: Address, busy_seconds: float) -> None:
        self._address = address
        self._busy_seconds = busy_seconds
        self._making = Lock()
        self._closed = False
        self._was_reached = False
        self._failure: tuple[float, psycopg.Error] | None = None
        """The last connection that could not be made, and when."""
        self._pools: dict[int, Pool] = {}
        _all.add(self)
        weakref.finalize(self, _close, self._pools)

    def borrow(self, deadline: float) -> Link:
        """A connection for one user.

        Raises:
            StorageBusyError: there is none before ``deadline`` (of ``time.monotonic``).
            StorageUnreachableError: none can be made; ``undone`` where that may pass.
        """
        pool = self._pool()
        asked_at = monotonic()
        if not self._was_reached:  # who makes the first connection waits for no other user
            deadline = max(deadline, asked_at + FIRST_SECONDS)
        while True:
            try:
                link = pool.getconn(timeout=max(0.001, min(SLICE_SECONDS, deadline - monotonic())))
            except PoolTimeout:
                failure = self._failure
                if failure is not None and failure[0] >= asked_at:
                    raise self._unreachable(failure[1]) from failure[1]
                if monotonic() >= deadline:
                    raise self._busy(pool) from None
            else:
                self._was_reached = True
                return link

    def give_back(self, link: Link) -> None:
        """Keep the connection for the next user, unless it is in a state of its own."""
        if link.pid != os.getpid():
            _abandoned.append(link)
            return
        pool = self._pools.get(link.pid)
        if pool is None or link.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            link.close()
        if pool is not None:
            pool.putconn(link)

    def discard(self, link: Link) -> None:
        """Close a connection instead."""
        if link.pid == os.getpid():
            link.close()
        self.give_back(link)

    def connect(self) -> Link:
        """A connection beside the pool, for who keeps it.

        Raises:
            StorageUnreachableError: it cannot be made.
        """
        try:
            return Link.connect("", **self._options())
        except psycopg.Error as error:
            raise translate_connect(error, self._address.shown) from error

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        self._closed = True
        _close(self._pools)

    def after_fork(self) -> None:
        """In a forked child: what the parent has stays the parent's."""
        self._making = Lock()
        _abandoned.extend(self._pools.values())
        self._pools.clear()

    def _pool(self) -> Pool:
        with self._making:
            if self._closed:
                raise InvalidInputError("store: is closed", field="store")
            pool = self._pools.get(os.getpid())
            if pool is None:
                pool = self._pools[os.getpid()] = self._open_pool()
            return pool

    def _open_pool(self) -> Pool:
        me = weakref.ref(self)

        class Noting(Link):
            @classmethod
            def connect(cls, *arguments: Any, **named: Any) -> Any:
                try:
                    return super().connect(*arguments, **named)
                except psycopg.Error as error:
                    links = me()
                    if links is not None:
                        links._failure = (monotonic(), error)
                    raise

        pool: Pool = ConnectionPool(
            connection_class=Noting,
            kwargs=self._options(),
            min_size=0,
            max_size=self._address.pool_size,
            open=False,
            name=NAME,
            max_idle=IDLE_SECONDS,
            max_lifetime=LIFE_SECONDS,
            reconnect_timeout=0,
            num_workers=1,
        )
        pool.open()
        return pool

    def _options(self) -> dict[str, Any]:
        prepare = PREPARE_AFTER if self._address.prepared else None
        return {
            **self._address.parameters,
            "autocommit": True,
            "prepare_threshold": prepare,
            "cursor_factory": RawCursor,
        }

    def _unreachable(self, failure: psycopg.Error) -> StorageError:
        error = translate_connect(failure, self._address.shown)
        # A server that never was there is a mistake in the URL more often than a server that comes back;
        # one that answers, that it starts or has no connection left, is there.
        error.undone = error.undone and (self._was_reached or "FATAL" in str(failure))
        return error

    def _busy(self, pool: Pool) -> StorageBusyError:
        if pool.get_stats()["pool_size"] < self._address.pool_size:
            message, hint = "no connection could be made within the busy timeout", ""
        else:
            message = f"all {self._address.pool_size} connections of this process were in use for the busy timeout"
            hint = "give the URL a larger pool_size, or use fewer threads"
        place = self._address.shown
        return StorageBusyError(f"{place}: {message}", hint=hint, database=place, blocker=None)


def _close(pools: dict[int, Pool]) -> None:
    pool = pools.pop(os.getpid(), None)
    if pool is not None:
        pool.close(timeout=CLOSE_SECONDS)


def _after_fork() -> None:
    for links in list(_all):
        links.after_fork()


os.register_at_fork(after_in_child=_after_fork)
