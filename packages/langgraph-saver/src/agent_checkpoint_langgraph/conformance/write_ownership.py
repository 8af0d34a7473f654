"""WRITE_OWNERSHIP: whoever lost the lease of a thread cannot change the thread any more.

A saver says how its leases are taken and lost by a ``Leases``; the clauses
know nothing else of them. A refused write leaves nothing behind, and whoever
has the lease notices nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance.test_utils import (
    generate_checkpoint,
    generate_config,
    generate_metadata,
    put_test_checkpoint,
)

from agent_checkpoint_langgraph.conformance.runner import OnTestResult, run_clauses

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from contextlib import AbstractContextManager

    from langchain_core.runnables import RunnableConfig

Saver = BaseCheckpointSaver[Any]


class Leases(Protocol):
    """How the leases of a saver are taken and lost; a lease itself may be anything."""

    refusals: tuple[type[Exception], ...]
    """What a write is refused with."""

    async def take(self, thread_id: str, owner: str) -> Any:
        """Take the lease of a thread that nobody holds."""

    async def supersede(self, thread_id: str, owner: str) -> Any:
        """Take the lease of a thread from whoever holds it."""

    async def expire(self, lease: Any) -> None:
        """Let the time of a lease run out; nobody has taken over."""

    async def release(self, lease: Any) -> None:
        """Give a lease back."""

    def config(self, lease: Any, config: RunnableConfig) -> RunnableConfig:
        """The config for a call that is made under a lease."""

    def holding(self, lease: Any) -> AbstractContextManager[object]:
        """A block whose calls without a config are made under a lease."""


class Thread:
    """A thread with two checkpoints and a write on top, and what is done to it."""

    def __init__(self, saver: Saver, leases: Leases) -> None:
        self.saver = saver
        self.leases = leases
        self.id = str(uuid4())
        self.run_id = str(uuid4())
        self.head: RunnableConfig = generate_config(self.id)

    async def fill(self, lease: Any = None) -> Thread:
        """Put in what every clause begins with."""
        for step in range(2):
            await self.put(lease, step=step)
        await self.write(lease, "begun")
        return self

    def under(self, lease: Any, config: RunnableConfig) -> RunnableConfig:
        """The config, with a lease where there is one."""
        return config if lease is None else self.leases.config(lease, config)

    async def put(self, lease: Any = None, **options: Any) -> None:
        """Save a checkpoint on top of the newest one."""
        step = options.pop("step", 2)
        self.head = await self.saver.aput(
            self.under(lease, self.head),
            generate_checkpoint(channel_values={"n": step}, channel_versions={"n": step + 1}),
            generate_metadata(step=step, run_id=self.run_id),
            {"n": step + 1},
        )

    async def write(self, lease: Any, value: Any, task_id: str = "task") -> None:
        """Save a write on top of the newest checkpoint."""
        await self.saver.aput_writes(self.under(lease, self.head), [("n", value)], task_id)

    async def content(self) -> list[Any]:
        """All that can be read of the thread."""
        return [found async for found in self.saver.alist({"configurable": {"thread_id": self.id}})]

    async def refused(self, attempt: Awaitable[Any]) -> None:
        """The attempt is refused, and has changed nothing."""
        before = await self.content()
        try:
            await attempt
        except self.leases.refusals:
            pass
        else:
            raise AssertionError("the write was not refused")
        assert await self.content() == before, "the refused write left something"


async def _superseded(saver: Saver, leases: Leases) -> tuple[Thread, Any, Any]:
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    return thread, late, await leases.supersede(thread.id, "worker-b")


async def test_ownership_holder_writes(saver: Saver, leases: Leases) -> None:
    """Whoever has the lease can write."""
    thread = Thread(saver, leases)
    await thread.fill(await leases.take(thread.id, "worker-a"))
    found = await thread.content()
    assert len(found) == 2
    assert [write[2] for write in found[0].pending_writes] == ["begun"]


async def test_ownership_is_not_asked_without_leases(saver: Saver, leases: Leases) -> None:
    """A thread that never had a lease takes writes without one."""
    thread = await Thread(saver, leases).fill()
    assert len(await thread.content()) == 2
    await saver.adelete_thread(thread.id)
    assert await thread.content() == []
    await thread.put()
    assert len(await thread.content()) == 1


async def test_ownership_superseded_put(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot save a checkpoint."""
    thread, late, _ = await _superseded(saver, leases)
    await thread.refused(thread.put(late))


async def test_ownership_superseded_put_writes(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot save writes."""
    thread, late, _ = await _superseded(saver, leases)
    await thread.refused(thread.write(late, "late", task_id="task-2"))
    await thread.refused(thread.write(late, "late"))


async def test_ownership_superseded_special_writes(saver: Saver, leases: Leases) -> None:
    """Nor can it replace an interrupt or an error, of which the last one counts."""
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    for channel in ("__interrupt__", "__error__", "__resume__"):
        await saver.aput_writes(thread.under(late, thread.head), [(channel, "first")], "task")
    await leases.supersede(thread.id, "worker-b")
    for channel in ("__interrupt__", "__error__", "__resume__"):
        await thread.refused(saver.aput_writes(thread.under(late, thread.head), [(channel, "late")], "task"))


async def test_ownership_superseded_sync(saver: Saver, leases: Leases) -> None:
    """The calls that are not awaited are refused as well."""
    import asyncio

    thread, late, _ = await _superseded(saver, leases)
    config = thread.under(late, thread.head)
    await thread.refused(asyncio.to_thread(saver.put, config, generate_checkpoint(), generate_metadata(), {}))
    await thread.refused(asyncio.to_thread(saver.put_writes, config, [("n", "late")], "task-2"))


async def test_ownership_superseded_replacing_put(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot save a checkpoint anew that it saved before."""
    thread, late, _ = await _superseded(saver, leases)
    checkpoint_id = thread.head["configurable"]["checkpoint_id"]
    again = generate_checkpoint(checkpoint_id=checkpoint_id, channel_values={"n": "late"}, channel_versions={"n": 9})
    await thread.refused(
        saver.aput(thread.under(late, generate_config(thread.id)), again, generate_metadata(), {"n": 9})
    )


async def test_ownership_superseded_delete(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot remove the thread."""
    thread, late, _ = await _superseded(saver, leases)
    with leases.holding(late):
        await thread.refused(saver.adelete_thread(thread.id))


async def test_ownership_superseded_delete_for_runs(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot remove what a run saved."""
    thread, late, _ = await _superseded(saver, leases)
    with leases.holding(late):
        await thread.refused(saver.adelete_for_runs([thread.run_id]))


async def test_ownership_superseded_prune(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot prune the thread, either way."""
    thread, late, _ = await _superseded(saver, leases)
    with leases.holding(late):
        for strategy in ("keep_latest", "delete"):
            await thread.refused(saver.aprune([thread.id], strategy=strategy))


async def test_ownership_superseded_copy(saver: Saver, leases: Leases) -> None:
    """A superseded worker cannot copy something into the thread; out of it everybody can."""
    thread, late, _ = await _superseded(saver, leases)
    other = await Thread(saver, leases).fill()
    with leases.holding(late):
        await thread.refused(saver.acopy_thread(other.id, thread.id))
    target = Thread(saver, leases)
    await saver.acopy_thread(thread.id, target.id)
    assert len(await target.content()) == 2


async def test_ownership_superseded_namespaces(saver: Saver, leases: Leases) -> None:
    """The lease of a thread guards all of its namespaces."""
    thread, late, _ = await _superseded(saver, leases)
    inner = thread.under(late, generate_config(thread.id, checkpoint_ns="child:1"))
    await thread.refused(saver.aput(inner, generate_checkpoint(), generate_metadata(), {}))


async def test_ownership_expired(saver: Saver, leases: Leases) -> None:
    """An expired lease is no good, though nobody took over."""
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    await leases.expire(late)
    await thread.refused(thread.put(late))
    await thread.refused(thread.write(late, "late", task_id="task-2"))
    with leases.holding(late):
        await thread.refused(saver.adelete_thread(thread.id))


async def test_ownership_released(saver: Saver, leases: Leases) -> None:
    """A lease that was given back is no good."""
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    await leases.release(late)
    await thread.refused(thread.put(late))
    await thread.refused(thread.write(late, "late", task_id="task-2"))
    with leases.holding(late):
        await thread.refused(saver.adelete_thread(thread.id))


async def test_ownership_same_owner_again(saver: Saver, leases: Leases) -> None:
    """The label of an owner is no lease: its earlier lease stays lost when it takes a new one."""
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    await leases.release(late)
    current = await leases.take(thread.id, "worker-a")
    await thread.refused(thread.put(late))
    await thread.put(current)


async def test_ownership_first_grant_ends_unleased_writes(saver: Saver, leases: Leases) -> None:
    """From the first lease of a thread on nobody writes without one, also while nobody has it."""
    thread = await Thread(saver, leases).fill()
    lease = await leases.take(thread.id, "worker-a")
    await thread.refused(thread.put())
    await thread.refused(thread.write(None, "late", task_id="task-2"))
    await leases.release(lease)
    await thread.refused(thread.put())
    await thread.refused(thread.write(None, "late", task_id="task-2"))


async def test_ownership_of_another_thread(saver: Saver, leases: Leases) -> None:
    """The lease of one thread is none of another one."""
    thread, other = Thread(saver, leases), Thread(saver, leases)
    await thread.fill(await leases.take(thread.id, "worker-a"))
    with leases.holding(await leases.take(other.id, "worker-a")):
        await thread.refused(thread.put())


async def test_ownership_held_thread_stays(saver: Saver, leases: Leases) -> None:
    """Without its lease nobody removes a thread that somebody holds."""
    thread = Thread(saver, leases)
    lease = await leases.take(thread.id, "worker-a")
    await thread.fill(lease)
    await thread.refused(saver.adelete_thread(thread.id))
    await thread.refused(saver.aprune([thread.id]))
    await thread.refused(saver.adelete_for_runs([thread.run_id]))
    await thread.put(lease)


async def test_ownership_holder_deletes(saver: Saver, leases: Leases) -> None:
    """Whoever has the lease can remove the thread, and goes on writing."""
    thread = Thread(saver, leases)
    lease = await leases.take(thread.id, "worker-a")
    await thread.fill(lease)
    with leases.holding(lease):
        await saver.adelete_thread(thread.id)
    assert await thread.content() == []
    thread.head = generate_config(thread.id)
    await thread.put(lease)
    assert len(await thread.content()) == 1


async def test_ownership_deleted_thread_stays_deleted(saver: Saver, leases: Leases) -> None:
    """A late writer does not bring a deleted thread back."""
    thread = Thread(saver, leases)
    late = await leases.take(thread.id, "worker-a")
    await thread.fill(late)
    await leases.expire(late)
    await saver.adelete_thread(thread.id)
    assert await thread.content() == []
    await thread.refused(thread.put(late))
    await thread.refused(thread.write(late, "late"))


async def test_ownership_successor_is_unaffected(saver: Saver, leases: Leases) -> None:
    """The successor writes before and after the refusal, and finds only its own writes."""
    thread, late, current = await _superseded(saver, leases)
    await thread.put(current)
    mine = thread.head
    await thread.refused(thread.put(late))
    await thread.refused(thread.write(late, "late"))
    await thread.write(current, "mine")
    await thread.put(current, step=3)
    found = await saver.aget_tuple(generate_config(thread.id))
    assert found is not None
    assert found.metadata["step"] == 3
    assert found.parent_config is not None
    assert found.parent_config["configurable"]["checkpoint_id"] == mine["configurable"]["checkpoint_id"]
    parent = await saver.aget_tuple(mine)
    assert parent is not None
    assert [write[2] for write in parent.pending_writes or ()] == ["mine"]


async def test_ownership_reading_needs_no_lease(saver: Saver, leases: Leases) -> None:
    """Everybody may read, whoever was superseded included."""
    thread, late, _ = await _superseded(saver, leases)
    assert await saver.aget_tuple(thread.head) is not None
    assert await saver.aget_tuple(thread.under(late, thread.head)) is not None


async def test_ownership_neighbours_go_on(saver: Saver, leases: Leases) -> None:
    """A refusal does not touch the writes to other threads that are made at the same time."""
    import asyncio

    thread, late, _ = await _superseded(saver, leases)
    neighbours = [str(uuid4()) for _ in range(8)]
    config = thread.under(late, thread.head)
    answers = await asyncio.gather(
        *(put_test_checkpoint(saver, thread_id=name) for name in neighbours[:4]),
        saver.aput(config, generate_checkpoint(), generate_metadata(), {}),
        *(put_test_checkpoint(saver, thread_id=name) for name in neighbours[4:]),
        return_exceptions=True,
    )
    assert isinstance(answers[4], leases.refusals)
    for name in neighbours:
        assert await saver.aget_tuple(generate_config(name)) is not None


ALL_WRITE_OWNERSHIP_TESTS = [
    test_ownership_holder_writes,
    test_ownership_is_not_asked_without_leases,
    test_ownership_superseded_put,
    test_ownership_superseded_put_writes,
    test_ownership_superseded_special_writes,
    test_ownership_superseded_sync,
    test_ownership_superseded_replacing_put,
    test_ownership_superseded_delete,
    test_ownership_superseded_delete_for_runs,
    test_ownership_superseded_prune,
    test_ownership_superseded_copy,
    test_ownership_superseded_namespaces,
    test_ownership_expired,
    test_ownership_released,
    test_ownership_same_owner_again,
    test_ownership_first_grant_ends_unleased_writes,
    test_ownership_of_another_thread,
    test_ownership_held_thread_stays,
    test_ownership_holder_deletes,
    test_ownership_deleted_thread_stays_deleted,
    test_ownership_successor_is_unaffected,
    test_ownership_reading_needs_no_lease,
    test_ownership_neighbours_go_on,
]


async def run_write_ownership_tests(
    saver: Saver, leases: Leases, on_test_result: OnTestResult | None = None
) -> tuple[int, int, list[str]]:
    """Run all write ownership clauses. Returns (passed, failed, failures)."""
    return await run_clauses("write_ownership", ALL_WRITE_OWNERSHIP_TESTS, saver, leases, on_test_result=on_test_result)
