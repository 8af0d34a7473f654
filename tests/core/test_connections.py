"""Connections: one file, looked at on each use, and nobody writes to a file that is gone."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from tests.watching import wait_until

from agent_checkpoint import (
    InvalidInputError,
    LeaseHeldError,
    NotAStoreError,
    NotFoundError,
    StateStore,
    StorageBusyError,
    StorageError,
)
from agent_checkpoint.sqlite.translate import translate
from agent_checkpoint.testing import FakeClock

LONG = 30.0
FILES = ("", "-wal", "-shm", "-gate")


def delete(path: Path) -> None:
    """As ``rm -f agents.db*`` does it."""
    for suffix in FILES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def move_away(path: Path) -> Path:
    """Rename the store with all that belongs to it; the new path."""
    moved = path.with_name(f"moved-{path.name}")
    for suffix in FILES:
        if os.path.exists(f"{path}{suffix}"):
            os.rename(f"{path}{suffix}", f"{moved}{suffix}")
    return moved


def open_files(path: Path) -> Counter[str]:
    """The descriptors of this process on files in the store's folder, by name."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the one that listed the folder
        if target.startswith(f"{path.parent}{os.sep}"):
            found[target.removeprefix(f"{path.parent}{os.sep}")] += 1
    return found


def sequences(path: Path, workflow: str) -> list[int]:
    with StateStore(path) as looking:
        return [info.sequence for info in looking.checkpoint_history(workflow)]


# Deleted, replaced


def test_a_store_that_was_deleted_under_a_running_process_is_not_found(store: StateStore, path: Path) -> None:
    store.acquire("release", "worker-a")
    delete(path)

    for call in (
        lambda: store.acquire("release", "worker-b"),
        lambda: store.get_lease("release"),
        lambda: store.put_checkpoint("deploy", {}),
        store.events,
        store.status,
    ):
        with pytest.raises(NotFoundError):
            call()
    assert not path.exists()


def test_a_store_that_was_made_anew_is_used_with_its_own_tokens(
    store: StateStore, path: Path, clock: FakeClock
) -> None:
    for _ in range(3):
        lease = store.acquire("release", "worker-a")
        store.put_checkpoint("deploy", {"store": "old"}, lease=lease)
        store.release(*lease.fence)
    delete(path)
    with StateStore(path, clock=clock) as another:
        assert another.initialize()
        assert another.acquire("release", "worker-b").token == 1

    assert store.get_checkpoint("deploy") is None
    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-a")
    assert (held.value.owner, held.value.token) == ("worker-b", 1)
    store.force_release("release", reason="test")
    assert store.acquire("release", "worker-a").token == 2
    assert sequences(path, "deploy") == []


def test_a_store_that_was_replaced_by_a_rename_is_used(store: StateStore, path: Path, tmp_path: Path) -> None:
    store.acquire("release", "worker-a")
    with StateStore(tmp_path / "restored.db") as restored:
        restored.initialize()
        for _ in range(7):
            restored.release(*restored.acquire("release", "worker-z").fence)
    move_away(path)
    os.replace(tmp_path / "restored.db", path)

    assert store.acquire("release", "worker-a").token == 8


def test_a_store_comes_back_when_its_file_does(store: StateStore, path: Path) -> None:
    store.put_checkpoint("deploy", {"number": 1})
    moved = move_away(path)
    with pytest.raises(NotFoundError):
        store.get_checkpoint("deploy")
    for suffix in FILES:
        if os.path.exists(f"{moved}{suffix}"):
            os.rename(f"{moved}{suffix}", f"{path}{suffix}")

    assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2


def test_what_takes_the_place_of_a_store_is_left_as_it_is(store: StateStore, path: Path) -> None:
    store.acquire("release", "worker-a")
    delete(path)
    path.write_text("not a database at all, only some text that is long enough\n" * 20)
    before = path.read_bytes()

    with pytest.raises(NotAStoreError):
        store.acquire("release", "worker-a")
    assert path.read_bytes() == before
    assert not path.with_name("agents.db-gate").exists()


def test_a_store_whose_folder_is_deleted_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "state" / "agents.db"
    with StateStore(path) as store:
        store.initialize()
        shutil.rmtree(path.parent)

        with pytest.raises(NotFoundError):
            store.acquire("release", "worker-a")
        assert not path.parent.exists()


def test_a_connection_lent_while_the_file_is_replaced_is_not_lent_again(store: StateStore, path: Path) -> None:
    store.put_checkpoint("deploy", {"store": "old"})
    with store.read():
        moved = move_away(path)
        with StateStore(path) as another:
            another.initialize()
        assert store.get_checkpoint("deploy") is None

    # The read gave back a connection to the old file.
    assert store.put_checkpoint("deploy", {"store": "new"}).sequence == 1
    assert sequences(path, "deploy") == [1]
    assert sequences(moved, "deploy") == [1]


def test_a_writer_that_waited_while_the_file_was_replaced_does_not_write_to_the_old_one(
    store: StateStore, path: Path
) -> None:
    store.release(*store.acquire("release", "worker-a").fence)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    answers: list[object] = []

    def wait() -> None:
        try:
            answers.append(store.acquire("release", "worker-a").token)
        except (NotFoundError, StorageError) as error:
            answers.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.3)  # it has its connection by now, and waits for the write lock
    moved = move_away(path)
    with StateStore(path) as another:
        another.initialize()
    holder.execute("ROLLBACK")
    holder.close()
    waiting.join(LONG)

    with StateStore(moved) as old:
        assert [event.kind for event in old.events(scope="release")] == ["lease.acquired", "lease.released"]
    assert len(answers) == 1
    if not isinstance(answers[0], Exception):
        assert answers[0] == 1


def test_the_log_of_a_new_store_survives_the_old_one_being_let_go(store: StateStore, path: Path) -> None:
    # Closing an old connection must not remove a -wal that has the same name by now.
    store.put_checkpoint("deploy", {"store": "old"})
    delete(path)
    with StateStore(path) as another:
        another.initialize()
        another.put_checkpoint("deploy", {"number": 1})
        assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2
        assert another.put_checkpoint("deploy", {"number": 3}).sequence == 3
        assert store.put_checkpoint("deploy", {"number": 4}).sequence == 4
    assert sequences(path, "deploy") == [4, 3, 2, 1]


REPLACED_UNDER_WRITERS = """
import json, sys
from agent_checkpoint import NotFoundError, NotAStoreError, SchemaVersionError, StateStore
with StateStore(sys.argv[1]) as store:
    print("ready", flush=True)
    while True:
        try:
            saved = store.put_checkpoint("deploy", {"by": sys.argv[2]})
        except (NotFoundError, NotAStoreError, SchemaVersionError):
            continue  # just now there is none, or it is being made
        if len(saved.data) and saved.sequence == int(sys.argv[3]):
            break
        print(json.dumps(saved.sequence), flush=True)
print("done", flush=True)
"""


def test_processes_meet_again_in_the_new_store(store: StateStore, path: Path) -> None:
    store.put_checkpoint("deploy", {})
    enough = 60
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", REPLACED_UNDER_WRITERS, str(path), str(number), str(enough)],
            stdout=subprocess.DEVNULL,
        )
        for number in range(3)
    ]
    try:
        wait_until(lambda: len(sequences(path, "deploy")) > 5)
        delete(path)
        with StateStore(path) as another:
            another.initialize()
            wait_until(lambda: len(another.checkpoint_history("deploy")) >= enough)
            found = [info.sequence for info in another.checkpoint_history("deploy")]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert found == list(range(len(found), 0, -1))


# Closed


def test_a_closed_store_says_so(store: StateStore) -> None:
    store.close()
    store.close()

    with pytest.raises(InvalidInputError) as closed:
        store.acquire("release", "worker-a")
    assert closed.value.field == "store"


def test_closing_leaves_the_database_alone_on_the_disk(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        store.put_checkpoint("deploy", {})
        assert open_files(path)["agents.db"] >= 1

    assert not open_files(path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["agents.db", "agents.db-gate"]


def test_a_store_that_is_dropped_without_close_closes_its_connections(path: Path) -> None:
    store = StateStore(path)
    store.initialize()
    del store

    assert not open_files(path)


def test_a_connection_lent_while_the_store_is_closed_is_closed_when_it_comes_back(
    store: StateStore, path: Path
) -> None:
    with store.read() as reader:
        store.close()
        assert reader.rows("SELECT 1") == [(1,)]

    assert not open_files(path)


# Descriptors


def test_a_thousand_operations_leak_no_descriptor(store: StateStore, path: Path) -> None:
    def work(times: int) -> None:
        for _ in range(times):
            lease = store.acquire("release", "worker-a")
            store.check_lease(*lease.fence)
            store.put_checkpoint("deploy", {}, lease=lease)
            store.get_checkpoint("deploy")
            store.release(*lease.fence)

    work(1)
    before = open_files(path)
    work(200)
    assert open_files(path) == before
    assert before["agents.db-gate"] == 1


def test_refused_and_failed_operations_leak_no_descriptor(store: StateStore, path: Path) -> None:
    lease = store.acquire("release", "worker-a")

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises(StorageError), store.read() as reader:
                reader.rows("SELECT no_such_column FROM leases")
            with (
                pytest.raises(ZeroDivisionError),
                store.transaction(component="tests", action="test.write", fence=lease) as part,
            ):
                part.run("DELETE FROM refusals")
                _ = 1 / 0

    fail(1)
    before = open_files(path)
    fail(50)
    assert open_files(path) == before


def test_fifty_openings_beside_an_open_store_leak_no_descriptor(store: StateStore, path: Path) -> None:
    # SQLite keeps a closed connection's descriptor for the next one while another is open.
    def open_again(times: int) -> None:
        for number in range(times):
            with StateStore(path) as again:
                again.put_checkpoint("deploy", {"number": number})

    store.acquire("release", "worker-a")
    open_again(2)
    before = open_files(path)
    open_again(50)
    assert open_files(path) == before


def test_fifty_openings_leave_no_descriptor_behind(store: StateStore, path: Path) -> None:
    store.close()
    for number in range(50):
        with StateStore(path) as again:
            again.put_checkpoint("deploy", {"number": number})
    assert not open_files(path)


def test_openings_that_fail_leave_no_descriptor(tmp_path: Path) -> None:
    missing, text, foreign = tmp_path / "missing.db", tmp_path / "text.db", tmp_path / "foreign.db"
    text.write_text("only text\n" * 100)
    with sqlite3.connect(foreign) as theirs:
        theirs.execute("CREATE TABLE theirs (column_1)")
    theirs.close()
    for path in (missing, text, foreign):
        for _ in range(20):
            with StateStore(path) as store, pytest.raises((NotFoundError, NotAStoreError)):
                store.acquire("release", "worker-a")
    assert not open_files(missing)


def test_a_store_deleted_again_and_again_leaks_no_descriptor(store: StateStore, path: Path) -> None:
    for _ in range(10):
        delete(path)
        with pytest.raises(NotFoundError):
            store.get_lease("release")
        assert not [name for name in open_files(path) if "-gate" not in name]
        with StateStore(path) as another:
            another.initialize()
        assert store.acquire("release", "worker-a").token == 1
    store.close()
    assert not open_files(path)


def test_a_process_that_is_frozen_while_it_opens_the_log_is_in_the_way_and_nothing_worse(path: Path) -> None:
    # SQLite's words for it; the moment itself lasts some microseconds (tests/faults/test_frozen.py meets it at times).
    error = translate(sqlite3.OperationalError("locking protocol"), str(path))
    assert isinstance(error, StorageBusyError)
    assert error.retryable
