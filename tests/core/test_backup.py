"""Backups: one sound file, or none; and what is refused as one."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint import (
    InvalidInputError,
    NewerSchemaError,
    NotAStoreError,
    NotFoundError,
    StateStore,
    StorageCorruptError,
    StorageError,
)
from agent_checkpoint.sqlite import schema
from agent_checkpoint.sqlite.database import MIGRATIONS
from agent_checkpoint.testing import FakeClock

from .conftest import COMMAND, Cli, contents, process, set_version
from .test_cli_disks import needs_mounts, on_a_small_disk


@pytest.fixture
def file(store: StateStore, tmp_path: Path) -> Path:
    """A backup from when worker-a held token 1 and had saved one checkpoint."""
    lease = store.acquire("release", "worker-a")
    store.put_checkpoint("deploy", {"stage": "built"}, lease=lease)
    store.release(*lease.fence)
    store.backup(tmp_path / "backup.db")
    return tmp_path / "backup.db"


def state_of(store: StateStore) -> object:
    return store.events(), store.list_leases(include_expired=True), store.list_checkpoints(), store.list_effects()


# The copy


def test_a_backup_is_one_sound_private_file_that_opens_as_a_store(store: StateStore, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    store.put_checkpoint("deploy", {"stage": "built"})
    answer = store.backup(folder / "backup.db")

    assert [each.name for each in folder.iterdir()] == ["backup.db"]
    file = folder / "backup.db"
    assert (file.stat().st_mode & 0o777, file.stat().st_size) == (0o600, answer.bytes)
    with StateStore(file) as copy:
        assert {check.check: check.verdict for check in copy.doctor()}["integrity"] == "ok"
        assert copy.list_checkpoints() == store.list_checkpoints()


def test_a_backup_never_takes_the_place_of_a_file(store: StateStore, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "nowhere.db")
    for taken in (link, Path(store.database)):
        before = contents(tmp_path)
        with pytest.raises(InvalidInputError, match="is there already"):
            store.backup(taken)
        assert contents(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("name", ["a b.db", "50%?#&.db", "naïve-日本.db", "-f", "new\nline.db", "it's.db"])
def test_a_backup_may_have_any_name(store: StateStore, clock: FakeClock, tmp_path: Path, name: str) -> None:
    store.acquire("release", "worker-a", 0.1)
    clock.advance(1)
    store.backup(tmp_path / name)
    assert store.restore(tmp_path / name).scopes == 1


@pytest.mark.parametrize("name", ["", "nul\0.db", "surrogate\ud800.db"])
def test_what_can_be_no_path_is_refused(store: StateStore, tmp_path: Path, name: str) -> None:
    before = contents(tmp_path).keys()
    for call in (store.backup, store.restore):
        with pytest.raises(InvalidInputError, match="file"):
            call(name)
    assert contents(tmp_path).keys() == before


# Ends at once, as when killed, with nothing copied yet.
DIES = """
import os, sys
from agent_checkpoint import StateStore
sys.addaudithook(lambda event, words: event == "sqlite3.connect" and "partial" in str(words[0]) and os._exit(9))
StateStore(sys.argv[1]).backup(sys.argv[2])
"""


@needs_mounts
def test_a_backup_that_was_killed_does_not_stop_the_next_one(store: StateStore, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    # Each is process 1, as in a container.
    alone = ("unshare", "--pid", "--fork")
    killed = process(*alone, sys.executable, "-c", DIES, store.database, file)
    assert (killed.status, len(list(tmp_path.glob("*.partial"))), file.exists()) == (9, 1, False)

    assert process(*alone, *COMMAND, "--db", store.database, "backup", file).value()["file"] == str(file)


def test_a_backup_where_no_folder_is_says_so(store: StateStore, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        store.backup(tmp_path / "nowhere" / "backup.db")


@needs_mounts
def test_a_full_disk_leaves_no_half_of_a_backup_and_no_half_of_a_restore(tmp_path: Path) -> None:
    answers = on_a_small_disk(
        tmp_path,
        """
elsewhere = os.path.join(disk, "..", "elsewhere.db")
big = json.dumps("x" * 60_000)
command("init", "init")
command("put", "checkpoint", "put", "deploy", "--data", big)
fill_up(leave=65_536)
command("backup", "backup", os.path.join(disk, "backup.db"))
results["left"] = [0, json.dumps(sorted(os.listdir(disk))), ""]
command("elsewhere", "backup", elsewhere)
command("restore", "restore", elsewhere)
command("list", "checkpoint", "list")
free()
command("again", "restore", elsewhere)
command("after", "checkpoint", "list")
os.remove(elsewhere)
""",
    )
    assert answers["backup"].error()["code"] == "storage-full"
    assert not [name for name in answers["left"].value() if "backup" in name]
    assert answers["restore"].error()["code"] == "storage-full"
    assert answers["list"].value() == answers["after"].value()
    assert answers["again"].value()["workflows"] == 0


# What is no backup


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8192])


def scribbled(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[8192 : 8192 + 4096] = os.urandom(4096)
    file.write_bytes(whole)


def foreign(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as raw, raw:
        raw.execute("CREATE TABLE theirs (id INTEGER)")


def newer(file: Path) -> None:
    set_version(file, 999)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (Path.unlink, NotFoundError),
        (lambda file: file.write_bytes(b""), NotAStoreError),
        (lambda file: file.write_text("no database at all" * 100), NotAStoreError),
        (foreign, NotAStoreError),
        (truncated, StorageCorruptError),
        (scribbled, StorageCorruptError),
        (newer, NewerSchemaError),
    ],
)
def test_what_is_no_sound_backup_is_refused_and_nothing_changes(
    store: StateStore, file: Path, tmp_path: Path, spoil: Callable[[Path], object], error: type[Exception]
) -> None:
    spoil(file)
    before = state_of(store)
    with pytest.raises(error):
        store.restore(file)
    assert state_of(store) == before
    with StateStore(tmp_path / "new" / "agents.db") as missing:
        with pytest.raises(error):
            missing.restore(file)
        with pytest.raises(NotFoundError):
            missing.events()


def test_a_damaged_store_makes_no_backup(store: StateStore, tmp_path: Path, path: Path) -> None:
    for number in range(40):
        store.put_checkpoint("deploy", "x" * 4_000 + str(number))
    store.close()
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 4096] = os.urandom(4096)
    path.write_bytes(whole)
    with StateStore(path) as damaged, pytest.raises(StorageCorruptError):
        damaged.backup(tmp_path / "backup.db")
    assert not [each.name for each in tmp_path.iterdir() if "backup" in each.name]


@pytest.mark.parametrize("version", range(1, len(os.listdir(MIGRATIONS))))
def test_a_backup_of_an_older_version_is_brought_up_to_date_and_stays_as_it_is(
    store: StateStore, tmp_path: Path, version: int
) -> None:
    old = tmp_path / "old.db"
    schema.create(str(old), 1)
    with closing(sqlite3.connect(old)) as raw, raw:
        for script in sorted(Path(MIGRATIONS).iterdir())[:version]:
            raw.executescript(script.read_text())
        raw.execute("INSERT INTO components VALUES ('core', ?, '0', 0)", (version,))
        raw.execute("INSERT INTO checkpoints VALUES (7, 'deploy', 3, 1, 0, NULL, NULL, NULL, '1')")
    as_it_was = old.read_bytes()
    store.restore(old)
    assert old.read_bytes() == as_it_was
    assert store.put_checkpoint("deploy", 2).sequence == 4
    assert [event.detail["from_version"] for event in store.events(kind="store.migrated")] == [version]
    assert {check.check: check.verdict for check in store.doctor()}["schema"] == "ok"


def test_two_restores_at_once_are_one_after_the_other(store: StateStore, path: Path, file: Path) -> None:
    stores = [StateStore(path) for _ in range(4)]
    threads = [threading.Thread(target=each.restore, args=(file,)) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokens = [row.token for row in store.list_leases(include_expired=True)]
    assert len(store.events(kind="store.restored")) == 1  # each brings back the log of the copy
    assert tokens[0] > 1
    for each in stores:
        each.close()


# The commands


def test_the_commands_say_what_they_did(cli: Cli, tmp_path: Path, path: Path) -> None:
    file = tmp_path / "backup.db"
    cli("checkpoint", "put", "deploy", "--data", "1")
    assert cli("backup", file).value() == {"bytes": file.stat().st_size, "file": str(file)}
    cli("checkpoint", "put", "deploy", "--data", "2")
    assert cli("backup", file).status == 2
    assert cli("restore", file).value() == {
        "database": str(path),
        "effects": 0,
        "file": str(file),
        "leases_expired": 0,
        "scopes": 0,
        "workflows": 1,
    }
    assert cli("checkpoint", "get", "deploy", "--field", "sequence").out == "1\n"
    assert cli("doctor", "--restored").value()["workflows"] == 1
    assert cli("restore", tmp_path / "nowhere.db").status == 66


def test_a_live_lease_exits_75(cli: Cli, tmp_path: Path) -> None:
    cli("backup", tmp_path / "backup.db")
    cli("lease", "acquire", "release", "--owner", "worker-a")
    answer = cli("restore", tmp_path / "backup.db")
    assert (answer.status, answer.error()["code"]) == (75, "lease-held")


def test_a_backup_of_no_store_makes_none(bare_cli: Cli, tmp_path: Path) -> None:
    assert bare_cli("--db", tmp_path / "none.db", "backup", tmp_path / "backup.db").status == 66
    assert contents(tmp_path) == {}
