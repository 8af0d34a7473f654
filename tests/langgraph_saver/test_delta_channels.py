"""Channels that are saved as their changes: what comes back of them, also after forks, copies and pruning."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Overwrite

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import WATCHDOG_SECONDS, Line, at, checkpoint
from .graphs import (
    Calls,
    DeltaState,
    Story,
    chain,
    delta_graph,
    extended,
    keeps_changes,
    keeps_changes_and_is_forked,
    thread,
)
from .test_same_as_memory import Names, _by_id


def histories(saver: Any, awaited: bool) -> list[Any]:
    """The history of each checkpoint's channels, oldest first."""
    names = Names()
    names.shared([each._asdict() for each in sorted(saver.list(thread()), key=lambda each: each.checkpoint["id"])])
    found = []
    for each in _by_id(list(saver.list(thread()))):
        ask = {"config": each["config"], "channels": ["log", "seen", "absent"]}
        answer = saver.get_delta_channel_history(**ask)
        if awaited:
            answer = asyncio.run(saver.aget_delta_channel_history(**ask))
        found.append(names.shared(dict(answer)))
    return found


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("story", [keeps_changes, keeps_changes_and_is_forked], ids=lambda story: story.__name__)
def test_the_history_of_each_checkpoint_is_that_in_memory(
    story: Story, saver: AgentCheckpointSaver, durability: str, awaited: bool
) -> None:
    memory = InMemorySaver()
    for each in (memory, saver):
        story(each, Calls(durability))

    assert histories(saver, awaited) == histories(memory, awaited)


def logs(graph: Any, config: Any = None) -> list[Any]:
    return [state.values.get("log") for state in graph.get_state_history(config or thread())]


def test_a_thread_without_any_snapshot_is_put_together_from_all_its_writes(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for number in range(150):  # more than are looked at at once
        made = checkpoint(f"id-{number:04}", {"other": number}, f"{number + 1}.x")
        made["channel_versions"]["log"] = f"{number + 1}.x"
        line.head = saver.put(line.head, made, {"source": "loop", "step": number}, made["channel_versions"])
        saver.put_writes(line.head, [("log", [str(number)])], "task")

    (found,) = saver.get_delta_channel_history(config=at(), channels=["log"]).values()
    assert "seed" not in found
    assert extended([], [value for _, _, value in found["writes"]]) == [str(number) for number in range(149)]


def test_each_channel_is_followed_to_where_it_was_stored_last(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    stored: list[dict[str, Any]] = [{"a": _DeltaSnapshot([1])}, {"b": "plain"}, {}, {}]
    for number, values in enumerate(stored):
        config = line.put(values)
        saver.put_writes(config, [("a", number), ("b", number), ("c", number)], "task")

    found = saver.get_delta_channel_history(config=at(), channels=["a", "b", "c"])
    assert {channel: [value for _, _, value in each["writes"]] for channel, each in found.items()} == {
        "a": [0, 1, 2],
        "b": [1, 2],
        "c": [0, 1, 2],
    }
    assert {channel: each.get("seed") for channel, each in found.items()} == {
        "a": _DeltaSnapshot([1]),
        "b": "plain",
        "c": None,
    }


def test_what_was_written_on_another_branch_is_not_in_it(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    root = line.put({})
    for branch in ("left", "right"):
        config = line.put({}, f"id-{branch}", on=root)
        saver.put_writes(config, [("log", [branch])], "task")
        line.put({}, f"id-{branch}-more", on=config)

    (found,) = saver.get_delta_channel_history(config=at(checkpoint_id="id-left-more"), channels=["log"]).values()
    assert found["writes"] == [("task", "log", ["left"])]


def test_there_is_no_history_of_nothing(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)

    assert saver.get_delta_channel_history(config=at(), channels=["log"]) == {"log": {"writes": []}}
    line.put({"log": 1})
    assert saver.get_delta_channel_history(config=at(), channels=["log"]) == {"log": {"writes": []}}
    assert saver.get_delta_channel_history(config=at(), channels=[]) == {}
    unknown = at(checkpoint_id="unknown")
    assert saver.get_delta_channel_history(config=unknown, channels=["log"]) == {"log": {"writes": []}}


@pytest.mark.parametrize("length", [1, 2, 70])
def test_a_line_that_leads_back_into_itself_has_an_end(saver: AgentCheckpointSaver, length: int) -> None:
    configs = [at(checkpoint_id=f"id-{number}") for number in range(length)]
    for number, config in enumerate(configs):
        made = checkpoint(f"id-{(number + 1) % length}", {}, "1.x")
        saver.put(config, made, {"source": "loop", "step": number, "parents": {}}, {})

    async def go() -> Any:
        return await saver.aget_delta_channel_history(config=configs[0], channels=["log"])

    assert asyncio.run(asyncio.wait_for(go(), WATCHDOG_SECONDS)) == {"log": {"writes": []}}


def test_a_run_that_overwrites_its_changes_goes_on_from_there(saver: AgentCheckpointSaver) -> None:
    savers = (saver, InMemorySaver())
    graphs = [
        chain(each, lambda state: {"log": Overwrite(["anew"])}, lambda state: {"log": ["b"]}, schema=DeltaState)
        for each in savers
    ]
    for graph in graphs:
        for word in "pq":
            graph.invoke({"log": [word]}, thread())

    ours, memory = map(logs, graphs)
    assert ours == memory


@pytest.mark.parametrize("keep_last", [1, 2, 5])
@pytest.mark.parametrize("runs", [1, 3, 8])
def test_a_pruned_thread_still_has_its_state_and_goes_on(
    saver: AgentCheckpointSaver, runs: int, keep_last: int
) -> None:
    graph = delta_graph(saver)
    for number in range(runs):
        graph.invoke({"log": [str(number)]}, thread())
    before = logs(graph)[:keep_last]
    saver.prune(["thread-1"], keep_last=keep_last)

    assert logs(graph)[:keep_last] == before
    grown = graph.invoke({"log": ["more"]}, thread())["log"]
    assert grown[: len(before[0])] == before[0]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_pruning_makes_a_long_thread_of_changes_short(saver: AgentCheckpointSaver, keep_last: int) -> None:
    graph = delta_graph(saver)
    for number in range(20):
        graph.invoke({"log": [str(number)]}, thread())
    saver.prune(["thread-1"], keep_last=keep_last)

    # A snapshot is made with every third change.
    assert keep_last <= len(list(saver.list(thread()))) < 12


def test_a_copy_has_the_same_changes_and_goes_its_own_way(saver: AgentCheckpointSaver) -> None:
    graph = delta_graph(saver)
    for word in "pqr":
        graph.invoke({"log": [word]}, thread())
    expected = logs(graph)
    saver.copy_thread("thread-1", "copy")
    graph.invoke({"log": ["late"]}, thread())
    saver.delete_thread("thread-1")

    assert logs(graph, thread("copy")) == expected
    assert graph.invoke({"log": ["on"]}, thread("copy"))["log"][: len(expected[0])] == expected[0]
