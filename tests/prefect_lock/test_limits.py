"""A limit of more than one: never more than so many, each with a slot of its own."""

from __future__ import annotations

import asyncio
from threading import Barrier, Event, Lock

import pytest

from agent_checkpoint import InvalidInputError, LeaseHeldError
from agent_checkpoint_prefect import FencedLease, FencedLock

from .conftest import Locks, elsewhere, in_loop, in_thread
from .losing import lose

LIMIT = 3


@pytest.fixture
def pool(locks: Locks) -> FencedLock:
    return locks(limit=LIMIT)


def test_a_limit_lets_so_many_in_and_no_more(pool: FencedLock) -> None:
    leases = [elsewhere(pool.acquire, "db") for _ in range(LIMIT)]
    assert [lease.slot for lease in leases] == [0, 1, 2]
    assert [lease.token for lease in leases] == [1, 2, 3]
    with pytest.raises(LeaseHeldError):
        elsewhere(pool.acquire, "db", timeout_seconds=0)
    assert elsewhere(pool.try_acquire, "db") is None


def test_a_slot_that_was_given_back_is_the_next_to_be_taken(pool: FencedLock) -> None:
    leases = [elsewhere(pool.acquire, "db") for _ in range(LIMIT)]
    leases[1].release()
    assert elsewhere(pool.acquire, "db").slot == 1
    assert len(pool.list_leases()) == LIMIT


def test_a_slot_is_not_lost_with_its_lease(pool: FencedLock) -> None:
    leases = [elsewhere(pool.acquire, "db") for _ in range(LIMIT)]
    lose(pool, leases[0])
    assert elsewhere(pool.acquire, "db").slot == 0
    assert elsewhere(pool.try_acquire, "db") is None
    leases[0].release()
    assert elsewhere(pool.try_acquire, "db") is None


class Room:
    """How many are inside, and in which slots."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.full = Event()
        self._slots: list[int] = []
        self.most = 0
        self.shared = False

    def enter(self, lease: FencedLease) -> None:
        with self._lock:
            self.shared |= lease.slot in self._slots
            self._slots.append(lease.slot)
            self.most = max(self.most, len(self._slots))
            if self.most >= LIMIT:
                self.full.set()

    def leave(self, lease: FencedLease) -> None:
        with self._lock:
            self._slots.remove(lease.slot)


def test_threads_are_never_more_than_the_limit(pool: FencedLock) -> None:
    room, ready = Room(), Barrier(8)

    def work() -> None:
        ready.wait()
        for _ in range(6):
            with pool.lease("db") as lease:
                room.enter(lease)
                assert room.full.wait(60)  # chance would have it that they come one after the other
                lease.check()
                room.leave(lease)

    for each in [in_thread(work) for _ in range(8)]:
        each.result(60)
    assert room.most == LIMIT
    assert not room.shared


def test_tasks_are_never_more_than_the_limit(pool: FencedLock) -> None:
    room = Room()

    async def work() -> None:
        async with pool.alease("db") as lease:
            room.enter(lease)
            assert await asyncio.to_thread(room.full.wait, 60)
            await lease.acheck()
            room.leave(lease)

    async def run() -> None:
        await asyncio.gather(*[work() for _ in range(12)])

    in_loop(run())
    assert room.most == LIMIT
    assert not room.shared


def test_another_limit_of_one_name_is_refused_and_both_are_named(locks: Locks, pool: FencedLock) -> None:
    pool.acquire("db").release()
    with pytest.raises(InvalidInputError, match=r"3.*5|5.*3"):
        locks(limit=5).acquire("db")


def test_a_limit_is_refused_as_a_lock_manager(pool: FencedLock) -> None:
    calls = (
        lambda: pool.acquire_lock("key", "holder"),
        lambda: in_loop(pool.aacquire_lock("key", "holder")),
        lambda: pool.is_locked("key"),
        lambda: pool.is_lock_holder("key", "holder"),
        lambda: pool.wait_for_lock("key", 0),
        lambda: in_loop(pool.await_for_lock("key", 0)),
        lambda: pool.release_lock("key", "holder"),
    )
    for call in calls:
        with pytest.raises(InvalidInputError, match="limit"):
            call()
