"""Waking a waiter of another process at the moment its turn comes.

A bell is a datagram socket with a name in Linux's abstract namespace: it needs
no file, and is gone with its process. Whoever frees a scope rings the bell that
is noted on the next ticket. It is speed only: a bell that cannot be heard (in
another network namespace, on another system) leaves the waiter to its looks.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache

from agent_checkpoint import database

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

ABSTRACT = "\0agent-checkpoint-bell-"


class Bell(database.Bell):
    """What one waiter listens to; ``name`` is for its ticket."""

    def __init__(self) -> None:
        import socket  # only those who wait need it

        self.name = os.urandom(12).hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(ABSTRACT + self.name)

    def fileno(self) -> int:
        """What to wait on; readable when it has rung."""
        return self._socket.fileno()

    def wait(self, seconds: float) -> bool:
        """Until it rings, at most so many seconds; whether it rang."""
        import select

        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        rang = bool(poll.poll(seconds * 1000))
        if rang:
            self.silence()
        return rang

    def silence(self) -> None:
        """Forget the rings that were heard."""
        with suppress(BlockingIOError):
            while self._socket.recv(1):
                pass

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def bell() -> Bell | None:
    """A new bell; None where there is none to be had."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return Bell()
    except OSError:
        return None


def ring(names: Iterable[str]) -> None:
    """Wake whoever listens to these."""
    for name in names:
        with suppress(OSError):  # it has left, or cannot be heard from here
            _ringer().sendto(b"!", ABSTRACT + name)


@lru_cache(maxsize=1)
def _ringer() -> socket.socket:
    import atexit
    import socket

    ringer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ringer.setblocking(False)
    atexit.register(ringer.close)
    return ringer
