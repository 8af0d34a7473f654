"""A real Prefect server, a flow whose process is killed, and another run that takes over.

It takes its time: the server is a process of its own, started here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from agent_checkpoint_prefect import FencedLock

from .harness import ended, finished, kinds, until, worker

pytestmark = pytest.mark.long


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The API's URL of a server that was started for the test, with a home of its own."""
    port = free_port()
    home = tmp_path / "server"
    home.mkdir()
    words = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    own = {"PREFECT_HOME": str(home), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    url = f"http://127.0.0.1:{port}/api"
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(words, cwd=home, env={**kept, **own}, stdout=log, stderr=log)
    try:
        until(lambda: answers(url) or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "server.log").read_text("utf-8")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def remote(server: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server}), get_client(sync_client=True) as client:
        yield client


def test_another_run_takes_over_at_once_when_the_process_of_a_flow_is_killed(
    server: str, remote: SyncPrefectClient, lock: FencedLock, tmp_path: Path
) -> None:
    store = lock.store.open()
    first, second = worker(tmp_path, server, "freeze"), None
    with ended(first):
        until((tmp_path / f"holding-{first.pid}").exists, while_alive=first)
        held = lock.inspect("orders")
        assert held is not None
        second = worker(tmp_path, server, "take_over")
        with ended(second):
            until(lambda: store.status().queues, while_alive=second)
            first.kill()
            finished(second)

    journal = (tmp_path / "journal.txt").read_text("utf-8").splitlines()
    assert journal == [f"frozen with token {held.token}", f"taken over with token {held.token + 1}"]
    (expired,) = store.events(kind="lease.expired")
    assert (expired.token, expired.detail["reason"]) == (held.token, "owner-dead")
    assert kinds(lock, "lease.acquired", "lease.expired", "lease.released") == [
        "lease.acquired",
        "lease.expired",
        "lease.acquired",
        "lease.released",
    ]
    assert lock.list_leases() == []

    # The server knows nothing of the death of the first.
    assert sorted(str(run.state_name) for run in remote.read_flow_runs()) == ["Completed", "Running"]
