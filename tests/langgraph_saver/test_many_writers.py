"""Many processes on one thread without a lease: whatever they do at once, all that is left is whole.

SQLite lets one write at a time; a server lets all of them, but for what they lock by name.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import WATCHDOG_SECONDS, values
from .writing_worker import COPY, THREAD, at, digest

pytestmark = pytest.mark.usefixtures("unmeasured")

WORKERS = 8
DANGLING = {
    "a value of a checkpoint is missing": """
SELECT s.value FROM langgraph_state s LEFT JOIN langgraph_values v ON v.number = s.value WHERE v.number IS NULL""",
    "a checkpoint of a value is missing": """
SELECT s.checkpoint FROM langgraph_state s LEFT JOIN langgraph_checkpoints c ON c.number = s.checkpoint
WHERE c.number IS NULL""",
    "what a value is a difference to is missing": """
SELECT v.base FROM langgraph_values v LEFT JOIN langgraph_values b ON b.number = v.base
WHERE v.base IS NOT NULL AND b.number IS NULL""",
    "a history of a checkpoint is missing": """
SELECT c.history FROM langgraph_checkpoints c LEFT JOIN langgraph_histories h ON h.number = c.history
WHERE h.number IS NULL""",
    "a history of writes is missing": """
SELECT w.history FROM langgraph_writes w LEFT JOIN langgraph_histories h ON h.number = w.history
WHERE h.number IS NULL""",
}


def run_workers(store: Path | str, turns: int, *only: str) -> None:
    program = str(Path(__file__).with_name("writing_worker.py"))
    done = subprocess.run(
        [sys.executable, program, str(store), str(WORKERS), str(turns), *only],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS + turns,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("turns", [15, pytest.param(400, marks=pytest.mark.long)])
def test_what_many_leave_behind_is_whole(url_or_path: Path | str, turns: int) -> None:
    run_workers(url_or_path, turns)

    with AgentCheckpointSaver.from_conn_string(url_or_path) as saver:
        for thread in (THREAD, COPY):
            for each in saver.list(at(thread)):
                state = values(each)
                assert state["digest"] == digest(state["messages"])
                assert state["same"] == "x" * 300
                for task, channel, value in each.pending_writes or ():
                    name = each.config["configurable"]["checkpoint_id"]
                    assert (task, value) == (f"task-{int(name[:2])}", name if channel == "__error__" else [name])
        with saver.store.read() as reader:
            assert [what for what, sql in DANGLING.items() if reader.rows(sql)] == []


def test_every_save_of_many_is_there(url_or_path: Path | str) -> None:
    """Where nobody removes anything."""
    run_workers(url_or_path, 8, "save")

    with AgentCheckpointSaver.from_conn_string(url_or_path) as saver:
        found = list(saver.list(at(THREAD)))
        assert sorted(each.config["configurable"]["checkpoint_id"] for each in found) == [
            f"{worker:02}-{number:04}" for worker in range(WORKERS) for number in range(1, 9)
        ]
        assert all(len(each.pending_writes or ()) == 2 for each in found)
        saved = saver.store.events(1_000, kind="langgraph.checkpoint-saved", workflow=f"langgraph/{THREAD}")
        # The order of the history is the order in which the changes were committed.
        assert [event.detail["checkpoint_id"] for event in saved] == [
            each.config["configurable"]["checkpoint_id"] for each in reversed(found)
        ]
