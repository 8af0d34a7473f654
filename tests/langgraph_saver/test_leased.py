"""A leased run is a run: however it is driven, left or nested, it has its lease from its first step to its last."""

from __future__ import annotations

import asyncio
import copy
import gc
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from langgraph.checkpoint.serde.types import ERROR
from langgraph.constants import START
from langgraph.graph import StateGraph
from langgraph.types import StateUpdate
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from agent_checkpoint import StaleLeaseError, StateStore
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock
from agent_checkpoint_langgraph import AgentCheckpointSaver, LeasedGraph, current_lease, leased

from .conftest import Line
from .graphs import State, chain, saying, thread
from .test_zombies import wait_until

SCOPE = "langgraph/thread-1"
# What a lease of 30 s has left right after it was renewed.
WHOLE_NS = round(28.5 * NS)

needs_python_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="async nodes have no context before")


def refused(saver: AgentCheckpointSaver) -> list[Any]:
    return saver.store.events(kind="write.refused", after="start")


# Left early


class LeftRun:
    """A run of a thread with a step that is under way, and slow to clean up, when the caller leaves."""

    def __init__(self, saver: AgentCheckpointSaver, durability: str) -> None:
        self._saver = saver
        self._durability = durability
        self._is_busy = asyncio.Event()
        self.was_leased_at_its_end: list[bool] = []
        builder = StateGraph(State)
        builder.add_node("first", saying("first"))
        builder.add_node("quick", saying("quick"))
        builder.add_node("slow", self._slow)
        builder.add_edge(START, "first")
        builder.add_edge("first", "quick")
        builder.add_edge("first", "slow")
        self.plain = builder.compile(checkpointer=saver)

    async def _slow(self, state: Any) -> Any:
        self._is_busy.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.was_leased_at_its_end.append(self._saver.store.get_lease(SCOPE) is not None)

    def items(self, graph: Any) -> Any:
        return graph.astream({"seen": ["start"]}, thread(), stream_mode="updates", durability=self._durability)

    async def reach_the_step(self, items: Any) -> None:
        async for item in items:
            if "quick" in item:
                break
        await self._is_busy.wait()

    def left(self) -> Any:
        """What it left in the thread, but for the error of the step that was cancelled."""
        state = self.plain.get_state(thread())
        found = [each.pending_writes or () for each in self._saver.list(thread())]
        writes = [[write[1:] for write in each if write[1] != ERROR] for each in found]
        return state.values, state.next, [task.result for task in state.tasks], writes


async def closes_it(run: LeftRun, graph: Any) -> None:
    async with aclosing(run.items(graph)) as items:
        await run.reach_the_step(items)


async def drops_it(run: LeftRun, graph: Any) -> None:
    await run.reach_the_step(run.items(graph))


async def is_cancelled(run: LeftRun, graph: Any) -> None:
    is_there = asyncio.Event()

    async def consume() -> None:
        items = run.items(graph)
        await run.reach_the_step(items)
        is_there.set()
        await asyncio.Event().wait()

    consumer = asyncio.create_task(consume())
    await is_there.wait()
    consumer.cancel()
    with suppress(asyncio.CancelledError):
        await consumer


async def rest() -> None:
    """Let the loop do what it still has to do, such as closing a generator that was dropped."""
    gc.collect()
    await asyncio.sleep(0)
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
        await asyncio.sleep(0)


def left_run(
    url_or_path: Path | str, leave: Callable[[LeftRun, Any], Awaitable[None]], durability: str, *, is_leased: bool
) -> Any:
    """Whether it was leased at its end, what it left, and which of its writes were refused."""
    with AgentCheckpointSaver.from_conn_string(url_or_path, synchronous="normal") as saver:

        async def go() -> LeftRun:
            run = LeftRun(saver, durability)
            await leave(run, leased(run.plain) if is_leased else run.plain)
            await rest()
            return run

        run = asyncio.run(go())
        assert saver.store.get_lease(SCOPE) is None
        return run.was_leased_at_its_end, run.left(), refused(saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("leave", [closes_it, drops_it, is_cancelled])
def test_a_run_that_its_caller_leaves_is_over_before_its_lease_is(tmp_path: Path, leave: Any, durability: str) -> None:
    was_leased, left, refusals = left_run(tmp_path / "leased.db", leave, durability, is_leased=True)

    assert was_leased == [True]
    assert {event.detail["action"] for event in refusals} <= {"langgraph.save-writes"}  # see the next test
    assert left == left_run(tmp_path / "plain.db", leave, durability, is_leased=False)[1]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_no_save_of_a_run_that_its_caller_leaves_comes_too_late(url_or_path: Path | str, durability: str) -> None:
    # LangGraph saves the error of the step that was cancelled after the run, and does not wait for it.
    assert left_run(url_or_path, closes_it, durability, is_leased=True)[2] == []


# Gone through by many threads


def in_a_thread_that_ends(call: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


def assert_renewed(clock: FakeClock, held: Any) -> None:
    clock.advance(15)
    whole = clock.ticks_ns() + WHOLE_NS
    wait_until(lambda: held.deadline_ns == whole)


def test_a_hold_that_is_bound_to_no_thread_is_renewed_until_it_is_left(store: StateStore, clock: FakeClock) -> None:
    hold = store.hold("release", "worker-a", ttl_seconds=30)
    hold.thread_bound = False
    held = in_a_thread_that_ends(hold.__enter__)
    for _ in range(3):
        assert_renewed(clock, held)
    hold.__exit__(None, None, None)

    assert held.remaining() == 0
    assert store.get_lease("release") is None


def test_a_stream_that_one_thread_after_another_goes_through_keeps_its_lease(
    store: StateStore, clock: FakeClock
) -> None:
    leases: list[Any] = []

    def node(state: Any) -> Any:
        leases.append(current_lease())
        return {"seen": ["node"]}

    saver = AgentCheckpointSaver(store)
    items = leased(chain(saver, node, node, node)).stream({"seen": []}, thread(), stream_mode="updates")
    for name in "abc":
        assert in_a_thread_that_ends(lambda: next(items)) == {name: {"seen": ["node"]}}
        assert_renewed(clock, leases[-1].held)

    assert in_a_thread_that_ends(lambda: list(items)) == []
    assert {lease.token for lease in leases} == {1}
    assert store.get_lease(SCOPE) is None
    saver.close()


# Used as the graph is


def test_a_leased_graph_that_a_node_calls_without_a_config_has_the_nodes_thread(saver: AgentCheckpointSaver) -> None:
    seen: list[Any] = []

    def remember(state: Any) -> Any:
        seen.append(current_lease())
        return {"seen": ["inner"]}

    inner = leased(chain(saver, remember))
    graph = leased(chain(saver, lambda state: inner.invoke({"seen": ["visit"]})))

    assert graph.invoke({"seen": []}, thread())["seen"] == ["visit", "inner"]
    (lease,) = seen
    assert (lease.thread_id, lease.token) == ("thread-1", 1)
    assert saver.store.get_lease(SCOPE) is None


@pytest.mark.parametrize("is_bound_first", [True, False])
def test_the_thread_may_be_bound_to_the_graph(saver: AgentCheckpointSaver, is_bound_first: bool) -> None:
    plain = chain(saver, saying("one"))
    graph = leased(plain.with_config(thread())) if is_bound_first else leased(plain).with_config(thread())

    assert graph.invoke({"seen": []})["seen"] == ["one"]
    assert [lease.scope for lease in saver.store.list_leases(include_expired=True)] == [SCOPE]


def test_a_copy_of_a_leased_graph_runs_under_a_lease_too(saver: AgentCheckpointSaver) -> None:
    copied = copy.copy(leased(chain(saver, saying("one"))))

    assert isinstance(copied, LeasedGraph)
    assert copied.invoke({"seen": []}, thread())["seen"] == ["one"]
    assert saver.store.list_leases(include_expired=True) != []


class Given(TypedDict):
    words: list[str]
    count: int


def test_the_schemas_of_a_leased_graph_are_the_graphs(saver: AgentCheckpointSaver) -> None:
    graph = chain(saver, saying("one"), schema=Given)

    def schemas(of: Any) -> list[Any]:
        return [found.model_json_schema() for found in (of.get_input_schema(), of.get_output_schema())]

    assert schemas(leased(graph)) == schemas(graph)


def test_the_json_schemas_of_a_leased_graph_are_the_graphs(saver: AgentCheckpointSaver) -> None:
    graph = chain(saver, saying("one"), schema=Given)

    assert leased(graph).get_input_jsonschema() == graph.get_input_jsonschema()
    assert leased(graph).get_output_jsonschema() == graph.get_output_jsonschema()


@pytest.mark.parametrize("act", [lambda graph: None, lambda graph: graph.get_state(thread())], ids=["run", "read"])
def test_a_graph_whose_thread_was_leased_can_be_drawn(saver: AgentCheckpointSaver, act: Any) -> None:
    graph = leased(chain(saver, saying("one")))
    graph.invoke({"seen": []}, thread())
    act(graph)

    assert "a" in graph.get_graph().nodes
    assert refused(saver) == []


# Its updates

UPDATES = {
    "two supersteps": ([[StateUpdate({"seen": [word]}, "a")] for word in ("two", "three")], ["one", "two", "three"]),
    "a copy": ([[StateUpdate(None, "__copy__")]], ["one"]),
}


@pytest.mark.parametrize(("supersteps", "seen"), UPDATES.values(), ids=list(UPDATES))
@pytest.mark.parametrize("is_awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("is_held", [False, True], ids=["its own lease", "the caller's lease"])
def test_every_superstep_of_an_update_has_its_lease(
    saver: AgentCheckpointSaver, supersteps: Any, seen: list[str], is_awaited: bool, is_held: bool
) -> None:
    graph = leased(chain(saver, saying("one")))
    graph.invoke({"seen": []}, thread())

    def update(config: Any) -> None:
        if is_awaited:
            asyncio.run(graph.abulk_update_state(config, supersteps))
        else:
            graph.bulk_update_state(config, supersteps)

    if is_held:
        with saver.lease("thread-1", in_context=False) as lease:
            update(lease.config())
    else:
        update(thread())

    assert graph.get_state(thread()).values["seen"] == seen
    assert refused(saver) == []
    assert current_lease() is None


# What a node does to its own thread


def bulk(graph: Any) -> Any:
    return graph.bulk_update_state(thread(), [[StateUpdate({"seen": ["updated"]}, "a")]])


ACTS: dict[str, Callable[[AgentCheckpointSaver, Any], Any]] = {
    "prune": lambda saver, graph: saver.prune(["thread-1"]),
    "copy_thread": lambda saver, graph: saver.copy_thread("other", "thread-1"),
    "delete_thread": lambda saver, graph: saver.delete_thread("thread-1"),
    "update_state": lambda saver, graph: graph.update_state(thread(), {"seen": ["updated"]}, as_node="a"),
    "bulk_update_state": lambda saver, graph: bulk(graph),
    "update_state without leased": lambda saver, graph: graph.graph.update_state(thread(), {"seen": ["u"]}, "a"),
}
AWAITED: dict[str, Callable[[AgentCheckpointSaver, Any], Awaitable[Any]]] = {
    "aprune": lambda saver, graph: saver.aprune(["thread-1"]),
    "acopy_thread": lambda saver, graph: saver.acopy_thread("other", "thread-1"),
    "adelete_thread": lambda saver, graph: saver.adelete_thread("thread-1"),
    "aupdate_state": lambda saver, graph: graph.aupdate_state(thread(), {"seen": ["updated"]}, as_node="a"),
    "aupdate_state without leased": lambda saver, graph: graph.graph.aupdate_state(thread(), {"seen": ["u"]}, "a"),
}


def assert_ended_under_one_lease(saver: AgentCheckpointSaver, ended: Any, graph: Any) -> None:
    assert ended["seen"] == graph.get_state(thread()).values["seen"] == ["start", "one", "two", "three"]
    assert refused(saver) == []
    assert [event.token for event in saver.store.events(kind="lease.acquired", after="start")] == [1]


@pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))
def test_a_node_changes_its_own_thread_under_the_lease_of_its_run(saver: AgentCheckpointSaver, act: Any) -> None:
    Line(saver, "other").put({"seen": ["other"]}, "0")

    def node(state: Any) -> Any:
        act(saver, graph)
        return {"seen": ["two"]}

    graph = leased(chain(saver, saying("one"), node, saying("three")))
    assert_ended_under_one_lease(saver, graph.invoke({"seen": ["start"]}, thread()), graph)


@needs_python_3_11
@pytest.mark.parametrize("act", AWAITED.values(), ids=list(AWAITED))
def test_so_does_an_async_node(saver: AgentCheckpointSaver, act: Any) -> None:
    Line(saver, "other").put({"seen": ["other"]}, "0")

    async def node(state: Any) -> Any:
        await act(saver, graph)
        return {"seen": ["two"]}

    graph = leased(chain(saver, saying("one"), node, saying("three")))
    assert_ended_under_one_lease(saver, asyncio.run(graph.ainvoke({"seen": ["start"]}, thread())), graph)


# The event loop


@contextmanager
def foreign_lock(path: Path) -> Iterator[None]:
    """Somebody else is writing."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def test_the_loop_goes_on_while_the_first_lease_waits_for_the_write_lock(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()

    async def go() -> Any:
        async with AgentCheckpointSaver.from_conn_string(path) as saver:
            with foreign_lock(path):
                run = asyncio.create_task(leased(chain(saver, saying("one"))).ainvoke({"seen": []}, thread()))
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not run.done()
            return await run

    assert asyncio.run(go())["seen"] == ["one"]


def test_the_loop_does_not_wait_until_a_refusal_is_on_record(saver: AgentCheckpointSaver, path: Path) -> None:
    async def go() -> None:
        with suppress(StaleLeaseError):
            async with saver.lease("thread-1") as lease:
                saver.store.force_release(SCOPE, reason="gone")
                with foreign_lock(path), pytest.raises(StaleLeaseError):
                    lease.check()  # would the loop wait, nobody could give the lock back
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(go())
    (event,) = refused(saver)
    assert (event.scope, event.token) == (SCOPE, 1)
