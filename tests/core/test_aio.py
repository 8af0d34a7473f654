"""The same door, awaited."""

from __future__ import annotations

import asyncio
import inspect
import random
import sqlite3
from pathlib import Path

import pytest

from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint.aio import AsyncStateStore

ONLY_SYNC = {"transaction", "read"}


def public(kind: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(kind).items()
        if callable(member) and (not name.startswith("_") or name == "__init__")
    }


def test_it_has_the_same_methods_with_the_same_arguments() -> None:
    sync, awaited = public(StateStore), public(AsyncStateStore)
    assert awaited.keys() == sync.keys() - ONLY_SYNC
    for name, signature in awaited.items():
        expected = str(sync[name]).replace("payload.MAX_BYTES", "16777216")
        if name in ("hold", "effect"):  # a block is entered, not awaited
            entered = expected.replace("Hold", "AsyncHold").replace("HeldLease", "AsyncHeldLease")
            assert str(signature) == entered.replace("Acting", "AsyncActing")
            continue
        assert str(signature) == expected, name
        assert name == "__init__" or inspect.iscoroutinefunction(getattr(AsyncStateStore, name))


def test_it_does_the_whole_scenario(path: Path) -> None:
    async def scenario() -> None:
        async with AsyncStateStore(path) as store:
            assert await store.initialize()
            lease = await store.acquire("release", "worker-a", 30, metadata={"a": 1})
            with pytest.raises(LeaseHeldError):
                await store.acquire("release", "worker-b")
            await store.put_checkpoint("deploy", {"n": 1}, lease=lease)
            await store.put_checkpoint("deploy", {"n": 2}, lease_scope="release", owner="worker-a", token=1)
            latest = await store.get_checkpoint("deploy")
            assert latest is not None
            assert latest.data == {"n": 2}
            assert [info.sequence for info in await store.checkpoint_history("deploy")] == [2, 1]
            assert len(await store.list_checkpoints()) == 1
            assert len(await store.prune_checkpoints(1)) == 1
            assert (await store.heartbeat(*lease.fence)).token == 1
            assert (await store.check_lease(*lease.fence)).token == 1
            assert await store.get_lease("release") is not None
            assert len(await store.list_leases()) == 1
            assert (await store.release(*lease.fence)).state == "released"
            await store.acquire("release", "worker-b")
            await store.force_release("release", reason="test")
            assert [event.kind for event in await store.events(limit=1)] == ["lease.force-released"]
            assert (await store.status()).database == store.database == str(path)
            assert {check.check for check in await store.doctor()} >= {"integrity"}
            assert await store.write_all([]) == []
            assert "agents.db" in repr(store)

    asyncio.run(scenario())


def test_a_cancelled_acquire_never_leaves_a_lease(path: Path) -> None:
    async def scenario() -> None:
        choose = random.Random(7)
        async with AsyncStateStore(path, synchronous="normal") as store:
            await store.initialize()
            for turn in range(200):
                asking = asyncio.ensure_future(store.acquire(f"scope-{turn % 5}", "worker-a", 600))
                await asyncio.sleep(choose.random() * 0.002)
                asking.cancel()
                try:
                    lease = await asking
                except asyncio.CancelledError:
                    continue
                await store.release(*lease.fence)
            assert await store.list_leases() == []

    asyncio.run(scenario())


def test_a_cancelled_acquire_waits_for_a_blocked_database_and_gives_back(path: Path) -> None:
    StateStore(path).initialize()
    blocker = sqlite3.connect(path, isolation_level=None)

    async def scenario() -> None:
        async with AsyncStateStore(path) as store:
            blocker.execute("BEGIN IMMEDIATE")
            asking = asyncio.ensure_future(store.acquire("release", "worker-a", 600))
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.sleep(0.05)
            asking.cancel()  # an impatient caller
            assert not asking.done()
            blocker.execute("COMMIT")
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert await store.get_lease("release") is None

    asyncio.run(scenario())
    blocker.close()
