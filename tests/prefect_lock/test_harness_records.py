"""Tasks whose result records are locked: Prefect's SERIALIZABLE, with the lock as its lock manager."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import CachePolicy
from prefect.context import get_run_context
from prefect.filesystems import LocalFileSystem
from prefect.transactions import IsolationLevel, get_transaction

from agent_checkpoint import StaleLeaseError, WaitTimeoutError
from agent_checkpoint_prefect import FencedLock, current_fencing_token
from agent_checkpoint_prefect.transactions import transaction_fence

from .conftest import Locks, elsewhere
from .harness import WATCHDOG_SECONDS, ended, finished, in_async_code, kinds, until, worker

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

Once = Callable[..., Any]


@pytest.fixture
def once(lock: FencedLock, tmp_path: Path) -> Once:
    """``@task`` for a function whose result is made once for each key."""
    return once_of(lock, tmp_path)


def once_of(lock: FencedLock, folder: Path) -> Once:
    """See ``once``; results are in a folder beside the lock's file."""
    storage = LocalFileSystem(basepath=str(folder / "results"))
    storage.save(re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-"))

    def decorate(function: Callable[..., Any], key: str) -> Any:
        policy = CachePolicy.from_cache_key_fn(lambda context, arguments: key)
        locked = policy.configure(lock_manager=lock, isolation_level=IsolationLevel.SERIALIZABLE)
        return task(cache_policy=locked, persist_result=True, result_storage=storage)(function)

    return decorate


def results(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "results").glob("**/*") if file.is_file())


def lines(folder: Path) -> list[str]:
    return (folder / "journal.txt").read_text("utf-8").splitlines()


def test_a_serializable_task_in_three_processes_runs_its_body_once(api: str, lock: FencedLock, tmp_path: Path) -> None:
    workers = [worker(tmp_path, api, "serializable") for _ in range(3)]
    with ended(*workers):
        for each in workers:
            until((tmp_path / f"ready-{each.pid}").exists, while_alive=each)
        (tmp_path / "go-on").touch()
        printed = [finished(each) for each in workers]

    (line,) = lines(tmp_path)
    token = int(line.removeprefix("charged order-42 with token "))
    assert printed == [f"order-42: {token}\n"] * 3
    assert lock.list_leases() == []
    assert kinds(lock, "lease.acquired", "lease.released") == ["lease.acquired", "lease.released"] * 3


def test_a_task_knows_the_token_of_the_lease_of_its_result_record(api: str, lock: FencedLock, once: Once) -> None:
    def body() -> tuple[int | None, str]:
        fence = transaction_fence()
        assert fence is not None
        return current_fencing_token(), fence.scope

    charge = once(body, "charge")

    @flow
    def outer() -> Any:
        return charge()

    assert outer() == (1, "prefect-record/default/charge")
    assert lock.list_leases() == []


def test_an_async_task_is_serialized_too(api: str, lock: FencedLock, once: Once, tmp_path: Path) -> None:
    ran: list[int | None] = []

    async def body() -> int | None:
        ran.append(current_fencing_token())
        await asyncio.sleep(0)
        return ran[-1]

    charge = once(body, "charge")

    @flow
    async def outer() -> list[Any]:
        return [await charge(), await charge()]

    assert in_async_code(outer()) == [1, 1]
    assert ran == [1]
    assert results(tmp_path) == ["charge"]
    assert lock.list_leases() == []
    assert kinds(lock, "lease.acquired", "lease.released") == ["lease.acquired", "lease.released"] * 2


def test_a_task_without_a_key_that_fits_is_locked_all_the_same(api: str, lock: FencedLock, once: Once) -> None:
    seen: list[str] = []

    def body() -> None:
        seen.extend(lease.scope for lease in lock.list_leases())

    charge = once(body, "a/../b " + "х" * 200)

    @flow
    def outer() -> None:
        charge()

    outer()
    (scope,) = seen
    assert scope.startswith("prefect-record/default/")


def test_the_result_of_a_task_whose_lease_was_lost_is_not_recorded_and_the_refusal_is(
    api: str, lock: FencedLock, once: Once, tmp_path: Path
) -> None:
    tokens: list[int | None] = []

    def body() -> int | None:
        tokens.append(current_fencing_token())
        fence = transaction_fence()
        assert fence is not None
        if len(tokens) == 1:
            lock.store.open().force_release(fence.scope, reason="a test")
        return tokens[-1]

    charge = once(body, "charge")

    @flow
    def outer() -> Any:
        return charge()

    assert outer() == 1
    assert results(tmp_path) == []
    refused = [
        event.token
        for event in lock.store.open().events(kind="write.refused")
        if event.scope == "prefect-record/default/charge" and event.detail["action"] == "prefect.save-result"
    ]
    assert refused == [1]

    assert outer() == 2  # nothing was recorded: it is done again, with a new token
    assert results(tmp_path) == ["charge"]
    assert outer() == 2
    assert tokens == [1, 2]
    assert lock.list_leases() == []


def test_a_checkpoint_under_the_lease_of_a_record_lands_or_is_refused_with_it(
    api: str, lock: FencedLock, once: Once
) -> None:
    """The atomic form: the check and the write are one transaction."""
    store = lock.store.open()

    def body() -> str:
        fence = transaction_fence()
        assert fence is not None
        store.put_checkpoint("charges", {"stage": "begun"}, lease=fence)
        store.force_release(fence.scope, reason="a test")
        with pytest.raises(StaleLeaseError):
            store.put_checkpoint("charges", {"stage": "done"}, lease=fence)
        return "refused"

    charge = once(body, "charge")

    @flow
    def outer() -> Any:
        return charge()

    assert outer() == "refused"
    saved = store.get_checkpoint("charges")
    assert (saved.data, saved.token) == ({"stage": "begun"}, 1)


def test_the_lock_of_a_record_that_failed_is_given_back(api: str, lock: FencedLock, once: Once) -> None:
    def body() -> None:
        raise ValueError("no")

    charge = once(body, "charge")

    @flow
    def outer() -> None:
        charge()

    with pytest.raises(ValueError, match="no"):
        outer()
    assert lock.list_leases() == []
    assert kinds(lock, "lease.acquired", "lease.released") == ["lease.acquired", "lease.released"]


def test_a_task_that_waits_in_vain_for_a_record_fails_with_who_holds_it(api: str, locks: Locks, tmp_path: Path) -> None:
    lock = locks(timeout_seconds=0.2)
    elsewhere(lock.acquire_lock, "charge", "another", None, WATCHDOG_SECONDS)

    @flow
    def outer() -> None:
        once_of(lock, tmp_path)(lambda: None, "charge")()

    with pytest.raises(WaitTimeoutError) as waited:
        outer()
    assert (waited.value.owner, waited.value.token) == ("another", 1)


def test_a_record_says_which_run_locks_it(api: str, lock: FencedLock, once: Once) -> None:
    def body() -> tuple[Any, str]:
        (lease,) = lock.list_leases()
        assert get_transaction() is not None
        return lease.metadata, str(get_run_context().task_run.flow_run_id)

    charge = once(body, "charge")

    @flow
    def outer() -> Any:
        return charge()

    metadata, flow_run_id = outer()
    assert metadata["flow_run_id"] == flow_run_id
    assert metadata["flow_name"] == "outer"
