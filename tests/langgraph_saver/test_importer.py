"""What an import brings over: all of it, once, and as often as one likes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send

from agent_checkpoint_langgraph import AgentCheckpointSaver, importer
from agent_checkpoint_langgraph.importer import ImportReport, import_threads
from agent_checkpoint_langgraph.sqlitefile import SqliteFile

from .conftest import WATCHDOG_SECONDS, Line, at, checkpoint, ids, rewrite, rows, values
from .graphs import STORIES, Calls, Story, thread
from .old_files import assert_same, everything, filled, stock

VALUES_OF_CHANNEL = "SELECT COUNT(*) FROM langgraph_values WHERE channel = ?"
EVENTS_OF_KIND = "SELECT COUNT(*) FROM events WHERE kind = ?"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old?#%.sqlite"


@pytest.fixture
def told_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told after each commit."""
    monkeypatch.setattr(importer, "TELL_SECONDS", 0)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_every_tuple_of_a_run_is_the_same_after_the_import(
    old: Path, saver: AgentCheckpointSaver, story: Story
) -> None:
    with stock(old) as theirs:
        graph, threads = story(theirs, Calls("sync"))
        before = [list(graph.get_state_history(thread(name))) for name in threads]
        import_threads(saver, old)
        graph.checkpointer = saver

        assert [list(graph.get_state_history(thread(name))) for name in threads] == before
    assert_same(old, saver)


def test_a_run_goes_on_where_the_imported_one_stopped(old: Path, saver: AgentCheckpointSaver) -> None:
    def answer(state: MessagesState) -> Any:
        return {"messages": [AIMessage(f"{len(state['messages'])}", id=f"a{len(state['messages'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    with stock(old) as theirs:
        builder.compile(checkpointer=theirs).invoke({"messages": [HumanMessage("hello", id="h")]}, thread())
    import_threads(saver, old)
    assert_same(old, saver)

    done = builder.compile(checkpointer=saver).invoke({"messages": [HumanMessage("more", id="i")]}, thread())

    assert [message.content for message in done["messages"]] == ["hello", "1", "more", "3"]


def test_the_report_and_the_last_progress_say_how_much_there_was(old: Path, saver: AgentCheckpointSaver) -> None:
    told: list[tuple[int, int]] = []
    filled(old, "a", "b")

    report = import_threads(saver, old, on_progress=lambda done, total: told.append((done, total)))

    assert report == ImportReport(threads=2, checkpoints=6, writes=12)
    assert told[-1] == (6, 6)


@pytest.mark.usefixtures("told_always")
def test_progress_only_grows(old: Path, saver: AgentCheckpointSaver) -> None:
    told: list[tuple[int, int]] = []
    import_threads(saver, filled(old, "a", "b", count=150), on_progress=lambda *both: told.append(both))

    assert told == sorted(told)
    assert len(told) > 3
    assert {total for _, total in told} == {300}


def test_a_file_without_threads_is_imported_as_nothing(old: Path, saver: AgentCheckpointSaver) -> None:
    told: list[tuple[int, int]] = []
    with stock(old) as theirs:
        theirs.setup()

    assert import_threads(saver, old, on_progress=lambda *both: told.append(both)) == ImportReport(0, 0, 0)
    assert told == [(0, 0)]


def test_a_value_that_stays_is_stored_once_and_a_growing_one_as_differences(
    old: Path, saver: AgentCheckpointSaver, path: Path
) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        for number in range(40):
            line.put({"stays": "s" * 5_000, "grows": [f"{each:0500}" for each in range(number + 1)]})
    import_threads(saver, old)

    assert rows(path, VALUES_OF_CHANNEL, "stays") == [(1,)]
    assert rows(path, VALUES_OF_CHANNEL, "grows") == [(40,)]
    (stored,) = rows(path, "SELECT SUM(LENGTH(data)) FROM langgraph_values WHERE channel = 'grows'")[0]
    assert stored < 5 * 40 * 500
    assert_same(old, saver)


def test_a_branch_builds_on_its_own_parent(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        root = line.put({"text": "t" * 9_000, "n": 0}, checkpoint_id="id-1")
        line.put({"text": "another", "n": 1}, checkpoint_id="id-2")
        line.put({"text": "t" * 9_000, "n": 2}, checkpoint_id="id-3", on=root)
    import_threads(saver, old)

    assert rows(path, "SELECT COUNT(*) FROM langgraph_values WHERE LENGTH(data) > 5000") == [(1,)]
    assert_same(old, saver)


def test_a_channel_without_a_value_of_its_own_does_not_get_its_parents(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        first = theirs.put(at(), checkpoint("id-1", {"a": 1, "b": 2}, "1"), {}, {})
        second = checkpoint("id-2", {"a": 1}, "1")
        second["channel_versions"]["b"] = "1"
        theirs.put(first, second, {}, {})
    import_threads(saver, old)

    assert values(saver.get_tuple(at(checkpoint_id="id-2"))) == {"a": 1}
    assert_same(old, saver)


def test_parents_come_before_children_whatever_their_ids_are(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        for name in ("m", "z", "a", "k"):
            line.put({"name": name}, checkpoint_id=name)
    import_threads(saver, old)

    assert ids(saver.list(at())) == ["k", "a", "z", "m"]


def test_checkpoints_that_are_each_others_parents_are_imported(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        for parent, name in (("b", "a"), ("a", "b"), ("gone", "c")):
            theirs.put(at(checkpoint_id=parent), checkpoint(name, {"name": name}, "1"), {}, {"name": "1"})
    import_threads(saver, old)

    assert everything(saver) != []
    with stock(old) as theirs:
        assert everything(saver) == everything(theirs)


def test_the_thread_that_was_saved_last_is_the_last_one_here_too(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        lines = {name: Line(theirs, name) for name in ("b", "c", "a")}
        for number, name in enumerate(["c", "a", "b", "a", "c", "b"]):
            lines[name].put({"n": number}, checkpoint_id=f"id-{number}")
    import_threads(saver, old)

    assert [each.thread_id for each in saver.list_threads()] == ["b", "c", "a"]


def test_writes_whose_checkpoint_is_not_there_are_imported(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        theirs.put_writes(at(checkpoint_id="id-1"), [("n", "early")], "task", "~path")
    assert import_threads(saver, old) == ImportReport(1, 0, 1)

    saver.put(at(), checkpoint("id-1", {}, "1"), {}, {})
    found = saver.get_tuple(at())

    assert found is not None
    assert found.pending_writes == [("task", "n", "early")]


def test_a_file_from_before_task_paths_is_imported(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a")
    rewrite(old, "ALTER TABLE writes DROP COLUMN task_path")
    import_threads(saver, old)

    assert "task_path" not in {name for (name,) in rows(old, "SELECT name FROM pragma_table_info('writes')")}
    assert_same(old, saver)


def test_what_was_sent_before_format_4_is_found_in_the_state(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        parent = theirs.put(at(), checkpoint("id-1", {}, "1", v=1), {}, {})
        theirs.put_writes(parent, [("__pregel_tasks", Send("work", "x"))], "task")
        theirs.put(parent, checkpoint("id-2", {"n": 1}, "1", v=1, pending_sends=[]), {}, {"n": "1"})
    import_threads(saver, old)

    assert values(saver.get_tuple(at())) == {"n": 1, "__pregel_tasks": [Send("work", "x")]}


def test_metadata_comes_over_but_for_what_is_denied(old: Path, saver: AgentCheckpointSaver) -> None:
    with stock(old) as theirs:
        Line(theirs).put({"n": 1}, score=float("nan"), name="näme", openai_api_key="sk-1", deep={"a": [1, None]})
    import_threads(saver, old)

    (found,) = saver.list(at(), filter={"name": "näme"})
    assert found.metadata["deep"] == {"a": [1, None]}
    assert str(found.metadata["score"]) == "nan"
    assert "openai_api_key" not in found.metadata


def test_each_checkpoint_has_its_event(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    import_threads(saver, filled(old, "a", "b"))

    assert rows(path, EVENTS_OF_KIND, "langgraph.checkpoint-saved") == [(6,)]
    assert rows(path, EVENTS_OF_KIND, "langgraph.writes-saved") == [(6,)]
    assert rows(path, EVENTS_OF_KIND, "langgraph.thread-imported") == [(2,)]


def test_a_second_import_changes_nothing(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    counts = """SELECT (SELECT COUNT(*) FROM events), (SELECT COUNT(*) FROM langgraph_values), COUNT(*)
    FROM langgraph_checkpoints"""
    first = import_threads(saver, filled(old, "a", "b"))
    before = rows(path, counts)

    assert import_threads(saver, old) == first
    assert rows(path, counts) == before
    assert_same(old, saver)


def test_what_came_since_is_brought_by_the_next_import(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        for number in range(20):
            line.put({"stays": "s" * 5_000, "n": number})
            theirs.put_writes(line.head, [("__interrupt__", number)], "task")
            if number in (0, 10, 11, 19):
                import_threads(saver, old)
        theirs.put_writes(line.head, [("__interrupt__", "another")], "task")
    import_threads(saver, old)

    assert rows(path, VALUES_OF_CHANNEL, "stays") == [(1,)]
    assert_same(old, saver)


def test_a_thread_that_went_on_here_goes_on(old: Path, saver: AgentCheckpointSaver) -> None:
    import_threads(saver, filled(old, "a"))
    saver.put(at("a", "a-0002"), checkpoint("b-0003", {"n": "here"}, "9"), {}, {"n": "9"})

    import_threads(saver, old)

    assert values(saver.get_tuple(at("a"))) == {"n": "here"}


def test_the_file_is_read_while_a_writer_has_all_in_its_log_and_stays_as_it_is(
    old: Path, saver: AgentCheckpointSaver
) -> None:
    with stock(old) as theirs:
        theirs.conn.execute("PRAGMA wal_autocheckpoint = 0")
        Line(theirs).put_many(5)
        theirs.conn.execute("BEGIN IMMEDIATE")  # a writer in the middle of something
        log = Path(f"{old}-wal")
        before = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (old, log)]

        assert import_threads(saver, old).checkpoints == 5
        assert [hashlib.sha256(file.read_bytes()).hexdigest() for file in (old, log)] == before
        theirs.conn.rollback()


@pytest.mark.usefixtures("told_always")
def test_what_is_written_to_the_file_during_the_import_is_for_the_next_one(
    old: Path, saver: AgentCheckpointSaver
) -> None:
    filled(old, "a", count=150)
    with stock(old) as theirs:
        line = Line(theirs, "a")

        def go_on(done: int, total: int) -> None:
            line.put({"n": done}, checkpoint_id=f"z-{done:04}")
            theirs.put_writes(at("a", "a-0149"), [("n", done)], f"task-{done}")

        assert import_threads(saver, old, on_progress=go_on) == ImportReport(1, 150, 300)
        assert import_threads(saver, old).checkpoints > 150
    assert_same(old, saver)


DYING = """
import os, signal, sys
from agent_checkpoint_langgraph import AgentCheckpointSaver, importer
importer.TELL_SECONDS = 0
with AgentCheckpointSaver.from_conn_string(sys.argv[2]) as saver:
    importer.import_threads(saver, sys.argv[1], on_progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_an_import_that_died_half_way_is_completed_by_the_next_one(
    old: Path, saver: AgentCheckpointSaver, path: Path
) -> None:
    filled(old, "a", count=150)
    with subprocess.Popen([sys.executable, "-c", DYING, os.fspath(old), os.fspath(path)]) as dying:
        assert dying.wait(WATCHDOG_SECONDS) == -signal.SIGKILL
    assert 0 < len(everything(saver)) < 150

    import_threads(saver, old)

    assert_same(old, saver)


@pytest.mark.usefixtures("told_always")
def test_an_import_goes_on_when_somebody_deletes_what_it_saved(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a", count=150)
    deleted: list[int] = []

    def delete_once(done: int, total: int) -> None:
        if not deleted:
            deleted.append(done)
            saver.delete_thread("a")

    import_threads(saver, old, on_progress=delete_once)
    assert len(everything(saver)) == 150 - deleted[0]


def test_an_import_into_the_file_of_a_saver_in_use_is_seen_by_it(old: Path, saver: AgentCheckpointSaver) -> None:
    assert saver.get_tuple(at("a")) is None
    import_threads(saver, filled(old, "a"))

    assert values(saver.get_tuple(at("a")))["n"] == 2


def test_a_file_in_a_folder_that_cannot_be_written_is_imported(old: Path, tmp_path: Path) -> None:
    filled(old, "a")
    read_only = tmp_path / "read-only"
    read_only.mkdir()
    old.rename(read_only / "old.sqlite")
    read_only.chmod(0o555)

    def count() -> int:
        with closing(SqliteFile(read_only / "old.sqlite")) as file:
            return file.count()

    try:
        assert as_somebody_else(tmp_path, count) == 3
        assert [file.name for file in read_only.iterdir()] == ["old.sqlite"]
    finally:
        read_only.chmod(0o755)


def as_somebody_else(folder: Path, call: Callable[[], int]) -> int:
    """What a call gives in a process that is not root's: root may write everywhere."""
    if os.geteuid() != 0:
        return call()
    modes = {each: each.stat().st_mode for each in (folder, *folder.parents)}
    closed = {each: mode for each, mode in modes.items() if not mode & 0o001}
    try:
        for each, mode in closed.items():
            each.chmod(mode | 0o011)
        return in_child_of_nobody(call)
    finally:
        for each, mode in closed.items():
            each.chmod(mode)


def in_child_of_nobody(call: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        status = 255
        try:
            os.setuid(65534)
            status = call()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
