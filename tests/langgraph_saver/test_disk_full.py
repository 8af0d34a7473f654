"""A disk that fills up in the middle of a group: what was acknowledged is there, and nothing else is half there.

The program runs in a mount namespace with a disk of 3 MB, which nobody outside sees.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 120

PROGRAM = """
import asyncio, sys
from agent_checkpoint import StorageError
from agent_checkpoint_langgraph import AgentCheckpointSaver

folder = sys.argv[1]


def config(number):
    return {"configurable": {"thread_id": "t", "checkpoint_ns": "", "checkpoint_id": f"id-{number}"}}


async def fill(saver):
    saved = set()
    for wave in range(50):
        asked = [saver.aput_writes(config(wave), [("n", "x" * 5_000)], f"task-{task}") for task in range(40)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        saved |= {(wave, task) for task, answer in enumerate(answers) if answer is None}
        failed = [answer for answer in answers if answer is not None]
        if failed:
            assert all(isinstance(answer, StorageError) for answer in failed), failed
            return saved
    raise AssertionError("the disk never filled up")


with AgentCheckpointSaver.from_conn_string(f"{folder}/agents.db") as saver:
    saved = asyncio.run(fill(saver))
with AgentCheckpointSaver.from_conn_string(f"{folder}/agents.db") as again:
    with again.store.read() as reader:
        rows = reader.rows("SELECT checkpoint_id, task_id FROM langgraph_writes")
        (events,) = reader.rows("SELECT COUNT(*) FROM events WHERE kind = 'langgraph.writes-saved'")
        assert reader.rows("PRAGMA integrity_check") == [("ok",)]
stored = {(int(checkpoint_id[3:]), int(task_id[5:])) for checkpoint_id, task_id in rows}
assert stored == saved and events == (len(saved),), (len(stored), len(saved), events)
assert saved
"""


def test_a_disk_that_is_full_in_the_middle_of_a_group_leaves_what_was_acknowledged(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        if "CI" in os.environ:
            pytest.fail("the gate runs as root, where there is unshare")
        pytest.skip("needs root, and unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = 'set -e; mount -t tmpfs -o size=3m tmpfs "$0"; exec "$@"'
    command = ["unshare", "--mount", "--fork", "sh", "-c", mount, str(disk), sys.executable, "-c", PROGRAM, str(disk)]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)

    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
