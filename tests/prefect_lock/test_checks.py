"""Ownership is asked for before what cannot be undone: by the holder, at the end of a fenced body, by plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_checkpoint import FenceRefusedError, StaleLeaseError
from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseLostError

from .conftest import Locks, Veto, elsewhere, events, in_loop, take_away
from .losing import lose

Check = Callable[[FencedLease], Any]


def check(lease: FencedLease) -> None:
    lease.check()


def acheck(lease: FencedLease) -> None:
    in_loop(lease.acheck())


@pytest.fixture(params=[check, acheck])
def ask(request: pytest.FixtureRequest) -> Check:
    call: Check = request.param
    return call


def test_a_live_lease_passes_and_nothing_is_written(lock: FencedLock, ask: Check) -> None:
    with lock.lease("orders") as lease:
        before = events(lock)
        ask(lease)
        assert events(lock) == before


def test_a_superseded_lease_is_refused_and_the_refusal_is_on_record(lock: FencedLock, ask: Check) -> None:
    late = lock.acquire("orders")
    take_away(lock, late)
    elsewhere(lock.acquire, "orders")
    with pytest.raises(LeaseLostError) as lost:
        ask(late)

    assert isinstance(lost.value, StaleLeaseError)
    assert isinstance(lost.value, RuntimeError)
    assert (lost.value.reason, lost.value.scope, lost.value.token) == ("superseded", late.scope, 1)
    assert late.lost
    (event,) = events(lock, "write.refused")
    assert (event.scope, event.token, event.owner) == (late.scope, 1, late.owner)
    assert (event.detail["action"], event.detail["reason"]) == ("prefect.check", "superseded")


def test_a_lost_lease_stays_lost_without_asking_the_store(lock: FencedLock, ask: Check) -> None:
    lease = lock.acquire("orders")
    lose(lock, lease)
    lock.store.open().close()
    with pytest.raises(LeaseLostError) as lost:
        ask(lease)
    assert (lost.value.reason, lost.value.token) == ("released", 1)


def test_a_loss_is_one_of_those_that_a_retry_takes(lock: FencedLock) -> None:
    lease = lock.acquire("orders")
    take_away(lock, lease)
    with pytest.raises(Exception, match="released") as lost:
        lease.check()
    assert not isinstance(lost.value, (KeyboardInterrupt, SystemExit))
    assert lost.value.retryable is False  # type: ignore[attr-defined]


# Plugins


def test_a_plugin_may_veto_at_a_check(veto: Veto, lock: FencedLock, ask: Check) -> None:
    with lock.lease("orders") as lease:
        ask(lease)
        veto.error = FenceRefusedError("not today")
        with pytest.raises(FenceRefusedError) as refused:
            ask(lease)
        veto.error = None
        ask(lease)  # a veto takes no lease away
        assert not lease.lost
    assert (refused.value.reason, refused.value.plugin) == ("not today", "veto")
    (event,) = events(lock, "write.refused")
    assert (event.detail["action"], event.detail["plugin"]) == ("prefect.check", "veto")
    write = veto.asked[0]
    assert (write.component, write.action) == ("prefect", "prefect.check")
    assert (write.scope, write.owner, write.token) == (lease.scope, lease.owner, lease.token)


def test_a_plugin_may_veto_at_the_end_of_a_fenced_body(veto: Veto, lock: FencedLock) -> None:
    ran: list[str] = []

    @lock.fenced("orders")
    def publish() -> None:
        ran.append("sync")

    @lock.fenced("orders")
    async def apublish() -> None:
        ran.append("async")

    publish()
    in_loop(apublish())
    veto.error = FenceRefusedError("not today")
    with pytest.raises(FenceRefusedError, match="not today"):
        publish()
    with pytest.raises(FenceRefusedError, match="not today"):
        in_loop(apublish())
    assert ran == ["sync", "async", "sync", "async"]
    assert [write.action for write in veto.asked] == ["prefect.check"] * 4
    assert lock.inspect("orders") is None


def test_a_plugin_may_veto_before_a_result_record(veto: Veto, lock: FencedLock) -> None:
    lock.acquire_lock("key", "holder")
    assert lock.is_lock_holder("key", "holder")
    veto.error = FenceRefusedError("not today")
    assert not lock.is_lock_holder("key", "holder")
    assert lock.is_locked("key")
    write = veto.asked[-1]
    assert (write.component, write.action) == ("prefect", "prefect.save-result")
    assert (write.scope, write.owner, write.token) == ("prefect-record/default/key", "holder", 1)
    (event,) = events(lock, "write.refused")
    assert (event.detail["action"], event.detail["plugin"]) == ("prefect.save-result", "veto")


def test_a_plugin_that_fails_refuses(veto: Veto, lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        veto.error = ZeroDivisionError("oops")
        with pytest.raises(FenceRefusedError, match="ZeroDivisionError: oops"):
            lease.check()
        lock.acquire_lock("key", "holder")
        assert not lock.is_lock_holder("key", "holder")


def test_no_plugin_is_asked_by_who_only_takes_and_gives_back(veto: Veto, locks: Locks) -> None:
    lock = locks()
    with lock.lease("orders"):
        pass
    lock.acquire_lock("key", "holder")
    lock.is_locked("key")
    lock.release_lock("key", "holder")
    assert veto.asked == []


def test_plugins_may_be_switched_off(veto: Veto, lock: FencedLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_CHECKPOINT_PLUGINS", "off")
    veto.error = FenceRefusedError("not today")
    with lock.lease("orders") as lease:
        lease.check()
    assert veto.asked == []
