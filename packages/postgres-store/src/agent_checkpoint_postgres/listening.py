"""Waking waiters by NOTIFY: one connection in a process listens for all of them.

It is speed only. Where nothing is heard, behind a pooling proxy or while the
server is away, waiters look for themselves.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg

from agent_checkpoint import database
from agent_checkpoint.errors import AgentCheckpointError
from agent_checkpoint_postgres import statements

if TYPE_CHECKING:
    from agent_checkpoint_postgres.links import Link, Links

PREFIX = "agent_checkpoint_"
# How long to rest before listening anew when the connection was lost.
REST_SECONDS = 1.0


class Bell(database.Bell):
    """What one waiter listens to; its name is ``channel/number``."""

    def __init__(self, channel: str) -> None:
        self.number = os.urandom(8).hex()
        self.name = f"{channel}/{self.number}"
        self._heard, self._clapper = socket.socketpair()
        self._heard.setblocking(False)
        self._clapper.setblocking(False)

    def ring(self) -> None:
        """Wake its waiter."""
        with suppress(OSError):  # rung already, or closed
            self._clapper.send(b"!")

    def fileno(self) -> int:
        """What to wait on; readable when it has rung."""
        return self._heard.fileno()

    def wait(self, seconds: float) -> bool:
        """Until it rings, at most so many seconds; whether it rang."""
        poll = select.poll()
        poll.register(self._heard, select.POLLIN)
        rang = bool(poll.poll(seconds * 1000))
        if rang:
            self.silence()
        return rang

    def silence(self) -> None:
        """Forget the rings that were heard."""
        with suppress(BlockingIOError):
            while self._heard.recv(16):
                pass

    def close(self) -> None:
        """Listen no more."""
        self._heard.close()
        self._clapper.close()


class Ear(threading.Thread):
    """The thread that listens, on a connection of its own, while the store is open."""

    def __init__(self, links: Links) -> None:
        super().__init__(name="agent-checkpoint-listener", daemon=True)
        self.channel = PREFIX + os.urandom(8).hex()
        self.bells: weakref.WeakValueDictionary[str, Bell] = weakref.WeakValueDictionary()
        self._links = links
        self._ended, self._end = socket.socketpair()

    def run(self) -> None:
        """Listen until the end, over every loss of the connection."""
        with self._ended:
            while not self._is_over(0):
                try:
                    with self._links.connect() as link:
                        self._listen(link)
                except (AgentCheckpointError, psycopg.Error, OSError):
                    self._is_over(REST_SECONDS)

    def end(self) -> None:
        """Stop listening."""
        self._end.close()
        if self is not threading.current_thread():
            self.join(REST_SECONDS)

    def _listen(self, link: Link) -> None:
        if link.ask(b"SELECT pg_backend_pid()") != (link.info.backend_pid,):
            # A proxy is in between: the session is the next client's, who would go on listening. Looking now and
            # then is enough for us.
            self._is_over(None)
            return
        link.own.execute(f"LISTEN {statements.identifier(self.channel)}".encode())
        for bell in list(self.bells.values()):
            bell.ring()  # what was notified before is not heard
        poll = select.poll()
        for source in (link.fileno(), self._ended.fileno()):
            poll.register(source, select.POLLIN)
        while poll.poll() and not self._is_over(0):
            for notify in link.notifies(timeout=0):
                rung = self.bells.get(notify.payload)
                if rung is not None:
                    rung.ring()

    def _is_over(self, seconds: float | None) -> bool:
        return bool(select.select([self._ended], [], [], seconds)[0])


class Listener:
    """The ear of one store in this process; none before somebody waits."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._making = threading.Lock()
        self._ear: Ear | None = None
        _all.add(self)

    def bell(self) -> Bell:
        """A new bell; from now on it may ring."""
        with self._making:
            if self._ear is None:
                self._ear = Ear(self._links)
                self._ear.start()
            ear = self._ear
        bell = Bell(ear.channel)
        ear.bells[bell.number] = bell
        return bell

    def close(self) -> None:
        """End the thread and its connection; idempotent."""
        with self._making:
            ear, self._ear = self._ear, None
        if ear is not None:
            ear.end()

    def after_fork(self) -> None:
        """In a forked child: the parent's connection and thread stay the parent's."""
        _abandoned.append(self._ear)
        self._making, self._ear = threading.Lock(), None


# What a forked child has of its parent's: not its to close.
_abandoned: list[object] = []
_all: weakref.WeakSet[Listener] = weakref.WeakSet()


def _after_fork() -> None:
    for listener in list(_all):
        listener.after_fork()


os.register_at_fork(after_in_child=_after_fork)
