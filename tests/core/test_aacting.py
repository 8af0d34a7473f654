"""Effects in asyncio: whatever becomes of the task, what happened is recorded, and what did not may be tried again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from types import coroutine
from typing import Any

import pytest

from agent_checkpoint import (
    Effect,
    EffectRunningError,
    EffectUnknownError,
    InvalidInputError,
    Resolution,
    StaleLeaseError,
    Write,
    hookimpl,
)
from agent_checkpoint.aio import AsyncStateStore

# Only what never comes reaches it.
LONG = 30.0


def play(path: Path, scenario: Callable[[AsyncStateStore], Awaitable[None]], **options: Any) -> None:
    """Run a scenario on a new store in a new loop."""

    async def whole() -> None:
        async with AsyncStateStore(path, synchronous="normal", **options) as store:
            await store.initialize()
            await asyncio.wait_for(scenario(store), LONG)

    asyncio.run(whole())


async def state_of(store: AsyncStateStore, key: str = "publish") -> str:
    found = await store.get_effect(key)
    assert found is not None
    return found.state


class Gate:
    """A plugin whose hook waits: it holds up the thread that begins, or that saves."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.reached, self.open = threading.Event(), threading.Event()

    @hookimpl
    def check_fence(self, write: Write) -> None:
        if write.action == self.action:
            self.reached.set()
            assert self.open.wait(LONG)

    async def reach(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.reached.wait, LONG)


def test_the_block_is_the_same_awaited(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        async with store.hold("release", "worker-a") as held:
            async with held.effect("publish", request=[1]) as effect:
                assert (effect.fresh, effect.key, effect.fence, effect.result) == (True, "publish", held.fence, None)
                with pytest.raises(EffectRunningError):
                    async with store.effect("publish", lease=held):
                        pytest.fail("it was let in")
                saved = await effect.done({"id": 7}, workflow="deploy", data=1)
                assert saved is not None
                assert (saved.sequence, effect.late) == (1, False)
            async with store.effect("publish", lease=held) as again:
                assert (again.fresh, again.result) == (False, {"id": 7})
                assert again.idempotency_key == effect.idempotency_key
        (listed,) = await store.list_effects()
        assert (listed.key, listed.state) == ("publish", "done")

    play(path, scenario)


def test_failed_left_and_unsaid_are_the_same_awaited(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")
        async with store.effect("publish", lease=lease) as effect:
            await effect.failed()
        async with store.effect("publish", lease=lease) as effect:
            await effect.leave("the line went dead")
        with pytest.raises(EffectUnknownError):
            async with store.effect("announce", lease=lease):
                pass
        assert {await state_of(store), await state_of(store, "announce")} == {"unknown"}
        await store.release(*lease.fence)
        assert (await store.resolve_effect("announce", done=1, by="ada")).state == "done"

    play(path, scenario)


def test_a_function_that_looks_runs_in_a_thread(path: Path) -> None:
    threads = []

    def resolve(_: Effect) -> Resolution:
        threads.append(threading.current_thread())
        return Resolution(False)

    async def scenario(store: AsyncStateStore) -> None:
        first = await store.acquire("release", "worker-a")
        with pytest.raises(ZeroDivisionError):
            async with store.effect("publish", lease=first):
                raise ZeroDivisionError
        await store.release(*first.fence)
        lease = await store.acquire("release", "worker-b")
        async with store.effect("publish", lease=lease, resolve=resolve) as effect:
            assert effect.fresh
            await effect.done()

    play(path, scenario)
    assert len(threads) == 1
    assert threads != [threading.main_thread()]


def test_a_task_that_is_cancelled_in_the_block_leaves_it_unknown(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")
        inside = asyncio.Event()

        async def act() -> None:
            async with store.effect("publish", lease=lease):
                inside.set()
                await asyncio.sleep(LONG)

        task = asyncio.create_task(act())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await state_of(store) == "unknown"

    play(path, scenario)


@coroutine
def driven(work: Coroutine[Any, Any, None], reached: asyncio.Event) -> Iterator[Any]:
    """Let it run in this task until it has reached a place; there it stays."""
    while True:
        awaited = work.send(None)
        if reached.is_set():
            return
        yield awaited


def test_a_coroutine_that_is_thrown_away_in_the_block_leaves_it_unknown(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")
        inside = asyncio.Event()

        async def act() -> None:
            async with store.effect("publish", lease=lease):
                inside.set()
                await asyncio.sleep(LONG)

        work = act()
        await driven(work, inside)
        work.close()  # as when its loop has stopped, and nobody has it any more
        assert await state_of(store) == "unknown"

    play(path, scenario)


@pytest.mark.parametrize("cancellations", [1, 3])
def test_a_task_that_is_cancelled_while_it_begins_has_surely_not_acted(path: Path, cancellations: int) -> None:
    gate = Gate("effect.begin")

    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")

        async def act() -> None:
            async with store.effect("publish", lease=lease):
                pytest.fail("it was let in")

        task = asyncio.create_task(act())
        await gate.reach()
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await state_of(store) == "failed"
        async with store.effect("publish", lease=lease) as effect:
            assert effect.fresh
            await effect.done()

    play(path, scenario, plugins=[gate])


def test_a_task_that_is_cancelled_while_it_tells_has_told(path: Path) -> None:
    gate = Gate("checkpoint.put")

    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")

        async def act() -> None:
            async with store.effect("publish", lease=lease) as effect:
                await effect.done(7, workflow="deploy", data=1)

        task = asyncio.create_task(act())
        await gate.reach()
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await store.get_effect("publish")
        assert found is not None
        assert (found.state, found.result) == ("done", 7)
        assert [event.kind for event in await store.events()][-3:] == [
            "effect.begun",
            "effect.done",
            "checkpoint.saved",
        ]

    play(path, scenario, plugins=[gate])


def test_a_word_that_waits_for_a_thread_is_told_though_its_task_is_cancelled(path: Path) -> None:
    gate = Gate("checkpoint.put")

    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")
        inside = asyncio.Event()

        async def act() -> None:
            async with store.effect("publish", lease=lease) as effect:
                inside.set()
                await gate.reach()
                await effect.done(7)

        task = asyncio.create_task(act())
        await inside.wait()
        # Every thread of the store is busy, and the word is in their queue.
        busy = [asyncio.create_task(store.put_checkpoint(f"w-{number}", 1, lease=lease)) for number in range(64)]
        await gate.reach()
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.sleep(0)
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*busy)
        assert await state_of(store) == "done"

    play(path, scenario, plugins=[gate])


def test_what_is_refused_is_refused_awaited(path: Path) -> None:
    async def scenario(store: AsyncStateStore) -> None:
        lease = await store.acquire("release", "worker-a")
        async with store.effect("publish", lease=lease) as effect:
            await effect.done()
            with pytest.raises(InvalidInputError):
                await effect.failed()
        await store.release(*lease.fence)
        with pytest.raises(StaleLeaseError):
            async with store.effect("announce", lease=lease):
                pytest.fail("it was let in")

    play(path, scenario)
