"""What an import refuses: nothing of such a thread is saved, and the others are."""

from __future__ import annotations

import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import (
    InvalidInputError,
    LeaseHeldError,
    NotFoundError,
    StaleLeaseError,
    StateStore,
    StorageCorruptError,
)
from agent_checkpoint_langgraph import AgentCheckpointSaver, importer
from agent_checkpoint_langgraph.importer import import_threads
from agent_checkpoint_langgraph.mapping import scope_of

from .conftest import at, checkpoint, raised, rewrite, rows, values
from .old_files import assert_same, encrypting, everything, filled, place, relabelled, stock


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old.sqlite"


class Trap:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def threads_of(saver: AgentCheckpointSaver) -> set[str]:
    return {place(found)[0] for found in everything(saver)}


def refuses(saver: AgentCheckpointSaver, old: Path, kind: type[Exception] = InvalidInputError) -> Any:
    return raised(kind, lambda: import_threads(saver, old))


# Threads


def test_a_pickled_checkpoint_is_named_and_its_thread_is_left_out(
    old: Path, saver: AgentCheckpointSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(old, "a", "b", "c")
    relabelled(old, "pickle", pickle.dumps(Trap()), "b", "b-0002")

    error = refuses(saver, old)

    assert "'b'" in error.message
    assert "'b-0002'" in error.message
    assert "pickle" in error.message
    assert (error.thread_id, error.checkpoint_id, error.refused_threads) == ("b", "b-0002", ["b"])
    assert error.hint
    assert threads_of(saver) == {"a", "c"}
    assert not (tmp_path / "sprung").exists()


def test_a_pickled_write_is_refused_as_well(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    filled(old, "a", "b")
    rewrite(old, "UPDATE writes SET type = 'pickle' WHERE checkpoint_id = 'a-0001' AND idx = 1")

    assert refuses(saver, old).checkpoint_id == "a-0001"
    assert threads_of(saver) == {"b"}
    assert rows(path, "SELECT DISTINCT thread_id FROM langgraph_histories") == [("b",)]


@pytest.mark.parametrize("kind", ["cbor", None, "msgpack+aes", "pickle+aes"])
def test_a_kind_that_the_serializer_does_not_know_is_refused(
    old: Path, saver: AgentCheckpointSaver, kind: str | None
) -> None:
    filled(old, "a", "b")
    rewrite(old, "UPDATE checkpoints SET type = ? WHERE checkpoint_id = 'a-0002'", kind)

    assert refuses(saver, old).checkpoint_id == "a-0002"
    assert threads_of(saver) == {"b"}


def test_a_file_with_another_key_is_refused(old: Path, path: Path) -> None:
    with stock(old, encrypting(3)) as theirs:
        theirs.put(at(), checkpoint("id-1", {"n": 1}, "1"), {}, {})
    with AgentCheckpointSaver.from_conn_string(path, serde=encrypting(9)) as saver:
        assert "wrong key" in refuses(saver, old).message
        assert everything(saver) == []


@pytest.mark.parametrize("data", [b"", b"\x81", b"\x93\x01\x02\x03", b"\xc1", b"\x81\xa1v\xdb\xff\xff\xff\xff"])
def test_a_damaged_checkpoint_is_named(old: Path, saver: AgentCheckpointSaver, data: bytes) -> None:
    filled(old, "a", "b")
    relabelled(old, "msgpack", data, "a", "a-0001")

    assert refuses(saver, old).checkpoint_id == "a-0001"
    assert threads_of(saver) == {"b"}


@pytest.mark.parametrize("metadata", [b"{", b"[1]", b"\xff\xfe\xfd"])
def test_damaged_metadata_is_named(old: Path, saver: AgentCheckpointSaver, metadata: bytes) -> None:
    filled(old, "a", "b")
    rewrite(old, "UPDATE checkpoints SET metadata = ? WHERE checkpoint_id = 'a-0001'", metadata)

    assert refuses(saver, old).checkpoint_id == "a-0001"
    assert threads_of(saver) == {"b"}


def test_all_threads_that_are_left_out_are_named(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a", "b", "c")
    rewrite(old, "UPDATE checkpoints SET type = 'pickle' WHERE thread_id IN ('a', 'c')")

    assert refuses(saver, old).refused_threads == ["a", "c"]


# Leases


def test_a_thread_that_somebody_holds_is_left_out_until_it_is_free(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a", "b")
    with saver.lease("a", owner="worker-a", in_context=False):
        error = refuses(saver, old, LeaseHeldError)
        assert error.owner == "worker-a"
        assert error.refused_threads == ["a"]
        assert threads_of(saver) == {"b"}

    import_threads(saver, old)

    assert_same(old, saver)


def test_whoever_holds_the_lease_can_import_the_thread(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    filled(old, "a")
    with saver.lease("a", owner="worker-a") as lease:
        import_threads(saver, old)

        assert_same(old, saver)
        saver.put(lease.config(at("a", "a-0002")), checkpoint("b", {"n": 9}, "9"), {}, {"n": "9"})
    saved = rows(path, "SELECT DISTINCT owner, token FROM events WHERE kind = 'langgraph.thread-imported'")
    assert saved == [("worker-a", lease.token)]


def test_whoever_lost_the_lease_cannot_import_the_thread(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a")
    with pytest.raises(StaleLeaseError), saver.lease("a", owner="worker-a") as lease:
        saver.store.force_release(lease.scope, reason="test")
        refuses(saver, old, StaleLeaseError)
        assert everything(saver) == []


def test_a_thread_that_was_ever_leased_is_imported_under_a_lease_of_its_own(
    old: Path, saver: AgentCheckpointSaver
) -> None:
    filled(old, "a")
    with saver.lease("a", owner="worker-a") as lease:
        late = lease.config(at("a"))
    import_threads(saver, old)

    assert_same(old, saver)
    assert saver.store.get_lease(scope_of("a")) is None
    raised(StaleLeaseError, lambda: saver.put(late, checkpoint("late", {}, "1"), {}, {}))


def test_a_thread_that_was_never_leased_needs_none_after_the_import(old: Path, saver: AgentCheckpointSaver) -> None:
    import_threads(saver, filled(old, "a"))

    saver.put(at("a", "a-0002"), checkpoint("b", {"n": "here"}, "9"), {}, {"n": "9"})

    assert values(saver.get_tuple(at("a"))) == {"n": "here"}


def test_a_thread_that_is_taken_in_the_middle_is_completed_when_it_is_free(
    old: Path, saver: AgentCheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "TELL_SECONDS", 0)
    filled(old, "a", count=150)
    taken: list[Any] = []

    def take(done: int, total: int) -> None:
        if not taken:
            taken.append(saver.store.acquire(scope_of("a"), "worker-a"))

    raised(LeaseHeldError, lambda: import_threads(saver, old, on_progress=take))
    saver.store.release(*taken[0].fence)
    import_threads(saver, old)

    assert_same(old, saver)


# Files


def test_a_path_without_a_file_is_not_found(old: Path, path: Path) -> None:
    with AgentCheckpointSaver.from_conn_string(path) as saver:
        refuses(saver, old, NotFoundError)
    assert not old.exists()
    assert not path.exists()


def made_by_somebody_else(old: Path) -> None:
    rewrite(old, "CREATE TABLE checkpoints (id INTEGER)")


def made_by_agent_checkpoint(old: Path) -> None:
    with StateStore(old) as store:
        store.initialize()


@pytest.mark.parametrize(
    "make",
    [
        lambda old: old.mkdir(),
        lambda old: old.write_bytes(b""),
        lambda old: old.write_text("not a database, but text that is long enough to be taken for one" * 9),
        made_by_somebody_else,
        made_by_agent_checkpoint,
    ],
    ids=["a folder", "an empty file", "text", "another program's", "a store"],
)
def test_something_else_is_refused_before_a_store_is_made(old: Path, path: Path, make: Any) -> None:
    make(old)
    with AgentCheckpointSaver.from_conn_string(path) as saver:
        error = refuses(saver, old)

    assert error.field == "path"
    assert "old.sqlite" in error.message
    assert not path.exists()


def test_a_store_given_for_a_file_is_told_what_it_is(old: Path, saver: AgentCheckpointSaver) -> None:
    made_by_agent_checkpoint(old)

    assert "store of Agent Checkpoint" in refuses(saver, old).hint


def test_a_damaged_file_is_said_to_be_damaged(old: Path, saver: AgentCheckpointSaver) -> None:
    filled(old, "a", count=50)
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    content = bytearray(old.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    old.write_bytes(content)

    assert "old.sqlite" in refuses(saver, old, StorageCorruptError).message
    assert everything(saver) == []
