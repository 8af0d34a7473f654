"""What a run leaves behind is what it leaves behind in ``InMemorySaver``, tuple for tuple."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .graphs import ASKS, STORIES, AwaitedCalls, Calls, Story, thread

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# What two runs of the same story have of their own: ids, the random part of versions, times.
OWN = re.compile(
    rf"(?P<id>{UUID}|\b[0-9a-f]{{32}}\b(?!\.))|(?P<version>\b\d{{32}})\.[0-9a-f.]+(?:-\d+)?|"
    r"(?P<time>\d{4}-\d\d-\d\dT[^'\" ]+)"
)
NULL_TASK = "00000000-0000-0000-0000-000000000000"


class Names:
    """Names that two runs of a story have in common: an id is the n-th that comes up, a version its number."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {NULL_TASK: "null task"}

    def shared(self, value: Any) -> Any:
        """The value with these names in it."""
        if isinstance(value, dict):
            ordered = sorted(value.items(), key=lambda item: OWN.sub("", str(item[0])))
            return {self.shared(key): self.shared(each) for key, each in ordered}
        if isinstance(value, (list, tuple)):
            return [self.shared(each) for each in value]
        if isinstance(value, (int, float, type(None))):
            return value
        return OWN.sub(self._name, value if isinstance(value, str) else repr(value))

    def _name(self, found: re.Match[str]) -> str:
        if found["id"]:
            return self._ids.setdefault(found["id"], f"id {len(self._ids)}")
        return str(int(found["version"])) if found["version"] else "time"


@pytest.fixture(params=[Calls, AwaitedCalls], ids=["sync", "async"])
def calls(request: pytest.FixtureRequest, durability: str) -> Iterator[Calls]:
    if request.param is AwaitedCalls and sys.version_info < (3, 11) and request.getfixturevalue("story") in ASKS:
        pytest.skip("before Python 3.11 LangGraph cannot hand its context on to an async node")
    made = request.param(durability)
    yield made
    made.close()


def told(story: Story, saver: Any, calls: Calls) -> dict[str, Any]:
    """What a story leaves behind, oldest first, as the saver and the graph show it."""
    graph, threads = story(saver, calls)
    names = Names()
    tuples = {name: _by_id(calls.tuples(saver, thread(name))) for name in threads}
    return {
        "tuples": names.shared(tuples),
        "history": names.shared(_by_id(calls.history(graph, thread()))),
        "state": names.shared(calls.state(graph, thread())),
    }


def _by_id(found: list[Any]) -> list[dict[str, Any]]:
    by_id = sorted(found, key=lambda each: each.config["configurable"]["checkpoint_id"])
    return [each._asdict() for each in by_id]


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_run_leaves_behind_what_it_leaves_in_memory(story: Story, saver: AgentCheckpointSaver, calls: Calls) -> None:
    expected = told(story, InMemorySaver(), calls)

    assert told(story, saver, calls) == expected
    assert expected["tuples"]["thread-1"]


@pytest.mark.parametrize("durability", ["async"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_each_namespace_is_listed_in_the_order_of_its_run(
    story: Story, saver: AgentCheckpointSaver, calls: Calls
) -> None:
    _, threads = story(saver, calls)

    for name in threads:
        by_namespace: dict[str, list[str]] = {}
        for each in calls.tuples(saver, thread(name)):
            where = each.config["configurable"]
            by_namespace.setdefault(where["checkpoint_ns"], []).append(where["checkpoint_id"])
        assert all(found == sorted(found, reverse=True) for found in by_namespace.values())


@pytest.mark.parametrize("durability", ["sync"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_each_checkpoint_by_its_id_is_the_one_of_the_list(
    story: Story, saver: AgentCheckpointSaver, calls: Calls
) -> None:
    _, threads = story(saver, calls)

    for name in threads:
        for listed in calls.tuples(saver, thread(name)):
            assert saver.get_tuple(listed.config) == listed
