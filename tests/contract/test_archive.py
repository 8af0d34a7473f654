"""What moving the older part of the audit log into a file promises, on every database."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import Event, Fence, InvalidInputError, NotFoundError, StaleLeaseError, StateStore, StorageError
from agent_checkpoint import archive as archives
from agent_checkpoint.archive import verify
from agent_checkpoint.errors import StorageBusyError
from agent_checkpoint.testing import FakeClock
from agent_checkpoint.times import rfc3339

ODD = "Ünï ☃ \U0001f600 \\ ' \""
EARLY = 12


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "archive.jsonl"


@pytest.fixture
def noon(store: StateStore, clock: FakeClock) -> datetime:
    """A log with events of two hours, and the time between them."""
    for number in range(EARLY - 1):
        store.put_checkpoint(ODD, number)
    clock.advance(3600)
    noon = datetime.fromtimestamp(clock.wall_ns() // 10**9, timezone.utc)
    for number in range(5):
        store.put_checkpoint("late", number)
    return noon


def whole(store: StateStore) -> list[Event]:
    return store.events(100_000, after="start")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def as_written(events: list[Event]) -> list[dict[str, Any]]:
    return [{**event._asdict(), "at": rfc3339(event.at)} for event in events]


def test_what_is_older_is_in_the_file_and_the_rest_in_the_log(store: StateStore, noon: datetime, file: Path) -> None:
    before = whole(store)
    archived = store.archive_events(noon, file)

    _, *events, _ = lines(file)
    for each in events:
        each.pop("sha256")
    assert events == as_written(before[:EARLY])
    assert whole(store)[:-1] == before[EARLY:]
    assert (archived.events, archived.from_cursor, archived.to_cursor) == (
        EARLY,
        before[0].cursor,
        before[EARLY - 1].cursor,
    )
    assert verify(str(file)) == archived
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.glob("*.partial")) == []


def test_the_log_says_what_went_where(store: StateStore, noon: datetime, file: Path) -> None:
    archived = store.archive_events(noon, file)

    last = store.events(1)[-1]
    assert (last.kind, last.detail) == (
        "events.archived",
        {
            "count": EARLY,
            "file": file.name,
            "from_cursor": archived.from_cursor,
            "to_cursor": archived.to_cursor,
            "sha256": archived.sha256,
        },
    )


def test_a_reader_goes_on_from_a_cursor_whose_event_is_gone(store: StateStore, noon: datetime, file: Path) -> None:
    before = whole(store)
    store.archive_events(noon, file)

    for event in before[:EARLY]:
        assert store.events(5, after=event.cursor) == before[EARLY:]
    assert store.events(2, after=before[-3].cursor) == before[-2:]


def test_the_last_event_stays_whatever_is_asked(store: StateStore, noon: datetime, file: Path) -> None:
    last = store.events(1)[-1]
    archived = store.archive_events(datetime.max.replace(tzinfo=timezone.utc), file)

    assert archived.events == EARLY + 4
    assert whole(store)[0] == last
    assert store.put_checkpoint("late", "more").sequence == 6
    assert store.events(1, after=last.cursor)[0].id > last.id


@pytest.mark.parametrize("years", [1, 1969, 1971])
def test_where_nothing_is_older_the_file_holds_nothing_and_the_log_stays(
    store: StateStore, noon: datetime, file: Path, years: int
) -> None:
    before = whole(store)
    archived = store.archive_events(datetime(years, 1, 1, tzinfo=timezone.utc), file)

    assert archived.events == 0
    assert verify(str(file)) == archived
    assert whole(store) == before


def test_an_event_of_that_very_microsecond_stays(store: StateStore, clock: FakeClock, file: Path) -> None:
    clock.advance(1_234.567891)
    store.put_checkpoint("deploy", 1)
    at = store.events(1)[-1].at
    store.put_checkpoint("deploy", 2)

    assert store.archive_events(at, file).events == 1
    assert store.archive_events(at + timedelta(microseconds=1), file.with_name("next")).events == 2


def test_a_file_that_is_there_is_left_as_it_is_and_so_is_the_log(store: StateStore, noon: datetime, file: Path) -> None:
    file.write_text("mine")
    before = whole(store)
    with pytest.raises(InvalidInputError, match="is there already"):
        store.archive_events(noon, file)

    assert (file.read_text(), whole(store)) == ("mine", before)


def test_a_folder_that_is_not_there_is_told_and_nothing_removed(store: StateStore, noon: datetime, file: Path) -> None:
    before = whole(store)
    with pytest.raises(StorageError, match="cannot be written: No such file") as failed:
        store.archive_events(noon, file.parent / "nowhere" / "archive.jsonl")

    assert failed.value.hint == "nothing was removed"
    assert whole(store) == before


@pytest.mark.parametrize("name", ["", "nul\0.jsonl", "surrogate\ud800.jsonl"])
def test_what_can_be_no_path_is_refused(store: StateStore, noon: datetime, name: str) -> None:
    before = whole(store)
    with pytest.raises(InvalidInputError) as refused:
        store.archive_events(noon, name)
    assert refused.value.field == "to"
    assert whole(store) == before
    with pytest.raises(InvalidInputError) as refused:
        verify(name)
    assert refused.value.field == "file"


def test_a_time_without_a_zone_is_refused(store: StateStore, file: Path) -> None:
    with pytest.raises(InvalidInputError, match="time zone"):
        store.archive_events(datetime(2030, 1, 1), file)


def test_nobody_else_removes_from_the_log_after_an_archive_either(
    store: StateStore, noon: datetime, file: Path
) -> None:
    store.archive_events(noon, file)
    for sql in ("DELETE FROM events", "UPDATE events SET kind = 'x'"):
        with (
            pytest.raises(StorageError, match="append-only"),
            store.transaction(component="test", action="test.x") as part,
        ):
            part.run(sql)


def test_of_two_archives_at_once_one_is_made_and_the_other_leaves_no_file(
    store: StateStore, noon: datetime, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "PAGE", 5)
    before = whole(store)
    second = file.with_name("second.jsonl")

    def meanwhile(_: int) -> None:
        if not second.exists():
            store.archive_events(noon, second)

    with pytest.raises(StorageBusyError, match="another archive"):
        store.archive_events(noon, file, meanwhile)

    assert [each.name for each in file.parent.glob("*.jsonl*")] == [second.name]
    assert verify(str(second)).events == EARLY
    assert whole(store)[:-1] == before[EARLY:]


def test_a_second_archive_goes_on_where_the_first_one_ended(store: StateStore, noon: datetime, file: Path) -> None:
    before = whole(store)
    first = store.archive_events(noon, file)
    second = store.archive_events(noon + timedelta(hours=1), file.with_name("second.jsonl"))

    (after,) = [event.cursor for event in before if event.id == before[EARLY].id]
    assert (first.to_cursor, second.from_cursor) == (before[EARLY - 1].cursor, after)


def test_a_file_that_is_not_there_is_not_found(file: Path) -> None:
    with pytest.raises(NotFoundError):
        verify(str(file))


def refuse(store: StateStore, times: int, number: int = 1) -> None:
    """So many late writes under one token."""
    for _ in range(times):
        with pytest.raises(StaleLeaseError):
            store.put_checkpoint("late", {}, lease=Fence("release", "worker-a", number))


def test_counters_of_refusals_that_count_no_more_go_with_the_older_part(
    store: StateStore, clock: FakeClock, file: Path
) -> None:
    store.acquire("release", "worker-b")
    # More than are read, or removed, at once.
    many = 1_200
    for number in range(many):
        refuse(store, 1, number + 2)
    refuse(store, 3)
    clock.advance(3600)
    refuse(store, 2, 2)  # one of them counts on
    archived = store.archive_events(datetime.fromtimestamp(clock.wall_ns() / 1e9, timezone.utc), file)

    assert archived.refusals == many
    assert verify(str(file)) == archived
    counters = [line for line in lines(file) if "times" in line]
    assert len(counters) == many
    (old,) = [line for line in counters if line["token"] == 1]
    assert (old["scope"], old["action"], old["reason"], old["times"]) == ("release", "checkpoint.put", "wrong-owner", 3)
    assert [(each.token, each.times) for each in store.status().refusals] == [(2, 3)]


def test_who_is_refused_again_after_that_is_on_record_again(store: StateStore, clock: FakeClock, file: Path) -> None:
    store.acquire("release", "worker-b")
    refuse(store, 2)
    clock.advance(3600)
    store.put_checkpoint("open", 1)
    store.archive_events(datetime.fromtimestamp(clock.wall_ns() / 1e9, timezone.utc), file)
    refuse(store, 2)

    assert [event.kind for event in whole(store)] == ["checkpoint.saved", "events.archived", "write.refused"]
    assert [each.times for each in store.status().refusals] == [2]


def test_what_is_counted_from_now_on_stays_whatever_time_is_given(
    store: StateStore, clock: FakeClock, file: Path
) -> None:
    store.acquire("release", "worker-b")
    refuse(store, 2)  # at this very moment
    store.archive_events(datetime(2100, 1, 1, tzinfo=timezone.utc), file)
    assert [each.times for each in store.status().refusals] == [2]
