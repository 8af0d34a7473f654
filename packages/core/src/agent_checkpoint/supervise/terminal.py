"""The terminal: which process group is in its foreground, and what state it is left in.

A command has a group of its own, and only the foreground group may read from
the terminal. It gets the foreground at once where nobody else of our group can
want it: where we lead the group, and our input and output are the terminal.
Elsewhere, in a pipeline before a pager or in a script, it gets it when it asks:
the kernel stops it then, which the guard sees.
"""

from __future__ import annotations

import os
import signal
import termios
from contextlib import suppress

from agent_checkpoint.supervise.channel import above_standard
from agent_checkpoint.supervise.descendants import group_exists
from agent_checkpoint.supervise.signals import held

ASKS_FOR_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


class Terminal:
    """The controlling terminal, as the process group ``home`` found it."""

    def __init__(self, fd: int) -> None:
        self.home = os.getpgrp()
        self._fd = fd
        self._modes = termios.tcgetattr(fd)

    def is_ours_alone(self) -> bool:
        """Nobody else of our group can want it."""
        return os.getpid() == self.home and all(map(_in_foreground, (0, 1)))

    def foreground(self) -> int | None:
        """The group that has it; None when it has been hung up."""
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:
            return None

    def pass_on(self, giver: int, taker: int) -> bool:
        """Let ``taker`` have the foreground, if ``giver`` has it."""
        if self.foreground() != giver:
            return False
        with held({signal.SIGTTOU}), suppress(OSError):
            os.tcsetpgrp(self._fd, taker)
        return self.foreground() == taker

    def restore(self, *, modes: bool) -> None:
        """Take it back from whoever had it and is gone; ``modes``: who left it could not tidy up."""
        group = self.foreground()
        if group is None:
            return
        if group != self.home and not group_exists(group):
            self.pass_on(group, self.home)
        if modes and self.foreground() == self.home:
            with held({signal.SIGTTOU}), suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSANOW, self._modes)

    def close(self) -> None:
        """Close our descriptor of it."""
        os.close(self._fd)


def controlling_terminal() -> Terminal | None:
    """The one of our session, if it has one."""
    fd = -1
    try:
        fd = above_standard(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
        return Terminal(fd)
    except (OSError, termios.error):
        if fd >= 0:
            os.close(fd)
        return None


def _in_foreground(fd: int) -> bool:
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
