"""Leases by name: who is granted one, who waits how long, and what is on record."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from agent_checkpoint import InvalidInputError, LeaseHeldError, NotFoundError, StaleLeaseError, WaitTimeoutError
from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseLostError, LeaseStore, holding

from .conftest import Locks, elsewhere, events, in_loop, in_thread, kinds, wait_until, waiting
from .losing import lose


def test_a_block_holds_its_name_and_gives_it_back(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        held = lock.inspect("orders")
        assert held is not None
        assert (held.scope, held.token, held.slot) == (lease.scope, lease.token, 0) == ("prefect/default/orders", 1, 0)
        assert 0 < lease.remaining() < 30
        assert not lease.lost
    assert lock.inspect("orders") is None
    assert lease.released
    assert lease.remaining() == 0
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_a_coroutine_holds_its_name_and_gives_it_back(lock: FencedLock) -> None:
    async def run() -> FencedLease:
        async with lock.alease("orders") as lease:
            held = await lock.ainspect("orders")
            assert held is not None
            assert held.token == lease.token
            await lease.acheck()
        assert await lock.ainspect("orders") is None
        return lease

    assert in_loop(run()).released
    assert kinds(lock) == ["lease.acquired", "lease.released"]


def test_a_block_that_raises_gives_its_name_back_and_the_error_is_its_own(lock: FencedLock) -> None:
    with pytest.raises(ZeroDivisionError), lock.lease("orders"):
        raise ZeroDivisionError
    assert lock.inspect("orders") is None

    async def run() -> None:
        async with lock.alease("orders"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_loop(run())
    assert lock.inspect("orders") is None


def test_each_grant_has_a_higher_token(lock: FencedLock) -> None:
    tokens = []
    for _ in range(5):
        with lock.lease("orders") as lease:
            tokens.append(lease.token)
    assert tokens == [1, 2, 3, 4, 5]


def test_a_timeout_of_zero_answers_at_once(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        with pytest.raises(LeaseHeldError) as held:
            elsewhere(lock.acquire, "orders", timeout_seconds=0)
        assert held.value.facts["token"] == lease.token
        assert held.value.facts["owner"] == lease.owner
        assert not isinstance(held.value, WaitTimeoutError)


def test_a_finite_timeout_ends_by_an_error_that_names_the_holder(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        with pytest.raises(WaitTimeoutError) as late:
            elsewhere(lock.acquire, "orders", timeout_seconds=0.05)
        assert late.value.facts["waited_seconds"] >= 0.05
        assert late.value.facts["token"] == lease.token
        with pytest.raises(WaitTimeoutError):
            in_loop(_alone(lock.aacquire, "orders", timeout_seconds=0.05))


async def _alone(call: Any, *arguments: Any, **options: Any) -> Any:
    """Call it as another run would: in a context that holds nothing."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(call(*arguments, **options)))


def test_without_a_timeout_the_wait_lasts_until_the_name_is_free(lock: FencedLock) -> None:
    with lock.lease("orders"):
        next_one = in_thread(_token_of, lock, "orders")
        wait_until(lambda: waiting(lock))
        assert not next_one.done()
    assert next_one.result(30) == 2


def _token_of(lock: FencedLock, name: str, **options: Any) -> int:
    with lock.lease(name, **options) as lease:
        return lease.token


def test_the_blocks_own_timeout_holds_where_none_is_given(locks: Locks) -> None:
    hasty, patient = locks(timeout_seconds=0), locks()
    with patient.lease("orders"):
        with pytest.raises(LeaseHeldError):
            elsewhere(hasty.acquire, "orders")
        waits = in_thread(_token_of, hasty, "orders", timeout_seconds=None)
        wait_until(lambda: waiting(patient))
    assert waits.result(30) == 2


def test_trying_is_none_where_another_one_has_it(lock: FencedLock) -> None:
    lease = lock.try_acquire("orders", metadata={"why": "first"})
    assert lease is not None
    assert elsewhere(lock.try_acquire, "orders") is None
    lease.release()

    async def run() -> None:
        mine = await lock.atry_acquire("orders")
        assert mine is not None
        assert elsewhere(lock.try_acquire, "orders") is None
        await mine.arelease()

    in_loop(run())
    assert elsewhere(in_loop, lock.atry_acquire("orders")) is not None


def test_release_is_idempotent_and_the_second_writes_nothing(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    lease.release()
    before = kinds(lock)
    lease.release()
    in_loop(lease.arelease())
    assert kinds(lock) == before == ["lease.acquired", "lease.released"]


def test_release_of_a_lost_lease_is_silent_and_hits_no_successor(lock: FencedLock) -> None:
    late = lock.acquire("orders")
    lose(lock, late)
    successor = elsewhere(lock.acquire, "orders")
    late.release()
    held = lock.inspect("orders")
    assert held is not None
    assert held.token == successor.token == 2


def test_a_lease_that_was_given_back_is_refused_by_its_check(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    lease.release()
    with pytest.raises(LeaseLostError) as lost:
        lease.check()
    assert lost.value.reason == "released"
    with pytest.raises(LeaseLostError):
        in_loop(lease.acheck())


def test_a_lease_may_be_given_back_by_another_thread(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    elsewhere(lease.release)
    assert lock.inspect("orders") is None


def test_a_lease_may_be_given_back_by_the_other_kind_of_code(lock: FencedLock) -> None:
    async def run() -> None:
        (await lock.aacquire("orders")).release()
        await lock.acquire("orders").arelease()
        assert (await lock.aacquire("orders", timeout_seconds=0)).token == 3

    in_loop(run())
    assert kinds(lock) == ["lease.acquired", "lease.released"] * 2 + ["lease.acquired"]


def test_what_the_caller_says_is_on_record_with_the_lease(lock: FencedLock) -> None:
    with lock.lease("orders", metadata={"customer": "Ада"}) as lease:
        held = lock.inspect("orders")
        assert held is not None
        assert held.metadata == lease.metadata == {"customer": "Ада"}
        assert held.owner == f"{socket.gethostname()}:{os.getpid()}"


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": math.nan}, {1: 2}])
def test_metadata_that_is_not_json_is_refused_and_nothing_is_held(lock: FencedLock, metadata: Any) -> None:
    with pytest.raises(InvalidInputError):
        lock.acquire("orders", metadata=metadata)
    assert lock.inspect("orders") is None


def test_a_call_may_give_its_lease_another_length(lock: FencedLock) -> None:
    with lock.lease("orders", ttl_seconds=5):
        held = lock.inspect("orders")
        assert held is not None
        assert held.ttl_seconds == 5


@pytest.mark.parametrize(
    "options", [{"ttl_seconds": 0}, {"ttl_seconds": math.nan}, {"timeout_seconds": -1}, {"timeout_seconds": math.nan}]
)
def test_lengths_that_make_no_sense_are_refused(lock: FencedLock, options: Any) -> None:
    with pytest.raises(InvalidInputError):
        lock.acquire("orders", **options)
    assert lock.list_leases() == []


def test_the_leases_of_a_namespace_are_listed_latest_first(locks: Locks) -> None:
    lock, other = locks(), locks(namespace="other")
    leases = [lock.acquire(name) for name in ("a", "b")]
    other.acquire("c")
    lock.acquire_lock("record", "holder")
    assert [each.scope for each in lock.list_leases()] == [
        "prefect-record/default/record",
        *[lease.scope for lease in reversed(leases)],
    ]
    assert [each.scope for each in in_loop(lock.alist_leases())] == [each.scope for each in lock.list_leases()]


def test_a_forced_release_is_on_record_with_its_reason(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    assert [each.token for each in lock.force_release("orders", reason="stuck")] == [lease.token]
    (event,) = events(lock, "lease.force-released")
    assert event.detail["reason"] == "stuck"
    with pytest.raises(NotFoundError):
        lock.force_release("orders", reason="again")
    with pytest.raises(NotFoundError):
        in_loop(lock.aforce_release("orders", reason="again"))
    assert elsewhere(lock.acquire, "orders").token == 2


def test_what_a_flow_run_holds_is_released_by_its_id_and_nothing_else(lock: FencedLock) -> None:
    mine = [lock.acquire(name, metadata={"flow_run_id": "run-1"}) for name in ("a", "b")]
    other = lock.acquire("c", metadata={"flow_run_id": "run-2"})
    assert lock.release_flow_run("run-1") == len(mine)
    assert [each.token for each in lock.list_leases()] == [other.token]
    assert in_loop(lock.arelease_flow_run("run-2")) == 1
    assert lock.release_flow_run("run-1") == 0


def test_threads_that_want_one_name_have_it_one_after_the_other(lock: FencedLock) -> None:
    inside: list[int] = []
    seen: list[tuple[int, int]] = []
    ready = Barrier(8)

    def work() -> None:
        ready.wait()
        for _ in range(5):
            with lock.lease("orders") as lease:
                inside.append(lease.token)
                seen.append((lease.token, len(inside)))
                inside.remove(lease.token)

    for each in [in_thread(work) for _ in range(8)]:
        each.result(60)
    assert [alone for _, alone in seen] == [1] * 40
    assert [token for token, _ in seen] == list(range(1, 41))


def test_tasks_that_want_one_name_have_it_one_after_the_other(lock: FencedLock) -> None:
    inside: list[int] = []
    tokens: list[int] = []

    async def work() -> None:
        async with lock.alease("orders") as lease:
            inside.append(lease.token)
            await asyncio.sleep(0)
            assert inside == [lease.token]
            tokens.append(lease.token)
            inside.remove(lease.token)

    async def run() -> None:
        await asyncio.gather(*[work() for _ in range(10)])

    in_loop(run())
    assert tokens == list(range(1, 11))


def test_a_cancelled_wait_leaves_neither_a_lease_nor_a_place_in_the_queue(lock: FencedLock) -> None:
    async def run() -> None:
        waits = asyncio.create_task(lock.aacquire("orders"))
        while not waiting(lock):
            await asyncio.sleep(0.005)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not waiting(lock)

    lease = elsewhere(lock.acquire, "orders")
    in_loop(run())
    lease.release()
    assert lock.inspect("orders") is None


def test_nobody_is_told_who_is_waited_for_when_the_store_was_closed(
    lock: FencedLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PATIENCE", 0.0)
    store = lock.store.open()
    ask = lock._ask("orders", None, None, None)
    store.close()
    with holding._told_after(ask):  # an error in its timer would fail the test: warnings are errors
        wait_until(lambda: not [each for each in threading.enumerate() if isinstance(each, threading.Timer)])


def test_a_store_is_created_where_the_environment_says_on_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "deep" / "named.db"
    monkeypatch.setenv("AGENT_CHECKPOINT_DB", str(named))
    lock = FencedLock(store=LeaseStore())
    assert not named.exists()
    with lock.lease("orders"):
        assert named.exists()
    lock.store.open().close()


def test_a_lease_says_what_it_is(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        assert repr(lease).startswith("FencedLease('orders', token 1, 2")
        assert lease.fence == (lease.scope, lease.owner, lease.token)
        assert json.loads(json.dumps(lease.metadata)) == {}


def test_what_is_taken_by_name_protects_a_checkpoint_of_the_same_store(lock: FencedLock) -> None:
    store = lock.store.open()
    with lock.lease("orders") as lease:
        assert store.put_checkpoint("deploy", {"stage": 1}, lease=lease).token == lease.token
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", {"stage": 2}, lease=lease)
