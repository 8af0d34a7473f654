"""Connections to one database file: lent to one user at a time, reopened when it was replaced, dropped at fork."""

from __future__ import annotations

import os
import stat
import sys
import weakref
from _thread import get_ident
from time import monotonic, sleep

from agent_checkpoint import forks
from agent_checkpoint.errors import InvalidInputError, NotAStoreError, NotFoundError
from agent_checkpoint.sqlite import opening
from agent_checkpoint.sqlite.opening import Connection, patiently, refuse_foreign
from agent_checkpoint.sqlite.translate import FAILURES, translate, translate_os

# Idle connections kept for the next user; more are closed when they come back.
KEPT = 8

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.errors import AgentCheckpointError

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


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
            ReentrancyError: this process was forked while the file was in use.
        """
        if self._closed:
            raise InvalidInputError("store: is closed", field="store")
        forks.settled()
        if forks.coming and not forks.is_mine():
            forks.wait()
        return self._find()

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next user, unless it is in a state of its own."""
        note = connection.note
        if note.generation != forks.generation():
            return  # the parent's
        unfit = self._closed or connection.raw.in_transaction or note.identity != self._identity
        if unfit or len(self._idle) >= KEPT:
            connection.close()
            return
        note.thread = 0
        self._idle.append(connection)
        if self._closed:  # since it was looked at: who closes looks at the idle ones once
            _close_all(self._idle)

    def is_current(self, connection: Connection) -> bool:
        """Whether the connection is to the file that is at the path now."""
        try:
            file = os.stat(self._path)
        except OSError:
            return False
        return connection.identity == (file.st_dev, file.st_ino)

    def close(self) -> None:
        """Close what is idle; what is lent is closed when it comes back."""
        self._closed = True
        self._drop()

    def withdraw(self) -> None:
        """Before a fork: close what is idle."""
        _close_all(self._idle)

    def abandon(self) -> None:
        """In a forked child: what the parent has stays the parent's."""
        self._idle.clear()
        self._identity = None

    def _find(self) -> tuple[Connection, bool]:
        try:
            file = os.stat(self._path)
        except OSError as error:
            raise self._unreachable(error) from error
        identity = (file.st_dev, file.st_ino)
        fresh = self._identity != identity
        if fresh:
            # The file is new to us, or somebody deleted or replaced it: what our
            # old connections would write to is nobody's store any more.
            self._drop()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection, fresh = self._open(file, fresh)
                self._identity = connection.identity
                return connection, fresh
            note = connection.note
            note.thread = get_ident()
            if note.identity == identity:
                return connection, fresh
            connection.close()  # it came back while the file was being replaced

    def _unreachable(self, error: OSError) -> AgentCheckpointError:
        """What a file that cannot be looked at means to the caller."""
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return translate_os(error, self._path)
        self._drop()
        return NotFoundError(
            f"there is no store at {self._path}",
            hint="create it with 'agent-checkpoint init' (store.initialize()), or name another with --db",
            database=self._path,
        )

    def _open(self, file: os.stat_result, fresh: bool) -> tuple[Connection, bool]:
        if fresh and not stat.S_ISREG(file.st_mode):
            raise NotAStoreError(f"{self._path} is not a file", database=self._path)
        if fresh and file.st_size == 0:
            raise NotAStoreError(f"{self._path} is empty", database=self._path)
        connection = None
        try:
            connection = patiently(self._busy_seconds, lambda: Connection(self._path, self._synchronous))
            fresh = fresh or connection.identity != (file.st_dev, file.st_ino)  # replaced meanwhile
            if fresh:
                refuse_foreign(connection, self._path, self._busy_seconds)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, FAILURES):
                raise translate(error, self._path) from error
            raise
        return connection, fresh

    def _drop(self) -> None:
        _close_all(self._idle)
        self._identity = None


def _close_all(idle: list[Connection]) -> None:
    while True:
        try:
            connection = idle.pop()
        except IndexError:  # not asked for before: others close, too
            return
        connection.close()


def _withdraw_all() -> None:
    """Before a fork: have no connection open, if the other threads allow it for a moment."""
    me, deadline = get_ident(), monotonic() + forks.PATIENCE
    while True:
        for pool in _all_pools():
            pool.withdraw()
        left = opening.opened.copy()
        if all(note.thread == me for note in left):
            opening.inside_sqlite.append(False)
            return
        if monotonic() >= deadline:
            opening.inside_sqlite.append(_may_be_inside({note.thread for note in left} - {me}))
            return
        sleep(0.001)


def _may_be_inside(threads: set[int]) -> bool:
    """Whether one of these threads may be in SQLite's own code: it is in the code that calls it."""
    frames = sys._current_frames()
    folder = os.path.dirname(__file__)
    return any(frames[thread].f_code.co_filename.startswith(folder) for thread in threads if thread in frames)


def _all_pools() -> list[Connections]:
    while True:
        try:
            return list(_pools)
        except RuntimeError:  # another thread has just opened a store
            continue


def _abandon_all() -> None:
    opening.abandon()
    for pool in _all_pools():
        pool.abandon()


forks.at_fork(before=_withdraw_all, in_child=_abandon_all)
os.register_at_fork(after_in_parent=opening.inside_sqlite.clear)
