"""One ``StateStore``, many threads."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.watching import open_files

from agent_checkpoint import (
    AgentCheckpointError,
    InvalidInputError,
    LeaseHeldError,
    NotFoundError,
    StateStore,
    StorageUnreachableError,
)

THREADS = 16
LONG = 60.0


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads are switched as often as Python can, so that what may come between does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def all_at_once(work: Callable[[int], None], threads: int = THREADS) -> list[BaseException]:
    """Run ``work`` in as many threads, started together; what went wrong."""
    errors: list[BaseException] = []
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        try:
            start.wait(LONG)
            work(number)
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in running), "a thread hangs"
    return errors


def test_threads_share_a_store_without_an_error_or_a_token_twice(path: Path) -> None:
    granted: dict[str, list[int]] = {"alpha": [], "beta": [], "gamma": []}
    saved: list[int] = []
    rounds = 20

    with StateStore(path) as store:
        store.initialize()

        def work(number: int) -> None:
            choice = random.Random(number)
            for _ in range(rounds):
                scope = choice.choice(sorted(granted))
                while True:
                    try:
                        lease = store.acquire(scope, f"thread-{number}", ttl_seconds=3600)
                        break
                    except LeaseHeldError:
                        store.get_lease(scope)
                        time.sleep(choice.uniform(0, 0.01))
                granted[scope].append(lease.token)
                store.heartbeat(*lease.fence)
                saved.append(store.put_checkpoint("deploy", {"token": lease.token}, lease=lease, rebind=True).sequence)
                store.release(*lease.fence)

        assert all_at_once(work) == []
        for scope, tokens in granted.items():
            events = [event for event in store.events(limit=10_000, scope=scope) if event.kind == "lease.acquired"]
            assert [event.token for event in events] == list(range(1, len(tokens) + 1))
            assert tokens == sorted(set(tokens))
        assert sorted(saved) == list(range(1, THREADS * rounds + 1))
        assert {check.verdict for check in store.doctor() if check.check == "integrity"} == {"ok"}


@pytest.mark.parametrize("opening", range(5))
def test_threads_may_be_the_first_users_of_a_store_all_at_once(path: Path, hasty: None, opening: int) -> None:
    with StateStore(path) as store:
        created: list[bool] = []
        assert all_at_once(lambda number: created.append(store.initialize())) == []
        assert created.count(True) == 1

    with StateStore(path) as store:
        sequences: list[int] = []
        assert all_at_once(lambda number: sequences.append(store.put_checkpoint("deploy", number).sequence)) == []
        assert sorted(sequences) == list(range(1, THREADS + 1))


def test_a_store_may_be_closed_while_others_work(path: Path, hasty: None) -> None:
    with StateStore(path) as store:
        store.initialize()

    for _ in range(10):
        store = StateStore(path)
        started = threading.Semaphore(0)

        def work(number: int, store: StateStore = store, started: threading.Semaphore = started) -> None:
            if number == 0:
                for _ in range(THREADS - 1):
                    assert started.acquire(timeout=LONG)
                store.close()
                return
            with pytest.raises(InvalidInputError, match="store: is closed"):
                while True:
                    store.get_lease("release")
                    if number % 4 == 0:
                        store.put_checkpoint("deploy", number)
                    started.release()

        assert all_at_once(work) == []
        assert open_files(path) == []

    with StateStore(path) as store:
        history = [info.sequence for info in store.checkpoint_history("deploy")]
        assert history == list(range(len(history), 0, -1))


def test_a_store_closed_by_many_threads_is_closed_once(path: Path, hasty: None) -> None:
    with StateStore(path) as store:
        store.initialize()
    for _ in range(20):
        store = StateStore(path)
        assert all_at_once(lambda number, store=store: store.status(), 8) == []  # eight idle connections
        assert all_at_once(lambda number, store=store: store.close(), 8) == []
        assert open_files(path) == []


def test_a_store_may_be_replaced_while_threads_work(path: Path, hasty: None) -> None:
    with StateStore(path) as store:
        store.initialize()
        ended = threading.Event()
        times = 10

        def work(number: int) -> None:
            if number == 0:
                for _ in range(times):
                    with StateStore(path.with_name("next.db")) as following:
                        following.initialize()
                    for suffix in ("-wal", "-shm", "-gate"):
                        Path(f"{path}{suffix}").unlink(missing_ok=True)
                    os.replace(path.with_name("next.db"), path)
                    store.put_checkpoint("marks", {})
                ended.set()
                return
            while not ended.is_set():
                # Between the two steps of the replacement a reader may meet a file without its log.
                with suppress(StorageUnreachableError):
                    store.status()

        assert all_at_once(work, 8) == []
        assert [info.sequence for info in store.checkpoint_history("marks")] == [1]


def test_threads_that_meet_a_deleted_store_are_told_so_each(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        all_at_once(lambda number: store.put_checkpoint("deploy", number))
        for suffix in ("", "-wal", "-shm", "-gate"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)

        errors = all_at_once(lambda number: store.put_checkpoint("deploy", number))
    assert [type(error) for error in errors] == [NotFoundError] * THREADS


def test_a_thread_s_error_is_its_own(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=3600)
    refused: list[AgentCheckpointError] = []

    def work(number: int) -> None:
        if number % 2:
            store.put_checkpoint(f"workflow-{number}", number, lease=lease)
            return
        with pytest.raises(AgentCheckpointError) as error:
            store.put_checkpoint(f"workflow-{number}", number, lease_scope="release", owner="worker-b", token=1)
        refused.append(error.value)

    assert all_at_once(work) == []
    assert len(refused) == THREADS // 2
    assert sorted(info.workflow for info in store.list_checkpoints()) == sorted(
        f"workflow-{number}" for number in range(1, THREADS, 2)
    )
