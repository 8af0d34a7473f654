"""One run and one name: what is held already is not waited for; and which lease the calling code holds."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from pathlib import Path

import pytest

from agent_checkpoint_prefect import (
    FencedLock,
    LeaseReentrancyError,
    LeaseStore,
    current_fencing_token,
    current_lease,
)

from .conftest import Locks, elsewhere, in_loop
from .losing import lose


def test_a_run_that_asks_for_what_it_holds_is_told_who_holds_it(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        with pytest.raises(LeaseReentrancyError) as error:
            lock.acquire("orders")
        assert (error.value.owner, error.value.token, error.value.scope) == (lease.owner, lease.token, lease.scope)
        lease.check()
    with lock.lease("orders") as again:
        assert again.token == 2


@pytest.mark.parametrize("timeout_seconds", [0, 1, None])
def test_every_way_to_ask_is_told(lock: FencedLock, timeout_seconds: float | None) -> None:
    async def run() -> None:
        async with lock.alease("orders"):
            for ask in (lock.aacquire, lock.atry_acquire):
                options = {} if ask == lock.atry_acquire else {"timeout_seconds": timeout_seconds}
                with pytest.raises(LeaseReentrancyError):
                    await ask("orders", **options)
            with pytest.raises(LeaseReentrancyError):
                async with lock.alease("orders", timeout_seconds=timeout_seconds):
                    pass
            with pytest.raises(LeaseReentrancyError):
                lock.try_acquire("orders")

    in_loop(run())


def test_a_child_task_is_part_of_the_run(lock: FencedLock) -> None:
    async def run() -> None:
        async with lock.alease("orders"):
            with pytest.raises(LeaseReentrancyError):
                await asyncio.create_task(lock.aacquire("orders"))

    in_loop(run())


def test_a_thread_with_the_context_of_the_run_is_part_of_it(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        context = copy_context()
        assert elsewhere(context.run, current_lease) is lease
        with pytest.raises(LeaseReentrancyError):
            elsewhere(context.run, lock.acquire, "orders")


def test_a_limit_of_several_changes_nothing_of_it(locks: Locks) -> None:
    pool = locks(limit=3)
    with pool.lease("db"):
        with pytest.raises(LeaseReentrancyError):
            pool.acquire("db")
        assert len(pool.list_leases()) == 1
        assert elsewhere(pool.acquire, "db").slot == 1


def test_other_names_and_namespaces_nest(locks: Locks) -> None:
    lock, other = locks(), locks(namespace="other")
    with lock.lease("a"), lock.lease("b"), other.lease("a"):
        assert len(lock.list_leases()) == 2
        assert len(other.list_leases()) == 1


def test_one_name_in_two_stores_is_two_locks(lock: FencedLock, tmp_path: Path) -> None:
    other = FencedLock(store=LeaseStore(path=tmp_path / "other.db"))
    with lock.lease("orders") as outer, other.lease("orders") as inner:
        assert current_lease() is inner
        outer.check()
        inner.check()
    other.store.open().close()


def test_siblings_are_not_one_another(lock: FencedLock) -> None:
    async def work() -> int:
        async with lock.alease("orders") as lease:
            return lease.token

    async def run() -> list[int]:
        return await asyncio.gather(work(), work(), work())

    assert sorted(in_loop(run())) == [1, 2, 3]


def test_a_lease_that_was_lost_keeps_its_run_from_nothing(lock: FencedLock) -> None:
    late = lock.acquire("orders")
    lose(lock, late)
    assert late.lost
    assert lock.acquire("orders", timeout_seconds=0).token == 2


# Which lease the calling code holds


def test_nothing_is_held_outside_of_blocks(lock: FencedLock) -> None:
    assert current_lease() is None
    assert current_fencing_token() is None
    with lock.lease("orders"):
        pass
    assert current_lease() is None
    assert current_fencing_token() is None


def test_the_lease_that_was_taken_last_is_the_current_one(lock: FencedLock) -> None:
    with lock.lease("warm-up"):
        pass
    with lock.lease("a") as outer:
        with lock.lease("warm-up") as inner:
            assert current_lease() is inner
            assert current_fencing_token() == inner.token == 2
        assert current_lease() is outer
        assert current_fencing_token() == outer.token == 1


def test_another_thread_holds_nothing_of_it(lock: FencedLock) -> None:
    with lock.lease("orders"):
        assert elsewhere(current_lease) is None


def test_who_was_granted_without_a_block_holds_it_until_it_is_given_back(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    assert current_lease() is lease
    lease.release()
    assert current_lease() is None


def test_a_child_holds_what_its_run_holds(lock: FencedLock) -> None:
    async def token() -> int | None:
        return current_fencing_token()

    async def run() -> None:
        async with lock.alease("orders") as lease:
            assert await asyncio.create_task(token()) == lease.token

    in_loop(run())


def test_a_child_that_outlives_the_block_holds_nothing_any_more(lock: FencedLock) -> None:
    over = threading.Event()

    async def child() -> int | None:
        while not over.is_set():
            await asyncio.sleep(0.001)
        return current_fencing_token()

    async def run() -> None:
        async with lock.alease("orders"):
            outlives = asyncio.create_task(child())
            await asyncio.sleep(0)
        over.set()
        assert await outlives is None

    in_loop(run())


def test_a_lease_that_another_thread_gave_back_is_not_held_any_more(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    elsewhere(lease.release)
    assert current_lease() is None
    assert current_fencing_token() is None
