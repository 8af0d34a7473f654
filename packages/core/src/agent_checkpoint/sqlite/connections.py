"""Connections to one database file: opened right, lent to one user at a time, dropped at fork."""

from __future__ import annotations

import os
import sqlite3
import stat
import weakref

from agent_checkpoint.errors import InvalidInputError, NotAStoreError, NotFoundError
from agent_checkpoint.sqlite import forks
from agent_checkpoint.sqlite.translate import translate

# Stamped into the file's header: "ACPT".
APPLICATION_ID = 0x41435054
# Idle connections kept for the next user; more are closed when they come back.
KEPT = 8

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class Connection(sqlite3.Connection):
    """A connection, which file it is to, the setting it has now, and its one cursor.

    Every statement goes through ``run``: a cursor for each would be a tenth of
    the cost of a write. Its rows are fetched before the next statement.
    """

    identity: tuple[int, int] | None = None
    busy_ms = -1
    run: Callable[..., sqlite3.Cursor]


def connect(path: str, busy_seconds: float, synchronous: str, *, create: bool = False) -> Connection:
    """Open the file; ``create`` makes it when it is missing.

    The busy timeout is set first: everything after it may have to wait.
    """
    # Percent-encoded bytes: a path is no URI, and need not be UTF-8.
    name = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"/._-" else f"%{byte:02x}"
        for byte in os.fsencode(path)
    )
    connection = sqlite3.connect(
        f"file:{name}?mode={'rwc' if create else 'rw'}",
        timeout=busy_seconds,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
        factory=Connection,
    )
    connection.busy_ms = int(busy_seconds * 1000)
    connection.run = connection.cursor().execute
    connection.run(f"PRAGMA synchronous={synchronous}")
    return connection


class Connections:
    """The connections of one store to one file, reopened when the file was replaced."""

    def __init__(self, path: str, busy_seconds: float, synchronous: str) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._synchronous = synchronous
        self._identity: tuple[int, int] | None = None
        self._idle: list[Connection] = []
        self._closed = False
        _pools.add(self)
        weakref.finalize(self, _close_all, self._idle)

    def borrow(self) -> tuple[Connection, bool]:
        """A connection for one user, and whether the file is another than last time.

        Raises:
            NotFoundError: there is no such file.
            NotAStoreError: the file is not a store.
        """
        if self._closed:
            raise InvalidInputError("store: is closed", field="store")
        try:
            file = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._drop()
            raise NotFoundError(
                f"there is no store at {self._path}",
                hint="create it with 'agent-checkpoint init' (store.initialize()), or name another with --db",
                database=self._path,
            ) from None
        except OSError as error:
            raise translate(sqlite3.OperationalError(f"unable to open database file: {error}"), self._path) from error
        identity = (file.st_dev, file.st_ino)
        fresh = self._identity != identity
        if fresh:
            # The file is new to us, or somebody deleted or replaced it: what our
            # old connections would write to is nobody's store any more.
            self._drop()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._open(file, fresh)
            connection.identity = self._identity = identity
        return connection, fresh

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next user, unless it is in a state of its own."""
        unfit = self._closed or connection.in_transaction or connection.identity != self._identity
        if unfit or len(self._idle) >= KEPT:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        self._closed = True
        self._drop()

    def abandon(self) -> None:
        """In a forked child: forget the parent's connections without closing them.

        Closing would run SQLite's clean-up on locks and shared memory that the
        parent is using.
        """
        for connection in self._idle:
            leak(connection)
        self._idle.clear()
        self._identity = None

    def _open(self, file: os.stat_result, fresh: bool) -> Connection:
        if fresh and not stat.S_ISREG(file.st_mode):
            raise NotAStoreError(f"{self._path} is not a file", database=self._path)
        if fresh and file.st_size == 0:
            raise NotAStoreError(f"{self._path} is empty", database=self._path)
        connection = None
        try:
            connection = connect(self._path, self._busy_seconds, self._synchronous)
            if fresh:
                refuse_foreign(connection, self._path)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise translate(error, self._path) from error
            raise
        return connection

    def _drop(self) -> None:
        _close_all(self._idle)
        self._identity = None


def refuse_foreign(connection: sqlite3.Connection, path: str) -> None:
    """Raise ``NotAStoreError`` for somebody else's SQLite database, before anything is changed in it."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise NotAStoreError(f"{path} is an SQLite database of another program", database=path)


def _close_all(idle: list[Connection]) -> None:
    while idle:
        idle.pop().close()


def leak(connection: Connection) -> None:
    """Keep an object alive until the process ends, beyond the interpreter's own clean-up."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


def _abandon_all() -> None:
    for pool in list(_pools):
        pool.abandon()


forks.in_child(_abandon_all)
