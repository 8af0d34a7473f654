"""``init`` and ``doctor``: making a store, and whether it is sound."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from .conftest import CLEAN, COMMAND, Answer, Cli, held, needs_proc_locks, set_version

# Init


def test_init_makes_missing_folders_for_their_owner_only(cli_on: Cli, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        value = cli_on(tmp_path / "a" / "b" / "agents.db", "init").value()
        cli_on(tmp_path / "a" / "b" / "agents.db", "lease acquire").value()
    finally:
        os.umask(old)

    assert value["created"] is True
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in tmp_path.rglob("*")}
    assert (modes.pop("a"), modes.pop("b")) == (0o700, 0o700)
    assert set(modes.values()) == {0o600}


def test_init_leaves_the_modes_of_a_folder_that_was_there(cli_on: Cli, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    cli_on(tmp_path / "agents.db", "init")

    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_init_may_be_repeated_and_keeps_everything(cli_on: Cli, filled: Path) -> None:
    before = cli_on(filled, "events").value()

    assert cli_on(filled, "init").value()["created"] is False
    assert cli_on(filled, "events").value() == before
    assert cli_on(filled, "checkpoint get").value()["sequence"] == 2


def test_init_makes_a_store_of_an_empty_file(cli_on: Cli, path: Path) -> None:
    path.touch()

    assert cli_on(path, "init").value()["created"] is True
    assert cli_on(path, "lease acquire").value()["token"] == 1


def test_a_path_may_hold_any_byte(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "caf") + b"\xe9 %20?mode=ro#x"
    os.mkdir(folder)
    for words in (("init",), ("lease", "acquire", "s", "--owner", "a"), ("status",), ("doctor",)):
        done = subprocess.run(
            [*COMMAND, "--db", os.path.join(folder, b"a&b.db"), *words], capture_output=True, env=CLEAN, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")

    assert b"a&b.db" in os.listdir(folder)


# Doctor


def verdicts(answer: Answer) -> dict[str, str]:
    """What doctor thinks of each thing it looked at."""
    assert answer.err == ""
    return {check["check"]: check["verdict"] for check in json.loads(answer.out)["checks"]}


def test_doctor_exits_0_on_a_sound_store_and_looks_at_everything(cli_on: Cli, filled: Path) -> None:
    answer = cli_on(filled, "doctor")
    value = answer.value()

    assert value["database"] == str(filled)
    assert value["verdict"] in ("ok", "warning")
    assert verdicts(answer).keys() == {
        *("package_version", "sqlite_version", "filesystem", "modes", "sizes", "write_lock"),
        *("integrity", "journal_mode", "synchronous", "schema", "sums", "clock_domain", "growth", "plugins"),
    }
    sound = {"package_version", "modes", "sizes", "write_lock", "integrity", "journal_mode", "synchronous", "schema"}
    assert {name for name, verdict in verdicts(answer).items() if verdict == "ok"} >= sound
    schema = next(check for check in value["checks"] if check["check"] == "schema")
    assert schema["value"] == {"core": 6}


def test_doctor_as_text_is_a_line_for_each_check(cli_on: Cli, filled: Path) -> None:
    answer = cli_on(filled, "doctor", "--format", "text")
    first, blank, *lines = answer.out.splitlines()

    assert answer.status == 0
    assert first.startswith(f"{filled}: ")
    assert blank == ""
    assert [line.split()[1] for line in lines] == list(verdicts(cli_on(filled, "doctor")))


def test_doctor_exits_74_on_a_damaged_page(cli_on: Cli, path: Path, large: bytes) -> None:
    damaged = bytearray(large)
    middle = len(damaged) // 4096 // 2 * 4096
    # The first page from the middle on that is the leaf of a table.
    leaf = next(at for at in range(middle, len(damaged), 4096) if damaged[at] == 0x0D)
    damaged[leaf : leaf + 64] = bytes(byte ^ 0xFF for byte in damaged[leaf : leaf + 64])
    path.write_bytes(damaged)

    answer = cli_on(path, "doctor")

    assert answer.status == 74
    assert json.loads(answer.out)["verdict"] == "broken"
    assert verdicts(answer)["integrity"] == "broken"
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("size", [50, 4096, 20_000])
def test_doctor_exits_74_on_a_truncated_store(cli_on: Cli, path: Path, large: bytes, size: int) -> None:
    path.write_bytes(large[:size])

    answer = cli_on(path, "doctor")

    assert answer.status == 74
    assert json.loads(answer.out)["verdict"] == "broken"


def test_doctor_exits_74_with_a_report_on_what_is_no_store(cli_on: Cli, path: Path) -> None:
    path.write_text("# my notes\n")

    answer = cli_on(path, "doctor")

    assert answer.status == 74
    assert verdicts(answer)["open"] == "broken"
    assert path.read_text() == "# my notes\n"


def test_doctor_exits_74_on_a_newer_schema(cli_on: Cli, filled: Path) -> None:
    set_version(filled, 99)

    answer = cli_on(filled, "doctor")

    assert answer.status == 74
    assert verdicts(answer)["schema"] == "broken"
    assert "99" in answer.out


def test_doctor_warns_of_modes_that_let_others_in(cli_on: Cli, filled: Path) -> None:
    filled.chmod(0o644)

    answer = cli_on(filled, "doctor")

    assert answer.status == 0
    assert verdicts(answer)["modes"] == "warning"


def test_doctor_warns_when_somebody_switched_the_write_ahead_log_off(cli_on: Cli, filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")

    assert verdicts(cli_on(filled, "doctor"))["journal_mode"] == "warning"
    cli_on(filled, "init")
    assert verdicts(cli_on(filled, "doctor"))["journal_mode"] == "ok"


@needs_proc_locks
def test_doctor_names_who_sits_on_the_write_lock(cli_on: Cli, filled: Path) -> None:
    with held(filled) as holder:
        writing = json.loads(cli_on(filled, "doctor").out)["checks"]
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        stopped = json.loads(cli_on(filled, "doctor").out)["checks"]

    found = [next(check for check in checks if check["check"] == "write_lock") for checks in (writing, stopped)]
    assert [check["value"]["pid"] for check in found] == [holder.pid, holder.pid]
    assert [check["verdict"] for check in found] == ["ok", "warning"]
