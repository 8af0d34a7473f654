"""A wire between client and server that can be cut, silently or not, at a moment of one's choice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

COMMIT = b"Q\0\0\0\x0bCOMMIT\0"


class Proxy:
    """Forwards connections on a port of its own to a server on loopback.

    ``on_commit(connection)`` is called once, for the next COMMIT and in place of
    forwarding it. While it ``stalls`` nothing goes through, and nobody is told;
    while it is ``down`` nobody gets a connection.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.on_commit: Callable[[Connection], object] | None = None
        self.down = False
        self._flows = threading.Event()
        self._flows.set()
        self.connections: list[Connection] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def take(self) -> Callable[[Connection], object] | None:
        taken, self.on_commit = self.on_commit, None
        return taken

    def stall(self) -> None:
        self._flows.clear()

    def flow(self) -> None:
        self._flows.set()

    def wait(self) -> None:
        self._flows.wait()

    def cut(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            connection.cut()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self.flow()
        self.cut()
        for connection in self.connections:
            connection.join()

    def _accept(self) -> None:
        with suppress(OSError), self._listening:
            while True:
                client, _ = self._listening.accept()
                try:
                    if self.down:
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self.connections.append(Connection(self, client, server))


class Connection:
    """One client and its session on the server."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self.client = client
        self.server = server
        self.forwards_answers = True
        self.tells_the_end = True
        self.answered = threading.Event()
        """Whether the server has answered since the answers are not forwarded any more."""
        self._pumps = [threading.Thread(target=pump) for pump in (self._requests, self._answers)]
        for pump in self._pumps:
            pump.start()

    def join(self) -> None:
        for pump in self._pumps:
            pump.join()
        self.client.close()
        self.server.close()

    def commit(self) -> None:
        """Forward the COMMIT that was withheld."""
        self.server.sendall(COMMIT)

    def cut(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _requests(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(65_536):
                self._proxy.wait()
                act = self._proxy.take() if data == COMMIT else None
                if act is None:
                    self.server.sendall(data)
                else:
                    act(self)
        self.cut()

    def _answers(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(65_536):
                self._proxy.wait()
                if self.forwards_answers:
                    self.client.sendall(data)
                else:
                    self.answered.set()
        if self.tells_the_end:
            self.cut()
