"""What the tests of the lock share: a lock on a real file, and ways to lose a lease and to see what happened.

Fixtures are found by pytest; the rest is imported, ``from .conftest import …``. What one file alone needs stays there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest


def _begin() -> None:
    """Prefect reads its environment when it is imported: a home of our own, no API, and no server that it starts."""
    home = tempfile.mkdtemp(prefix="agent-checkpoint-prefect-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ |= {
        "PREFECT_HOME": home,
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_LEVEL": "ERROR",
    }


_begin()

from prefect.filesystems import LocalFileSystem  # noqa: E402
from prefect.results import ResultStore  # noqa: E402
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings  # noqa: E402

from agent_checkpoint import hookimpl  # noqa: E402
from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseStore  # noqa: E402
from agent_checkpoint_prefect.context import held  # noqa: E402
from agent_checkpoint_prefect.stores import awaited  # noqa: E402

from .harness import api, client  # noqa: E402, F401 -- fixtures: one Prefect API for the whole run of the tests

T = TypeVar("T")
Locks = Callable[..., FencedLock]
# For what must come to an end by itself: a test that waits longer than this has found a hang.
WATCHDOG_SECONDS = 60
# SQLite's write-ahead log: bytes before the first frame, and before each page.
LOG_HEADER, FRAME_HEADER = 32, 24


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AGENT_CHECKPOINT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _holds_nothing() -> Iterator[None]:
    """All tests have one context: what one of them left in it must not be there for the next."""
    yield
    held.set({})


@pytest.fixture(autouse=True)
def _no_api(request: pytest.FixtureRequest) -> Iterator[None]:
    """No API but for those who ask for one; theirs goes on for the rest of the session."""
    if "api" in request.fixturenames or get_current_settings().api.url is None:
        yield
    else:
        with temporary_settings(restore_defaults={PREFECT_API_URL}):
            yield


@pytest.fixture
def locks(path: Path) -> Iterator[Locks]:
    """Makes locks on a fresh file, which are alike but for their options."""
    made: list[FencedLock] = []

    def make(**options: Any) -> FencedLock:
        made.append(FencedLock(store=LeaseStore(path=path), **options))
        return made[-1]

    yield make
    if made:
        store = made[0].store.open()
        asyncio.run(awaited(store).close())
        store.close()


@pytest.fixture
def lock(locks: Locks) -> FencedLock:
    """A lock as its defaults make it."""
    return locks()


@pytest.fixture
def results(lock: FencedLock, tmp_path: Path) -> ResultStore:
    """Prefect's store of results in a folder, with the lock as its lock manager."""
    return result_store(lock, tmp_path)


def result_store(lock: Any, folder: Path) -> ResultStore:
    """Prefect's store of results in a folder, which asks no server for it."""
    return ResultStore(
        result_storage=LocalFileSystem(basepath=str(folder / "results")),
        lock_manager=lock,
        cache_result_in_memory=False,
    )


# Another one, and time


def in_thread(call: Callable[..., T], *arguments: Any, **options: Any) -> Future[T]:
    """Call it in a new thread, which has a context of its own: another run, for a lock."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def elsewhere(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """What it answers, or raises, to another thread."""
    return in_thread(call, *arguments, **options).result(WATCHDOG_SECONDS)


def in_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it in an event loop of its own, whose tasks have the context of the caller."""
    return asyncio.run(asyncio.wait_for(coroutine, WATCHDOG_SECONDS))


def wait_until(true: Callable[[], object]) -> None:
    """Wait for what comes by itself."""
    for _ in range(WATCHDOG_SECONDS * 200):
        if true():
            return
        threading.Event().wait(0.005)
    pytest.fail("it did not come")


def waiting(lock: FencedLock) -> int:
    """How many wait in the queues of the lock's store."""
    with lock.store.open().read() as reader:
        ((count,),) = reader.rows("SELECT COUNT(*) FROM tickets")
    return int(count)


# Losing a lease


def take_away(lock: FencedLock, lease: FencedLease) -> None:
    """End a lease in the store; its holder hears of it with its next heartbeat or check: see losing.py."""
    lock.store.open().force_release(lease.scope, reason="a test", token=lease.token)


# What is on record


def events(lock: FencedLock, kind: str | None = None) -> list[Any]:
    """The audit events of the lock's store but for its own."""
    return [each for each in lock.store.open().events(limit=1000, kind=kind) if not each.kind.startswith("store.")]


def kinds(lock: FencedLock) -> list[str]:
    return [each.kind for each in events(lock)]


class Commits:
    """Counts the commits in a file, seen from outside: SQLite leaves the number of its commits in no file.

    So what is counted are the write-ahead log's commit frames, which say how many
    pages the database has; the log is never reset while this one reads.
    """

    def __init__(self, path: Path) -> None:
        self._log = Path(f"{path}-wal")
        self._reader = sqlite3.connect(path, isolation_level=None)
        self._reader.execute("BEGIN")
        self._reader.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        self._seen = self._count()

    def since(self) -> int:
        """How many there were since the last look."""
        before, self._seen = self._seen, self._count()
        return self._seen - before

    def _count(self) -> int:
        log = self._log.read_bytes()
        page_size, salts = int.from_bytes(log[8:12], "big"), log[16:24]
        frames = (log[at : at + FRAME_HEADER] for at in range(LOG_HEADER, len(log), FRAME_HEADER + page_size))
        return sum(frame[8:16] == salts and frame[4:8] != bytes(4) for frame in frames)

    def close(self) -> None:
        self._reader.close()


# Plugins


class Veto:
    """A plugin that refuses with ``error``, where it has one, and notes what it was asked."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked: list[Any] = []

    @hookimpl
    def check_fence(self, write: Any) -> None:
        self.asked.append(write)
        if self.error is not None:
            raise self.error


@pytest.fixture
def veto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Veto:
    """A plugin that is installed, as far as anybody can tell. To be asked for before the lock is used."""
    plugin = Veto()
    folder = tmp_path / "site"
    info = folder / "veto-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: veto\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agent_checkpoint]\nveto = the_veto_of_a_test:plugin\n")
    module = type(os)("the_veto_of_a_test")
    module.plugin = plugin  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    monkeypatch.syspath_prepend(folder)
    return plugin


# What shows what is still open in the lock: it runs with --long, as what starts a Prefect API does.
UNSETTLED = ("test_interruptions.py", "test_lost.py", "test_lost_moments.py", "test_lost_tasks.py")


# A loss that strikes between the making of a file or socket and the next line leaves it to the collector.
STRUCK = pytest.mark.filterwarnings("ignore:unclosed (file )?<:ResourceWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"lose", "hear"} & set(vars(getattr(item, "module", None) or object)):
        item.add_marker(STRUCK)
    if item.path.name in UNSETTLED:
        item.add_marker(pytest.mark.long)
