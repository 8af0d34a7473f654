"""The example, with a server of its own, and the flow of the guide, whose function the test of the docs calls bare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_checkpoint import StateStore

from .harness import WATCHDOG_SECONDS

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/prefect_publish_once.py"
GUIDE = ROOT / "docs/prefect.md"


def test_the_example_publishes_twice_without_a_lock_and_once_with_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split(r" {3,}", line) for line in done.stdout.splitlines()]
    assert rows == [
        ["", "without a lock", "with FencedLock"],
        ["worker A, killed", "was killed", "was killed"],
        ["worker B, failed, retried, frozen, woken", "published 1.0", "found 1.0 published"],
        ["worker C, took over", "published 1.0", "published 1.0"],
        ["the release was published", "2 times", "once"],
        ["", "by C, by B", "by C, token 4"],
    ]
    assert list(tmp_path.iterdir()) == []  # it cleans up


def test_the_function_of_the_guide_runs_as_a_flow_too(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = GUIDE.read_text("utf-8").partition("## A fenced flow in ten lines")[2].split("```")[1].removeprefix("python")
    assert code.count('publish.fn("1.0")') == 1
    monkeypatch.chdir(tmp_path)

    exec(code.replace("publish.fn(", "publish(").replace('"agents.db"', repr(str(tmp_path / "agents.db"))), {})

    assert capsys.readouterr().out == "publishing 1.0 with token 1\n"
    with StateStore(tmp_path / "agents.db") as store:
        (lease,) = store.events(kind="lease.acquired")
    assert lease.scope == "prefect/default/release-1.0"
