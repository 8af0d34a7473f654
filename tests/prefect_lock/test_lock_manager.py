"""``FencedLock`` as Prefect's lock manager: the seven methods by Prefect's contract, and Prefect's store above it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from prefect.locking.protocol import LockManager
from prefect.results import ResultStore

from agent_checkpoint import InvalidInputError, WaitTimeoutError
from agent_checkpoint_prefect import FencedLock, records

from .conftest import Commits, Locks, elsewhere, events, in_loop, in_thread, kinds, wait_until, waiting

Acquire = Callable[..., bool]


def acquire(lock: Any, *arguments: Any, **options: Any) -> bool:
    return bool(lock.acquire_lock(*arguments, **options))


def aacquire(lock: Any, *arguments: Any, **options: Any) -> bool:
    return bool(elsewhere(asyncio.run, lock.aacquire_lock(*arguments, **options)))


@pytest.fixture(params=[acquire, aacquire])
def take(request: pytest.FixtureRequest) -> Acquire:
    """Takes a record's lock for good: one that is taken in a loop is not renewed when the loop is closed."""
    call: Acquire = request.param
    return call


def test_it_is_a_lock_manager(lock: FencedLock) -> None:
    assert isinstance(lock, LockManager)


def test_a_record_that_is_locked_is_so_for_all_others(lock: FencedLock, take: Acquire) -> None:
    assert not lock.is_locked("key")
    assert take(lock, "key", "one") is True
    assert lock.is_locked("key")
    assert lock.is_lock_holder("key", "one")
    assert not lock.is_lock_holder("key", "two")
    assert not lock.is_locked("another")
    lock.release_lock("key", "one")
    assert not lock.is_locked("key")
    assert not lock.is_lock_holder("key", "one")
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_the_same_holder_has_it_again_without_another_grant(lock: FencedLock, take: Acquire) -> None:
    for _ in range(3):
        assert take(lock, "key", "one", acquire_timeout=0) is True
    assert kinds(lock) == ["lease.acquired"]
    lock.release_lock("key", "one")
    assert not lock.is_locked("key")


def test_an_acquire_timeout_of_zero_answers_false_at_once(lock: FencedLock, take: Acquire) -> None:
    lock.acquire_lock("key", "one")
    assert take(lock, "key", "two", acquire_timeout=0) is False
    assert not waiting(lock)


def test_a_finite_acquire_timeout_answers_false(lock: FencedLock, take: Acquire) -> None:
    elsewhere(lock.acquire_lock, "key", "one", hold_timeout=60)
    assert take(lock, "key", "two", acquire_timeout=0.05) is False


def test_a_finite_acquire_timeout_answers_false_in_the_thread_that_has_it_too(lock: FencedLock) -> None:
    lock.acquire_lock("key", "one")
    assert lock.acquire_lock("key", "two", acquire_timeout=0.05) is False


def test_a_thread_waits_for_the_end_of_its_own_hold_timeout(lock: FencedLock) -> None:
    lock.acquire_lock("key", "one", hold_timeout=0.1)
    assert lock.acquire_lock("key", "two", acquire_timeout=30) is True


def test_a_task_waits_for_the_end_of_its_own_hold_timeout(lock: FencedLock) -> None:
    async def run() -> bool:
        await lock.aacquire_lock("key", "one", hold_timeout=0.1)
        return await lock.aacquire_lock("key", "two", acquire_timeout=30)

    assert in_loop(run()) is True


def test_a_thread_waits_no_longer_than_it_wants_for_its_own_hold_timeout(lock: FencedLock, take: Acquire) -> None:
    lock.acquire_lock("key", "one", hold_timeout=60)
    assert lock.acquire_lock("key", "two", acquire_timeout=0.05) is False
    assert take(lock, "key", "two", acquire_timeout=0.05) is False


def test_without_an_acquire_timeout_the_blocks_own_ends_by_an_error(locks: Locks, take: Acquire) -> None:
    lock = locks(timeout_seconds=0.05)
    elsewhere(lock.acquire_lock, "key", "one", hold_timeout=60)
    with pytest.raises(WaitTimeoutError):
        take(lock, "key", "two")


def test_without_any_timeout_it_waits_until_the_record_is_free(lock: FencedLock, take: Acquire) -> None:
    lock.acquire_lock("key", "one")
    waits = in_thread(take, lock, "key", "two")
    wait_until(lambda: waiting(lock))
    assert not waits.done()
    lock.release_lock("key", "one")
    assert waits.result(30) is True
    assert lock.is_lock_holder("key", "two")


def test_with_a_hold_timeout_it_lasts_so_long_and_is_not_renewed(lock: FencedLock, take: Acquire) -> None:
    assert take(lock, "key", "one", hold_timeout=0.1) is True
    (lease,) = lock.list_leases()
    assert lease.ttl_seconds == 0.1
    assert elsewhere(take, lock, "key", "two", acquire_timeout=30, hold_timeout=60) is True
    assert not lock.is_lock_holder("key", "one")
    lock.release_lock("key", "one")
    assert lock.is_lock_holder("key", "two")
    assert "lease.expired" in kinds(lock)


def test_without_a_hold_timeout_it_is_renewed(locks: Locks) -> None:
    lock = locks(ttl_seconds=0.2)
    lock.acquire_lock("key", "one")
    store = lock.store.open()
    granted = lock.list_leases()[0].heartbeat_at
    wait_until(lambda: store.list_leases()[0].heartbeat_at > granted)
    assert lock.is_lock_holder("key", "one")


def test_a_release_never_raises(lock: FencedLock) -> None:
    lock.release_lock("never", "locked")
    lock.acquire_lock("key", "one")
    lock.release_lock("key", "another")
    assert lock.is_lock_holder("key", "one")
    lock.release_lock("key", "one")
    lock.release_lock("key", "one")
    lock.acquire_lock("key", "one")
    lock.store.open().force_release("prefect-record/default/key", reason="a test")
    lock.acquire_lock("key", "two")
    lock.release_lock("key", "one")
    assert lock.is_lock_holder("key", "two")


def test_what_async_code_acquired_sync_code_gives_back(lock: FencedLock) -> None:
    async def run() -> None:
        assert await lock.aacquire_lock("key", "one")
        lock.release_lock("key", "one")  # as Prefect's own transaction does
        assert not lock.is_locked("key")

    in_loop(run())
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_waiting_for_a_record_takes_no_lock(lock: FencedLock) -> None:
    assert lock.wait_for_lock("key", timeout=0) is True
    lock.acquire_lock("key", "one")
    before = kinds(lock)
    assert lock.wait_for_lock("key", timeout=0) is False
    assert lock.wait_for_lock("key", timeout=0.02) is False
    assert in_loop(lock.await_for_lock("key", timeout=0)) is False
    assert in_loop(lock.await_for_lock("key", timeout=0.02)) is False
    assert kinds(lock) == before
    waits = [in_thread(lock.wait_for_lock, "key"), in_thread(asyncio.run, lock.await_for_lock("key"))]
    lock.release_lock("key", "one")
    assert [each.result(30) for each in waits] == [True, True]


def test_the_blocks_own_timeout_ends_no_wait_for_a_record(locks: Locks) -> None:
    lock = locks(timeout_seconds=0)
    lock.acquire_lock("key", "one")
    waits = in_thread(lock.wait_for_lock, "key")
    lock.release_lock("key", "one")
    assert waits.result(30) is True


def test_holders_that_race_have_the_record_one_after_the_other(lock: FencedLock) -> None:
    inside: list[str] = []
    seen: list[int] = []
    ready = Barrier(8)

    def work(holder: str) -> None:
        ready.wait()
        for number in range(5):
            assert lock.acquire_lock("key", f"{holder}-{number}")
            inside.append(holder)
            seen.append(len(inside))
            inside.remove(holder)
            lock.release_lock("key", f"{holder}-{number}")

    for each in [in_thread(work, f"holder-{number}") for number in range(8)]:
        each.result(60)
    assert seen == [1] * 40


def test_of_locks_that_were_lost_and_never_given_back_only_the_latest_are_kept(
    locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEPT", 2)
    lock = locks(ttl_seconds=0.2)
    for key in ("a", "b", "c"):
        lock.acquire_lock(key, "crashed")
    for lease in lock.list_leases():
        lock.store.open().force_release(lease.scope, reason="a test")
    mine = [record for place, record in records._records.items() if place[2] == "crashed"]
    wait_until(lambda: all(record.over for record in mine))  # the heartbeat hears of it
    assert all(lock.is_locked(key) for key in ("a", "b", "c"))

    lock.acquire_lock("d", "one")
    assert [lock.is_locked(key) for key in ("a", "b", "c")] == [False, True, True]
    assert not lock.is_lock_holder("c", "crashed")
    assert lock.is_lock_holder("d", "one")


def test_the_sync_methods_may_be_called_on_an_event_loop(lock: FencedLock) -> None:
    async def run() -> None:
        assert lock.acquire_lock("key", "one")
        assert lock.is_locked("key")
        assert lock.is_lock_holder("key", "one")
        assert lock.acquire_lock("key", "two", acquire_timeout=0) is False
        assert lock.wait_for_lock("key", timeout=0) is False
        lock.release_lock("key", "one")
        assert lock.wait_for_lock("key") is True

    in_loop(run())


@pytest.mark.parametrize("holder", ["", "a\0b", "h" * 600])
def test_a_holder_that_cannot_be_an_owner_is_refused(lock: FencedLock, holder: str) -> None:
    with pytest.raises(InvalidInputError):
        lock.acquire_lock("key", holder)
    assert not lock.is_locked("key")


# Prefect's store


def test_prefects_store_locks_by_it(results: ResultStore, lock: FencedLock) -> None:
    assert results.acquire_lock("key", "one") is True
    assert results.is_locked("key")
    assert results.is_lock_holder("key", "one")
    assert results.acquire_lock("key", "two", timeout=0) is False
    assert results.wait_for_lock("key", timeout=0) is False
    results.release_lock("key", "one")
    assert results.wait_for_lock("key") is True
    assert [event.owner for event in events(lock, "lease.acquired")] == ["one"]


def test_prefects_store_locks_by_it_in_async_code(results: ResultStore) -> None:
    async def run() -> None:
        assert await results.aacquire_lock("key", "one") is True
        assert await results.aacquire_lock("key", "two", timeout=0) is False
        assert await results.await_for_lock("key", timeout=0) is False
        results.release_lock("key", "one")
        assert await results.await_for_lock("key") is True

    in_loop(run())


def test_prefects_own_name_for_a_holder_is_taken(results: ResultStore) -> None:
    assert results.acquire_lock("key") is True
    assert results.is_lock_holder("key")
    results.release_lock("key")
    assert not results.is_locked("key")


# What it costs


def test_no_method_does_more_than_one_commit_uncontended(lock: FencedLock, path: Path) -> None:
    lock.acquire_lock("warm-up", "one")
    lock.release_lock("warm-up", "one")
    before = len(lock.store.open().events(limit=1000))
    commits = Commits(path)
    for call, changes in (
        (lambda: lock.acquire_lock("key", "one"), 1),
        (lambda: lock.acquire_lock("key", "one"), 0),
        (lambda: lock.acquire_lock("key", "two", acquire_timeout=0), 0),
        (lambda: lock.is_locked("key"), 0),
        (lambda: lock.is_lock_holder("key", "one"), 0),
        (lambda: lock.is_lock_holder("key", "two"), 0),
        (lambda: lock.wait_for_lock("key", 0), 0),
        (lambda: lock.release_lock("key", "one"), 1),
        (lambda: lock.release_lock("key", "one"), 0),
        (lambda: lock.is_locked("key"), 0),
        (lambda: lock.wait_for_lock("key"), 0),
    ):
        call()
        assert commits.since() == changes
    commits.close()
    assert len(lock.store.open().events(limit=1000)) == before + 2
