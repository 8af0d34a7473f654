"""Stores on whose write lock another process sits, and what lies beside a store."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main

WATCHDOG_SECONDS = 60
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
COMMAND = (sys.executable, "-m", "agent_checkpoint")
FENCE = ("--owner", "worker-a", "--token", "1")

# Commands in a form that a good store takes.
WORDS = {
    "init": (),
    "lease acquire": ("new", "--owner", "worker-b"),
    "lease heartbeat": ("release", *FENCE),
    "lease release": ("release", *FENCE),
    "lease show": ("release",),
    "lease check": ("release", *FENCE),
    "checkpoint put": ("deploy-v2", "--data", "1", "--lease-scope", "release", *FENCE),
    "checkpoint get": ("deploy-v2",),
    "events": (),
    "status": (),
    "doctor": (),
}


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
        (name,) = whole = json.loads(self.err)
        assert name == "error"
        return dict(whole[name])


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """``cli(database, name, …)``: the command in this process."""
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)

    def run(database: Path, name: str, *arguments: str) -> Answer:
        status = main(["--db", str(database), *name.split(), *(arguments or WORDS[name])])
        return Answer(status, *capsys.readouterr())

    return run


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


@pytest.fixture
def filled(path: Path, small: bytes) -> Path:
    """A store with a live lease and two protected checkpoints."""
    path.write_bytes(small)
    path.chmod(0o600)
    return path


def process(*command: object) -> Answer:
    done = subprocess.run(
        [str(word) for word in command],
        env=CLEAN,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


# Locked

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
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.send_signal(signal.SIGCONT)
            holder.kill()


knows_lockers = pytest.mark.skipif(not os.path.exists("/proc/locks"), reason="only Linux tells who holds a lock")
WRITES = ["lease acquire", "lease heartbeat", "lease release", "checkpoint put", "init"]


@knows_lockers
@pytest.mark.parametrize("name", WRITES)
def test_a_write_behind_another_writer_is_busy_and_names_it(cli: Cli, filled: Path, name: str) -> None:
    before = cli(filled, "events").value()
    with held(filled) as holder:
        answer = cli(filled, name, *WORDS[name], "--busy-timeout", "0.05")

    error = answer.error()
    assert answer.status == 75
    assert (error["code"], error["retryable"]) == ("storage-busy", True)
    assert (error["blocker"]["pid"], error["blocker"]["stopped"]) == (holder.pid, False)
    assert str(holder.pid) in error["message"]
    assert "stopped" not in error["message"]
    assert cli(filled, "events").value() == before


@knows_lockers
def test_a_write_behind_a_stopped_writer_says_that_it_is_stopped(cli: Cli, filled: Path) -> None:
    with held(filled) as holder:
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        answer = cli(filled, "lease acquire", *WORDS["lease acquire"], "--busy-timeout", "0.05")

    error = answer.error()
    assert answer.status == 75
    assert (error["blocker"]["pid"], error["blocker"]["stopped"]) == (holder.pid, True)
    assert "stopped" in error["message"]


def test_a_process_behind_another_writer_is_busy_and_succeeds_once_it_is_gone(filled: Path) -> None:
    words = (*COMMAND, "--db", filled, "--busy-timeout", "0.05", "lease", "acquire", "new", "--owner", "worker-b")
    with held(filled):
        answer = process(*words)

    assert answer.status == 75
    assert answer.error()["code"] == "storage-busy"
    assert process(*words).value()["token"] == 1


def test_reads_do_not_wait_for_a_writer(cli: Cli, filled: Path) -> None:
    with held(filled):
        for name in ("lease show", "lease check", "checkpoint get", "events", "status", "doctor"):
            assert cli(filled, name, *WORDS[name], "--busy-timeout", "0").status == 0


def test_with_no_busy_timeout_a_free_store_is_written_at_once(cli: Cli, filled: Path) -> None:
    assert cli(filled, "lease acquire", *WORDS["lease acquire"], "--busy-timeout", "0").value()["token"] == 1


# Sidecars


def test_a_gate_that_is_a_link_is_not_followed(cli: Cli, filled: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    Path(f"{filled}-gate").symlink_to(target)

    assert cli(filled, "checkpoint put").value()["sequence"] == 3
    assert not target.exists()


def test_a_link_to_a_store_is_that_store_with_its_one_set_of_sidecars(cli: Cli, filled: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "agents.db"
    link.symlink_to(filled)

    with closing(sqlite3.connect(filled)) as reader:  # keeps the -wal and -shm in place
        reader.execute("SELECT count(*) FROM events").fetchone()
        assert cli(link, "checkpoint put").value()["sequence"] == 3
        assert cli(filled, "checkpoint put").value()["sequence"] == 4
        assert os.listdir(link.parent) == [link.name]
