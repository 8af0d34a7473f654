"""What the tests with a Prefect API share: the API itself, worker processes that use it, and ways to look.

One temporary API serves them all: it takes its time to start. It keeps its
database and its results in a directory of its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_HOME,
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL,
    temporary_settings,
)
from prefect.testing.utilities import prefect_test_harness

from agent_checkpoint_prefect import FencedLock

T = TypeVar("T")
WORKERS = Path(__file__).with_name("flows_worker.py")
# For what must come to an end by itself: a test that waits longer than this has found a hang.
WATCHDOG_SECONDS = 180
POLL_SECONDS = 0.05


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prefect API that serves this run of the tests, this process included."""
    home = tmp_path_factory.mktemp("prefect-home")
    settings = {
        PREFECT_HOME: home,
        PREFECT_LOCAL_STORAGE_PATH: home / "storage",
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL: 0.2,
    }
    with temporary_settings(settings), prefect_test_harness(WATCHDOG_SECONDS):
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def client(api: str) -> Iterator[SyncPrefectClient]:
    """Asks the API, as the pages of Prefect's UI do."""
    with get_client(sync_client=True) as opened:
        yield opened


def in_async_code(flow_run: Coroutine[Any, Any, T]) -> T:
    """Run an async flow in a loop of its own.

    Prefect leaves sockets of its clients open when a loop ends; they are collected here, not in a later test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return asyncio.run(asyncio.wait_for(flow_run, WATCHDOG_SECONDS))
        finally:
            gc.collect()


def worker(folder: Path, api_url: str, *words: str) -> subprocess.Popen[str]:
    """A process that runs a flow of ``flows_worker.py``, with ``agents.db`` and results in the folder."""
    return subprocess.Popen(
        [sys.executable, str(WORKERS), *words],
        cwd=folder,
        env={
            **os.environ,
            "PREFECT_API_URL": api_url,
            "PREFECT_HOME": str(folder / "home"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    """These processes, by id, are over after the block, whatever happens in it."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finished(process: subprocess.Popen[str]) -> str:
    """What a process printed, which must end well by itself."""
    printed, _ = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 0, printed
    return printed


def until(found: Callable[[], T | None], while_alive: subprocess.Popen[str] | None = None) -> T:
    """What is found at last: not None, False or empty. The process that it comes from must be alive."""
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, "it never came"
        if while_alive is not None and while_alive.poll() is not None:
            raise AssertionError(f"the process ended before it: {while_alive.communicate()[0]}")
        time.sleep(POLL_SECONDS)
    return answer


def kinds(lock: FencedLock, *ours: str) -> list[str]:
    """The kinds of the audit log's events, oldest first; with ``ours`` of these kinds only."""
    found = [event.kind for event in lock.store.open().events(limit=1_000)]
    return [kind for kind in found if not ours or kind in ours]


def lease_events(client: SyncPrefectClient, scope: str) -> list[dict[str, Any]]:
    """What Prefect's event feed has of a lease, oldest first."""
    wanted = {"resource": {"id": [f"agent-checkpoint.lease.{scope}"]}, "order": "ASC"}
    answer = client.request("POST", "/events/filter", json={"filter": wanted})
    answer.raise_for_status()
    return list(answer.json()["events"])
