"""Stores on whose write lock another process sits, and what lies beside a store."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from .conftest import COMMAND, WORDS, Cli, held, needs_proc_locks, process

# Locked

WRITES = ["lease acquire", "lease heartbeat", "lease release", "checkpoint put", "init"]


@needs_proc_locks
@pytest.mark.parametrize("name", WRITES)
def test_a_write_behind_another_writer_is_busy_and_names_it(cli_on: Cli, filled: Path, name: str) -> None:
    before = cli_on(filled, "events").value()
    with held(filled) as holder:
        answer = cli_on(filled, name, *WORDS[name], "--busy-timeout", "0.05")

    error = answer.error()
    assert answer.status == 75
    assert (error["code"], error["retryable"]) == ("storage-busy", True)
    assert (error["blocker"]["pid"], error["blocker"]["stopped"]) == (holder.pid, False)
    assert str(holder.pid) in error["message"]
    assert "stopped" not in error["message"]
    assert cli_on(filled, "events").value() == before


@needs_proc_locks
def test_a_write_behind_a_stopped_writer_says_that_it_is_stopped(cli_on: Cli, filled: Path) -> None:
    with held(filled) as holder:
        holder.send_signal(signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        answer = cli_on(filled, "lease acquire", *WORDS["lease acquire"], "--busy-timeout", "0.05")

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


def test_reads_do_not_wait_for_a_writer(cli_on: Cli, filled: Path) -> None:
    with held(filled):
        for name in ("lease show", "lease check", "checkpoint get", "events", "status", "doctor"):
            assert cli_on(filled, name, *WORDS[name], "--busy-timeout", "0").status == 0


def test_with_no_busy_timeout_a_free_store_is_written_at_once(cli_on: Cli, filled: Path) -> None:
    assert cli_on(filled, "lease acquire", *WORDS["lease acquire"], "--busy-timeout", "0").value()["token"] == 1


# Sidecars


def test_a_gate_that_is_a_link_is_not_followed(cli_on: Cli, filled: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    Path(f"{filled}-gate").symlink_to(target)

    assert cli_on(filled, "checkpoint put").value()["sequence"] == 3
    assert not target.exists()


def test_a_link_to_a_store_is_that_store_with_its_one_set_of_sidecars(
    cli_on: Cli, filled: Path, tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "agents.db"
    link.symlink_to(filled)

    with closing(sqlite3.connect(filled)) as reader:  # keeps the -wal and -shm in place
        reader.execute("SELECT count(*) FROM events").fetchone()
        assert cli_on(link, "checkpoint put").value()["sequence"] == 3
        assert cli_on(filled, "checkpoint put").value()["sequence"] == 4
        assert os.listdir(link.parent) == [link.name]
