"""Between the wrapper and the guard: messages through pipes, and a moment in shared memory.

Nothing here ever blocks: whom one talks to may be frozen.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import select
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

NEVER = 2**63 - 1
# poll() takes milliseconds as a C int, and a ttl of 30 days would be too many.
LONGEST_WAIT_NS = 3600 * 10**9


def above_standard(fd: int) -> int:
    """The same file at a descriptor that is not 0, 1 or 2, which may have been closed at our start."""
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def pipe() -> tuple[int, int]:
    """A pipe that neither blocks nor is passed to a command."""
    reading, writing = map(above_standard, os.pipe())
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def wait(until_ns: int, reading: Iterable[int], writing: Iterable[int] = ()) -> None:
    """Sleep until a descriptor is ready or the moment has come (or, for far moments, a while)."""
    poller = select.poll()
    for fd in reading:
        poller.register(fd, select.POLLIN)
    for fd in writing:
        poller.register(fd, select.POLLOUT)
    left = min(until_ns - time.monotonic_ns(), LONGEST_WAIT_NS)
    poller.poll(max(0, -(-left // 10**6)))


def drain(fd: int) -> bytes | None:
    """All that is in a pipe now; None when it is empty and nobody can write to it any more."""
    parts = []
    with suppress(BlockingIOError):
        while part := os.read(fd, 65536):
            parts.append(part)
        if not parts:
            return None
    return b"".join(parts)


class Channel:
    """Messages, one JSON line each, to and from the other process.

    ``closed`` becomes True when the other process has ended: nobody else may
    hold its ends of the pipes.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.closed = False
        self._writing = writing
        self._lines: list[bytes] = []
        self._part = b""
        self._unsent = b""

    def send(self, *message: Any) -> None:
        """Send now, or with a later ``wait`` what does not fit now."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[Any] | None:
        """The next message; None when there is no more for now, and only then ``wait`` is of use."""
        if not self._lines and not self.closed:
            part = drain(self.reading)
            self.closed = part is None
            *self._lines, self._part = (self._part + (part or b"")).split(b"\n")
        return json.loads(self._lines.pop(0)) if self._lines else None

    def wait(self, until_ns: int, *others: int) -> None:
        """Sleep until a message, something in ``others``, or the moment; sends on what is unsent."""
        reading = others if self.closed else (self.reading, *others)
        wait(until_ns, reading, [self._writing] if self._unsent else [])
        self._flush()

    @property
    def fds(self) -> tuple[int, int]:
        """This side's ends of the two pipes."""
        return self.reading, self._writing

    def close(self) -> None:
        """Close this side; the other process sees that as our end."""
        for fd in self.fds:
            os.close(fd)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._writing, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = b""


def channels() -> tuple[Channel, Channel]:
    """The two sides; after the fork each process closes the side that is not its own."""
    (guard_reads, wrapper_writes), (wrapper_reads, guard_writes) = pipe(), pipe()
    return Channel(wrapper_reads, wrapper_writes), Channel(guard_reads, guard_writes)


class Deadline:
    """A moment of the monotonic clock, in memory that a forked child shares.

    A pipe of many heartbeats fills up while the guard is frozen, and then the
    newest would be lost. Setting it is one store of eight bytes.
    """

    def __init__(self) -> None:
        self._cell = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.set(NEVER)

    def get(self) -> int:
        """The moment, in nanoseconds."""
        return self._cell[0]

    def set(self, ns: int) -> None:
        """Move it."""
        self._cell[0] = ns
