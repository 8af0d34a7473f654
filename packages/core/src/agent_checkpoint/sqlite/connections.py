"""Connections to one database file: lent to one user at a time, reopened when it was replaced, dropped at fork."""

from __future__ import annotations

import os
import stat
import weakref
from _thread import get_ident
from time import monotonic, sleep

from agent_checkpoint.errors import InvalidInputError, NotAStoreError, NotFoundError, ReentrancyError
from agent_checkpoint.sqlite import forks
from agent_checkpoint.sqlite.opening import connect, patiently, refuse_foreign
from agent_checkpoint.sqlite.translate import FAILURES, translate, translate_os

# Idle connections kept for the next user; more are closed when they come back.
KEPT = 8

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.errors import AgentCheckpointError
    from agent_checkpoint.sqlite.opening import Connection

# How long a fork waits for the connections that other threads are using.
FORK_PATIENCE = 2.0

# Files that were in use when this process was forked.
_poisoned: set[tuple[int, int]] = set()
_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class _Loan:
    """Who has a connection, or is about to get one."""

    __slots__ = ("connection", "thread")

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.connection: weakref.ref[Connection] | None = None

    def is_out(self) -> bool:
        """Whether it is still used: an interrupt may have lost it."""
        return self.connection is None or self.connection() is not None


class Connections:
    """The connections of one store to one file, reopened when the file was replaced."""

    def __init__(self, path: str, busy_seconds: float, synchronous: str) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._synchronous = synchronous
        self._identity: tuple[int, int] | None = None
        self._idle: list[Connection] = []
        self._lent: dict[_Loan, object] = {}
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
        loan = _Loan(get_ident())
        try:
            # Noted before it has its connection: either it sees a fork coming, or the fork sees it.
            self._lent[loan] = None
            if forks.coming:
                self._let_pass(loan)
            connection, fresh = self._find()
            loan.connection, connection.loan = weakref.ref(connection), loan
        except BaseException:
            self._lent.pop(loan, None)
            raise
        return connection, fresh

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next user, unless it is in a state of its own."""
        loan = connection.__dict__.pop("loan", None)
        if loan is None:
            return  # given back before; two users must never have it
        try:
            unfit = self._closed or connection.in_transaction or connection.identity != self._identity
            if unfit or len(self._idle) >= KEPT:
                connection.close()
            else:
                self._idle.append(connection)
                if self._closed:  # since it was looked at: who closes looks at the idle ones once
                    _close_all(self._idle)
        finally:
            # Last, or a fork would come while the connection is neither lent nor idle.
            self._lent.pop(loan, None)

    def discard(self, connection: Connection) -> None:
        """Close a connection instead of giving it back."""
        connection.close()
        self._lent.pop(connection.__dict__.pop("loan", None), None)

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
        loan = _Loan(get_ident())
        try:
            self._lent[loan] = None
            if forks.coming:
                self._let_pass(loan)
            self._drop()
        finally:
            self._lent.pop(loan, None)

    def withdraw(self, deadline: float) -> None:
        """Before a fork: have no connection open, if the other threads allow it until ``deadline``."""
        me = get_ident()
        while any(loan.thread != me and loan.is_out() for loan in list(self._lent)) and monotonic() < deadline:
            sleep(0.001)
        _close_all(self._idle)

    def abandon(self) -> None:
        """In a forked child: connections that were in use stay the parent's.

        Closing one would run SQLite's clean-up on locks and shared memory that
        the parent is using; so the file cannot be opened anew here either.
        """
        out = [loan for loan in self._lent if loan.is_out()]
        if out or self._idle:  # idle: what came back after the last look
            for loan in out:
                leak(loan.connection() if loan.connection is not None else None)
            leak(list(self._idle))
            self._idle.clear()
            try:
                file = os.stat(self._path)
            except OSError:
                pass  # it is gone, and nobody can open it by that name
            else:
                _poisoned.add((file.st_dev, file.st_ino))
        self._lent.clear()
        self._identity = None

    def _let_pass(self, loan: _Loan) -> None:
        """Step back for the fork that another thread is about to make, then note the user again."""
        while forks.coming and not forks.is_mine():
            del self._lent[loan]
            forks.wait()
            self._lent[loan] = None

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
            _refuse_poisoned(identity, self._path)
            self._drop()
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._open(file, fresh)
                connection.identity = self._identity = identity
                return connection, fresh
            if connection.identity == identity:
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

    def _open(self, file: os.stat_result, fresh: bool) -> Connection:
        if fresh and not stat.S_ISREG(file.st_mode):
            raise NotAStoreError(f"{self._path} is not a file", database=self._path)
        if fresh and file.st_size == 0:
            raise NotAStoreError(f"{self._path} is empty", database=self._path)
        connection = None
        try:
            connection = patiently(self._busy_seconds, lambda: connect(self._path, self._synchronous))
            if fresh:
                refuse_foreign(connection, self._path, self._busy_seconds)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, FAILURES):
                raise translate(error, self._path) from error
            raise
        return connection

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


def leak(connections: object) -> None:
    """Keep an object alive until the process ends, beyond the interpreter's own clean-up."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections))


def _refuse_poisoned(identity: tuple[int, int], path: str) -> None:
    if identity in _poisoned:
        raise ReentrancyError(
            f"this process was forked while {path} was in use, so SQLite's locks cannot be trusted here",
            hint="start the process anew (multiprocessing: spawn), or fork outside of transactions",
            database=path,
        )


def _withdraw_all() -> None:
    """Before a fork: close what is idle, and wait a moment for what others are using."""
    deadline = monotonic() + FORK_PATIENCE
    for pool in _all_pools():
        pool.withdraw(deadline)


def _all_pools() -> list[Connections]:
    while True:
        try:
            return list(_pools)
        except RuntimeError:  # another thread has just opened a store
            continue


def _abandon_all() -> None:
    for pool in _all_pools():
        pool.abandon()


forks.at_fork(before=_withdraw_all, in_child=_abandon_all)
