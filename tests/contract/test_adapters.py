"""What adapters build on: own tables, written in the store's one commit under its fence."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_checkpoint import (
    FencedWrite,
    InvalidInputError,
    Lease,
    NewerSchemaError,
    Part,
    ReentrancyError,
    StaleLeaseError,
    StateStore,
    StorageError,
)

NOTE = "INSERT INTO notes (text) VALUES (?)"
NOTES = "SELECT text FROM notes ORDER BY text"


def migrations(folder: Path, *scripts: str) -> dict[str, list[Path]]:
    """Migration files for every dialect the tests know; these scripts are portable."""
    files = []
    for number, script in enumerate(scripts, start=1):
        file = folder / f"{number:04}_step.sql"
        file.write_text(script)
        files.append(file)
    return {"sqlite": files, "postgresql": files}


@pytest.fixture
def noted(store: StateStore, tmp_path: Path) -> StateStore:
    store.migrate("notes", migrations(tmp_path, "CREATE TABLE notes (text TEXT NOT NULL);"))
    return store


@pytest.fixture
def lease(noted: StateStore) -> Lease:
    return noted.acquire("release", "worker-a", 30)


def notes(store: StateStore) -> list[str]:
    with store.read() as reader:
        return [text for (text,) in reader.rows(NOTES)]


def note(text: str, fence: Lease | None, *, fails: bool = False) -> FencedWrite:
    def body(part: Part) -> str:
        part.run(NOTE, (text,))
        part.event("note.written", {"text": text})
        if fails:
            raise LookupError(text)
        return text.upper()

    return FencedWrite("notes", "note.write", body, fence, workflow="notebook")


def test_a_block_commits_with_its_fence_check_and_its_events(noted: StateStore, lease: Lease) -> None:
    with noted.transaction(component="notes", action="note.write", fence=lease, workflow="notebook") as part:
        part.executemany(NOTE, [("one",), ("two",)])
        assert part.rows(NOTES) == [("one",), ("two",)]
        part.event("note.written", {"count": 2}, sequence=7)

    assert notes(noted) == ["one", "two"]
    (event,) = noted.events(kind="note.written")
    assert (event.scope, event.token, event.workflow, event.sequence) == ("release", 1, "notebook", 7)


def test_a_stale_fence_runs_no_block_and_is_on_record(noted: StateStore, lease: Lease) -> None:
    noted.release(*lease.fence)
    ran = []
    with (
        pytest.raises(StaleLeaseError) as stale,
        noted.transaction(component="notes", action="note.write", fence=lease),
    ):
        ran.append(True)

    assert (ran, stale.value.reason, stale.value.recorded) == ([], "released", True)
    (event,) = noted.events(kind="write.refused")
    assert event.detail == {"action": "note.write", "component": "notes", "reason": "released"}


def test_an_exception_in_the_block_rolls_everything_back(noted: StateStore, lease: Lease) -> None:
    with (
        pytest.raises(LookupError),
        noted.transaction(component="notes", action="note.write", fence=lease) as part,
    ):
        part.run(NOTE, ("lost",))
        part.event("note.written")
        raise LookupError

    assert notes(noted) == []
    assert noted.events(kind="note.written") == []


def test_in_a_group_a_refusal_or_failure_leaves_its_neighbours_alone(noted: StateStore, lease: Lease) -> None:
    stale = noted.acquire("other", "worker-b", 30)
    noted.release(*stale.fence)

    first, refused, failed, last = noted.write_all(
        [note("first", lease), note("stale", stale), note("broken", lease, fails=True), note("last", None)]
    )

    assert (first.answer, last.answer) == ("FIRST", "LAST")
    assert (first.error, last.error) == (None, None)
    assert isinstance(refused.error, StaleLeaseError)
    assert isinstance(failed.error, LookupError)
    assert notes(noted) == ["first", "last"]
    assert [event.detail["text"] for event in noted.events(kind="note.written")] == ["first", "last"]
    assert [event.scope for event in noted.events(kind="write.refused")] == ["other"]


def test_an_error_of_the_database_in_a_group_makes_each_item_run_alone(noted: StateStore, lease: Lease) -> None:
    broken = FencedWrite("notes", "note.write", lambda part: part.run("INSERT INTO nowhere VALUES (1)"), lease)

    first, failed, last = noted.write_all([note("first", lease), broken, note("last", lease)])

    assert isinstance(failed.error, StorageError)
    assert (first.answer, last.answer) == ("FIRST", "LAST")
    assert notes(noted) == ["first", "last"]
    assert [event.detail["text"] for event in noted.events(kind="note.written")] == ["first", "last"]


def test_a_block_that_calls_the_store_is_told_so_and_rolled_back(noted: StateStore, lease: Lease) -> None:
    with (
        pytest.raises(ReentrancyError),
        noted.transaction(component="notes", action="note.write", fence=lease) as part,
    ):
        part.run(NOTE, ("lost",))
        noted.heartbeat(*lease.fence)
    assert notes(noted) == []
    assert noted.heartbeat(*lease.fence).token == 1


def test_nothing_runs_after_the_end_of_a_block(noted: StateStore, lease: Lease) -> None:
    with noted.transaction(component="notes", action="note.write", fence=lease) as part:
        pass
    for call in (lambda: part.run(NOTE, ("late",)), lambda: part.rows(NOTES), lambda: part.executemany(NOTE, [("x",)])):
        with pytest.raises(StorageError):
            call()
    assert notes(noted) == []


def test_a_block_that_ends_the_transaction_itself_is_an_error(noted: StateStore, lease: Lease) -> None:
    with (
        pytest.raises(StorageError),
        noted.transaction(component="notes", action="note.write", fence=lease) as part,
    ):
        part.run("ROLLBACK")
    assert noted.heartbeat(*lease.fence).token == 1


def test_migrations_run_once_in_order_and_are_on_record(store: StateStore, tmp_path: Path) -> None:
    first = "CREATE TABLE notes (text TEXT);"
    assert store.migrate("notes", migrations(tmp_path, first)) == 0
    assert store.migrate("notes", migrations(tmp_path, first)) == 1
    both = migrations(
        tmp_path, first, "ALTER TABLE notes ADD COLUMN author TEXT; -- who\nINSERT INTO notes VALUES ('a;b', 'c');"
    )
    assert store.migrate("notes", both) == 1
    with store.read() as reader:
        assert reader.rows("SELECT text, author FROM notes") == [("a;b", "c")]
    spans = [
        (event.detail["from_version"], event.detail["to_version"]) for event in store.events(kind="store.migrated")
    ]
    assert spans == [(0, 1), (1, 2)]


def test_a_migration_that_fails_changes_nothing(store: StateStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        store.migrate("notes", migrations(tmp_path, "CREATE TABLE notes (text TEXT); INSERT INTO nowhere VALUES (1);"))
    assert store.migrate("notes", migrations(tmp_path, "CREATE TABLE notes (text TEXT);")) == 0


def test_newer_tables_of_an_adapter_are_refused_untouched(store: StateStore, tmp_path: Path) -> None:
    store.migrate("notes", migrations(tmp_path, "CREATE TABLE notes (text TEXT);", "CREATE TABLE more (text TEXT);"))
    with pytest.raises(NewerSchemaError) as newer:
        store.migrate("notes", {dialect: files[:1] for dialect, files in migrations(tmp_path, "", "").items()})
    assert (newer.value.component, newer.value.found, newer.value.supported) == ("notes", 2, 1)


@pytest.mark.parametrize("name", ["0002_step.sql", "1_step.sql", "0001-step.sql", "0001_step.txt"])
def test_migration_files_are_numbered_without_a_gap(store: StateStore, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("CREATE TABLE notes (text TEXT);")
    with pytest.raises(InvalidInputError) as refused:
        store.migrate("notes", {"sqlite": [file], "postgresql": [file]})
    assert refused.value.field == "files"


def test_migrations_for_another_database_are_refused(store: StateStore) -> None:
    with pytest.raises(InvalidInputError):
        store.migrate("notes", {"oracle": []})
