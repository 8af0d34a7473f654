"""A lease that is lost while a coroutine runs under it: its task is cancelled, and nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from prefect.utilities.timeout import timeout_async

from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseLostError, current_lease

from .conftest import WATCHDOG_SECONDS, Locks, in_loop, in_thread, take_away
from .losing import lose


async def sleep_under(lock: FencedLock, name: str = "orders") -> None:
    """Sleep in a block whose lease is lost meanwhile."""
    async with lock.alease(name) as lease:
        in_thread(lose, lock, lease)
        await asyncio.sleep(WATCHDOG_SECONDS)
        pytest.fail("the body was not interrupted")


def uncancelled() -> None:
    """Nothing of the interruption is left in the task, and it can wait again."""
    task = asyncio.current_task()
    assert task is not None
    assert sys.version_info < (3, 11) or task.cancelling() == 0


def test_a_loss_interrupts_the_task_at_its_await(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(LeaseLostError) as lost:
            await sleep_under(lock)
        assert (lost.value.scope, lost.value.token, lost.value.reason) == ("prefect/default/orders", 1, "released")
        uncancelled()
        await asyncio.sleep(0.001)
        assert current_lease() is None
        async with lock.alease("orders") as again:
            await again.acheck()
            assert again.token == 2

    in_loop(run())


def test_a_loss_interrupts_what_is_awaited_below(lock: FencedLock) -> None:
    async def below() -> None:
        await asyncio.gather(asyncio.sleep(WATCHDOG_SECONDS), asyncio.Event().wait())

    async def run() -> None:
        with pytest.raises(LeaseLostError):
            async with lock.alease("orders") as lease:
                in_thread(lose, lock, lease)
                await below()
        uncancelled()

    in_loop(run())


def test_a_check_by_a_child_that_finds_the_loss_interrupts_the_block(lock: FencedLock) -> None:
    async def run(check: Callable[[FencedLease], Awaitable[object]]) -> None:
        with pytest.raises(LeaseLostError):
            async with lock.alease("orders") as lease:
                take_away(lock, lease)
                checked = asyncio.ensure_future(check(lease))
                await asyncio.wait([checked])
                assert isinstance(checked.exception(), LeaseLostError)
                await asyncio.sleep(WATCHDOG_SECONDS)
                pytest.fail("the body was not interrupted")
        uncancelled()

    in_loop(run(FencedLease.acheck))
    in_loop(run(lambda lease: asyncio.to_thread(lease.check)))


def test_a_check_by_the_task_itself_that_finds_the_loss_is_all_that_it_hears(lock: FencedLock) -> None:
    reached = []

    async def run() -> None:
        async with lock.alease("orders") as lease:
            take_away(lock, lease)
            with pytest.raises(LeaseLostError):
                await lease.acheck()
            await asyncio.sleep(0.01)
            reached.append(lease.lost)

    with pytest.raises(LeaseLostError):
        in_loop(run())
    assert reached == [True]


def test_of_several_that_are_gathered_only_one_is_interrupted(lock: FencedLock) -> None:
    async def bystander() -> str:
        async with lock.alease("other") as lease:
            for _ in range(50):
                await asyncio.sleep(0.001)
            await lease.acheck()
        return "done"

    async def run() -> None:
        lost, other = await asyncio.gather(sleep_under(lock), bystander(), return_exceptions=True)
        assert isinstance(lost, LeaseLostError)
        assert other == "done"

    in_loop(run())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
def test_a_loss_is_not_taken_for_a_timeout_around_it(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(LeaseLostError):
            async with asyncio.timeout(WATCHDOG_SECONDS):
                await sleep_under(lock)
        with pytest.raises(LeaseLostError):
            async with lock.alease("inner") as lease, asyncio.timeout(WATCHDOG_SECONDS):
                in_thread(lose, lock, lease)
                await asyncio.sleep(WATCHDOG_SECONDS)
        uncancelled()

    in_loop(run())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
def test_a_timeout_is_not_taken_for_a_loss(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), lock.alease("orders"):
                await asyncio.sleep(WATCHDOG_SECONDS)
        with pytest.raises(TimeoutError):
            async with lock.alease("orders"), asyncio.timeout(0.01):
                await asyncio.sleep(WATCHDOG_SECONDS)
        uncancelled()

    in_loop(run())
    assert lock.inspect("orders") is None


def test_a_loss_and_a_timeout_of_prefect_are_told_apart(lock: FencedLock) -> None:
    async def run() -> None:
        with timeout_async(WATCHDOG_SECONDS), pytest.raises(LeaseLostError):
            await sleep_under(lock)
        with pytest.raises(LeaseLostError), timeout_async(WATCHDOG_SECONDS):
            await sleep_under(lock)
        with pytest.raises(TimeoutError), timeout_async(0.01):
            async with lock.alease("orders"):
                await asyncio.sleep(WATCHDOG_SECONDS)
        uncancelled()
        await asyncio.sleep(0.001)

    in_loop(run())
    assert lock.inspect("orders") is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="task groups came with Python 3.11")
def test_a_loss_ends_the_task_group_around_it_by_its_error(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(BaseExceptionGroup) as group:  # noqa: F821 -- of Python 3.11
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sleep_under(lock))
                tasks.create_task(asyncio.sleep(WATCHDOG_SECONDS))
        assert [type(error) for error in group.value.exceptions] == [LeaseLostError]

    in_loop(run())


def test_a_cancellation_by_others_stays_one(lock: FencedLock) -> None:
    async def hold() -> None:
        async with lock.alease("orders"):
            inside.set()
            await asyncio.sleep(WATCHDOG_SECONDS)

    async def run() -> None:
        nonlocal inside
        inside = asyncio.Event()
        task = asyncio.create_task(hold())
        await inside.wait()
        task.cancel("by others")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    inside = None  # type: ignore[assignment]
    in_loop(run())
    assert lock.inspect("orders") is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 nobody can tell two cancellations apart")
def test_a_cancellation_by_others_that_comes_with_a_loss_stays_one(lock: FencedLock) -> None:
    async def hold() -> None:
        async with lock.alease("orders") as lease:
            task = asyncio.current_task()
            assert task is not None
            lose(lock, lease)  # without an await: it is heard of at the next one
            task.cancel("by others")
            await asyncio.sleep(WATCHDOG_SECONDS)

    async def run() -> None:
        task = asyncio.create_task(hold())
        await asyncio.wait([task])
        assert task.cancelled()

    in_loop(run())


def test_a_body_that_ends_before_it_can_be_interrupted_is_told_and_not_cancelled(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(LeaseLostError):
            async with lock.alease("orders") as lease:
                lose(lock, lease)
        uncancelled()
        for _ in range(10):
            await asyncio.sleep(0)

    in_loop(run())


def test_a_body_that_swallows_the_interruption_is_told_at_its_end(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(LeaseLostError):
            async with lock.alease("orders") as lease:
                in_thread(lose, lock, lease)
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(WATCHDOG_SECONDS)
        uncancelled()
        await asyncio.sleep(0.001)

    in_loop(run())


def test_the_loss_of_the_outer_lease_ends_both_blocks(lock: FencedLock) -> None:
    async def run() -> None:
        with pytest.raises(LeaseLostError) as lost:
            async with lock.alease("outer") as outer:
                await _sleep_in(lock, "inner", lost=outer)
        assert lost.value.scope == "prefect/default/outer"
        uncancelled()
        assert await lock.alist_leases() == []

    in_loop(run())


async def _sleep_in(lock: FencedLock, name: str, lost: FencedLease) -> None:
    async with lock.alease(name):
        in_thread(lose, lock, lost)
        await asyncio.sleep(WATCHDOG_SECONDS)


def test_the_loss_of_the_inner_lease_leaves_the_outer_one(lock: FencedLock) -> None:
    async def run() -> None:
        async with lock.alease("outer") as outer:
            with pytest.raises(LeaseLostError) as lost:
                await sleep_under(lock, "inner")
            assert lost.value.scope == "prefect/default/inner"
            uncancelled()
            await outer.acheck()
            await asyncio.sleep(0.001)

    in_loop(run())


@pytest.mark.parametrize("on_lost", ["raise", "warn"])
def test_a_loss_interrupts_nobody_who_does_not_want_it(locks: Locks, on_lost: str) -> None:
    lock, reached = locks(on_lost=on_lost), []

    async def run() -> None:
        async with lock.alease("orders") as lease:
            lose(lock, lease)
            await asyncio.sleep(0.01)
            reached.append(lease.lost)

    if on_lost == "raise":
        with pytest.raises(LeaseLostError):
            in_loop(run())
    else:
        in_loop(run())
    assert reached == [True]


@pytest.mark.parametrize("on_lost", ["cancel", "raise"])
def test_a_loss_that_nobody_heard_of_is_told_at_the_end(locks: Locks, on_lost: str) -> None:
    lock = locks(on_lost=on_lost)

    async def run() -> None:
        async with lock.alease("orders") as lease:
            take_away(lock, lease)  # between two heartbeats: only the store knows

    with pytest.raises(LeaseLostError):
        in_loop(run())


def test_the_loss_of_a_thread_s_block_on_an_event_loop_hits_no_other_task(lock: FencedLock) -> None:
    outcome: dict[str, Any] = {}

    async def holder() -> None:
        with lock.lease("orders") as lease:
            in_thread(lose, lock, lease)
            await asyncio.sleep(WATCHDOG_SECONDS)

    async def bystander() -> None:
        task = asyncio.create_task(holder())
        try:
            while not task.done():
                await asyncio.sleep(0.001)
        except LeaseLostError:
            outcome["bystander"] = "interrupted"
            raise
        outcome["holder"] = task.exception()

    with suppress(LeaseLostError):
        in_loop(bystander())
    assert "bystander" not in outcome
    assert isinstance(outcome.get("holder"), LeaseLostError)
