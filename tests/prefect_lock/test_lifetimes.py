"""Whom a lease outlives: not the code that drops it, nor its process; and a forked child has no part in it."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from agent_checkpoint import LeaseHeldError
from agent_checkpoint_prefect import FencedLease, FencedLock, current_fencing_token, current_lease

from .conftest import Locks, elsewhere, in_loop
from .forking import in_fork, needs_fork


def test_a_lease_that_is_dropped_is_held_by_nobody(lock: FencedLock) -> None:
    dropped = weakref.ref(lock.acquire("orders"))
    assert dropped() is None
    assert current_lease() is None

    async def run() -> None:
        dropped = weakref.ref(await lock.aacquire("invoices"))
        assert dropped() is None
        assert current_lease() is None

    in_loop(run())


def test_a_lease_that_is_dropped_is_renewed_no_more(locks: Locks) -> None:
    lock = locks(ttl_seconds=1)
    assert lock.acquire("orders").token == 1
    gc.collect()
    assert elsewhere(lock.acquire, "orders", timeout_seconds=30).token == 2


def test_a_block_needs_no_name_for_its_lease(lock: FencedLock) -> None:
    with lock.lease("orders"):
        gc.collect()
        assert current_fencing_token() == 1


@needs_fork
def test_a_forked_child_holds_nothing_and_waits_for_its_parent_as_others_do(lock: FencedLock) -> None:
    def child() -> tuple[FencedLease | None, int | None, str]:
        with pytest.raises(LeaseHeldError) as held:
            lock.acquire("orders", timeout_seconds=0)
        return current_lease(), current_fencing_token(), type(held.value).__name__

    with lock.lease("orders"):
        assert in_fork(child) == (None, None, "LeaseHeldError")
        assert current_fencing_token() == 1


@needs_fork
def test_a_forked_childs_copy_is_checked_and_neither_renewed_nor_told_of(locks: Locks) -> None:
    lock = locks(ttl_seconds=60)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), lock.lease("orders") as lease:

        def child() -> list[str]:
            lease.check()  # by the store: its parent has it
            lease.release()
            lease.release()
            return [thread.name for thread in threading.enumerate() if thread.name.startswith("agent-checkpoint")]

        assert in_fork(child) == []
        lease.check()
