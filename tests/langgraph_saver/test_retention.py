"""The rule of a store's retention policy that is ours: whole threads that nobody went on with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import AgentCheckpointError, StateStore, hookimpl
from agent_checkpoint.testing import FakeClock
from agent_checkpoint_langgraph import AgentCheckpointSaver, retention

from .conftest import at, checkpoint, rewrite, rows

RULE = "langgraph.thread_days"


@pytest.fixture
def saver(path: Path, clock: FakeClock) -> Iterator[AgentCheckpointSaver]:
    with StateStore(path, clock=clock, synchronous="normal") as store, AgentCheckpointSaver(store) as opened:
        opened.setup()
        store.set_retention(RULE, 30)
        yield opened


def saved(saver: AgentCheckpointSaver, thread: str, days_ago: float, number: int = 1, **where: Any) -> None:
    """Save a checkpoint in a thread that says of itself that it is so many days old."""
    now = datetime.fromtimestamp(FakeClock().wall_ns() // 10**9, timezone.utc)
    ts = (now - timedelta(days=days_ago)).isoformat()
    made = checkpoint(f"id-{number:04}", {"text": thread}, f"{number}", ts=ts)
    saver.put(at(thread, **where), made, {"source": "loop", "step": number, "parents": {}}, made["channel_versions"])


def threads(saver: AgentCheckpointSaver) -> set[str]:
    return {info.thread_id for info in saver.list_threads()}


def freed(saver: AgentCheckpointSaver, dry_run: bool = False) -> int:
    (rule,) = saver.store.apply_retention(dry_run)
    assert rule.rule == RULE
    return rule.removed


def test_a_thread_goes_whole_once_its_latest_checkpoint_is_older(path: Path, saver: AgentCheckpointSaver) -> None:
    saved(saver, "old", 31)
    saved(saver, "young", 29)
    saved(saver, "went on", 400)
    saved(saver, "went on", 1, number=2)

    assert freed(saver, dry_run=True) == 1
    assert threads(saver) == {"old", "young", "went on"}
    assert freed(saver) == 1
    assert threads(saver) == {"young", "went on"}
    assert len(list(saver.list(at("went on")))) == 2
    assert freed(saver) == 0
    for table in ("langgraph_values", "langgraph_state", "langgraph_histories"):
        assert rows(path, f"SELECT COUNT(*) FROM {table}")[0][0] == {"langgraph_histories": 2}.get(table, 3)


def test_what_a_subgraph_saved_last_keeps_its_thread(saver: AgentCheckpointSaver) -> None:
    saved(saver, "parent", 100)
    saved(saver, "parent", 1, number=2, namespace="child")
    assert freed(saver) == 0


def test_a_thread_that_somebody_has_stays(saver: AgentCheckpointSaver) -> None:
    saved(saver, "old", 31)
    for in_context in (False, True):
        with saver.lease("old", owner="worker-a", in_context=in_context):
            assert (freed(saver, dry_run=True), freed(saver)) == (0, 0)

    assert freed(saver) == 1


def test_a_thread_that_somebody_takes_just_now_stays(path: Path, saver: AgentCheckpointSaver) -> None:
    saved(saver, "old", 31)
    saver.store.release(*saver.store.acquire("langgraph/old", "worker-a").fence)
    with StateStore(path, plugins=[Takes(saver.store)], clock=FakeClock()) as store:
        assert retention.apply(store, 30, False) == 0

    assert threads(saver) == {"old"}


class Takes:
    """Takes the thread as soon as somebody is about to change it."""

    def __init__(self, store: StateStore) -> None:
        self.store = store

    @hookimpl
    def check_fence(self, write: Any) -> None:
        taking = threading.Thread(target=self.store.acquire, args=(write.workflow, "worker-b"))
        taking.start()
        taking.join()


def test_a_thread_that_was_never_leased_is_free_for_everybody_afterwards(saver: AgentCheckpointSaver) -> None:
    saved(saver, "old", 31)
    assert freed(saver) == 1
    saved(saver, "old", 0)
    assert threads(saver) == {"old"}


def test_a_thread_whose_age_cannot_be_read_stays(
    path: Path, saver: AgentCheckpointSaver, caplog: pytest.LogCaptureFixture
) -> None:
    saved(saver, "old", 31)
    saved(saver, "strange", 31)
    rewrite(path, "UPDATE langgraph_checkpoints SET kind = 'sealed' WHERE history = 2")

    assert freed(saver) == 1
    assert threads(saver) == {"strange"}
    assert "'strange' stays" in caplog.text


def test_a_store_that_no_saver_used_gets_no_tables(path: Path, clock: FakeClock) -> None:
    with StateStore(path, clock=clock) as store:
        store.initialize()
        store.set_retention(RULE, 1)
        assert [each.removed for each in store.apply_retention()] == [0]

    assert rows(path, "SELECT COUNT(*) FROM sqlite_schema WHERE name LIKE 'langgraph%'") == [(0,)]


def test_a_rule_that_fails_keeps_no_other_from_being_applied(
    tmp_path: Path, saver: AgentCheckpointSaver, clock: FakeClock
) -> None:
    saved(saver, "old", 31)
    folder = tmp_path / "archive"
    folder.mkdir()
    saver.store.set_retention("events.archive_to", str(folder))
    saver.store.set_retention("events.days", 0)  # comes before ours
    folder.rmdir()
    clock.advance(60)

    with pytest.raises(AgentCheckpointError) as failed:
        saver.store.apply_retention()
    assert failed.value.facts["retention"] == "events.days"
    assert threads(saver) == set()
