"""Saves that share a commit, and removals in several: what goes wrong with one of them ends there."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from agent_checkpoint import hookimpl
from agent_checkpoint_langgraph import AgentCheckpointSaver
from agent_checkpoint_langgraph.core import BATCH
from agent_checkpoint_langgraph.mapping import Address
from agent_checkpoint_langgraph.remembered import MOST_ENTRIES, Known, Remembered

from .conftest import WATCHDOG_SECONDS, Line, at, checkpoint, ids, values
from .graphs import chain, extended, thread

# The writer's thread


async def saved(saver: AgentCheckpointSaver, thread_id: str) -> Any:
    """Saved, or the error."""
    made = checkpoint("id-1", {"n": 1}, "1.x")
    put = saver.aput(at(thread_id), made, {"step": 1}, made["channel_versions"])
    try:
        return await asyncio.wait_for(put, WATCHDOG_SECONDS)
    except (Exception, Halt) as error:
        return error


def threads(saver: AgentCheckpointSaver) -> set[str]:
    return {each.thread_id for each in saver.list_threads()}


@pytest.fixture
def one_thread_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter can start no writer, once."""
    start, failed = threading.Thread.start, list[str]()

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith("agent-checkpoint-langgraph") and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


@pytest.mark.usefixtures("one_thread_too_many")
def test_after_a_thread_could_not_be_started_later_saves_are_made(saver: AgentCheckpointSaver) -> None:
    async def go() -> list[Any]:
        first = await saved(saver, "t0")
        return [first, *await asyncio.gather(*(saved(saver, f"t{number}") for number in range(1, 4)))]

    first, *later = asyncio.run(go())
    assert isinstance(first, RuntimeError)
    assert [each["configurable"]["thread_id"] for each in later] == ["t1", "t2", "t3"]
    assert threads(saver) == {"t1", "t2", "t3"}


class Halt(BaseException):
    """No ``Exception``."""


class HaltsOnce:
    """A plugin that raises it at the first save of a group."""

    def __init__(self) -> None:
        self.was_asked: list[str] = []

    @hookimpl
    def check_fence(self, write: Any) -> None:
        self.was_asked.append(write.action)
        if len(self.was_asked) == 1:
            raise Halt


def test_whatever_a_plugin_raises_reaches_those_who_wait_and_later_saves_are_made(path: Path) -> None:
    with AgentCheckpointSaver.from_conn_string(path, plugins=[HaltsOnce()]) as saver:
        saver.setup()

        async def go() -> tuple[Any, Any]:
            with saver.lease("t0"), saver.lease("t1"):
                return await saved(saver, "t0"), await saved(saver, "t1")

        first, second = asyncio.run(go())
        assert isinstance(first, Halt)
        assert second["configurable"]["thread_id"] == "t1"
        assert threads(saver) == {"t1"}


# What is remembered


def test_no_more_namespaces_are_remembered_than_that() -> None:
    remembered = Remembered()
    known = [Known(number, 0, "id-1", {}, {}) for number in range(MOST_ENTRIES + 10)]
    for each in known:
        remembered.note(f"thread-{each.number}", "", each)

    found = [remembered.parent_of(address(each)) for each in known]
    assert found == [None] * 10 + known[10:]


def address(known: Known) -> Address:
    return Address(f"thread-{known.number}", "", known.checkpoint_id)


# Removing


class LooksAtTheLock(JsonPlusSerializer):
    """Notes at each value that it loads whether somebody else could write."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.was_free: list[bool] = []

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        with closing(sqlite3.connect(self._path, timeout=0, isolation_level=None)) as other:
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                self.was_free.append(False)
            else:
                other.execute("ROLLBACK")
                self.was_free.append(True)
        return super().loads_typed(data)


def test_what_to_prune_is_found_out_without_the_write_lock(path: Path) -> None:
    looking = LooksAtTheLock(path)
    with AgentCheckpointSaver.from_conn_string(path, serde=looking) as saver:
        # Metadata that is no JSON is loaded by the serializer.
        Line(saver).put_many(5, at=datetime(2030, 1, 1, tzinfo=timezone.utc))
        looking.was_free.clear()
        saver.prune(["thread-1"], keep_last=2)

        assert looking.was_free
        assert all(looking.was_free)
        assert ids(saver.list(at())) == ["id-0005", "id-0004"]


class Changing(TypedDict, total=False):
    log: Annotated[list[int], DeltaChannel(extended, snapshot_frequency=40)]
    count: int


class Unbroken(TypedDict, total=False):
    """Its channel is never stored whole: all of its history is needed."""

    log: Annotated[list[int], DeltaChannel(extended, snapshot_frequency=100_000)]
    count: int


def counting(state: Any) -> Any:
    count = state.get("count", 0)
    return {"log": [count], "count": count + 1}


def test_a_long_history_of_changes_is_pruned_in_batches_and_its_state_stays(saver: AgentCheckpointSaver) -> None:
    graph = chain(saver, *[counting] * 60, schema=Changing, names=[f"n{number}" for number in range(60)])
    for _ in range(8):
        graph.invoke({"log": [-1]}, {**thread(), "recursion_limit": 100})
    before, count = graph.get_state(thread()).values, len(list(saver.list(at())))
    saver.prune(["thread-1"], keep_last=3)
    pruned = [
        event.detail["checkpoints"] for event in saver.store.events(kind="langgraph.thread-pruned", after="start")
    ]

    left = len(list(saver.list(at())))
    assert graph.get_state(thread()).values == before
    assert left <= 3 + 2 * 40
    assert sum(pruned) == count - left
    assert len(pruned) > 1
    assert max(pruned) <= BATCH


def test_deleting_a_run_keeps_what_the_changes_of_another_one_build_on(saver: AgentCheckpointSaver) -> None:
    graph = chain(saver, *[counting] * 3, schema=Unbroken)
    first, second = (str(uuid4()) for _ in range(2))
    for run_id in (first, second):
        graph.invoke({"log": [-1]}, {**thread(), "metadata": {"run_id": run_id}})
    before = graph.get_state(thread()).values
    saver.delete_for_runs([first])

    assert graph.get_state(thread()).values == before
    saver.delete_for_runs([second])
    saver.delete_for_runs([first])
    assert list(saver.list(at())) == []


def test_deleting_a_run_removes_what_no_other_one_builds_on(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put_many(3, run_id="run-1")
    line.put({"n": "kept"}, run_id="run-2")
    saver.delete_for_runs(["run-1"])

    assert [values(each) for each in saver.list(at())] == [{"n": "kept"}]
