"""What adapters build on: own tables, written in the store's one commit under its fence."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_checkpoint import (
    FencedWrite,
    InvalidInputError,
    Lease,
    LeaseHeldError,
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


# A scope that guards what adapters write


def guarded(fence: Lease | None, *, required: bool = False, takes: str | None = None) -> FencedWrite:
    def body(part: Part) -> None:
        part.run(NOTE, ("guarded",))
        part.event("note.written")

    return FencedWrite("notes", "note.write", body, fence, scope="release", required=required, takes=takes)


def only(store: StateStore, write: FencedWrite) -> Exception | None:
    (outcome,) = store.write_all([write])
    return outcome.error


def test_a_scope_lets_pass_unfenced_writes_until_its_first_grant(noted: StateStore) -> None:
    assert only(noted, guarded(None)) is None
    lease = noted.acquire("release", "worker-a", 30)
    noted.release(*lease.fence)

    refused = only(noted, guarded(None))
    assert isinstance(refused, StaleLeaseError)
    assert (refused.reason, refused.facts["protected_by"]) == ("protected", "release")
    assert notes(noted) == ["guarded"]
    (event,) = noted.events(kind="write.refused")
    assert (event.scope, event.detail["reason"]) == ("release", "protected")


def test_a_scope_may_require_a_lease_before_its_first_grant(noted: StateStore) -> None:
    refused = only(noted, guarded(None, required=True))
    assert isinstance(refused, StaleLeaseError)
    assert refused.reason == "protected"
    assert notes(noted) == []


def test_a_lease_of_another_scope_does_not_count(noted: StateStore) -> None:
    other = noted.acquire("other", "worker-a", 30)
    refused = only(noted, guarded(other))
    assert isinstance(refused, StaleLeaseError)
    assert (refused.reason, refused.scope) == ("scope-mismatch", "other")


def test_a_write_that_takes_the_scope_leaves_late_holders_behind(noted: StateStore) -> None:
    late = noted.acquire("release", "worker-a", 30)
    noted.release(*late.fence)

    assert only(noted, guarded(None, takes="cleaner")) is None
    (event,) = noted.events(kind="note.written")
    assert (event.owner, event.token) == ("cleaner", 2)
    kinds = [event.kind for event in noted.events(scope="release")]
    assert kinds[-3:] == ["lease.acquired", "note.written", "lease.released"]
    assert isinstance(only(noted, guarded(late)), StaleLeaseError)
    assert noted.acquire("release", "worker-b", 30).token == 3


def test_a_write_cannot_take_a_scope_that_another_holds(noted: StateStore) -> None:
    noted.acquire("release", "worker-a", 30)
    for group in ([guarded(None, takes="cleaner")], [guarded(None, takes="cleaner"), note("beside", None)]):
        refused = noted.write_all(group)[0].error
        assert isinstance(refused, LeaseHeldError)
        assert refused.owner == "worker-a"
    assert notes(noted) == ["beside"]


def test_a_write_that_takes_a_scope_and_fails_leaves_no_lease(noted: StateStore) -> None:
    noted.release(*noted.acquire("release", "worker-a", 30).fence)

    def fails(part: Part) -> None:
        part.run(NOTE, ("lost",))
        raise LookupError

    broken = FencedWrite("notes", "note.write", fails, scope="release", takes="cleaner")
    for group in ([broken], [broken, note("beside", None)]):
        assert isinstance(noted.write_all(group)[0].error, LookupError)
    assert notes(noted) == ["beside"]
    assert noted.get_lease("release") is None
    assert noted.acquire("release", "worker-b", 30).token == 2


def test_taking_a_scope_that_was_never_granted_grants_nothing(noted: StateStore) -> None:
    assert only(noted, guarded(None, takes="cleaner")) is None
    assert noted.get_lease("release", include_expired=True) is None
    assert only(noted, guarded(None, takes="cleaner", required=True)) is None
    assert noted.get_lease("release", include_expired=True) is not None


def test_whether_a_scope_would_let_a_write_pass_can_be_asked(noted: StateStore) -> None:
    noted.check_scope("release")
    with pytest.raises(StaleLeaseError):
        noted.check_scope("release", required=True)
    lease = noted.acquire("release", "worker-a", 30)
    noted.check_scope("release", lease)
    for presented in (None, noted.acquire("other", "worker-a", 30)):
        with pytest.raises(StaleLeaseError):
            noted.check_scope("release", presented)
    noted.release(*lease.fence)
    with pytest.raises(StaleLeaseError) as stale:
        noted.check_scope("release", lease)
    assert stale.value.reason == "released"
    assert noted.events(kind="write.refused") == []


def test_what_was_removed_is_given_back_to_the_file_system(noted: StateStore) -> None:
    if "://" in noted.database:
        assert noted.shrink() == 0  # PostgreSQL's own vacuum does that
        return
    for _ in range(30):
        with noted.transaction(component="notes", action="note.write") as part:
            part.executemany(NOTE, [("x" * 100_000,)])
    with noted.transaction(component="notes", action="note.clear") as part:
        part.run("DELETE FROM notes")
    assert noted.shrink() > 2_900_000
    assert noted.shrink() == 0
