"""Lists: their order, what they leave out, and what may be done while one goes through them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import WATCHDOG_SECONDS, Line, at, checkpoint, ids

# More than are read at once, with or without a filter.
MANY = 600
KEYS = ["it's", 'say "x"', "a.b", "$.c", "naïve", "100%", "_", "", "a b", "[0]", "source' OR 1=1 --", "\n", "🙂"]


# Order


def test_the_newest_comes_first_whatever_its_id_is(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for name in ("id-5", "id-9", "id-1", "id-7"):  # a clock that was set back makes such ids
        line.put({"n": name}, name)

    assert ids(saver.list(at())) == ["id-7", "id-1", "id-9", "id-5"]
    assert ids([saver.get_tuple(at())]) == ["id-7"]  # type: ignore[list-item]


def test_before_follows_the_order_of_saving_and_leaves_its_checkpoint_out(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for name in ("id-5", "id-9", "id-1", "id-7"):
        line.put({"n": name}, name)

    assert ids(saver.list(at(), before=at(checkpoint_id="id-1"))) == ["id-9", "id-5"]
    assert ids(saver.list(at(), before=at(checkpoint_id="id-5"))) == []
    assert ids(saver.list(at(), before=at(checkpoint_id="id-7"), limit=1)) == ["id-1"]


def test_before_an_unknown_checkpoint_are_those_of_lower_ids(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(4)

    assert ids(saver.list(at(), before=at(checkpoint_id="id-0003a"))) == ["id-0003", "id-0002", "id-0001"]
    assert ids(saver.list(at(), before=at(checkpoint_id="id-0000"))) == []


def test_before_no_checkpoint_leaves_nothing_out(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(2)

    assert ids(saver.list(at(), before=at())) == ["id-0002", "id-0001"]


def test_before_over_all_threads_leaves_out_its_checkpoint_though_a_copy_has_the_same_id(
    saver: AgentCheckpointSaver,
) -> None:
    Line(saver, "original").put_many(3)
    saver.copy_thread("original", "copy")

    found = saver.list(None, before=at("original", "id-0002"))
    assert [(each.config["configurable"]["thread_id"], *ids([each])) for each in found] == [("original", "id-0001")]


def test_without_a_config_all_threads_are_listed_newest_first(saver: AgentCheckpointSaver) -> None:
    lines = {name: Line(saver, name) for name in ("a", "b", "c")}
    for name in "abcabca":
        lines[name].put({"n": name})

    assert [each.config["configurable"]["thread_id"] for each in saver.list(None)] == list("acbacba")
    assert [each.thread_id for each in saver.list_threads()] == ["a", "c", "b"]


def test_a_namespace_is_listed_alone_where_the_config_names_it(saver: AgentCheckpointSaver) -> None:
    for namespace in ("", "inner:1", "inner:2"):
        Line(saver, namespace=namespace).put({"n": namespace})

    everywhere = {"configurable": {"thread_id": "thread-1"}}
    assert [each.config["configurable"]["checkpoint_ns"] for each in saver.list(everywhere)] == [
        "inner:2",
        "inner:1",
        "",
    ]
    for namespace in ("", "inner:1", "inner:2"):
        (only,) = saver.list(at(namespace=namespace))
        assert only.checkpoint["channel_values"] == {"n": namespace}


def test_a_checkpoint_is_listed_alone_where_the_config_names_it(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(3)

    assert ids(saver.list(at(checkpoint_id="id-0002"))) == ["id-0002"]


# Limits and filters


@pytest.mark.parametrize(("limit", "count"), [(None, 5), (0, 0), (1, 1), (5, 5), (9, 5)])
def test_a_limit_is_the_most_there_can_be(saver: AgentCheckpointSaver, limit: int | None, count: int) -> None:
    Line(saver).put_many(5)

    assert len(list(saver.list(at(), limit=limit))) == count


def test_the_limit_counts_what_passed_the_filter(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for number in range(MANY):
        line.put({"n": number}, kind="rare" if number % 100 == 0 else "common")

    found = saver.list(at(), filter={"kind": "rare"}, limit=4)
    assert [each.checkpoint["channel_values"]["n"] for each in found] == [500, 400, 300, 200]
    assert len(list(saver.list(at(), filter={"kind": "rare"}))) == 6
    before = saver.list(at(), filter={"kind": "rare"}, before=at(checkpoint_id="id-0201"), limit=9)
    assert [each.checkpoint["channel_values"]["n"] for each in before] == [100, 0]


def test_many_checkpoints_are_all_listed_once(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(MANY)

    expected = [f"id-{number:04}" for number in range(MANY, 0, -1)]
    assert ids(saver.list(at())) == expected
    assert ids(saver.list(at(), filter={"source": "loop"})) == expected
    assert ids(saver.list(None, limit=MANY - 1)) == expected[:-1]


@pytest.mark.parametrize("key", KEYS)
def test_any_key_can_be_filtered_by(saver: AgentCheckpointSaver, key: str) -> None:
    line = Line(saver)
    line.put({"n": 1}, **{key: key})
    line.put({"n": 2}, **{key: "other"})
    line.put({"n": 3})

    assert ids(saver.list(at(), filter={key: key})) == ["id-0001"]


@pytest.mark.parametrize("value", ["' OR 1=1 --", '"; DROP TABLE langgraph_checkpoints; --', "%", "_", "\\", "?"])
@pytest.mark.parametrize("key", ["source", "run_id", "other"])
def test_a_value_is_only_compared(saver: AgentCheckpointSaver, key: str, value: str) -> None:
    line = Line(saver)
    line.put({"n": 1}, **{key: value})
    line.put({"n": 2}, **{key: "plain"})

    assert ids(saver.list(at(), filter={key: value})) == ["id-0001"]
    assert ids(saver.list(at())) == ["id-0002", "id-0001"]


def test_several_keys_must_all_match(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put({"n": 1}, user="ann", tier=1)
    line.put({"n": 2}, user="ann", tier=2)

    assert ids(saver.list(at(), filter={"user": "ann", "tier": 2, "source": "loop", "step": 2})) == ["id-0002"]
    assert ids(saver.list(at(), filter={"user": "ann", "tier": 2, "step": 1})) == []


def test_an_absent_key_is_none_as_in_memory(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put({"n": 1}, user=None)
    line.put({"n": 2})
    line.put({"n": 3}, user="ann")

    assert ids(saver.list(at(), filter={"user": None})) == ["id-0002", "id-0001"]
    assert ids(saver.list(at(), filter={"source": None})) == []
    assert len(ids(saver.list(at(), filter={}))) == 3


def test_a_nested_value_matches_as_a_whole(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put({"n": 1}, tags={"a": [1, {"b": None}]})
    line.put({"n": 2}, tags={"a": [1]})

    assert ids(saver.list(at(), filter={"tags": {"a": [1, {"b": None}]}})) == ["id-0001"]
    assert ids(saver.list(at(), filter={"tags": {}})) == []


def test_values_are_equal_as_they_are_in_python(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put({"n": 1}, value=True)
    line.put({"n": 2}, value=1)
    line.put({"n": 3}, value="1")

    assert ids(saver.list(at(), filter={"value": 1})) == ids(saver.list(at(), filter={"value": True})) != []
    assert ids(saver.list(at(), filter={"value": "1"})) == ["id-0003"]
    assert ids(saver.list(at(), filter={"step": True})) == ids(saver.list(at(), filter={"step": 1.0})) == ["id-0001"]


def test_nan_equals_nothing_and_poisons_no_other_filter(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put({"n": 1}, score=math.nan, user="ann")
    line.put({"n": 2}, score=math.inf, user="ann")
    line.put({"n": 3}, score=0.5, user="ann")

    assert ids(saver.list(at(), filter={"score": math.nan})) == []
    assert ids(saver.list(at(), filter={"score": math.inf})) == ["id-0002"]
    assert ids(saver.list(at(), filter={"user": "ann"})) == ["id-0003", "id-0002", "id-0001"]


@pytest.mark.parametrize(
    ("key", "stored"),
    [("step", 2**70), ("step", "2"), ("step", None), ("source", 7), ("source", None), ("run_id", UUID(int=5))],
)
def test_a_key_with_a_column_is_filtered_by_what_no_column_holds(
    saver: AgentCheckpointSaver, key: str, stored: Any
) -> None:
    line = Line(saver)
    line.put({"n": 1}, **{key: stored})
    line.put({"n": 2}, **{key: "another"})

    assert ids(saver.list(at(), filter={key: stored})) == ["id-0001"]


# In the middle of a list


def look(saver: AgentCheckpointSaver, config: Any) -> None:
    assert saver.get_tuple(config) is not None


def add(saver: AgentCheckpointSaver, config: Any) -> None:
    made = checkpoint(f"{config['configurable']['checkpoint_id']}-more", {"n": 0}, "1.x")
    saver.put(config, made, {"source": "fork", "step": 0, "parents": {}}, made["channel_versions"])


def write(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.put_writes(config, [("n", 1)], "task")


def copy(saver: AgentCheckpointSaver, config: Any) -> None:
    saver.copy_thread("thread-1", "copy")


DEEDS = [look, add, write, copy]


@pytest.mark.parametrize("wanted", [None, {"source": "loop"}])
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_anything_may_be_done_inside_of_a_list(
    saver: AgentCheckpointSaver, deed: Callable[..., None], wanted: Any
) -> None:
    Line(saver).put_many(40)
    found = []
    for each in saver.list(at(), filter=wanted):
        deed(saver, each.config)
        found.append(each)

    assert ids(found) == [f"id-{number:04}" for number in range(40, 0, -1)]


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_anything_may_be_done_inside_of_an_awaited_list(saver: AgentCheckpointSaver, deed: Callable[..., None]) -> None:
    Line(saver).put_many(40)

    async def go() -> list[str]:
        found = []
        async for each in saver.alist(at()):
            deed(saver, each.config)  # a sync method on the loop's own thread
            await saver.aget_tuple(each.config)
            found.append(each)
        return ids(found)

    expected = [f"id-{number:04}" for number in range(40, 0, -1)]
    assert asyncio.run(asyncio.wait_for(go(), WATCHDOG_SECONDS)) == expected


@pytest.mark.parametrize("wanted", [None, {"source": "loop"}])
def test_a_thread_that_is_deleted_inside_of_its_list_ends_the_list(saver: AgentCheckpointSaver, wanted: Any) -> None:
    Line(saver).put_many(300)
    found = []
    for each in saver.list(at(), filter=wanted):
        found.append(each)
        saver.delete_thread("thread-1")

    assert 1 <= len(found) < 300
    assert list(saver.list(at())) == []


def test_a_list_that_is_left_keeps_nobody_waiting(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put_many(40)
    left = saver.list(at())
    next(left)

    line.put({"n": "more"})
    saver.delete_thread("thread-1")

    assert saver.get_tuple(at()) is None


def test_a_checkpoint_that_is_saved_again_inside_of_a_list_is_still_listed(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(40)
    found = []
    for each in saver.list(at(), filter={"source": "loop"}):
        if not found:
            Line(saver).put_many(40)
        found.append(each)

    assert len(set(ids(found))) == 40
