"""A saver that is open goes on when a backup is put in place of the store under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import pytest
from langgraph.constants import START
from langgraph.graph import StateGraph

from agent_checkpoint import StateStore
from agent_checkpoint_langgraph import AgentCheckpointSaver

# Long enough to be stored as the difference to the one before.
LONG = "a long text that changes little; " * 100


class Story(TypedDict):
    chapter: int
    text: str


class Author:
    """A graph that adds a chapter each time it runs, with one saver for all its life."""

    def __init__(self, store: StateStore) -> None:
        builder = StateGraph(Story)
        builder.add_node("write", lambda state: {"chapter": state["chapter"] + 1, "text": state["text"] + "."})
        builder.add_edge(START, "write")
        self._graph: Any = builder.compile(checkpointer=AgentCheckpointSaver(store))

    def write(self, thread: str, story: Story | None) -> dict[str, Any]:
        config = {"configurable": {"thread_id": thread}}
        self._graph.invoke(story or self.read(thread), config)
        return self.read(thread)

    def read(self, thread: str) -> dict[str, Any]:
        return dict(self._graph.get_state({"configurable": {"thread_id": thread}}).values)


@pytest.fixture
def author(store: StateStore) -> Author:
    return Author(store)


def test_threads_go_back_and_go_on_from_there(store: StateStore, author: Author, tmp_path: Path) -> None:
    first = author.write("before", {"chapter": 0, "text": LONG})
    store.backup(tmp_path / "backup.db")
    for _ in range(3):
        author.write("before", None)
    author.write("since", {"chapter": 0, "text": LONG.upper()})

    store.restore(tmp_path / "backup.db")
    assert author.read("before") == first
    assert author.read("since") == {}
    # In another order than before, so that a number which was given again would be another's row.
    assert author.write("since", {"chapter": 5, "text": LONG[::-1]}) == {"chapter": 6, "text": f"{LONG[::-1]}."}
    assert author.write("before", None) == {"chapter": 2, "text": f"{LONG}.."}


def test_a_backup_from_before_the_first_thread_is_brought_up_to_date(
    tmp_path: Path, store: StateStore, author: Author
) -> None:
    with StateStore(tmp_path / "empty.db") as empty:
        empty.initialize()
        empty.backup(tmp_path / "backup.db")
    author.write("before", {"chapter": 0, "text": LONG})

    store.restore(tmp_path / "backup.db")
    assert author.read("before") == {}
    assert author.write("before", {"chapter": 0, "text": LONG})["chapter"] == 1
