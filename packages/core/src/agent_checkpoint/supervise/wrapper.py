"""The wrapper: the process that holds the lease, and the caller of all the rest.

What the guard does not do the wrapper does: when the guard has been killed, or
is frozen past a deadline, it ends the command itself.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from _thread import allocate_lock
from contextlib import suppress

from agent_checkpoint.record import Record
from agent_checkpoint.supervise.channel import NEVER, Deadline, channels
from agent_checkpoint.supervise.command import NOT_FOUND
from agent_checkpoint.supervise.descendants import Descendants, has_ended, look
from agent_checkpoint.supervise.guard import Charge, guard
from agent_checkpoint.supervise.jobs import Job
from agent_checkpoint.supervise.kernel import adopt_orphans
from agent_checkpoint.supervise.signals import Dispositions, Inbox, held
from agent_checkpoint.supervise.terminal import controlling_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Literal

    OnLost = Literal["term", "kill", "ignore"]
    Why = Literal["exited", "not-found", "cannot-execute", "lost", "guard-died"]

# How long past a moment the guard may be at work before the wrapper takes over.
PATIENCE_NS = 250 * 10**6
# How long a guard that is dismissed may take to end.
FAREWELL_NS = 2 * 10**9
# How long to wait before killing again who is not dead yet: at first, at most.
PAUSE_SECONDS = 0.002
LONGEST_PAUSE_SECONDS = 0.1
ENDS = (signal.SIGTERM, signal.SIGINT)


class Ended(Record):
    """How a command ended, and all that it had started with it.

    ``status`` is what a shell would say: the command's own, 128 + n when
    ``signal`` n ended it, 126 or 127 when it could not be executed (``error``
    says why not). ``why`` is ``lost`` when it was ended because of its deadline
    or of ``lose``. ``expired``: whoever was left has expired the lease.
    """

    status: int
    signal: int | None
    why: Why
    error: str
    expired: bool


class Supervisor:
    """Runs one command so that nothing of it outlives a deadline, the wrapper or the guard.

    The calls are: the constructor, while the process has one thread; ``prepare``;
    ``run``; and in any case ``close``, when the lease has been released. They
    belong to the main thread; ``extend`` and ``lose`` to any.
    """

    def __init__(
        self, argv: Sequence[str], *, grace_seconds: float, on_lost: OnLost, expire: Callable[[str], None]
    ) -> None:
        """Fork the guard, which waits.

        ``grace_seconds`` lie between being asked to end and being killed; a
        deadline must always be further away. ``expire`` gets the token given to
        ``prepare``, in the process that is left, when all of the command is gone.
        """
        self._on_lost = on_lost
        self._grace_ns = int(grace_seconds * 1e9)
        self._enforced = on_lost != "ignore"
        self._expire = expire
        self._adopting = adopt_orphans()
        self._descendants = Descendants(self._adopting, spared=look()(os.getpid()) if self._adopting else ())
        self._start = Dispositions()
        if signal.SIGCHLD in self._start.ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else no child leaves word of how it ended
        self._terminal = controlling_terminal()
        self._deadline = Deadline()
        self._lock = allocate_lock()
        self._lost = self._closed = False
        self._kill_at = NEVER
        self._asked = False
        self._group = 0
        self._token = ""
        self._status = int(signal.SIGKILL)
        self._guard_ended = False
        self.guard = self._fork_guard(argv)
        self._inbox = Inbox()

    def _fork_guard(self, argv: Sequence[str]) -> int:
        charge = Charge(argv, self._grace_ns, self._enforced, self._expire, self._start, self._deadline, self._terminal)
        self._channel, others = channels()
        with held(signal.valid_signals()):
            pid = os.fork()
            if pid == 0:
                self._channel.close()
                guard(charge, others)
        others.close()
        return pid

    def prepare(self, environ: Mapping[str, str], token_text: str, deadline_ns: int) -> int:
        """Make the command's process, which waits; its process group. From now on the deadline holds.

        ``deadline_ns`` is a moment of ``time.monotonic_ns``. Signals are
        collected from here on, for ``run`` to forward.

        Raises:
            OSError: there can be no more processes, or the guard has been killed or frozen.
        """
        with self._lock:
            if not self._lost:
                self._deadline.set(deadline_ns)
        self._token = token_text
        self._inbox.listen({*self._start.forwarded, signal.SIGCHLD})
        self._channel.send("prepare", dict(environ), token_text)
        limit = deadline_ns + PATIENCE_NS
        while (answer := self._channel.receive()) is None:
            if self._channel.closed or time.monotonic_ns() >= limit:
                raise ChildProcessError(errno.ECHILD, "the guard has died, or does not answer")
            self._channel.wait(limit)
        if answer[0] == "failed":
            raise OSError(*answer[1:])
        self._group = int(answer[1])
        return self._group

    def extend(self, deadline_ns: int) -> None:
        """Move the deadline; never blocks, never raises. Once it has passed, or after ``lose``, it stays."""
        with self._lock:
            deadline = self._deadline.get()
            if not self._lost and time.monotonic_ns() < deadline:
                self._deadline.set(max(deadline, deadline_ns))

    def lose(self) -> None:
        """The lease is lost: end the command as ``on_lost`` says; never blocks, never raises."""
        with self._lock:
            if self._enforced and not self._lost and not self._closed:
                self._lost = True
                grace_ns = self._grace_ns if self._on_lost == "term" else 0
                self._deadline.set(min(self._deadline.get(), time.monotonic_ns() + grace_ns))
                self._inbox.nudge()

    def run(self) -> Ended:
        """Let the command go, and wait until it and all that it started is gone."""
        job = Job(self._terminal, self._group, self._channel, self._inbox)
        job.start()
        self._forward(job, self._inbox.take())  # before it goes, so that none is lost
        self._channel.send("go")
        while True:
            now = time.monotonic_ns()  # before listening: the guard's word goes first, if we were frozen here
            if (ended := self._listen(job)) is not None:
                break
            if self._channel.closed or now >= self._overdue():
                ended = self._take_over()
                break
            self._forward(job, job.attend() + self._inbox.take())
            self._channel.wait(self._overdue(), self._inbox.fd)
        self._group = 0
        job.end(killed=ended.signal is not None)
        return ended

    def close(self) -> None:
        """The lease is released, or was not granted: dismiss the guard and, if it never went, the command."""
        if self._closed:
            return
        self._channel.send("bye")
        limit = time.monotonic_ns() + FAREWELL_NS
        while not self._channel.closed and time.monotonic_ns() < limit:
            self._channel.wait(limit)
            self._channel.receive()
        self._end_all()
        with self._lock:
            self._closed = True
            self._inbox.close()
        self._channel.close()
        if self._terminal is not None:
            self._terminal.close()

    def _listen(self, job: Job) -> Ended | None:
        """Hear what the guard has said so far."""
        ended = None
        while (message := self._channel.receive()) is not None:
            what, *facts = message
            if what == "stopped":
                job.stopped(*facts)
            elif what == "continued":
                job.goes_on()
            elif what == "ended":
                ended = _ended(*facts)
            elif what == "expired" and ended is not None:
                ended = ended._replace(expired=True)
        return ended

    def _forward(self, job: Job, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGCHLD:
                self._reap()
            elif number == signal.SIGCONT:
                job.go_on()
            elif number in ENDS and self._asked:
                self._kill_at = min(self._kill_at, time.monotonic_ns())
                self._channel.send("kill")
            else:
                # Also what is no signal: the guard wakes, and looks at the deadline.
                self._channel.send("signal", number if number in self._start.forwarded else 0)
            self._asked = self._asked or number in ENDS

    def _overdue(self) -> int:
        return PATIENCE_NS + min(self._kill_at, self._deadline.get() if self._enforced else NEVER)

    def _take_over(self) -> Ended:
        """The guard is dead or frozen: do what it would have done."""
        why: Why = "guard-died" if self._channel.closed else "exited"
        if self._enforced and time.monotonic_ns() >= self._deadline.get():
            why = "lost"
        self._end_all()
        expired = False
        with suppress(Exception):
            self._expire(self._token)
            expired = True
        return _ended(self._status, False, None)._replace(why=why, expired=expired)

    def _end_all(self) -> None:
        """Kill until there is nobody left, the guard included."""
        if not self._adopting:
            self._descendants.group = self._group or None
        pause = PAUSE_SECONDS
        while self._reap():
            if not self._guard_ended:
                os.kill(self.guard, signal.SIGKILL)
            self._descendants.kill(deep=True)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _reap(self) -> bool:
        """Wait for those of our children who have ended; there are others.

        While the guard lives it has the command's. But the first process of a
        pid namespace has all the orphans, and must let none of them lie about.
        """
        for pid, status in self._descendants.reap():
            if pid == self.guard and has_ended(status):
                self._guard_ended = True
            elif pid == self._group and has_ended(status):
                self._status = status
        return self._descendants.left or not self._guard_ended


def _ended(status: int, lost: bool, failure: Sequence[Any] | None) -> Ended:
    """Put the guard's report, which has the command's wait status, as a shell would."""
    code = os.waitstatus_to_exitcode(status)
    if failure is not None:
        code, error = failure
        why: Why = "not-found" if code == NOT_FOUND else "cannot-execute"
        return Ended(code, None, why, error, expired=False)
    number = -code if code < 0 else None
    return Ended(128 - code if code < 0 else code, number, "lost" if lost else "exited", "", expired=False)
