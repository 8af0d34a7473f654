"""What the tests of the command share: ways to call it, and what they expect of its answer.

Fixtures are found by pytest; the rest is imported, ``from .conftest import …``, which import mode importlib
resolves to this same module. What one file alone needs stays in that file.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main

WATCHDOG_SECONDS = 60
# The environment without our variables.
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
COMMAND = (sys.executable, "-m", "agent_checkpoint")
FENCE = ("--owner", "worker-a", "--token", "1")

# Every command that works on a store, in a form that the ``filled`` store takes.
WORDS = {
    "init": (),
    "lease acquire": ("new", "--owner", "worker-b"),
    "lease heartbeat": ("release", *FENCE),
    "lease release": ("release", *FENCE),
    "lease show": ("release",),
    "lease list": (),
    "lease check": ("release", *FENCE),
    "lease force-release": ("release", "--reason", "gone"),
    "lease wait": ("new",),
    "lease set-limit": ("new", "3"),
    "checkpoint put": ("deploy-v2", "--data", "1", "--lease-scope", "release", *FENCE),
    "checkpoint get": ("deploy-v2",),
    "checkpoint list": (),
    "checkpoint history": ("deploy-v2",),
    "checkpoint diff": ("deploy-v2",),
    "checkpoint prune": ("--keep-last", "1"),
    "effect list": (),
    "events": (),
    "events archive": ("--before", "2001-01-01", "--to", "archive.jsonl"),
    "retention show": (),
    "retention set": ("checkpoints.keep_last", "3"),
    "retention unset": ("checkpoints.keep_last",),
    "prune": ("--apply-policy",),
    "export": (),
    "status": (),
    "doctor": (),
}

# The keys of a lease in JSON.
LEASE_FIELDS = {
    *("scope", "slot", "owner", "token", "state", "ttl_seconds", "acquired_at", "heartbeat_at", "expires_at"),
    *("remaining_seconds", "metadata", "process", "owner_alive"),
}

needs_proc_locks = pytest.mark.skipif(
    not os.path.exists("/proc/locks"), reason="only Linux tells who holds a lock, in /proc/locks"
)


# The command and its answers


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    def value(self) -> Any:
        """The JSON value on stdout of a command that did it."""
        assert (self.status, self.err) == (0, "")
        return json.loads(self.out)

    def error(self) -> dict[str, Any]:
        """The one JSON error on stderr of a command that did not."""
        assert self.out == ""
        return the_error(self.err)


Cli = Callable[..., Answer]


def the_error(stderr: str) -> dict[str, Any]:
    """The one JSON error that is all of stderr."""
    (name,) = whole = json.loads(stderr)
    assert name == "error"
    return dict(whole[name])


@pytest.fixture
def bare_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command in this process, told nothing by its environment."""
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)

    def run(*arguments: object) -> Answer:
        status = main([str(argument) for argument in arguments])
        return Answer(status, *capsys.readouterr())

    return run


@pytest.fixture
def cli(bare_cli: Cli, path: Path) -> Cli:
    """The command in this process, on a fresh store."""
    on_the_store = partial(bare_cli, "--db", path)
    on_the_store("init")
    return on_the_store


@pytest.fixture
def cli_on(bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli_on(database, name, …)``: the command in this process on any store, with its WORDS unless told others."""

    monkeypatch.chdir(tmp_path)  # some write a file

    def run(database: Path, name: str, *arguments: str) -> Answer:
        return bare_cli("--db", database, *name.split(), *(arguments or WORDS[name]))

    return run


def process(*command: object, cwd: Path | None = None) -> Answer:
    """A command in a process of its own."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=CLEAN,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def acquire(cli: Cli, scope: str, owner: str, *options: object) -> tuple[str, ...]:
    """A granted lease, as the options that present it."""
    lease = cli("lease", "acquire", scope, "--owner", owner, *options).value()
    return "--owner", owner, "--token", str(lease["token"])


def kinds(cli: Cli) -> list[str]:
    return [event["kind"] for event in cli("events").value()]


# Stores, and what may happen to them


def fill(path: Path, checkpoints: int = 2) -> None:
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", ttl_seconds=3600)
        for number in range(checkpoints):
            store.put_checkpoint("deploy-v2", {"number": number, "text": "x" * 500}, lease=lease)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with a live lease and two protected checkpoints."""
    path = tmp_path_factory.mktemp("small") / "agents.db"
    fill(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same with many checkpoints."""
    path = tmp_path_factory.mktemp("large") / "agents.db"
    fill(path, checkpoints=200)
    return path.read_bytes()


@pytest.fixture
def filled(path: Path, small: bytes) -> Path:
    """A store with a live lease and two protected checkpoints."""
    path.write_bytes(small)
    path.chmod(0o600)
    return path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None for what is no file."""
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


def expire(path: Path, scope: str) -> None:
    """Let a lease run out: its last heartbeat was a day before the clock's zero and the epoch."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE leases SET beat_ticks = beat_ticks - ttl_ns, expires_at = 0, sum = NULL WHERE scope = ?", (scope,)
        )


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE components SET version = ? WHERE component = 'core'", (version,))


# Runs with -S: it needs no packages, and starts at once.
HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process sits on the write lock."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.send_signal(signal.SIGCONT)
            holder.kill()
