"""The command on a store behind a URL: the children find it by their environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_checkpoint import StateStore

COMMAND = (sys.executable, "-m", "agent_checkpoint")

CHILD = """
import json, os
from agent_checkpoint import Lease, StateStore
with StateStore(os.environ["AGENT_CHECKPOINT_DB"]) as store:
    lease = Lease.from_env()
    store.put_checkpoint("deploy", {"by": "child"}, lease=lease)
    print(json.dumps([os.environ["AGENT_CHECKPOINT_DB"], lease.scope, lease.token]))
"""


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        timeout=120,
    )


def test_what_runs_under_a_lease_finds_the_store(store: StateStore, url: str) -> None:
    ran = subprocess.run(
        [*COMMAND, "--db", url, "run", "release", "--owner", "worker-a", "--", sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == [url, "release", 1]
    assert store.get_lease("release") is None
    saved = store.get_checkpoint("deploy")
    assert saved is not None
    assert (saved.token, saved.data) == (1, {"by": "child"})


def test_a_shell_takes_a_lease_over_into_its_environment(store: StateStore, url: str) -> None:
    ran = shell(
        """
        eval "$($PYTHON -m agent_checkpoint --db "$URL" lease acquire release --owner worker-a --ttl 60 --export)"
        echo '{"by": "shell"}' | $PYTHON -m agent_checkpoint checkpoint put deploy --data - > /dev/null
        $PYTHON -m agent_checkpoint lease release release --field state
        echo "$AGENT_CHECKPOINT_DB"
        """,
        URL=url,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["released", url]
    saved = store.get_checkpoint("deploy")
    assert saved is not None
    assert saved.data == {"by": "shell"}


@pytest.mark.parametrize("words", [("lease", "list"), ("doctor",), ("status",), ("events",)])
def test_a_url_makes_no_file_and_its_store_is_not_made_by_looking(url: str, tmp_path: Path, words: tuple[str]) -> None:
    ran = subprocess.run([*COMMAND, "--db", url, *words], capture_output=True, text=True, cwd=tmp_path, timeout=120)

    assert (ran.returncode, ran.stdout) == (66, "")
    assert json.loads(ran.stderr)["error"]["code"] == "not-found"
    assert list(tmp_path.iterdir()) == []


def test_no_patience_is_taken_by_the_command_too(store: StateStore, url: str) -> None:
    ran = subprocess.run(
        [*COMMAND, "--db", url, "--busy-timeout", "0", "lease", "list"], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")
