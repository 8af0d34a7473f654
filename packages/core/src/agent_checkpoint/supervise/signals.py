"""Signals: as they were at the start, as a command gets them back, and as bytes a loop can wait for."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress

from agent_checkpoint.supervise.channel import drain, pipe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

FORWARDED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGTSTP,
        signal.SIGCONT,
    }
)
# The interpreter ignores these for itself; whether our own start did cannot be known any more.
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


class Dispositions:
    """Which signals were ignored and blocked when the program started.

    To be made before the program ignores any signal itself. What was ignored,
    as by ``nohup``, the command ignores too, and it is not forwarded.
    """

    def __init__(self) -> None:
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
        self.ignored = ignored - IGNORED_BY_PYTHON
        self.forwarded = FORWARDED - self.ignored

    def restore(self) -> None:
        """Put everything back, for a command that is about to be executed.

        What is pending is delivered now, with its default action.
        """
        for number in signal.valid_signals():
            wanted = signal.SIG_IGN if number in self.ignored else signal.SIG_DFL
            if signal.getsignal(number) is not wanted:
                signal.signal(number, wanted)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


@contextmanager
def held(numbers: Iterable[int]) -> Iterator[None]:
    """Signals that come meanwhile wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Inbox:
    """Signals as bytes in a pipe: ``fd`` is readable when there are some."""

    def __init__(self) -> None:
        self.fd, self._writing = pipe()
        self._before: dict[int, object] = {}
        self._fd_before = -1

    def listen(self, numbers: Iterable[int]) -> None:
        """From now on collect these; main thread only."""
        self._fd_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in numbers:
            self._before[number] = signal.signal(number, _note)

    @property
    def fds(self) -> tuple[int, int]:
        """Both ends of the pipe."""
        return self.fd, self._writing

    def take(self) -> bytes:
        """What came, in the order in which it came; 0 stands for a nudge."""
        return drain(self.fd) or b""

    def nudge(self) -> None:
        """Wake who waits; from any thread."""
        with suppress(BlockingIOError):  # full: it will wake anyhow
            os.write(self._writing, b"\0")

    def close(self) -> None:
        """Give the signals back to whom they belonged before."""
        for number, before in self._before.items():
            signal.signal(number, before or signal.SIG_DFL)  # type: ignore[arg-type] # what signal() returned
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
        os.close(self.fd)
        os.close(self._writing)


def _note(number: int, frame: FrameType | None) -> None:
    """Nothing to do here: the interpreter has written the number into the pipe."""
