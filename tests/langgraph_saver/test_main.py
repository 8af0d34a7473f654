"""``python -m agent_checkpoint_langgraph``: what is printed where, and what the exit status says."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint_langgraph import AgentCheckpointSaver
from agent_checkpoint_langgraph.__main__ import main

from .conftest import WATCHDOG_SECONDS, rewrite
from .old_files import assert_same, everything, filled

pytestmark = pytest.mark.usefixtures("unmeasured")

PROGRAM = [sys.executable, "-m", "agent_checkpoint_langgraph"]


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def error(self) -> Any:
        """The one object on stderr; nothing was answered."""
        assert self.out == ""
        return json.loads(self.err)["error"]


Run = Callable[..., Answer]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, run in this process in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGENT_CHECKPOINT_DB", raising=False)

    def call(*words: object) -> Answer:
        status = main([str(word) for word in words])
        return Answer(status, *capsys.readouterr())

    return call


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return filled(tmp_path / "old.sqlite", "a", "b")


def test_import_prints_one_object_and_nothing_on_stderr(old: Path, path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "import", old, "--db", path], capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"threads": 2, "checkpoints": 6, "writes": 12}
    with AgentCheckpointSaver.from_conn_string(path) as saver:
        assert_same(old, saver)


def test_import_finds_the_store_as_the_other_commands_do(
    old: Path, path: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("import", old).status == 0
    monkeypatch.setenv("AGENT_CHECKPOINT_DB", os.fspath(path))
    assert run("import", old).status == 0

    for store in (path, tmp_path / ".agent-checkpoint" / "state.db"):
        with AgentCheckpointSaver.from_conn_string(store) as saver:
            assert len(everything(saver)) == 6


def test_import_shows_a_line_of_progress_on_a_terminal(old: Path, path: Path) -> None:
    leader, follower = pty.openpty()
    with closing(os.fdopen(leader, "rb", buffering=0)) as terminal:
        done = subprocess.run(
            [*PROGRAM, "import", old, "--db", path],
            stdout=subprocess.PIPE,
            stderr=follower,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
        os.close(follower)
        shown = terminal.read(4096)

    assert done.returncode == 0
    assert shown.startswith(b"\rimported ")
    assert shown.endswith(b"\rimported 6 of 6 checkpoints\r\n")
    assert json.loads(done.stdout)["checkpoints"] == 6


def test_an_import_that_leaves_a_thread_out_says_which(old: Path, path: Path, run: Run) -> None:
    rewrite(old, "UPDATE checkpoints SET type = 'pickle' WHERE thread_id = 'a'")
    done = run("import", old, "--db", path)

    assert done.status == 2
    assert done.error["code"] == "invalid-input"
    assert done.error["thread_id"] == "a"
    assert done.error["refused_threads"] == ["a"]


def test_a_held_thread_gives_the_status_of_a_held_lease(old: Path, path: Path, run: Run) -> None:
    with AgentCheckpointSaver.from_conn_string(path) as saver, saver.lease("a", owner="worker-a", in_context=False):
        done = run("import", old, "--db", path)

    assert done.status == 75
    assert done.error["owner"] == "worker-a"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["import", "missing.sqlite"], 66),
        (["import"], 2),
        (["import", "a", "b"], 2),
        ([], 2),
        (["export"], 2),
    ],
)
def test_mistakes_are_json_on_stderr(tmp_path: Path, run: Run, words: list[str], status: int) -> None:
    done = run(*words)

    assert done.status == status
    assert done.error["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--help"], ["import", "--help"], ["conformance", "--help"]])
def test_help_is_printed(run: Run, words: list[str]) -> None:
    done = run(*words)

    assert (done.status, done.err) == (0, "")
    assert "usage: python -m agent_checkpoint_langgraph" in done.out


def test_a_store_that_cannot_be_opened_is_told_as_everywhere(old: Path, tmp_path: Path, run: Run) -> None:
    done = run("import", old, "--db", tmp_path)

    assert done.status == 74
    assert done.error["code"].startswith("storage")


def test_nobody_reading_the_answer_is_the_status_of_a_closed_pipe(old: Path, path: Path) -> None:
    with subprocess.Popen(
        [*PROGRAM, "import", str(old), "--db", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(WATCHDOG_SECONDS) == 141
        assert process.stderr is not None
        assert process.stderr.read() == b""
