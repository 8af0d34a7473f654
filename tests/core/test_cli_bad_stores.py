"""Stores that are missing, foreign, cut off or of another version: exit 66 or 74, and left as they are."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main, run

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
FENCE = ("--owner", "worker-a", "--token", "1")

# Every command that works on a store, in a form that a good store would take.
WORDS = {
    "init": (),
    "lease acquire": ("new", "--owner", "worker-b"),
    "lease heartbeat": ("release", *FENCE),
    "lease release": ("release", *FENCE),
    "lease show": ("release",),
    "lease list": (),
    "lease check": ("release", *FENCE),
    "lease force-release": ("release", "--reason", "gone"),
    "checkpoint put": ("deploy-v2", "--data", "1", "--lease-scope", "release", *FENCE),
    "checkpoint get": ("deploy-v2",),
    "checkpoint list": (),
    "checkpoint history": ("deploy-v2",),
    "checkpoint diff": ("deploy-v2",),
    "checkpoint prune": ("--keep-last", "1"),
    "events": (),
    "status": (),
    "doctor": (),
}
# Those that answer a bad store with an error; doctor answers with a report.
ASKING = [name for name in WORDS if name not in ("init", "doctor")]


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    def value(self) -> Any:
        """The JSON value on stdout of a command that did it."""
        assert (self.status, self.err) == (0, "")
        return json.loads(self.out)

    def error(self) -> dict[str, Any]:
        """The one JSON error on stderr of a command that did not."""
        assert self.out == ""
        (name,) = whole = json.loads(self.err)
        assert name == "error"
        return dict(whole[name])


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """``cli(database, name, …)``: the command in this process."""
    for name in set(os.environ) - set(CLEAN):
        monkeypatch.delenv(name)

    def run(database: Path, name: str, *arguments: str) -> Answer:
        status = main(["--db", str(database), *name.split(), *(arguments or WORDS[name])])
        return Answer(status, *capsys.readouterr())

    return run


def fill(path: Path, checkpoints: int = 2) -> None:
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", ttl_seconds=3600)
        for number in range(checkpoints):
            store.put_checkpoint("deploy-v2", {"number": number, "text": "x" * 500}, lease=lease)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with a live lease and two protected checkpoints."""
    path = tmp_path_factory.mktemp("small") / "agents.db"
    fill(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same with many checkpoints."""
    path = tmp_path_factory.mktemp("large") / "agents.db"
    fill(path, checkpoints=200)
    return path.read_bytes()


@pytest.fixture
def filled(path: Path, small: bytes) -> Path:
    """A store with a live lease and two protected checkpoints."""
    path.write_bytes(small)
    path.chmod(0o600)
    return path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None for what is no file."""
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None for each in folder.rglob("*")}


def test_the_words_above_are_all_commands_that_work_on_a_store() -> None:
    assert list(WORDS) == [name for name in run.COMMANDS if name not in ("demo", "completion")]


@pytest.mark.parametrize("name", WORDS)
def test_every_command_does_it_on_a_good_store(cli: Cli, filled: Path, name: str) -> None:
    answer = cli(filled, name)

    assert (answer.status, answer.err) == (0, "")
    assert answer.out


# Missing


@pytest.mark.parametrize("name", [*ASKING, "doctor"])
def test_on_a_missing_store_every_command_but_init_exits_66_and_makes_nothing(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    answer = cli(tmp_path / "none" / "agents.db", name)

    assert answer.status == 66
    assert answer.error()["code"] == "not-found"
    assert answer.error()["database"] == str(tmp_path / "none" / "agents.db")
    assert contents(tmp_path) == {}


def test_a_store_below_a_file_is_missing_too(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    assert cli(tmp_path / "file" / "agents.db", "lease list").error()["code"] == "not-found"
    assert cli(tmp_path / "file" / "agents.db", "init").status in (66, 74)
    assert contents(tmp_path) == {"file": b"not a folder"}


# Not a store


@pytest.mark.parametrize("name", [*ASKING, "init"])
def test_a_folder_is_no_store(cli: Cli, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").write_text("kept")

    answer = cli(folder, name)

    assert answer.status == 74
    assert answer.error()["code"] in ("storage-not-a-store", "storage-unreachable")
    assert contents(tmp_path) == {"folder": None, "folder/inside": b"kept"}


TEXTS = {
    "one byte": b"x",
    "a line": b"# my notes\n",
    "several pages": b"# my notes\n" * 1000,
    "almost SQLite": b"SQLite format 3\0" + b"but no database\n" * 1000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("name", ["init", "lease acquire", "checkpoint put", "lease show", "events", "status"])
def test_a_text_file_stays_as_it_is_with_nothing_beside_it(cli: Cli, path: Path, text: bytes, name: str) -> None:
    path.write_bytes(text)

    answer = cli(path, name)

    assert answer.status == 74
    assert answer.error()["code"] in ("storage-not-a-store", "storage-corrupt")
    assert contents(path.parent) == {path.name: text}


OTHER_PROGRAMS = {
    "a table": "CREATE TABLE bookmarks (url TEXT); INSERT INTO bookmarks VALUES ('https://example.org');",
    "a table named as one of ours": "CREATE TABLE components (id, name); INSERT INTO components VALUES (1, 'R1');",
    "all tables named as ours": "CREATE TABLE components (component, version); CREATE TABLE leases (a, b);",
    "its own application id": "PRAGMA application_id = 1196444487; CREATE TABLE gpkg_contents (a);",
    "its own application id and no table": "PRAGMA application_id = 1196444487; VACUUM;",
    "its own user version and no table": "PRAGMA user_version = 7; VACUUM;",
    "a write-ahead log": "PRAGMA journal_mode = WAL; CREATE TABLE history (url TEXT);",
}


@pytest.mark.parametrize("script", OTHER_PROGRAMS.values(), ids=OTHER_PROGRAMS.keys())
@pytest.mark.parametrize("name", ["init", "lease acquire", "checkpoint put", "lease show", "events"])
def test_another_programs_database_stays_as_it_is(cli: Cli, path: Path, script: str, name: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(script)
    before = contents(path.parent)

    answer = cli(path, name)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-not-a-store"
    assert contents(path.parent) == before


@pytest.mark.parametrize("name", ASKING)
def test_an_empty_file_is_no_store_and_stays_empty(cli: Cli, path: Path, name: str) -> None:
    path.touch()

    answer = cli(path, name)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-not-a-store"
    assert contents(path.parent) == {path.name: b""}


def test_a_pipe_or_device_is_no_store(cli: Cli, path: Path) -> None:
    os.mkfifo(path)

    for name in ("lease list", "lease acquire", "init"):
        answer = cli(path, name)
        assert answer.status == 74
        assert answer.error()["code"] in ("storage-not-a-store", "storage-unreachable")
    assert contents(path.parent) == {path.name: None}


@pytest.mark.parametrize("size", [17, 50, 100, 1000, 4096, 20_000, "half", "a page less"])
@pytest.mark.parametrize("name", ["checkpoint get", "checkpoint put", "lease acquire", "status", "init"])
def test_a_truncated_store_exits_74_and_is_not_made_worse(
    cli: Cli, path: Path, large: bytes, name: str, size: int | str
) -> None:
    cut = large[: {"half": len(large) // 2, "a page less": len(large) - 4096}.get(str(size), size)]
    path.write_bytes(cut)

    answer = cli(path, name)

    assert answer.status == 74
    assert answer.error()["code"] in ("storage-corrupt", "storage-not-a-store")
    assert path.read_bytes() == cut


# Another version


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE components SET version = ? WHERE component = 'core'", (version,))


@pytest.mark.parametrize("name", [*ASKING, "init"])
def test_a_newer_schema_exits_74_and_is_left_untouched(cli: Cli, filled: Path, name: str) -> None:
    set_version(filled, 99)
    before = filled.read_bytes()

    answer = cli(filled, name)
    error = answer.error()

    assert answer.status == 74
    assert (error["code"], error["component"], error["found"]) == ("storage-newer-schema", "core", 99)
    assert "upgrade" in error["hint"]
    assert filled.read_bytes() == before
    assert contents(filled.parent).keys() <= {filled.name, f"{filled.name}-gate"}


@pytest.fixture
def half_made(filled: Path) -> Path:
    """What an init leaves that was killed between making the file and making the tables: version 0."""
    with closing(sqlite3.connect(filled, isolation_level=None)) as connection:
        for kind in ("trigger", "index", "table"):
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = ?", (kind,)).fetchall():
                if name != "components" and not name.startswith("sqlite_"):
                    connection.execute(f"DROP {kind} {name}")
        connection.execute("DELETE FROM components")
    return filled


@pytest.mark.parametrize("name", ASKING)
def test_an_older_schema_exits_74_and_names_init(cli: Cli, half_made: Path, name: str) -> None:
    before = half_made.read_bytes()

    answer = cli(half_made, name)
    error = answer.error()

    assert answer.status == 74
    assert (error["code"], error["component"], error["found"]) == ("storage-schema-version", "core", 0)
    assert "agent-checkpoint init" in error["hint"]
    assert half_made.read_bytes() == before


def test_init_finishes_what_an_earlier_init_began(cli: Cli, half_made: Path) -> None:
    assert cli(half_made, "init").status == 0
    assert cli(half_made, "lease acquire").value()["token"] == 1
    assert cli(half_made, "doctor").status == 0


def test_a_version_that_was_set_back_exits_74_and_loses_nothing(cli: Cli, filled: Path) -> None:
    set_version(filled, 0)

    for name in ("lease acquire", "checkpoint get", "init"):
        answer = cli(filled, name)
        assert answer.status == 74
        assert answer.error()["code"].startswith("storage")

    set_version(filled, 1)
    assert cli(filled, "checkpoint get").value()["sequence"] == 2
