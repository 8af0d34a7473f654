"""Prefect's SERIALIZABLE transactions with the lock, without a server: one at a time, and no result of a stale one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import ConfigurationError
from prefect.results import ResultStore
from prefect.transactions import AsyncTransaction, IsolationLevel, Transaction, atransaction, transaction

from agent_checkpoint import FenceRefusedError, ReentrancyError
from agent_checkpoint_prefect import FencedLock, current_fencing_token

from .conftest import (
    Locks,
    Veto,
    elsewhere,
    events,
    in_loop,
    in_thread,
    kinds,
    result_store,
    wait_until,
    waiting,
)

SCOPE = "prefect-record/default/key"


@contextmanager
def serializable(results: ResultStore, key: str = "key", **options: Any) -> Iterator[Transaction]:
    with transaction(key=key, store=results, isolation_level=IsolationLevel.SERIALIZABLE, **options) as opened:
        yield opened


@asynccontextmanager
async def aserializable(results: ResultStore, key: str = "key", **options: Any) -> AsyncIterator[AsyncTransaction]:
    async with atransaction(key=key, store=results, isolation_level=IsolationLevel.SERIALIZABLE, **options) as opened:
        yield opened


def saved(results: ResultStore, key: str = "key") -> Any:
    """What is in the record, as somebody else reads it; None without one."""
    fresh = results.model_copy(update={"lock_manager": None})
    return fresh.read(key).result if fresh.exists(key) else None


def compute(results: ResultStore, value: Any, ran: list[Any]) -> None:
    """Compute a result, unless it is there."""
    with serializable(results) as current:
        if current.is_committed():
            return
        ran.append(value)
        current.stage(value)


async def acompute(results: ResultStore, value: Any, ran: list[Any]) -> None:
    """See ``compute``."""
    async with aserializable(results) as current:
        if current.is_committed():
            return
        await asyncio.sleep(0.001)
        ran.append(value)
        current.stage(value)


def test_a_transaction_holds_its_record_and_gives_it_back(results: ResultStore, lock: FencedLock) -> None:
    with serializable(results) as current:
        assert lock.is_lock_holder("key", current._holder)
        current.stage("result")
    assert saved(results) == "result"
    assert not lock.is_locked("key")
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_a_transaction_of_async_code_holds_its_record_and_gives_it_back(results: ResultStore, lock: FencedLock) -> None:
    async def run() -> None:
        async with aserializable(results) as current:
            assert lock.is_lock_holder("key", current._holder)
            current.stage("result")
        assert not lock.is_locked("key")

    in_loop(run())
    assert saved(results) == "result"
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_a_body_that_raises_gives_its_record_back_and_saves_nothing(results: ResultStore, lock: FencedLock) -> None:
    with pytest.raises(ZeroDivisionError), serializable(results) as current:
        current.stage("result")
        raise ZeroDivisionError

    async def run() -> None:
        async with aserializable(results) as current:
            current.stage("result")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_loop(run())
    assert saved(results) is None
    assert not lock.is_locked("key")


def test_of_many_threads_one_computes(results: ResultStore) -> None:
    ran: list[int] = []
    for each in [in_thread(compute, results, number, ran) for number in range(8)]:
        each.result(60)
    assert len(ran) == 1
    assert saved(results) == ran[0]


def test_of_many_tasks_one_computes(results: ResultStore) -> None:
    ran: list[int] = []

    async def run() -> None:
        await asyncio.gather(*[acompute(results, number, ran) for number in range(8)])

    in_loop(run())
    assert len(ran) == 1
    assert saved(results) == ran[0]


def test_sync_and_async_transactions_exclude_one_another(results: ResultStore) -> None:
    ran: list[str] = []
    works = [in_thread(compute, results, "sync", ran) for _ in range(3)]
    works += [in_thread(asyncio.run, acompute(results, "async", ran)) for _ in range(3)]
    for each in works:
        each.result(60)
    assert len(ran) == 1


def test_records_do_not_wait_for_one_another(results: ResultStore) -> None:
    with serializable(results, "a") as outer:
        outer.stage(1)
        with serializable(results, "b", commit_mode=None) as inner:
            inner.stage(2)
    assert (saved(results, "a"), saved(results, "b")) == (1, 2)


def test_a_transaction_inside_of_one_of_the_same_record_is_an_error_and_not_a_hang(results: ResultStore) -> None:
    with serializable(results), pytest.raises(ReentrancyError), serializable(results):
        pass


def test_the_token_is_reachable_inside(results: ResultStore, lock: FencedLock) -> None:
    tokens = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), serializable(results):
            tokens.append(current_fencing_token())
            raise ZeroDivisionError

    async def run() -> None:
        async with aserializable(results):
            tokens.append(current_fencing_token())
            tokens.append(await asyncio.to_thread(current_fencing_token))

    in_loop(run())
    assert tokens == [1, 2, 3, 3]
    assert current_fencing_token() is None


def test_a_lease_inside_has_its_own_token(results: ResultStore, lock: FencedLock) -> None:
    with serializable(results):
        with lock.lease("warm-up"):
            pass
        with lock.lease("warm-up") as lease:
            assert current_fencing_token() == lease.token == 2
        assert current_fencing_token() == 1


def test_a_transaction_without_our_lock_has_no_token(tmp_path: Path) -> None:
    with transaction(key="key", store=result_store(None, tmp_path)):
        assert current_fencing_token() is None
    with transaction():
        assert current_fencing_token() is None


def test_a_limit_is_refused_before_the_body(locks: Locks, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit"), serializable(result_store(locks(limit=2), tmp_path)):
        pytest.fail("the body ran")


def test_without_a_lock_manager_prefect_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError), serializable(result_store(None, tmp_path)):
        pass


# A holder that is stale


def lose_record(lock: FencedLock) -> None:
    lock.store.open().force_release(SCOPE, reason="a test")


def late(results: ResultStore, lock: FencedLock, meanwhile: Any) -> None:
    """A transaction that loses its record before it commits."""
    with serializable(results) as current:
        current.stage("late")
        lose_record(lock)
        meanwhile()


async def alate(results: ResultStore, lock: FencedLock, meanwhile: Any) -> None:
    """See ``late``."""
    async with aserializable(results) as current:
        current.stage("late")
        lose_record(lock)
        await asyncio.to_thread(meanwhile)


def run_late(results: ResultStore, lock: FencedLock, meanwhile: Any) -> None:
    late(results, lock, meanwhile)


def run_alate(results: ResultStore, lock: FencedLock, meanwhile: Any) -> None:
    in_loop(alate(results, lock, meanwhile))


@pytest.fixture(params=[run_late, run_alate], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Prefect logs what it refuses as an error."""
    caplog.set_level(logging.CRITICAL, logger="prefect.transactions")


def test_a_stale_holder_saves_nothing_while_another_one_has_the_record(
    results: ResultStore, lock: FencedLock, run: Any
) -> None:
    run(results, lock, lambda: elsewhere(lock.acquire_lock, "key", "successor", hold_timeout=60))
    assert saved(results) is None
    assert lock.is_lock_holder("key", "successor")
    event = events(lock, "write.refused")[0]
    assert (event.token, event.detail["action"], event.detail["reason"]) == (1, "prefect.save-result", "superseded")


def test_a_stale_holder_saves_nothing_when_nobody_has_the_record(
    results: ResultStore, lock: FencedLock, run: Any
) -> None:
    run(results, lock, lambda: None)
    assert saved(results) is None
    assert not lock.is_locked("key")
    event = events(lock, "write.refused")[0]
    assert (event.token, event.detail["action"], event.detail["reason"]) == (1, "prefect.save-result", "released")


def test_a_stale_holder_overwrites_no_result_of_its_successor(results: ResultStore, lock: FencedLock, run: Any) -> None:
    ran: list[str] = []
    run(results, lock, lambda: elsewhere(compute, results, "successor", ran))
    assert saved(results) == "successor"
    assert not lock.is_locked("key")


def test_after_a_stale_holder_the_record_is_computed_anew(results: ResultStore, lock: FencedLock, run: Any) -> None:
    run(results, lock, lambda: None)
    ran: list[str] = []
    compute(results, "anew", ran)
    assert (ran, saved(results)) == (["anew"], "anew")


def test_a_veto_refuses_the_result_record(veto: Veto, results: ResultStore, lock: FencedLock) -> None:
    with serializable(results) as current:
        current.stage("result")
        veto.error = FenceRefusedError("not today")
    assert saved(results) is None
    assert not lock.is_locked("key")
    veto.error = None
    with serializable(results) as current:
        current.stage("result")
    assert saved(results) == "result"


def test_a_transaction_that_waits_begins_when_the_record_is_free(results: ResultStore, lock: FencedLock) -> None:
    done = threading.Event()

    def hold() -> None:
        with serializable(results) as current:
            done.wait(60)
            current.stage("first")

    first = in_thread(hold)
    wait_until(lambda: lock.is_locked("key"))
    ran: list[str] = []
    second = in_thread(compute, results, "second", ran)
    wait_until(lambda: waiting(lock))
    done.set()
    first.result(30)
    second.result(30)
    assert (ran, saved(results)) == ([], "first")
