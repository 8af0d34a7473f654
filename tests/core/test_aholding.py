"""Holding a lease in asyncio: whatever becomes of the task or the loop, nothing is left behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import (
    AgentCheckpointError,
    InvalidInputError,
    LeaseHeldError,
    ReentrancyError,
    StaleLeaseError,
    StateStore,
    WaitTimeoutError,
    aholding,
)
from agent_checkpoint.aholding import AsyncHeldLease
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

# Only what never comes reaches it.
LONG = 30.0
Scenario = Callable[[AsyncStateStore], Awaitable[None]]


def play(path: Path, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a new store in a new loop."""

    async def whole() -> None:
        async with AsyncStateStore(path, synchronous="normal", **options) as store:
            await store.initialize()
            await asyncio.wait_for(scenario(store), LONG)

    asyncio.run(whole())


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.001)


def left_behind(path: Path) -> tuple[list[str], int]:
    """The scopes that are still held, and how many tickets there are."""
    with StateStore(path) as store, store.read() as reader:
        queued = int(reader.rows("SELECT COUNT(*) FROM tickets")[0][0])
        held = [scope for (scope,) in reader.rows("SELECT scope FROM leases WHERE state = 'live'")]
    return held, queued


def sockets() -> int:
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return found


def threads(*names: str) -> set[threading.Thread]:
    wanted = tuple(f"agent-checkpoint-{name}" for name in names or ("heartbeat", "deadline", "lost"))
    return {thread for thread in threading.enumerate() if thread.name.startswith(wanted)}


@pytest.fixture(autouse=True)
def no_thread_stays(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("agent_checkpoint.alarm.LINGER_NS", NS // 20)
    before = threads()
    yield
    gc.collect()

    def over() -> bool:
        clock.advance(40 * 86_400)
        return not threads() - before

    deadline = time.monotonic() + 10
    while not over():
        assert time.monotonic() < deadline, "a thread stays"
        time.sleep(0.001)


# The block


def test_a_block_holds_the_lease_and_gives_it_back(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        async with store.hold("release", "worker-a", 30, metadata={"host": "build-7"}) as held:
            assert isinstance(held, AsyncHeldLease)
            assert (held.scope, held.slot, held.owner, held.token) == ("release", 0, "worker-a", 1)
            assert isinstance(held.lost, threading.Event)
            assert 28 < held.remaining() <= 28.5
            found = await held.check()
            assert found.process is not None
            assert (found.process["pid"], found.metadata) == (os.getpid(), {"host": "build-7"})
            assert (await store.put_checkpoint("deploy", 1, lease=held)).token == 1
            with pytest.raises(LeaseHeldError):
                async with store.hold("release", "worker-b"):
                    raise AssertionError("entered")
        assert await store.get_lease("release") is None
        kinds = [event.kind for event in await store.events(scope="release")]
        assert kinds == ["lease.acquired", "checkpoint.saved", "lease.released"]

    play(path, scenario)


def test_a_block_waits_for_its_lease_and_no_longer_than_it_was_told(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a", 600)
        other = asyncio.create_task(hold_once(store, "release", wait_seconds=LONG))
        await asyncio.sleep(0.05)
        assert not other.done()
        await store.release(*lease.fence)
        assert await other == 2
        await store.acquire("release", "worker-a", 600)

        async def impatient() -> None:
            with pytest.raises(WaitTimeoutError):
                async with store.hold("release", "worker-b", wait_seconds=0.05):
                    raise AssertionError("entered")

        await asyncio.create_task(impatient())

    play(path, scenario)
    assert left_behind(path) == (["release"], 0)


async def hold_once(store: AsyncStateStore, scope: str, **options: Any) -> int:
    async with store.hold(scope, "worker-b", 30, **options) as held:
        return held.token


def test_a_task_does_not_wait_for_what_it_holds_itself_but_for_another_task(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        async with store.hold("release", "worker-a"):
            with pytest.raises(ReentrancyError, match="task"):
                async with store.hold("release", "worker-a", wait_seconds=LONG):
                    raise AssertionError("entered")
            with pytest.raises(ReentrancyError):
                await store.acquire("release", "worker-a", wait_seconds=LONG)
            waiting = asyncio.create_task(hold_once(store, "release", wait_seconds=LONG))
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert await waiting == 2

    play(path, scenario)
    assert left_behind(path) == ([], 0)


def test_waiting_parks_no_thread(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        async with store.hold("release", "worker-a"):
            waiting = [asyncio.create_task(hold_once(store, "release", wait_seconds=LONG)) for _ in range(20)]
            await asyncio.sleep(0.1)
            started = time.monotonic()
            for number in range(10):
                await store.put_checkpoint("deploy", number)
            assert time.monotonic() - started < 5
            assert not any(task.done() for task in waiting)
        assert sorted(await asyncio.gather(*waiting)) == list(range(2, 22))

    play(path, scenario)
    assert left_behind(path) == ([], 0)


def test_tasks_are_served_first_come_first(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        served: list[int] = []

        async def work(number: int) -> None:
            async with store.hold("release", f"worker-{number}", wait_seconds=LONG):
                served.append(number)

        async with store.hold("release", "worker-a"):
            waiting = []
            for number in range(8):
                waiting.append(asyncio.create_task(work(number)))
                await asyncio.sleep(0.05)
        await asyncio.gather(*waiting)
        assert served == list(range(8))

    play(path, scenario)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, asyncio.CancelledError])
def test_the_body_s_exception_is_the_block_s(path: Path, error: type[BaseException]) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        for how in ("kept", "lost"):
            with pytest.raises(error):
                async with store.hold("release", "worker-a"):
                    if how == "lost":
                        await store.force_release("release", reason="stuck")
                    raise error

    play(path, scenario)
    assert left_behind(path) == ([], 0)


def test_a_lease_that_is_lost_is_told_at_the_end(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        with pytest.raises(StaleLeaseError) as at_the_end:
            async with store.hold("release", "worker-a") as held:
                await store.force_release("release", reason="stuck")
                with pytest.raises(StaleLeaseError) as stale:
                    await held.check()
                assert held.lost.is_set()
                assert stale.value.heartbeat_gap == held.heartbeat_gap
        assert (stale.value.reason, at_the_end.value.reason) == ("released", "released")

    play(path, scenario)


def test_one_block_that_many_tasks_enter_at_once_leaves_nothing_held(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        block = store.hold("pool", "worker-a", limit=8)
        refused = []

        async def enter() -> None:
            try:
                async with block:
                    await asyncio.sleep(0.005)
            except ReentrancyError:
                refused.append(True)

        for _ in range(5):
            await asyncio.gather(*(enter() for _ in range(8)))
        assert await store.list_leases() == []

    play(path, scenario)


def test_one_block_serves_one_loop_after_another(path: Path) -> None:
    async def enter() -> None:
        async with block as held:
            assert (await held.check()).token == held.token

    with StateStore(path) as opened:
        opened.initialize()
    store = AsyncStateStore(path)
    block = store.hold("release", "worker-a")
    for _ in range(3):
        asyncio.run(enter())
    asyncio.run(store.close())
    assert left_behind(path) == ([], 0)


# The loop


def test_a_loop_that_is_blocked_for_longer_than_the_ttl_loses_nothing(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        async with store.hold("release", "worker-a", 1) as held:
            time.sleep(2.2)
            assert not held.lost.is_set()
            assert (await held.check()).token == 1
            assert held.heartbeat_gap < 1

    play(path, scenario)


def test_a_loop_that_ended_renews_nothing_though_somebody_has_its_object(path: Path, clock: FakeClock) -> None:
    kept: list[AsyncHeldLease] = []
    heard: list[str] = []

    async def scenario(store: AsyncStateStore) -> None:
        await store.initialize()
        block = store.hold("release", "worker-a", 30, on_lost=lambda held, reason: heard.append(reason))
        kept.append(await block.__aenter__())

    store = AsyncStateStore(path, clock=clock)
    asyncio.run(scenario(store))
    for _ in range(28):
        clock.advance(1)
        time.sleep(0.002)
    assert not kept[0].lost.is_set()
    clock.advance(0.5)
    assert kept[0].lost.wait(LONG)
    deadline = time.monotonic() + LONG
    while heard != ["expired"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert left_behind(path)[1] == 0


def test_a_loop_that_ends_with_its_tasks_inside_or_waiting_leaves_nothing(path: Path) -> None:
    with StateStore(path) as opened:
        opened.initialize()
    choose = random.Random(2)
    bells = sockets()
    for _ in range(20):

        async def ends_early() -> None:
            store = AsyncStateStore(path, synchronous="normal")
            tasks = [asyncio.create_task(hold_for_ever(store, f"scope-{number % 3}")) for number in range(9)]
            await asyncio.sleep(choose.uniform(0, 0.03))
            del tasks

        asyncio.run(ends_early())
        gc.collect()
        assert left_behind(path) == ([], 0)
    assert sockets() <= bells


async def hold_for_ever(store: AsyncStateStore, scope: str) -> None:
    async with store.hold(scope, "worker-a", 600, wait_seconds=LONG):
        await asyncio.sleep(LONG)


# Cancelled


@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("impatient", [False, True])
def test_a_task_cancelled_at_any_moment_leaves_nothing_behind(path: Path, times: int, impatient: bool) -> None:
    choose = random.Random(times)
    before, threads_before = sockets(), len(threading.enumerate())
    inside = cancelled = 0

    async def victim(store: AsyncStateStore) -> None:
        nonlocal inside
        async with store.hold("release", "victim", 600, wait_seconds=10) as held:
            inside += 1
            if choose.random() < 0.3:
                await held.check()
            await asyncio.sleep(choose.uniform(0, 0.004))

    async def rival(store: AsyncStateStore) -> None:
        while True:
            async with store.hold("release", "rival", 600, wait_seconds=10):
                await asyncio.sleep(choose.uniform(0, 0.004))
            await asyncio.sleep(choose.uniform(0, 0.004))

    async def scenario(store: AsyncStateStore) -> None:
        nonlocal cancelled
        against = asyncio.create_task(rival(store))
        for _ in range(times):
            task = asyncio.create_task(victim(store))
            await asyncio.sleep(choose.uniform(0, 0.012))
            task.cancel()
            if impatient:
                await asyncio.sleep(choose.uniform(0, 0.002))
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            found = await store.get_lease("release")
            assert found is None or found.owner == "rival"
        against.cancel()
        with suppress(asyncio.CancelledError):
            await against
        assert await store.list_leases() == []
        assert sockets() - before <= 3  # the loop's own pair, and what rings the bells

    play(path, scenario)
    assert left_behind(path) == ([], 0)
    assert (cancelled > times / 10, inside > 0) == (True, True)
    deadline = time.monotonic() + 10
    while len(threading.enumerate()) > threads_before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    assert sockets() - before <= 1


@pytest.mark.parametrize("steps", range(12))
def test_a_task_cancelled_while_its_turn_comes_does_not_go_on(path: Path, steps: int) -> None:
    """The release, and thereby the bell, and so many rounds of the loop later the cancellation."""
    entered: list[bool] = []

    async def scenario(store: AsyncStateStore) -> None:
        async def victim() -> None:
            async with store.hold("release", "victim", 600, wait_seconds=10):
                entered.append(False)
                await asyncio.sleep(0.01)
                entered.append(True)

        with StateStore(path) as sync:
            lease = sync.acquire("release", "worker-a", 600)
            task = asyncio.create_task(victim())
            with sync.read() as reader:
                pass
            while not left_behind(path)[1]:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            sync.release(*lease.fence)  # on the loop's own thread: it sees nothing of it yet
            del reader
            for _ in range(steps):
                await asyncio.sleep(0)
            inside = list(entered)
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert entered == inside

    play(path, scenario)
    assert left_behind(path) == ([], 0)


def test_a_task_cancelled_at_the_end_of_its_block_gives_the_lease_back_first(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        blocker = sqlite3.connect(path, isolation_level=None)
        leaving = asyncio.Event()

        async def work() -> None:
            async with store.hold("release", "worker-a", 600):
                blocker.execute("BEGIN IMMEDIATE")
                leaving.set()

        task = asyncio.create_task(work())
        await leaving.wait()
        await asyncio.sleep(0.05)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.02)
        assert not task.done()
        blocker.execute("COMMIT")
        blocker.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await store.get_lease("release") is None

    play(path, scenario)


def test_a_cancelled_end_whose_release_is_refused_leaves_no_word_on_stderr(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        blocker = sqlite3.connect(path, isolation_level=None)
        leaving = asyncio.Event()

        async def work() -> None:
            async with store.hold("release", "worker-a", 600) as held:
                await store.release(*held.fence)
                blocker.execute("BEGIN IMMEDIATE")
                leaving.set()

        task = asyncio.create_task(work())
        await leaving.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0.02)
        blocker.execute("COMMIT")
        blocker.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await asyncio.sleep(0)

    with caplog.at_level(logging.ERROR, "asyncio"):
        play(path, scenario)
        gc.collect()
    assert caplog.text == ""


def test_a_wait_that_is_timed_out_from_outside_leaves_nothing(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a", 600)

        async def wait_here() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(hold_once(store, "release", wait_seconds=LONG), 0.05)

        await asyncio.gather(*(wait_here() for _ in range(10)))
        assert left_behind(path) == (["release"], 0)
        await store.release(*lease.fence)

    play(path, scenario)


def test_a_store_that_is_closed_while_tasks_wait_tells_them_and_leaks_nothing(path: Path) -> None:
    with StateStore(path) as opened:
        opened.initialize()
        opened.acquire("release", "worker-a", 600)
    before = sockets()

    async def scenario() -> None:
        store = AsyncStateStore(path)
        waiting = [asyncio.create_task(hold_once(store, "release", wait_seconds=LONG)) for _ in range(5)]
        await asyncio.sleep(0.2)
        await store.close()
        for task in waiting:
            with pytest.raises(InvalidInputError, match="closed"):
                await task
        del waiting, task
        gc.collect()
        assert sockets() - before <= 3

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(scenario())
        gc.collect()
    assert [str(each.message) for each in warned] == []


def test_a_store_that_is_closed_while_a_lease_is_held_hides_no_exception_of_the_body(path: Path) -> None:
    async def scenario() -> None:
        store = AsyncStateStore(path)
        await store.initialize()
        with pytest.raises(ZeroDivisionError):
            async with store.hold("release", "worker-a"):
                await store.close()
                _ = 1 / 0

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_release_that_fails_is_told_unless_the_body_failed(path: Path, error: type[Exception] | None) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        blocker = sqlite3.connect(path, isolation_level=None)
        with pytest.raises(error or AgentCheckpointError) as raised:
            async with store.hold("release", "worker-a"):
                blocker.execute("BEGIN IMMEDIATE")
                if error is not None:
                    raise error
        if error is None:
            assert raised.value.code == "storage-busy"  # type: ignore[attr-defined]
        blocker.close()

    play(path, scenario, busy_timeout_seconds=0.02)


# Telling the holder


def test_on_lost_may_be_a_coroutine_function_which_runs_in_the_loop(path: Path, clock: FakeClock) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        told: list[Any] = []

        async def on_lost(held: AsyncHeldLease, reason: str, *, note: list[Any] = told) -> None:
            lease = await store.acquire("alarm", "worker-a")
            await store.release(*lease.fence)
            note.append((held.token, reason, asyncio.get_running_loop(), threading.current_thread()))

        expected = [("released", asyncio.get_running_loop(), threading.current_thread())]
        for call in (on_lost, functools.partial(on_lost, note=told)):
            told.clear()
            with pytest.raises(StaleLeaseError):
                async with store.hold("release", "worker-a", 30, on_lost=call) as held:
                    await store.force_release("release", reason="stuck")
                    clock.advance(10)
                    await until(lambda: told)
                    assert told == [(held.token, *each) for each in expected]

    play(path, scenario, clock=clock)


def test_on_lost_may_be_a_function_which_runs_in_its_own_thread(path: Path, clock: FakeClock) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        told: list[Any] = []

        def on_lost(held: AsyncHeldLease, reason: str) -> None:
            told.append((held.token, reason, threading.current_thread() is threading.main_thread()))

        with pytest.raises(StaleLeaseError):
            async with store.hold("release", "worker-a", 30, on_lost=on_lost):
                await store.force_release("release", reason="stuck")
                clock.advance(10)
                await until(lambda: told)
        assert told == [(1, "released", False)]

    play(path, scenario, clock=clock)


def test_an_on_lost_of_the_loop_that_fails_is_logged(
    path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        called = asyncio.Event()

        async def on_lost(held: AsyncHeldLease, reason: str) -> None:
            called.set()
            raise ZeroDivisionError("cannot be told")

        with pytest.raises(StaleLeaseError):
            async with store.hold("release", "worker-a", 30, on_lost=on_lost):
                await store.force_release("release", reason="stuck")
                clock.advance(10)
                await called.wait()
        await asyncio.sleep(0.05)

    with caplog.at_level(logging.ERROR):
        play(path, scenario, clock=clock)
        gc.collect()
    assert "cannot be told" in caplog.text


def test_an_on_lost_of_a_loop_that_has_ended_is_not_called_and_not_complained_of(path: Path, clock: FakeClock) -> None:
    kept: list[AsyncHeldLease] = []

    async def on_lost(held: AsyncHeldLease, reason: str) -> None:
        raise AssertionError("there is no loop")

    async def scenario(store: AsyncStateStore) -> None:
        await store.initialize()
        kept.append(await store.hold("release", "worker-a", 30, on_lost=on_lost).__aenter__())

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(scenario(AsyncStateStore(path, clock=clock)))
        clock.advance(29)
        assert kept[0].lost.wait(LONG)
        deadline = time.monotonic() + LONG
        while threads("lost"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        gc.collect()
    assert [str(each.message) for each in warned if "on_lost" in str(each.message)] == []


def test_a_lost_lease_can_be_waited_for_in_the_loop(path: Path, clock: FakeClock) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        with pytest.raises(StaleLeaseError) as stale:
            async with store.hold("release", "worker-a", 30) as held:
                watching = asyncio.get_running_loop().run_in_executor(None, held.lost.wait, LONG)
                clock.advance(28.6)
                assert await watching
        assert stale.value.reason == "expired"

    play(path, scenario, clock=clock)


# These tests would notice


async def _careless(call: Awaitable[Any]) -> Any:
    return await call


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], Callable[[Path], None]]] = {
    "a cancelled call is not waited for": (
        lambda patch: patch.setattr(aholding, "uncancelled", _careless),
        lambda path: test_a_task_cancelled_at_any_moment_leaves_nothing_behind(path, 100, True),
    ),
    "a granted lease is not given back": (
        lambda patch: patch.setattr("agent_checkpoint.leases.take_back", lambda changes, granted: None),
        lambda path: test_a_task_cancelled_at_any_moment_leaves_nothing_behind(path, 100, False),
    ),
    "a waiter does not leave": (
        lambda patch: patch.setattr("agent_checkpoint.waiting.Waiter._give_up", lambda self, change: None),
        test_a_wait_that_is_timed_out_from_outside_leaves_nothing,
    ),
    "the loop renews": (
        lambda patch: patch.setattr("agent_checkpoint.heart.Heart._beat", lambda self: None),
        test_a_loop_that_is_blocked_for_longer_than_the_ttl_loses_nothing,
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_hold_is_noticed_here(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    break_it, notices = BROKEN[how]
    with monkeypatch.context() as patch:
        break_it(patch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is left behind, sockets too
            with pytest.raises((AssertionError, StaleLeaseError, asyncio.TimeoutError)):
                notices(path)
            gc.collect()
