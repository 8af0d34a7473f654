"""What the nemesis tells all workers at once, in memory they share: how wrong the clock is, who is to stop where."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

from agent_checkpoint.clock import Clock

# Where a process may be asked to stop itself: inside the write lock, or between a
# read and the write that rests on it.
IN_THE_LOCK = 1
BEFORE_THE_WRITE = 2
WORDS = 3
WORD_BYTES = 8


class Control:
    """A few words in a file that all map: the offset of the wall clock, and a pid for each place to stop at."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, WORDS * WORD_BYTES)
            memory = mmap.mmap(file, WORDS * WORD_BYTES)
        finally:
            os.close(file)
        # A word is read and written as one: nobody sees half an offset.
        self._words = memoryview(memory).cast("q")

    @property
    def offset_ns(self) -> int:
        """How far the wall clock is ahead."""
        return self._words[0]

    @offset_ns.setter
    def offset_ns(self, offset: int) -> None:
        self._words[0] = offset

    def ask(self, place: int, pid: int) -> None:
        """Ask a process to stop itself the next time it comes to that place."""
        self._words[place] = pid

    def is_asked(self, place: int) -> bool:
        """Whether this process is to stop there; it is asked once."""
        if self._words[place] != os.getpid():
            return False
        self._words[place] = 0
        return True


def stop() -> None:
    """Stop this process until somebody wakes it."""
    os.kill(os.getpid(), signal.SIGSTOP)


class SteppingClock(Clock):
    """The machine's clocks, of which the wall clock is as wrong as the nemesis says."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.wall_ns = lambda: time.time_ns() + control.offset_ns
