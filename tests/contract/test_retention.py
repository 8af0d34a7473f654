"""What the policy of what is kept promises, on every database."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import InvalidInputError, StateStore, retention
from agent_checkpoint.archive import verify
from agent_checkpoint.testing import FakeClock

WATCHDOG_SECONDS = 60
DAY = 86_400


def policy(store: StateStore, **rules: Any) -> None:
    for rule, value in rules.items():
        store.set_retention(rule.replace("__", "."), value)


def freed(store: StateStore, dry_run: bool = False) -> dict[str, int]:
    return {each.rule: each.removed for each in store.apply_retention(dry_run)}


def test_without_rules_nothing_is_removed(store: StateStore) -> None:
    assert store.retention() == {}
    assert store.apply_retention() == []


def test_each_change_of_a_rule_is_on_record_once(store: StateStore) -> None:
    for value in (5, 5, 7, None):
        store.set_retention("checkpoints.keep_last", value)

    changes = [event.detail for event in store.events(kind="store.retention-set")]
    assert [(each["previous"], each["value"]) for each in changes] == [(None, 5), (5, 7), (7, None)]
    assert store.retention() == {}


def test_the_last_checkpoints_of_each_workflow_stay(store: StateStore) -> None:
    for number in range(10):
        store.put_checkpoint("deploy", number)
    store.put_checkpoint("small", 1)
    policy(store, checkpoints__keep_last=3)

    assert freed(store, dry_run=True) == {"checkpoints.keep_last": 7}
    assert len(store.checkpoint_history("deploy")) == 10
    assert freed(store) == {"checkpoints.keep_last": 7}
    assert [each.sequence for each in store.checkpoint_history("deploy")] == [10, 9, 8]
    assert freed(store) == {"checkpoints.keep_last": 0}


def test_older_events_go_into_a_file_of_the_folder(store: StateStore, clock: FakeClock, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    policy(store, events__days=30, events__archive_to=str(folder))
    clock.advance(31 * DAY)
    store.put_checkpoint("deploy", 1)

    assert freed(store, dry_run=True) == {"events.days": 3}
    assert list(folder.iterdir()) == []
    (made,) = store.apply_retention()
    (file,) = folder.iterdir()
    assert (made.removed, made.archive) == (3, str(file))
    assert verify(str(file)).events == 3
    assert [event.kind for event in store.events()] == ["checkpoint.saved", "events.archived"]
    assert freed(store) == {"events.days": 0}
    assert list(folder.iterdir()) == [file]


def test_however_often_it_is_applied_there_is_a_file_a_day_at_most(
    store: StateStore, clock: FakeClock, tmp_path: Path
) -> None:
    policy(store, events__days=1, events__archive_to=str(tmp_path))
    for _ in range(4 * 24):
        clock.advance(3600)
        store.put_checkpoint("deploy", 1)
        store.apply_retention()

    files = sorted(tmp_path.glob("*.jsonl"))
    assert [file.name[:26] for file in files] == [f"events-before-2030010{day}T000" for day in (2, 3, 4)]
    assert len(store.events(1_000, after="start")) <= 2 * 24 + 4


def test_stores_may_share_a_folder(store: StateStore, clock: FakeClock, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    folder.mkdir()
    with StateStore(tmp_path / "other.db", clock=clock) as other:
        other.initialize()
        for each in (store, other):
            policy(each, events__days=30, events__archive_to=str(folder))
        clock.advance(31 * DAY)
        for each in (store, other):
            each.put_checkpoint("deploy", 1)

        assert [freed(each) for each in (store, other)] == [{"events.days": 3}] * 2
    stem = "events-before-20300102T000000.000000Z"
    assert sorted(file.name for file in folder.iterdir()) == [f"{stem}-1.jsonl", f"{stem}.jsonl"]
    assert [verify(str(file)).events for file in folder.iterdir()] == [3, 3]


def test_a_file_whose_archive_was_killed_before_it_was_on_record_stays_as_it_is(
    store: StateStore, clock: FakeClock, tmp_path: Path
) -> None:
    policy(store, events__days=30, events__archive_to=str(tmp_path))
    clock.advance(31 * DAY)
    store.put_checkpoint("deploy", 1)
    left_behind = tmp_path / "events-before-20300102T000000.000000Z.jsonl"
    left_behind.write_text("whole, and noted nowhere")

    (made,) = store.apply_retention()
    assert made.archive == str(left_behind.with_name(f"{left_behind.stem}-1.jsonl"))
    assert left_behind.read_text() == "whole, and noted nowhere"


def test_an_idle_store_may_have_two_files_of_a_day_and_no_more(
    store: StateStore, clock: FakeClock, tmp_path: Path
) -> None:
    policy(store, events__days=30, events__archive_to=str(tmp_path))
    clock.advance(40 * DAY)
    # The last event stays, until that of the archive is behind it.
    assert [freed(store)["events.days"] for _ in range(4)] == [2, 1, 0, 0]
    assert len(list(tmp_path.glob("events-before-20300111T*.jsonl"))) == 2


def test_events_without_a_folder_stay(store: StateStore, clock: FakeClock) -> None:
    policy(store, events__days=0)
    store.put_checkpoint("deploy", 1)
    with pytest.raises(InvalidInputError, match=r"events\.archive_to: is not set"):
        store.apply_retention()

    assert len(store.events()) == 3


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("checkpoints.keep_last", 0),
        ("checkpoints.keep_last", True),
        ("checkpoints.keep_last", 1.5),
        ("events.days", -1),
        ("events.days", 1e300),
        ("events.days", float("nan")),
        ("events.days", "30"),
        ("events.archive_to", "relative"),
        ("events.archive_to", "/nowhere/at/all"),
        ("events.archive_to", 5),
        ("holders", 1),
        ("nonsense", 1),
        ("", 1),
        ("checkpoints.keep_last", [1]),
    ],
)
def test_a_rule_that_is_none_and_a_value_that_breaks_one_are_refused(
    store: StateStore, rule: str, value: object
) -> None:
    with pytest.raises(InvalidInputError):
        store.set_retention(rule, value)

    assert store.retention() == {}


def test_a_rule_that_is_none_is_not_forgotten_either(store: StateStore) -> None:
    with pytest.raises(InvalidInputError, match=r"no rule 'checkpoint\.keep_last'"):
        store.set_retention("checkpoint.keep_last", None)


def test_the_rule_of_an_adapter_that_is_gone_can_be_forgotten(
    store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapter-1.dist-info").mkdir()
    (tmp_path / "adapter-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: adapter\nVersion: 1\n")
    entry = f"[{retention.GROUP}]\nadapter.days = builtins:print\n"
    (tmp_path / "adapter-1.dist-info/entry_points.txt").write_text(entry)
    with monkeypatch.context() as installed:
        installed.syspath_prepend(tmp_path)
        store.set_retention("adapter.days", 30)

    assert store.set_retention("adapter.days", None) == {}


@pytest.fixture
def adapters_rule() -> str:
    pytest.importorskip("agent_checkpoint_langgraph", reason="a rule of an adapter's package")
    return "langgraph.thread_days"


@pytest.mark.parametrize("days", [0, -1, -1e300, 1e300])
def test_days_of_an_adapters_rule_are_more_than_0_and_no_more_than_a_life(
    store: StateStore, adapters_rule: str, days: float
) -> None:
    with pytest.raises(InvalidInputError, match="days"):
        store.set_retention(adapters_rule, days)


def test_doctor_tells_growth_policy_and_what_it_would_remove(
    store: StateStore, clock: FakeClock, tmp_path: Path
) -> None:
    store.put_checkpoint("deploy", 1)
    clock.advance(2 * DAY)
    store.put_checkpoint("deploy", 2)
    policy(store, checkpoints__keep_last=1, events__days=1, events__archive_to=str(tmp_path))

    (growth,) = [check for check in store.doctor() if check.check == "growth"]
    told = growth.value
    assert (told["checkpoints_a_day"], told["events_a_day"]) == (1, 4)
    assert told["policy"]["checkpoints.keep_last"] == 1
    # The first checkpoint; and what initialized the store and saved it.
    assert told["would_remove"] == {"checkpoints.keep_last": 1, "events.days": 2}
    assert {freed.rule: freed.removed for freed in store.apply_retention(dry_run=True)} == told["would_remove"]


# Holders


def applied(store: StateStore) -> None:
    """What the heart asks for now and then, to its end."""
    store._keep_house()
    for thread in threading.enumerate():
        if thread.name == "agent-checkpoint-retention":
            thread.join(WATCHDOG_SECONDS)


def left(store: StateStore) -> int:
    return len(store.checkpoint_history("deploy"))


def test_holders_apply_it_only_where_it_says_so_and_not_all_the_time(store: StateStore, clock: FakeClock) -> None:
    for number in range(5):
        store.put_checkpoint("deploy", number)
    policy(store, checkpoints__keep_last=2)
    applied(store)
    assert left(store) == 5

    policy(store, holders=True)
    applied(store)
    assert left(store) == 2
    store.put_checkpoint("deploy", "more")
    applied(store)
    assert left(store) == 3
    clock.advance(retention.HOLDERS_EVERY_NS / 1e9)
    applied(store)
    assert left(store) == 2


def test_what_a_holder_cannot_apply_is_logged(store: StateStore, caplog: pytest.LogCaptureFixture) -> None:
    policy(store, events__days=0, holders=True)
    with caplog.at_level(logging.WARNING):
        applied(store)

    assert "the retention policy could not be applied" in caplog.text
