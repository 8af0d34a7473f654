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
import threading
import time
from collections import deque
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, lockf

from agent_checkpoint.errors import ReentrancyError
from agent_checkpoint.sqlite import forks

TRY = LOCK_EX | LOCK_NB

_gates: dict[tuple[int, int], Gate] = {}
_opening = threading.Lock()
# Gates that a store does not use any more.
_unused: deque[Gate] = deque()


def gate_at(database: str) -> Gate | None:
    """The process's gate for a database file; None when its sidecar cannot be opened.

    Without it (a read-only directory, a sidecar that is not ours) writers are
    merely less fair. The sidecar can be opened by whoever can open the database.
    """
    path = database + "-gate"
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
    with _opening:
        _close_unused()


def leave_later(gate: Gate) -> None:
    """The same for a finalizer, which may run in the midst of anything: it takes no lock."""
    _unused.append(gate)


def _close_unused() -> None:
    while _unused:
        gate = _unused.popleft()
        gate.users -= 1
        if gate.users == 0 and gate.retire():
            del _gates[gate.key]
            os.close(gate.descriptor)


class Gate:
    """The queue of one process for one database, and its place in the queue of processes."""

    def __init__(self, descriptor: int, key: tuple[int, int]) -> None:
        self.descriptor = descriptor
        self.key = key
        self.users = 0
        self.reset()

    def reset(self) -> None:
        """Forget what the parent process had: a child holds no lock and has no threads."""
        self._mutex = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Lock] = deque()
        self._inside = 0
        self._retired = False
        self._helper: _Helper | None = None

    def enter(self, patience: float) -> bool:
        """Take a turn, or False after ``patience`` seconds: go around.

        Raises:
            ReentrancyError: this thread is inside already.
        """
        me = threading.get_ident()
        if self._inside == me:
            raise ReentrancyError(
                "the body of a store transaction called the store: it would wait for itself",
                hint="use the transaction's own methods inside its block, the store after it",
            )
        with self._mutex:
            if self._retired:
                return False
            first = not self._taken
            if first:
                self._taken = True
                self._inside = me
        if not first:
            started = time.monotonic()
            if not self._queue_up(patience):
                return False
            self._inside = me
            patience -= time.monotonic() - started
        helper = self._helper
        if helper is None or not helper.waiting:
            try:
                lockf(self.descriptor, TRY)
            except OSError as error:
                entered = self._wait(error, patience)
            else:
                entered = True
        else:
            # Somebody sits on the gate and this process has gone around before:
            # waiting again would cost every write its patience.
            entered = False
        if not entered:
            self._inside = 0
            self._next_thread()
        return entered

    def leave(self) -> None:
        """Let the next one in, if this thread is inside: an interrupt may have come at any moment."""
        if self._inside == threading.get_ident():
            self._inside = 0
            lockf(self.descriptor, LOCK_UN)
            self._next_thread()

    def retire(self) -> bool:
        """Let nobody in any more; False when somebody is inside, or waits in the kernel."""
        with self._mutex:
            if self._taken or (self._helper is not None and self._helper.waiting):
                return False
            self._retired = True
        if self._helper is not None:
            self._helper.end()
        return True

    def _queue_up(self, patience: float) -> bool:
        """Wait until the threads that came before have had their turn."""
        turn = threading.Lock()
        turn.acquire()
        with self._mutex:
            if not self._taken:
                self._taken = True
                return True
            self._queue.append(turn)
        if turn.acquire(timeout=max(0.0, patience)):
            return True
        with self._mutex:
            if turn in self._queue:
                self._queue.remove(turn)
                return False
        return True  # it was handed over just now

    def _next_thread(self) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False

    def _wait(self, error: OSError, patience: float) -> bool:
        if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        if self._helper is None:
            self._helper = _Helper(self.descriptor)
        return self._helper.take(patience)


class _Helper:
    """A thread that blocks on the lock in place of a writer, who can then stop waiting."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Used as signals: taken from the start, released once for each question and answer.
        self._asked = threading.Lock()
        self._asked.acquire()
        self._answer = threading.Lock()
        self._answer.acquire()
        self._state = threading.Lock()
        self._wanted = False
        self._ended = False
        self.waiting = False
        threading.Thread(target=self._serve, name="agent-checkpoint-gate", daemon=True).start()

    def take(self, patience: float) -> bool:
        """Wait for the lock; False when it did not come in time (it is then passed on)."""
        self._wanted = self.waiting = True
        self._asked.release()
        if self._answer.acquire(timeout=max(0.0, patience)):
            return True
        with self._state:
            self._wanted = False
            return self._answer.acquire(blocking=False)  # it came just now

    def end(self) -> None:
        """Let the thread end; nobody waits."""
        self._wanted = False
        self._ended = True
        self._asked.release()

    def _serve(self) -> None:
        while self._asked.acquire() and not self._ended:
            self._block()
            with self._state:
                if self._wanted:
                    self._answer.release()
                else:
                    lockf(self._descriptor, LOCK_UN)
                self.waiting = False

    def _block(self) -> None:
        while True:
            try:
                lockf(self._descriptor, LOCK_EX)
                return
            except OSError as error:
                # The kernel looks for cycles between processes, not lock owners: two
                # stores in two processes look like a deadlock to it, and are none.
                if error.errno != errno.EDEADLK:
                    return  # without the lock: the gate is fairness only
                time.sleep(0.001)


def _reset_all() -> None:
    global _opening
    _opening = threading.Lock()
    for gate in _gates.values():
        gate.reset()


forks.in_child(_reset_all)
