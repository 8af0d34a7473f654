"""What tasks wrote on top of a checkpoint: which of two writes counts, and in which order they are read."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.base import ERROR, INTERRUPT, RESUME, SCHEDULED, writes_sort_key
from langgraph.checkpoint.memory import InMemorySaver

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import Line, at, raised

SPECIAL = [ERROR, SCHEDULED, INTERRUPT, RESUME]


def written(saver: Any, config: Any) -> list[tuple[str, str, Any]]:
    found = saver.get_tuple(config)
    assert found is not None
    return [(task, channel, value) for task, channel, value in found.pending_writes or ()]


@pytest.fixture
def config(saver: AgentCheckpointSaver) -> Any:
    """A checkpoint to write on."""
    return Line(saver).put({"n": 1})


def test_of_two_regular_writes_the_first_counts(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.put_writes(config, [("a", 1), ("b", 2)], "task")
    saver.put_writes(config, [("a", 3), ("b", 4), ("c", 5)], "task")

    assert written(saver, config) == [("task", "a", 1), ("task", "b", 2), ("task", "c", 5)]


def test_two_regular_writes_to_one_channel_both_count(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.put_writes(config, [("a", 1), ("a", 2)], "task")

    assert written(saver, config) == [("task", "a", 1), ("task", "a", 2)]


@pytest.mark.parametrize("channel", SPECIAL)
def test_of_two_special_writes_the_last_counts(saver: AgentCheckpointSaver, config: Any, channel: str) -> None:
    saver.put_writes(config, [(channel, "first")], "task")
    saver.put_writes(config, [(channel, "last")], "task")

    assert written(saver, config) == [("task", channel, "last")]


@pytest.mark.parametrize("channel", SPECIAL)
def test_a_special_write_beside_a_regular_one_is_judged_by_itself(
    saver: AgentCheckpointSaver, config: Any, channel: str
) -> None:
    saver.put_writes(config, [("a", 1), (channel, "first")], "task")
    saver.put_writes(config, [("a", 2), (channel, "last")], "task")

    assert sorted(written(saver, config)) == sorted([("task", "a", 1), ("task", channel, "last")])


def test_a_special_write_of_one_task_leaves_those_of_others(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.put_writes(config, [(RESUME, "first")], "task-1")
    saver.put_writes(config, [(RESUME, "other")], "task-2")

    assert written(saver, config) == [("task-1", RESUME, "first"), ("task-2", RESUME, "other")]


def test_writes_are_read_in_the_order_in_which_a_run_applies_them(saver: AgentCheckpointSaver, config: Any) -> None:
    tasks = [("~pull, b", "task-1"), ("~pull, a", "task-3"), ("", "task-9"), ("~pull, a", "task-2"), ("ä", "task-0")]
    for path, task in tasks:
        saver.put_writes(config, [(channel, path) for channel in "zyx"], task, path)

    expected = sorted(writes_sort_key(path, task, index) for path, task in tasks for index in range(3))
    assert written(saver, config) == [(task, "zyx"[index], path) for path, task, index in expected]


def test_more_writes_than_ten_keep_their_order(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.put_writes(config, [("a", number) for number in range(25)], "task")

    assert [value for _, _, value in written(saver, config)] == list(range(25))


def test_any_order_of_calls_leaves_what_it_leaves_in_memory(saver: AgentCheckpointSaver) -> None:
    savers = [saver, InMemorySaver()]
    configs = [Line(each).put({"n": 1}) for each in savers]
    for number in range(40):
        channels = [SPECIAL[number % 4], "ab"[number % 2], SPECIAL[number % 3], "c"][number % 3 :]
        for each, where in zip(savers, configs, strict=True):
            writes = [(channel, [number, channel]) for channel in channels]
            each.put_writes(where, writes, f"task-{number % 5}", f"path-{number % 3}")

    ours, memory = (written(each, where) for each, where in zip(savers, configs, strict=True))
    assert ours == memory


def test_writes_may_come_before_their_checkpoint(saver: AgentCheckpointSaver) -> None:
    saver.put_writes(at(checkpoint_id="id-0001"), [("a", 1)], "task")
    assert saver.get_tuple(at()) is None
    assert list(saver.list(at())) == []

    config = Line(saver).put({"n": 1})

    assert written(saver, config) == [("task", "a", 1)]


def test_writes_belong_to_their_namespace_and_thread(saver: AgentCheckpointSaver) -> None:
    configs = [Line(saver, *where).put({"n": 1}) for where in (("t", ""), ("t", "inner"), ("other", ""))]
    saver.put_writes(configs[1], [("a", 1)], "task")

    assert [written(saver, config) for config in configs] == [[], [("task", "a", 1)], []]


def test_a_checkpoint_that_is_saved_again_keeps_its_writes_and_its_place(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    first = line.put({"n": 1})
    line.put({"n": 2})
    saver.put_writes(first, [("a", 1)], "task")
    Line(saver).put({"n": "again"})

    found = list(saver.list(at()))
    assert [each.checkpoint["channel_values"]["n"] for each in found] == [2, "again"]
    assert written(saver, first) == [("task", "a", 1)]


def test_writes_need_a_checkpoint_to_belong_to(saver: AgentCheckpointSaver) -> None:
    error = raised(InvalidInputError, lambda: saver.put_writes(at(), [("a", 1)], "task"))

    assert error.field == "checkpoint_id"


def test_a_write_is_what_it_was_when_it_was_saved(saver: AgentCheckpointSaver, config: Any) -> None:
    value = ["early"]
    saver.put_writes(config, [("a", value)], "task")
    value.append("late")

    assert written(saver, config) == [("task", "a", ["early"])]


# What was sent, in checkpoints of formats before 4: stored with the writes on top of the parent


def old(saver: AgentCheckpointSaver, version: int, **versions: str) -> Any:
    """A checkpoint of a format, on one that two tasks sent something on."""
    line = Line(saver)
    parent = line.put({"n": 1})
    saver.put_writes(parent, [("__pregel_tasks", "from b")], "task-1", "~b")
    saver.put_writes(parent, [("n", 2), ("__pregel_tasks", "from a"), ("__pregel_tasks", "again")], "task-2", "~a")
    made = {"v": version, "id": "id-0002", "ts": "t", "channel_values": {}, "channel_versions": versions}
    saver.put(parent, {**made, "versions_seen": {}, "updated_channels": None}, {"source": "loop", "step": 2}, {})
    return saver.get_tuple(at())


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_old_checkpoint_has_what_was_sent_on_top_of_its_parent(saver: AgentCheckpointSaver, version: int) -> None:
    found = old(saver, version, a="1.x", b="3.x", c="2.x")

    assert found.checkpoint["channel_values"] == {"__pregel_tasks": ["from a", "again", "from b"]}
    assert found.checkpoint["channel_versions"] == {"a": "1.x", "b": "3.x", "c": "2.x", "__pregel_tasks": "3.x"}
    assert found.pending_writes == []
    assert [each.checkpoint for each in saver.list(at(), limit=1)] == [found.checkpoint]


def test_what_was_sent_has_a_version_where_no_channel_has_one(saver: AgentCheckpointSaver) -> None:
    found = old(saver, 3)

    assert (
        saver.get_next_version(None, None).split(".")[0]
        == found.checkpoint["channel_versions"]["__pregel_tasks"].split(".")[0]
    )


def test_a_checkpoint_of_today_does_not_take_what_was_sent_from_its_parent(saver: AgentCheckpointSaver) -> None:
    found = old(saver, 4, a="1.x")

    assert found.checkpoint["channel_values"] == {}
    assert found.checkpoint["channel_versions"] == {"a": "1.x"}


def test_a_checkpoint_of_today_beside_an_old_one_takes_nothing_either(saver: AgentCheckpointSaver) -> None:
    old(saver, 3, a="1.x")
    Line(saver).put({"n": 3}, "id-0003", on=at(checkpoint_id="id-0001"))

    today, before, _ = saver.list(at())
    assert today.checkpoint["channel_values"] == {"n": 3}
    assert before.checkpoint["channel_values"] == {"__pregel_tasks": ["from a", "again", "from b"]}
