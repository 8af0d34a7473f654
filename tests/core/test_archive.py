"""Archives that a lock or a full disk is in the way of; what every database promises: tests/contract."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

import pytest

from agent_checkpoint import Event, StateStore, StorageError, hookimpl
from agent_checkpoint.archive import verify

from .conftest import held
from .test_cli_disks import needs_mounts, on_a_small_disk

LATER = datetime(2100, 1, 1, tzinfo=timezone.utc)


class Blocks:
    """A plugin that lets another process sit on the write lock once the file is on record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.until = ExitStack()

    @hookimpl
    def event_recorded(self, event: Event) -> None:
        if event.kind == "events.archived":
            self.until.enter_context(held(self.path))


def test_a_lock_that_is_held_while_events_are_removed_leaves_a_file_that_is_whole(path: Path, tmp_path: Path) -> None:
    blocks = Blocks(path)
    with StateStore(path, busy_timeout_seconds=0.05, plugins=[blocks]) as store, blocks.until:
        store.initialize()
        for number in range(3):
            store.put_checkpoint("deploy", number)
        with pytest.raises(StorageError, match=r"first\.jsonl is whole and on record, but not all") as failed:
            store.archive_events(LATER, tmp_path / "first.jsonl")

    # Not busy: the same call again would find the file there.
    assert (failed.value.code, failed.value.retryable) == ("storage", False)
    first = verify(str(tmp_path / "first.jsonl"))
    with StateStore(path) as store:
        second = store.archive_events(LATER, tmp_path / "second.jsonl")
        assert [event.kind for event in store.events(after="start")] == ["events.archived"] * 2
    assert (first.events, second.events, second.from_cursor) == (3, 4, first.from_cursor)


@needs_mounts
def test_a_disk_without_room_for_the_file_is_storage_full_and_nothing_is_removed(tmp_path: Path) -> None:
    answers = on_a_small_disk(
        tmp_path,
        """
elsewhere = os.path.join(disk, "..", "elsewhere.db")
archive = ("events", "archive", "--before", "2100-01-01", "--to", os.path.join(disk, "archive.jsonl"))
command("init", "init", database=elsewhere)
command("put", "checkpoint", "put", "w", "--data", "1", database=elsewhere)
fill_up()
command("full", *archive, database=elsewhere)
results["left"] = [0, json.dumps(os.listdir(disk)), ""]
free()
command("room", *archive, database=elsewhere)
os.remove(elsewhere)
""",
    )
    assert (answers["full"].status, answers["full"].error()["code"]) == (74, "storage-full")
    assert answers["full"].error()["hint"] == "nothing was removed"
    assert answers["left"].value() == ["filler"]
    assert answers["room"].value()["events"] == 1
