"""``init`` and ``doctor``: making a store, and whether it is sound."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
COMMAND = (sys.executable, "-m", "agent_checkpoint")
FENCE = ("--owner", "worker-a", "--token", "1")

# Commands in a form that a good store takes.
WORDS = {
    "init": (),
    "lease acquire": ("new", "--owner", "worker-b"),
    "checkpoint get": ("deploy-v2",),
    "events": (),
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

    def verdicts(self) -> dict[str, str]:
        """What doctor thinks of each thing it looked at."""
        assert self.err == ""
        return {check["check"]: check["verdict"] for check in json.loads(self.out)["checks"]}


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


# Init


def test_init_makes_missing_folders_for_their_owner_only(cli: Cli, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        value = cli(tmp_path / "a" / "b" / "agents.db", "init").value()
        cli(tmp_path / "a" / "b" / "agents.db", "lease acquire").value()
    finally:
        os.umask(old)

    assert value["created"] is True
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.rglob("*")}
    assert (modes.pop("a"), modes.pop("b")) == (0o700, 0o700)
    assert set(modes.values()) == {0o600}


def test_init_leaves_the_modes_of_a_folder_that_was_there(cli: Cli, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    cli(tmp_path / "agents.db", "init")

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_init_may_be_repeated_and_keeps_everything(cli: Cli, filled: Path) -> None:
    before = cli(filled, "events").value()

    assert cli(filled, "init").value()["created"] is False
    assert cli(filled, "events").value() == before
    assert cli(filled, "checkpoint get").value()["sequence"] == 2


def test_init_makes_a_store_of_an_empty_file(cli: Cli, path: Path) -> None:
    path.touch()

    assert cli(path, "init").value()["created"] is True
    assert cli(path, "lease acquire").value()["token"] == 1


def test_a_path_may_hold_any_byte(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "caf") + b"\xe9 %20?mode=ro#x"
    os.mkdir(folder)
    for words in (("init",), ("lease", "acquire", "s", "--owner", "a"), ("status",), ("doctor",)):
        done = subprocess.run(
            [*COMMAND, "--db", os.path.join(folder, b"a&b.db"), *words], capture_output=True, env=CLEAN, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")

    assert b"a&b.db" in os.listdir(folder)


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


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE components SET version = ? WHERE component = 'core'", (version,))


# Doctor


def test_doctor_exits_0_on_a_sound_store_and_looks_at_everything(cli: Cli, filled: Path) -> None:
    answer = cli(filled, "doctor")
    value = answer.value()

    assert value["database"] == str(filled)
    assert value["verdict"] in ("ok", "warning")
    assert answer.verdicts().keys() == {
        *("package_version", "sqlite_version", "filesystem", "modes", "sizes", "write_lock"),
        *("integrity", "journal_mode", "synchronous", "schema", "clock_domain", "plugins"),
    }
    sound = {"package_version", "modes", "sizes", "write_lock", "integrity", "journal_mode", "synchronous", "schema"}
    assert {name for name, verdict in answer.verdicts().items() if verdict == "ok"} >= sound
    schema = next(check for check in value["checks"] if check["check"] == "schema")
    assert schema["value"] == {"core": 1}


def test_doctor_as_text_is_a_line_for_each_check(cli: Cli, filled: Path) -> None:
    answer = cli(filled, "doctor", "--format", "text")
    first, blank, *lines = answer.out.splitlines()

    assert answer.status == 0
    assert first.startswith(f"{filled}: ")
    assert blank == ""
    assert [line.split()[1] for line in lines] == list(cli(filled, "doctor").verdicts())


def test_doctor_exits_74_on_a_damaged_page(cli: Cli, path: Path, large: bytes) -> None:
    damaged = bytearray(large)
    middle = len(damaged) // 4096 // 2 * 4096
    # The first page from the middle on that is the leaf of a table.
    leaf = next(at for at in range(middle, len(damaged), 4096) if damaged[at] == 0x0D)
    damaged[leaf : leaf + 64] = bytes(byte ^ 0xFF for byte in damaged[leaf : leaf + 64])
    path.write_bytes(damaged)

    answer = cli(path, "doctor")

    assert answer.status == 74
    assert json.loads(answer.out)["verdict"] == "broken"
    assert answer.verdicts()["integrity"] == "broken"
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("size", [50, 4096, 20_000])
def test_doctor_exits_74_on_a_truncated_store(cli: Cli, path: Path, large: bytes, size: int) -> None:
    path.write_bytes(large[:size])

    answer = cli(path, "doctor")

    assert answer.status == 74
    assert json.loads(answer.out)["verdict"] == "broken"


def test_doctor_exits_74_with_a_report_on_what_is_no_store(cli: Cli, path: Path) -> None:
    path.write_text("# my notes\n")

    answer = cli(path, "doctor")

    assert answer.status == 74
    assert answer.verdicts()["open"] == "broken"
    assert path.read_text() == "# my notes\n"


def test_doctor_exits_74_on_a_newer_schema(cli: Cli, filled: Path) -> None:
    set_version(filled, 99)

    answer = cli(filled, "doctor")

    assert answer.status == 74
    assert answer.verdicts()["schema"] == "broken"
    assert "99" in answer.out


def test_doctor_warns_of_modes_that_let_others_in(cli: Cli, filled: Path) -> None:
    filled.chmod(0o644)

    answer = cli(filled, "doctor")

    assert answer.status == 0
    assert answer.verdicts()["modes"] == "warning"


def test_doctor_warns_when_somebody_switched_the_write_ahead_log_off(cli: Cli, filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")

    assert cli(filled, "doctor").verdicts()["journal_mode"] == "warning"
    cli(filled, "init")
    assert cli(filled, "doctor").verdicts()["journal_mode"] == "ok"


@knows_lockers
def test_doctor_names_who_sits_on_the_write_lock(cli: Cli, filled: Path) -> None:
    with held(filled) as holder:
        writing = json.loads(cli(filled, "doctor").out)["checks"]
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        stopped = json.loads(cli(filled, "doctor").out)["checks"]

    found = [next(check for check in checks if check["check"] == "write_lock") for checks in (writing, stopped)]
    assert [check["value"]["pid"] for check in found] == [holder.pid, holder.pid]
    assert [check["verdict"] for check in found] == ["ok", "warning"]
