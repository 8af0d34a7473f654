"""Thread ids of any type: each is a thread of its own by ``str()``, and fenced like any other."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from agent_checkpoint import InvalidInputError, LeaseHeldError, StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import Line, at, raised, values
from .graphs import chain, saying

THREAD_IDS: dict[str, Any] = {
    "int": 42,
    "zero": 0,
    "false": False,
    "float": 1.5,
    "UUID": UUID(int=5),
    "tuple": ("tenant", 7),
    "unicode": "naïve-ß-日本-🙂",
    "combining": "e\u0301",
    "2,000 characters": "x" * 2000,
    "2,000 wide characters": "日" * 2000,
    "just too long for a scope": "x" * 502,
    "control characters": "a\nb\tc\x01\x7f\x1b[0m",
    "invisible": "\u200b\u2028",
    "slashes": "a/../b",
    "like a scope": "langgraph/thread-1",
    "like a digest": "sha256:0",
    "SQL": "'; DROP TABLE langgraph_checkpoints; --",
    "pattern": "%_*?[a]",
    "blank": " ",
    "empty": "",
}
each_thread_id = pytest.mark.parametrize("thread_id", THREAD_IDS.values(), ids=list(THREAD_IDS))


@each_thread_id
def test_a_thread_may_have_any_id(saver: AgentCheckpointSaver, thread_id: Any) -> None:
    for other in (*THREAD_IDS.values(), "thread-1"):
        if str(other) != str(thread_id):
            Line(saver, other).put({"n": "another thread"})
    graph = chain(saver, saying("one"))
    config = {"configurable": {"thread_id": thread_id}}
    for _ in range(2):
        graph.invoke({"seen": ["start"]}, config)

    assert graph.get_state({"configurable": {"thread_id": str(thread_id)}}).values["seen"] == ["start", "one"] * 2
    assert len(list(saver.list(config))) == 6
    saver.delete_thread(thread_id)
    assert saver.get_tuple(config) is None
    assert len(saver.list_threads()) == len(THREAD_IDS)


@each_thread_id
def test_a_thread_of_any_id_is_fenced(saver: AgentCheckpointSaver, thread_id: Any) -> None:
    graph = chain(saver, saying("one"))
    with saver.lease(thread_id, owner="worker-a", in_context=False) as lease:
        config = lease.config({"configurable": {"thread_id": thread_id}})
        graph.invoke({"seen": ["start"]}, config)
        assert lease.thread_id == str(thread_id)
        with pytest.raises(LeaseHeldError):
            saver.delete_thread(thread_id)
        for other in THREAD_IDS.values():
            if str(other) != str(thread_id):
                Line(saver, other).put({"n": "another thread"})

    for late in (config, {"configurable": {"thread_id": thread_id}}):
        with pytest.raises(StaleLeaseError):
            graph.invoke({"seen": ["late"]}, late)
    assert graph.get_state({"configurable": {"thread_id": thread_id}}).values["seen"] == ["start", "one"]


@each_thread_id
def test_a_lease_of_a_thread_of_any_id_can_be_bound(saver: AgentCheckpointSaver, thread_id: Any) -> None:
    with saver.lease(thread_id, owner="worker-a", in_context=False) as lease:
        saver.bind(lease, thread_id)
        Line(saver, thread_id).put({"n": 1})
        saver.unbind(thread_id)
        with pytest.raises(StaleLeaseError):
            Line(saver, thread_id).put({"n": 2})

    assert values(saver.get_tuple(at(thread_id))) == {"n": 1}


@pytest.mark.parametrize("thread_id", [None, "a\0b", "\ud800"], ids=ascii)
def test_what_is_no_text_to_store_is_no_thread_id(saver: AgentCheckpointSaver, thread_id: Any) -> None:
    for call in (
        lambda: saver.get_tuple(at(thread_id)),
        lambda: Line(saver, thread_id).put({"n": 1}),
        lambda: saver.put_writes(at(thread_id, "id-1"), [("n", 1)], "task"),
        lambda: saver.delete_thread(thread_id),
        lambda: saver.lease(thread_id, owner="worker-a"),
    ):
        assert raised(InvalidInputError, call).field == "thread_id"
