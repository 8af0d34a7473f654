"""The saver on a PostgreSQL server: how it is opened, and what is another thing there than in a file."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests import postgres

from agent_checkpoint import InvalidInputError, StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver
from agent_checkpoint_langgraph.deploy import create_checkpointer

from .conftest import Line, at, fresh_url, ids, raised, values
from .graphs import chain, saying
from .test_conformance import command
from .test_metadata import ODD
from .test_thread_ids import THREAD_IDS
from .test_values import text

pytestmark = [
    pytest.mark.skipif(not postgres.is_installed(), reason="its package is not installed"),
    pytest.mark.usefixtures("unmeasured"),
]

COMPRESSED = "SELECT COUNT(*) FROM langgraph_values WHERE pg_column_compression(data) IS NOT NULL"
# The rows of the saver's own tables, with what is stored outside of them.
SIZE = """
SELECT SUM(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = current_schema() AND c.relkind = 'r' AND c.relname LIKE 'langgraph%'
"""


@pytest.fixture
def database() -> str:
    return "postgresql"


@pytest.fixture
def url() -> str:
    return fresh_url()


def number(saver: AgentCheckpointSaver, sql: str) -> int:
    with saver.store.read() as reader:
        return int(reader.rows(sql)[0][0])


# Opening


def test_it_is_opened_by_a_url_and_keeps_what_was_saved(url: str) -> None:
    with AgentCheckpointSaver.from_conn_string(url) as saver:
        chain(saver, saying("one")).invoke({"seen": ["start"]}, at())

    async def read() -> Any:
        async with AgentCheckpointSaver.from_conn_string(url) as again:
            return await again.aget_tuple(at())

    assert values(asyncio.run(read()))["seen"] == ["start", "one"]


def test_a_langgraph_server_gets_one_by_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_CHECKPOINT_DB", url)

    async def run() -> Any:
        async with create_checkpointer() as saver:
            await chain(saver, saying("one")).ainvoke({"seen": ["start"]}, at())
            return await saver.aget_tuple(at())

    assert values(asyncio.run(run()))["seen"] == ["start", "one"]


def test_prepared_statements_change_nothing() -> None:
    with AgentCheckpointSaver.from_conn_string(fresh_url("prepared_statements=on")) as saver:
        messages: list[str] = []
        for count in range(30):
            messages.append(text(300))
            Line(saver).put({"messages": messages}, f"id-{count:02}", on=at(checkpoint_id=f"id-{count - 1:02}"))
        found = [values(each)["messages"] for each in saver.list(at())]

    assert found == [messages[:count] for count in range(30, 0, -1)]


def test_the_command_checks_one_by_its_url(url: str) -> None:
    done = command("conformance", "--db", url)

    assert done.returncode == 0, done.stderr
    assert "Result: FULL (8/8)" in done.stdout
    assert "❌" not in done.stdout


# What is stored


def test_a_thread_may_have_any_id(saver: AgentCheckpointSaver) -> None:
    for thread_id in THREAD_IDS.values():
        with saver.lease(thread_id):
            Line(saver, thread_id).put({"n": 1})
        with pytest.raises(StaleLeaseError):
            Line(saver, thread_id).put({"n": 2})

    for thread_id in THREAD_IDS.values():
        assert values(saver.get_tuple(at(thread_id))) == {"n": 1}
    assert {each.thread_id for each in saver.list_threads()} == {str(thread_id) for thread_id in THREAD_IDS.values()}


def test_metadata_may_be_anything_anywhere(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for odd in ODD.values():
        for key in ("odd", "run_id", "source", "step", "parents"):
            line.put({"n": 1}, user="ann", **{key: odd()})
    saver.copy_thread("thread-1", "copy")
    saver.prune(["copy"], keep_last=5)

    assert len(ids(saver.list(at(), filter={"user": "ann"}))) == 5 * len(ODD)
    assert len(ids(saver.list(at("copy")))) == 5


BAD_TEXTS = ["a\0b", "half \ud800"]


@pytest.mark.parametrize("bad", BAD_TEXTS, ids=["NUL", "half a surrogate pair"])
def test_text_that_cannot_be_stored_is_refused_by_its_name(saver: AgentCheckpointSaver, bad: str) -> None:
    head = Line(saver).put({"n": 1})
    calls = {
        "thread_id": lambda: Line(saver, bad).put({"n": 1}),
        "checkpoint_ns": lambda: Line(saver, namespace=bad).put({"n": 1}),
        "checkpoint_id": lambda: saver.get_tuple(at(checkpoint_id=bad)),
        "checkpoint id": lambda: Line(saver).put({"n": 1}, bad),
        "channel": lambda: Line(saver).put({bad: 1}),
        "task_id": lambda: saver.put_writes(head, [("n", 1)], bad),
        "task_path": lambda: saver.put_writes(head, [("n", 1)], "task", bad),
        "run_id": lambda: saver.delete_for_runs([bad]),
    }

    assert {field: raised(InvalidInputError, call).field for field, call in calls.items()} == {
        field: field for field in calls
    }
    assert ids(saver.list(at(), filter={"source": bad, "run_id": bad})) == []
    assert len(saver.list_threads()) == 1


# Space


def test_a_growing_list_costs_its_growth(saver: AgentCheckpointSaver) -> None:
    messages: list[str] = []
    line = Line(saver)
    for _ in range(200):
        messages.append(text(1000))
        line.put({"messages": messages})

    found = [each.checkpoint["channel_values"]["messages"] for each in saver.list(at())]
    assert found == [messages[:count] for count in range(200, 0, -1)]
    assert number(saver, SIZE) < 1_500_000


def test_what_is_compressible_is_compressed_by_the_server(saver: AgentCheckpointSaver) -> None:
    Line(saver).put({"messages": ["the same again"] * 2_000})

    assert number(saver, COMPRESSED) == 1
