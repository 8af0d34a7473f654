"""DELTA_HISTORY: what ``aget_delta_channel_history`` gives for a channel that is saved as its changes.

For each channel: the value that the nearest ancestor has stored (``seed``, left
out where none has), and what was written since, the oldest first. Only the
target's own line of parents counts. What was written on top of the target is
its future; what was written on top of the ancestor with the value came after
it, and counts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.conformance.test_utils import generate_config, put_test_checkpoint
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from agent_checkpoint_langgraph.conformance.runner import OnTestResult, run_clauses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import DeltaChannelHistory

Saver = BaseCheckpointSaver[Any]


class Line:
    """A line of checkpoints, each on the one before it."""

    def __init__(self, saver: Saver, thread_id: str | None = None, namespace: str = "") -> None:
        self.saver = saver
        self.thread_id = thread_id or str(uuid4())
        self.namespace = namespace
        self.head: RunnableConfig | None = None

    async def add(self, on: RunnableConfig | None = None, **stored: Any) -> RunnableConfig:
        """Save a checkpoint whose channels have these values, and no others."""
        versions = {channel: self.saver.get_next_version(None, None) for channel in stored}
        self.head = await put_test_checkpoint(
            self.saver,
            thread_id=self.thread_id,
            checkpoint_ns=self.namespace,
            parent_config=on or self.head,
            channel_values=stored,
            channel_versions=versions,
        )
        return self.head

    async def write(self, *values: Any, channel: str = "log", task_id: str = "task", task_path: str = "") -> None:
        """Write values on top of the newest checkpoint."""
        assert self.head is not None
        await self.saver.aput_writes(self.head, [(channel, value) for value in values], task_id, task_path)

    async def history(self, on: RunnableConfig | None = None, channels: tuple[str, ...] = ("log",)) -> Any:
        """What the newest checkpoint, or another one, is told."""
        target = on or self.head
        assert target is not None
        return await self.saver.aget_delta_channel_history(config=target, channels=channels)


def _written(history: Mapping[str, DeltaChannelHistory], channel: str = "log") -> list[Any]:
    return [value for _, _, value in history[channel]["writes"]]


async def test_delta_history_of_no_channels(saver: Saver) -> None:
    """No channels asked, none answered."""
    line = Line(saver)
    await line.add(log=["a"])
    assert dict(await line.history(channels=())) == {}


async def test_delta_history_of_missing_thread(saver: Saver) -> None:
    """Every channel has an entry without a seed."""
    found = await saver.aget_delta_channel_history(config=generate_config(), channels=["log", "other"])
    assert dict(found) == {"log": {"writes": []}, "other": {"writes": []}}


async def test_delta_history_of_root(saver: Saver) -> None:
    """A root has no ancestors: its own value and writes do not count."""
    line = Line(saver)
    await line.add(log=["own"])
    await line.write("own")
    assert dict(await line.history()) == {"log": {"writes": []}}


async def test_delta_history_excludes_target(saver: Saver) -> None:
    """Neither the target's stored value nor the writes on top of it count."""
    line = Line(saver)
    await line.add()
    await line.write("a")
    await line.add(log=["own"])
    await line.write("pending")
    found = await line.history()
    assert _written(found) == ["a"]
    assert "seed" not in found["log"]


async def test_delta_history_oldest_first(saver: Saver) -> None:
    """Writes come in the order in which they were made."""
    line = Line(saver)
    for value in "abcd":
        await line.add()
        await line.write(value)
    await line.add()
    assert _written(await line.history()) == ["a", "b", "c", "d"]


async def test_delta_history_entries_are_pending_writes(saver: Saver) -> None:
    """Each is (task id, channel, value)."""
    line = Line(saver)
    await line.add()
    await line.write({"nested": [1, "x"]}, task_id="task-7")
    await line.add()
    (write,) = (await line.history())["log"]["writes"]
    assert tuple(write) == ("task-7", "log", {"nested": [1, "x"]})


async def test_delta_history_without_seed(saver: Saver) -> None:
    """No ancestor has a value: the entry has no seed."""
    line = Line(saver)
    await line.add()
    await line.write("a")
    await line.add(other=1)
    await line.add()
    found = await line.history()
    assert "seed" not in found["log"]
    assert _written(found) == ["a"]


async def test_delta_history_seed_is_nearest(saver: Saver) -> None:
    """The nearest value is the seed; what was written before it is in it already."""
    line = Line(saver)
    await line.add(log=["old"])
    await line.write("before")
    await line.add(log=["new"])
    await line.write("on the seed")
    await line.add()
    await line.write("after")
    await line.add()
    found = await line.history()
    assert found["log"]["seed"] == ["new"]
    assert _written(found) == ["on the seed", "after"]


async def test_delta_history_seed_at_parent(saver: Saver) -> None:
    """The parent's value is a seed too."""
    line = Line(saver)
    await line.add(log=["parent"])
    await line.add()
    assert dict(await line.history()) == {"log": {"seed": ["parent"], "writes": []}}


async def test_delta_history_seed_may_be_empty(saver: Saver) -> None:
    """A stored value that is false is stored nevertheless."""
    empties: list[Any] = [[], 0, "", False, {}]
    for empty in empties:
        line = Line(saver)
        await line.add(log=["old"])
        await line.add(log=empty)
        await line.add()
        found = await line.history()
        assert "seed" in found["log"], f"no seed for {empty!r}"
        assert found["log"]["seed"] == empty


async def test_delta_history_seed_snapshot(saver: Saver) -> None:
    """A snapshot of a delta channel comes back as one."""
    line = Line(saver)
    await line.add(log=_DeltaSnapshot(["a", "b"]))
    await line.write("c")
    await line.add()
    found = await line.history()
    assert isinstance(found["log"]["seed"], _DeltaSnapshot)
    assert found["log"]["seed"].value == ["a", "b"]
    assert _written(found) == ["c"]


async def test_delta_history_channels_apart(saver: Saver) -> None:
    """Each channel goes back as far as its own value, and has its own writes."""
    line = Line(saver)
    await line.add(log=["far"])
    await line.write("log 1")
    await line.write("other 1", channel="other", task_id="task-2")
    await line.add(other=["near"])
    await line.write("log 2")
    await line.write("other 2", channel="other", task_id="task-2")
    await line.add()
    found = await line.history(channels=("log", "other", "third"))
    assert found["log"]["seed"] == ["far"]
    assert _written(found) == ["log 1", "log 2"]
    assert found["other"]["seed"] == ["near"]
    assert _written(found, "other") == ["other 2"]
    assert found["third"] == {"writes": []}


async def test_delta_history_order_within_checkpoint(saver: Saver) -> None:
    """Writes on top of one checkpoint are sorted by (task path, task id, place)."""
    line = Line(saver)
    await line.add()
    await line.write("5", task_id="a", task_path="~2")
    await line.write("3", "4", task_id="z", task_path="~1")
    await line.write("2", task_id="y")
    await line.write("1", task_id="x")
    await line.add()
    assert _written(await line.history()) == ["1", "2", "3", "4", "5"]


async def test_delta_history_of_fork(saver: Saver) -> None:
    """Only the line of the target's own parents counts."""
    line = Line(saver)
    shared = await line.add(log=["start"])
    await line.add()
    await line.write("left")
    left = await line.add()
    await line.add(on=shared)
    await line.write("right")
    right = await line.add()
    assert _written(await line.history(left)) == ["left"]
    assert _written(await line.history(right)) == ["right"]
    assert (await line.history(right))["log"]["seed"] == ["start"]


async def test_delta_history_of_past(saver: Saver) -> None:
    """A checkpoint in the past is told nothing of what came later."""
    line = Line(saver)
    await line.add(log=["start"])
    await line.write("a")
    past = await line.add()
    await line.write("b")
    await line.add(log=["later"])
    assert dict(await line.history(past)) == {"log": {"seed": ["start"], "writes": [("task", "log", "a")]}}


async def test_delta_history_of_latest(saver: Saver) -> None:
    """Without a checkpoint id the latest one is meant."""
    line = Line(saver)
    await line.add()
    await line.write("a")
    await line.add()
    await line.write("pending")
    assert _written(await line.history(generate_config(line.thread_id))) == ["a"]


async def test_delta_history_namespaces_apart(saver: Saver) -> None:
    """The histories of a thread's namespaces do not mix."""
    outer = Line(saver)
    inner = Line(saver, outer.thread_id, "child:1")
    for line, value in ((outer, "outer"), (inner, "inner")):
        await line.add(log=[value])
        await line.write(value)
    for line, value in ((outer, "outer"), (inner, "inner")):
        await line.add()
        found = await line.history()
        assert found["log"]["seed"] == [value]
        assert _written(found) == [value]


async def test_delta_history_threads_apart(saver: Saver) -> None:
    """The histories of threads do not mix."""
    first, second = Line(saver), Line(saver)
    for line, value in ((first, "first"), (second, "second")):
        await line.add()
        await line.write(value)
        await line.add()
    assert _written(await first.history()) == ["first"]
    assert _written(await second.history()) == ["second"]


async def test_delta_history_of_long_line(saver: Saver) -> None:
    """However far the seed is, nothing on the way is lost."""
    line = Line(saver)
    await line.add(log=["start"])
    for number in range(150):
        await line.write(number)
        await line.add()
    found = await line.history()
    assert found["log"]["seed"] == ["start"]
    assert _written(found) == list(range(150))


async def test_delta_history_sync_is_the_same(saver: Saver) -> None:
    """``get_delta_channel_history`` gives what the awaited one gives."""
    line = Line(saver)
    await line.add(log=["start"])
    await line.write("a", "b")
    config = await line.add()
    direct = await asyncio.to_thread(saver.get_delta_channel_history, config=config, channels=["log"])
    assert dict(direct) == dict(await line.history())


async def test_delta_history_is_that_of_the_default_walk(saver: Saver) -> None:
    """A saver's own way gives what the base class finds by following parents."""
    line = Line(saver)
    await line.add(log=["start"])
    for number in range(3):
        await line.write(f"late {number}", task_id="b", task_path="~2")
        await line.write(f"early {number}", task_id="c", task_path="~1")
        stored: dict[str, Any] = {"other": [number]} if number == 1 else {}
        config = await line.add(**stored)
    channels = ("log", "other", "third")
    walked = await BaseCheckpointSaver.aget_delta_channel_history(saver, config=config, channels=channels)
    assert dict(await line.history(channels=channels)) == dict(walked)


ALL_DELTA_HISTORY_TESTS = [
    test_delta_history_of_no_channels,
    test_delta_history_of_missing_thread,
    test_delta_history_of_root,
    test_delta_history_excludes_target,
    test_delta_history_oldest_first,
    test_delta_history_entries_are_pending_writes,
    test_delta_history_without_seed,
    test_delta_history_seed_is_nearest,
    test_delta_history_seed_at_parent,
    test_delta_history_seed_may_be_empty,
    test_delta_history_seed_snapshot,
    test_delta_history_channels_apart,
    test_delta_history_order_within_checkpoint,
    test_delta_history_of_fork,
    test_delta_history_of_past,
    test_delta_history_of_latest,
    test_delta_history_namespaces_apart,
    test_delta_history_threads_apart,
    test_delta_history_of_long_line,
    test_delta_history_sync_is_the_same,
    test_delta_history_is_that_of_the_default_walk,
]


async def run_delta_history_tests(
    saver: Saver, on_test_result: OnTestResult | None = None
) -> tuple[int, int, list[str]]:
    """Run all delta history clauses. Returns (passed, failed, failures)."""
    return await run_clauses("delta_history", ALL_DELTA_HISTORY_TESTS, saver, on_test_result=on_test_result)
