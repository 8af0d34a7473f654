"""The guard: the process between the wrapper and the command, which sees to it that the command ends.

It has one thread, opens no database but to expire the lease at the very end,
and hears of the wrapper through a pipe that closes when the wrapper dies. Every
signal but KILL leaves it untouched.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from agent_checkpoint.record import Record
from agent_checkpoint.supervise.channel import NEVER
from agent_checkpoint.supervise.command import Command
from agent_checkpoint.supervise.descendants import Descendants, has_ended
from agent_checkpoint.supervise.ending import Ending
from agent_checkpoint.supervise.kernel import adopt_orphans, call_oneself
from agent_checkpoint.supervise.signals import Inbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn

    from agent_checkpoint.supervise.channel import Channel, Deadline
    from agent_checkpoint.supervise.signals import Dispositions
    from agent_checkpoint.supervise.terminal import Terminal

# Not the name of the command: `pkill agent-checkpoint` is not to end both supervisors.
NAME = b"lease-guard"
# How long to wait before killing again who is not dead yet: at first, at most.
PAUSE_NS = 5 * 10**6
LONGEST_PAUSE_NS = 200 * 10**6
# A wrapper that runs answers the report within this, or is about to release the lease itself.
ANSWER_NS = 10**9


class Charge(Record):
    """What the guard is told when it is made."""

    argv: Sequence[str]
    grace_ns: int
    enforced: bool
    expire: Callable[[str], None]
    start: Dispositions
    deadline: Deadline
    terminal: Terminal | None


def guard(charge: Charge, channel: Channel) -> NoReturn:
    """Be the guard; called in a forked process, all signals blocked."""
    try:
        Guard(charge, channel).run()
    finally:
        os._exit(0)


class Guard:
    """What it knows while it runs; ``run`` returns when all is done."""

    def __init__(self, charge: Charge, channel: Channel) -> None:
        os.setpgid(0, 0)
        call_oneself(NAME)
        self._charge = charge
        self._channel = channel
        self._inbox = Inbox()
        self._descendants = Descendants(adopt_orphans())
        self._ending = Ending(charge.grace_ns, charge.enforced)
        self._command: Command | None = None
        self._status: int | None = None
        self._token = ""
        self._dismissed = False
        self._kill_next = 0
        self._pause_ns = PAUSE_NS
        self._inbox.listen({signal.SIGCHLD})
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGCHLD})

    def run(self) -> None:
        """Serve the wrapper until there is nothing left to guard, and make an end."""
        while self._is_needed():
            self._channel.wait(self._next_moment(), self._inbox.fd)
            self._inbox.take()
            self._listen()
            if self._channel.closed:
                self._ending.kill()
            self._reap()
            self._act()
        if self._command is not None and not self._dismissed:
            self._conclude(self._command)

    def _is_needed(self) -> bool:
        if self._command is None:
            return not (self._dismissed or self._channel.closed)
        return self._descendants.left

    def _next_moment(self) -> int:
        if self._command is None:
            return NEVER
        return self._kill_next if self._ending.killing else self._ending.next_moment(self._charge.deadline.get())

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            self._obey(*message)

    def _obey(self, what: str, *facts: Any) -> None:
        if what == "prepare":
            self._prepare(*facts)
        elif what == "go":
            self._go()
        elif what == "signal":
            self._forward(*facts)
        elif what == "kill":
            self._ending.kill()
        elif what == "bye":
            self._dismissed = True
            self._ending.kill()

    def _prepare(self, environ: Mapping[str, str], token: str) -> None:
        foreign = (*self._channel.fds, *self._inbox.fds)
        try:
            command = Command(self._charge.argv, environ, self._charge.start, foreign)
        except OSError as error:
            self._channel.send("failed", error.errno, error.strerror)
            return
        self._command, self._token = command, token
        self._descendants.group, self._descendants.left = command.pid, True
        _let_go_of_standard_files()
        self._channel.send("prepared", command.pid)

    def _go(self) -> None:
        self._act()  # the deadline may have come meanwhile
        if self._ending.lost:
            self._ending.kill()
        if self._command is not None and not self._ending.killing:
            self._command.go()

    def _forward(self, number: int) -> None:
        if self._status is not None and number in (signal.SIGTERM, signal.SIGINT):
            self._ending.kill()  # what the command left behind has been asked already
        self._descendants.signal_group(number)
        if number in (signal.SIGTERM, signal.SIGHUP):
            self._descendants.signal_group(signal.SIGCONT)
        if number == signal.SIGCONT:
            self._channel.send("continued")

    def _reap(self) -> None:
        for pid, status in self._descendants.reap():
            if self._command is None or pid != self._command.pid:
                continue
            if has_ended(status):
                self._status = status
                self._descendants.forget_group()
            else:
                self._channel.send("stopped", os.WSTOPSIG(status) if os.WIFSTOPPED(status) else 0)

    def _act(self) -> None:
        if self._command is None or not self._descendants.left:
            return
        now = time.monotonic_ns()
        step = self._ending.step(now, self._charge.deadline.get(), over=self._status is not None)
        if step == "ask":
            self._descendants.signal_group(signal.SIGTERM, signal.SIGCONT)
        elif step == "ask-all":
            self._descendants.terminate()
        elif step == "kill":
            self._kill(now)

    def _kill(self, now: int) -> None:
        """Whenever a child has ended its children are killed at once, everybody now and then."""
        due = now >= self._kill_next
        if due:
            self._kill_next = now + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
        self._descendants.kill(deep=due)

    def _conclude(self, command: Command) -> None:
        """Nothing is left. The lease is the wrapper's to release, or ours if it does not."""
        if self._channel.closed:
            if self._charge.terminal is not None:
                self._charge.terminal.restore(modes=True)
        else:
            self._channel.send("ended", self._status, self._ending.lost, command.failure())
            self._await_answer()
        if not self._dismissed:
            with suppress(BaseException):
                self._charge.expire(self._token)
                self._channel.send("expired")

    def _await_answer(self) -> None:
        """Until the wrapper has released the lease, or has ended, or the lease with it."""
        until = time.monotonic_ns() + ANSWER_NS
        while not (self._dismissed or self._channel.closed):
            limit = max(until, self._charge.deadline.get())
            if time.monotonic_ns() >= limit:
                break
            self._channel.wait(limit)
            self._listen()


def _let_go_of_standard_files() -> None:
    """They are the command's: a pipe is to end when the command lets go of it."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
