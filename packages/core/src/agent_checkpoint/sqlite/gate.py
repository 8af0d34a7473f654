"""Who writes next: a fair queue in front of SQLite's write lock.

SQLite's busy handler polls, and one of eight writers can wait eight seconds.
Here writers queue on a POSIX record lock of a sidecar file, on which the kernel
wakes them up, and behind it BEGIN IMMEDIATE finds the lock free. The gate is
fairness only, safety is SQLite's lock: whoever cannot get through the gate in
time (its holder may be frozen) goes around it.

POSIX locks belong to the process and die with it. Any ``close`` of the sidecar
in this process would drop them, so there is one descriptor for a process and
inode, shared by all its stores, closed only when the last of them is.
"""

from __future__ import annotations

import errno
import os
import time
from _thread import RLock, allocate_lock, get_ident
from collections import deque
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf

from agent_checkpoint import forks
from agent_checkpoint.errors import ReentrancyError
from agent_checkpoint.process import describe
from agent_checkpoint.sqlite.blockers import holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Collection

    from agent_checkpoint.sqlite.blocking import Helper

TRY = LOCK_EX | LOCK_NB
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
HANDED = -1
# How long a writer waits for a lock of which nobody says who has it.
GLANCE_SECONDS = 0.05

_gates: dict[tuple[int, int], Gate] = {}
_opening = RLock()
# Gates that a store does not use any more.
_unused: deque[Gate] = deque()


def gate_at(database: str) -> Gate | None:
    """The process's gate for a database file; None when its sidecar cannot be opened.

    Without it (a read-only directory, a sidecar that is not ours) writers are
    merely less fair. The sidecar can be opened by whoever can open the database.
    """
    path = database + "-gate"
    if _is_opening():
        return None
    with _opening:
        _close_unused()
        try:
            known = os.lstat(path)
            if (known.st_dev, known.st_ino) in _gates:
                gate = _gates[known.st_dev, known.st_ino]
                gate.users += 1
                return gate
        except FileNotFoundError:
            pass
        except OSError:
            return None
        try:
            mode = os.stat(database).st_mode & 0o666
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        except OSError:
            return None
        opened = os.fstat(descriptor)
        key = (opened.st_dev, opened.st_ino)
        # Where another opener came first, ours is leaked: closing it would drop the other's locks.
        gate = _gates.setdefault(key, Gate(descriptor, key))
        gate.users += 1
        return gate


def leave_unused(gate: Gate) -> None:
    """The end of one ``gate_at``; its descriptor is closed when nobody can be inside any more."""
    _unused.append(gate)
    if not _is_opening():
        with _opening:
            _close_unused()


def leave_later(gate: Gate) -> None:
    """The same for a finalizer, which may run in the midst of anything: it waits for no lock."""
    _unused.append(gate)
    if not _is_opening() and _opening.acquire(blocking=False):
        try:
            _close_unused()
        finally:
            _opening.release()


def _is_opening() -> bool:
    """Whether this very thread is in the midst of that, and we are in the handler of a signal, or a finalizer."""
    return _opening._is_owned()  # type: ignore[attr-defined,no-any-return]


def _close_unused() -> None:
    while _unused:
        _unused.popleft().users -= 1
    # One that could not be closed before, because somebody was inside, is tried again.
    for gate in [gate for gate in _gates.values() if gate.users == 0 and gate.retire()]:
        del _gates[gate.key]
        os.close(gate.descriptor)


def refuse_reentrancy(inside: Collection[int]) -> None:
    """Raise ``ReentrancyError`` when this thread is among those inside a transaction."""
    if get_ident() in inside:
        raise ReentrancyError(
            "the body of a store transaction called the store: it would wait for itself",
            hint="use the transaction's own methods inside its block, the store after it",
        )


class Gate:
    """The queue of one process for one database, and its place in the queue of processes."""

    def __init__(self, descriptor: int, key: tuple[int, int]) -> None:
        self.descriptor = descriptor
        self.key = key
        self.users = 0
        self.reset()

    def reset(self) -> None:
        """Forget what the parent process had: a child holds no lock and has no threads."""
        # A thread that has it may come again, in the handler of a signal.
        self._mutex = RLock()
        self._queue: deque[LockType] = deque()
        # The thread that is inside, 0: none, HANDED: the next one, which has not noticed yet.
        # The only word on it, so that an interrupt finds it in one state or the other.
        self.inside = 0
        self._retired = False
        self._helper: Helper | None = None

    def enter(self, patience: float) -> bool:
        """Take a turn, or False after ``patience`` seconds: go around.

        Whoever is interrupted in here calls ``leave`` as well.

        Raises:
            ReentrancyError: this thread is inside already.
        """
        me = get_ident()
        if self.inside == me:
            self.refuse_reentrancy()
        with self._mutex:
            if self._retired:
                return False
            if self.inside == 0:
                self.inside = me
        try:
            if self.inside != me:
                started = time.monotonic()
                if not self._queue_up(me, patience):
                    return False
                patience -= time.monotonic() - started
            if self._lock(patience):
                return True
            self._pass_on()
        except BaseException:
            self.leave(me)
            raise
        return False

    def refuse_reentrancy(self) -> None:
        """Raise ``ReentrancyError`` when this thread is inside."""
        if self.inside:
            refuse_reentrancy((self.inside,))

    def leave(self, thread: int | None = None) -> None:
        """Let the next one in, if ``thread`` (this one) is inside."""
        if self.inside == (thread or get_ident()):
            lockf(self.descriptor, LOCK_UN)
            self._pass_on()

    def retire(self) -> bool:
        """Let nobody in any more; False when somebody is inside, or waits in the kernel."""
        # A finalizer may run while its thread is in there.
        if self._mutex._is_owned() or not self._mutex.acquire(blocking=False):  # type: ignore[attr-defined]
            return False
        try:
            if self.inside or (self._helper is not None and self._helper.waiting):
                return False
            self._retired = True
        finally:
            self._mutex.release()
        if self._helper is not None:
            self._helper.end()
        return True

    def _queue_up(self, me: int, patience: float) -> bool:
        """Wait until the threads that came before have had their turn."""
        turn = allocate_lock()
        turn.acquire()
        with self._mutex:
            if self._retired:  # since it was looked at: the descriptor may be another file's by now
                return False
            if self.inside == 0:
                self.inside = me
                return True
            self._queue.append(turn)
        try:
            if turn.acquire(timeout=max(0.0, patience)) or not self._step_back(turn):
                self.inside = me
                return True
        except BaseException:
            if not self._step_back(turn) and self.inside != me:
                self._pass_on()
            raise
        return False

    def _step_back(self, turn: LockType) -> bool:
        """Leave the queue; False when the turn was handed over just now."""
        with self._mutex:
            if turn not in self._queue:
                return False
            self._queue.remove(turn)
            return True

    def _pass_on(self) -> None:
        with self._mutex:
            if self._queue:
                self.inside = HANDED
                self._queue.popleft().release()
            else:
                self.inside = 0

    def _lock(self, patience: float) -> bool:
        helper = self._helper
        if helper is not None and helper.waiting:
            # This process has gone around before. No try of our own here: the lock is
            # the process's, so it would succeed on what the helper is about to let go.
            pid = holder(self.key, 0)
            if pid is None:  # free just now, or held where we cannot see it
                patience = min(patience, GLANCE_SECONDS)
            elif describe(pid)["stopped"] is not False:
                # Waiting again for a frozen process would cost every write its patience.
                return False
            return helper.take(patience)
        try:
            lockf(self.descriptor, TRY)
            return True
        except OSError as error:
            if error.errno not in TAKEN:
                return False
        if helper is None:
            try:
                from agent_checkpoint.sqlite.blocking import Helper

                helper = self._helper = Helper(self.descriptor)
            except (ImportError, OSError, RuntimeError):
                return False  # no more files, or threads, for this process
        return helper.take(patience)


def _reset_all() -> None:
    global _opening
    _opening = RLock()
    for gate in _gates.values():
        gate.reset()


forks.at_fork(in_child=_reset_all)
