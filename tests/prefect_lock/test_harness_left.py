"""What an attempt at a run leaves to the next one.

Prefect forgets a lock where it is interrupted between the lock and the look for
the result record; a run forgets a name that it took without a block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prefect import flow, task
from prefect.cache_policies import CachePolicy
from prefect.filesystems import LocalFileSystem
from prefect.transactions import IsolationLevel

from agent_checkpoint_prefect import FencedLock, current_fencing_token

from .harness import WATCHDOG_SECONDS, in_async_code, kinds

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

SCOPE = "prefect-record/default/charge"
TIMEOUT_SECONDS = 1


class StuckStorage(LocalFileSystem):
    """Storage whose first reads do not come to an end."""

    _block_type_slug = "stuck-storage-of-a-test"
    stuck: ClassVar[int] = 0
    """How many reads will be stuck."""

    async def aread_path(self, path: str) -> bytes:
        if StuckStorage.stuck:
            StuckStorage.stuck -= 1
            await asyncio.sleep(WATCHDOG_SECONDS)
        return await super().aread_path(path)


@pytest.fixture(autouse=True)
def _one_read_is_stuck() -> Iterator[None]:
    StuckStorage.stuck = 1
    yield
    StuckStorage.stuck = 0


def charging(lock: FencedLock, folder: Path, **options: Any) -> Any:
    """A flow of one serializable task that answers its token, with ``options`` for the task."""
    storage = StuckStorage(basepath=str(folder / "results"))
    storage.save("stuck-storage", overwrite=True)
    policy = CachePolicy.from_cache_key_fn(lambda context, arguments: "charge")
    locked = policy.configure(lock_manager=lock, isolation_level=IsolationLevel.SERIALIZABLE)

    @task(
        cache_policy=locked,
        persist_result=True,
        result_storage=storage,
        timeout_seconds=TIMEOUT_SECONDS,
        **options,
    )
    async def charge() -> int | None:
        return current_fencing_token()

    @flow
    async def outer() -> Any:
        return await charge(return_state=True)

    return outer


def test_a_retry_frees_the_lock_that_the_attempt_before_it_left(api: str, lock: FencedLock, tmp_path: Path) -> None:
    charges = charging(lock, tmp_path, retries=1)

    async def run() -> int | None:
        state = await charges()
        token: int | None = await state.result()
        return token

    assert in_async_code(run()) == 2
    assert lock.list_leases() == []
    assert kinds(lock, "lease.acquired", "lease.released") == ["lease.acquired", "lease.released"] * 2


@pytest.mark.parametrize(("hooked", "left"), [(False, [SCOPE]), (True, [])], ids=["without a hook", "with a hook"])
def test_without_a_retry_a_hook_of_the_task_ends_what_is_left(
    api: str, lock: FencedLock, tmp_path: Path, hooked: bool, left: list[str]
) -> None:
    charges = charging(lock, tmp_path, on_failure=[lock.release_on_crash] if hooked else [])

    async def run() -> list[str]:
        state = await charges(return_state=True)
        assert state.is_failed()
        return [lease.scope for lease in lock.list_leases()]

    assert in_async_code(run()) == left
    ended = lock.store.open().events(kind="lease.force-released")
    assert [event.detail["reason"] for event in ended] == ["its task run is failed"] * hooked


def test_a_retry_frees_the_name_that_the_attempt_before_it_left(api: str, lock: FencedLock) -> None:
    @flow(retries=1)
    def nightly() -> int:
        lease = lock.acquire("orders")
        if lease.token == 1:
            raise ConnectionError
        lease.release()
        return lease.token

    @flow(retries=1)
    async def anightly() -> int:
        lease = await lock.aacquire("orders")
        if lease.token == 3:
            raise ConnectionError
        await lease.arelease()
        return lease.token

    assert nightly() == 2
    assert in_async_code(anightly()) == 4
    assert lock.list_leases() == []
    assert kinds(lock, "lease.acquired", "lease.released") == ["lease.acquired", "lease.released"] * 4
