"""A command as a job of the shell that we are run from: it stops, goes on, and has the terminal in turns.

The shell knows the wrapper's process group only. So when the command stops,
the wrapper stops with its group, as the terminal would have stopped it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from agent_checkpoint.supervise.channel import wait
from agent_checkpoint.supervise.signals import held
from agent_checkpoint.supervise.terminal import ASKS_FOR_TERMINAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.supervise.channel import Channel
    from agent_checkpoint.supervise.signals import Inbox
    from agent_checkpoint.supervise.terminal import Terminal

# How long to wait for the CONT that ends a stop; without it there was no stop.
CONTINUED_NS = 10**9


class Job:
    """The command's process group and the terminal, if there is one."""

    def __init__(self, terminal: Terminal | None, group: int, channel: Channel, inbox: Inbox) -> None:
        self._terminal = terminal
        self._group = group
        self._channel = channel
        self._inbox = inbox
        self._had_terminal = False
        self._stopped_by = 0
        self._continuing = 0

    def start(self) -> None:
        """Give it the terminal at once, if that is to be."""
        if self._terminal is not None and self._terminal.is_ours_alone():
            self._terminal.pass_on(self._terminal.home, self._group)

    def go_on(self) -> None:
        """Continue it: with the terminal, if it had it and the shell gave it to us."""
        if self._terminal is not None and self._had_terminal:
            self._terminal.pass_on(self._terminal.home, self._group)
        self._continuing += 1
        self._channel.send("signal", signal.SIGCONT)

    def goes_on(self) -> None:
        """The guard has continued it."""
        self._continuing -= 1

    def stopped(self, number: int) -> None:
        """It was stopped by this signal, which ``attend`` sees to, or goes on (0); or will, as we have told it to."""
        self._stopped_by = 0 if self._continuing else number

    def attend(self) -> bytes:
        """If it was stopped help it, or stop too; the signals that came meanwhile.

        Without a terminal there is no job control, and the lease is kept
        through a stop. A stop by STOP is somebody's own affair, but in the
        foreground the shell has to get the terminal back.
        """
        number, self._stopped_by, terminal = self._stopped_by, 0, self._terminal
        if not number or terminal is None:
            return b""
        if number in ASKS_FOR_TERMINAL and terminal.pass_on(terminal.home, self._group):
            self.go_on()
            return b""
        if number == signal.SIGSTOP:
            if terminal.foreground() not in (terminal.home, self._group):
                return b""
            number = signal.SIGTSTP
        self._had_terminal = terminal.pass_on(self._group, terminal.home)
        if number == signal.SIGTSTP and not self._had_terminal:
            came = self._stop_too(number)
        else:
            came = self._stop_group(number)
        return self._until_continued(number, came)

    def end(self, *, killed: bool) -> None:
        """It is gone: the terminal is taken back, and its modes if the command could not."""
        if self._terminal is not None:
            self._terminal.restore(modes=killed)

    def _stop_group(self, number: int) -> bytes:
        """The command's group alone was stopped: ours is to follow, us included."""
        before = signal.signal(number, signal.SIG_DFL)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(0, number)
        signal.signal(number, before)
        return b""

    def _stop_too(self, number: int) -> bytes:
        """Our group was stopped, and is waiting for us; unless it has been continued already."""
        before = signal.signal(number, signal.SIG_DFL)
        with held({number}):
            signal.raise_signal(number)  # pending; a CONT from now on takes it away
            came = self._inbox.take()
            if signal.SIGCONT in came:
                signal.signal(number, signal.SIG_IGN)
        signal.signal(number, before)
        return came

    def _until_continued(self, number: int, came: bytes) -> bytes:
        """We go on, or never stopped. The signals that came, with CONT among them."""
        limit = time.monotonic_ns() + CONTINUED_NS
        while signal.SIGCONT not in came and time.monotonic_ns() < limit:
            wait(limit, [self._inbox.fd])
            came += self._inbox.take()
        if signal.SIGCONT in came:
            return came
        # Nobody could have continued us, so the kernel did not stop us. Nor is the
        # command to be left stopped; what asks in vain for the terminal it hangs up.
        if number in ASKS_FOR_TERMINAL:
            self._channel.send("signal", signal.SIGHUP)
        return came + bytes([signal.SIGCONT])
