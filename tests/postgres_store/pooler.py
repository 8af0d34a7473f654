"""pgbouncer in transaction mode, in front of a server of the tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.postgres import NOBODY

SETTINGS = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 500
logfile = {folder}/log
"""


def is_installed() -> bool:
    return shutil.which("pgbouncer") is not None


class Pooler:
    """Shares a few sessions of a server among all who come, a transaction at a time."""

    def __init__(self, server_port: int, sessions: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agent-checkpoint-pooler-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        (self.folder / "users").write_text('"postgres" ""\n')
        words = {"server": server_port, "port": self.port, "folder": self.folder, "sessions": sessions}
        (self.folder / "settings").write_text(SETTINGS.format(**words))
        who = {}
        if os.geteuid() == 0:
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, NOBODY, NOBODY)
            who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self._process = subprocess.Popen(
            ["pgbouncer", "-q", str(self.folder / "settings")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **who,  # type: ignore[call-overload]
        )
        self._wait()

    def url(self, schema: str, *options: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?" + "&".join((f"schema={schema}", *options))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
