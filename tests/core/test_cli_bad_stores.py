"""Stores that are missing, foreign, cut off or of another version: exit 66 or 74, and left as they are."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint.cli import run

from .conftest import WORDS, Cli, contents, set_version

# Those that answer a bad store with an error; doctor answers with a report.
ASKING = [name for name in WORDS if name not in ("init", "doctor")]


def test_the_words_are_all_commands_that_work_on_a_store() -> None:
    others = ("demo", "completion", "run", "once", "effect show", "effect resolve", "events verify")
    others += ("backup", "restore", "import", "migrate-store")  # which need more than a store, or take any version
    assert set(WORDS) == run.COMMANDS.keys() - set(others)


@pytest.mark.parametrize("name", WORDS)
def test_every_command_does_it_on_a_good_store(cli_on: Cli, filled: Path, name: str) -> None:
    answer = cli_on(filled, name)

    assert (answer.status, answer.err) == (0, "")
    assert answer.out


# Missing


@pytest.mark.parametrize("name", [*ASKING, "doctor"])
def test_on_a_missing_store_every_command_but_init_exits_66_and_makes_nothing(
    cli_on: Cli, tmp_path: Path, name: str
) -> None:
    answer = cli_on(tmp_path / "none" / "agents.db", name)

    assert answer.status == 66
    assert answer.error()["code"] == "not-found"
    assert answer.error()["database"] == str(tmp_path / "none" / "agents.db")
    assert contents(tmp_path) == {}


def test_a_store_below_a_file_is_missing_too(cli_on: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    assert cli_on(tmp_path / "file" / "agents.db", "lease list").error()["code"] == "not-found"
    assert cli_on(tmp_path / "file" / "agents.db", "init").status in (66, 74)
    assert contents(tmp_path) == {"file": b"not a folder"}


# Not a store


@pytest.mark.parametrize("name", [*ASKING, "init"])
def test_a_folder_is_no_store(cli_on: Cli, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").write_text("kept")

    answer = cli_on(folder, name)

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
def test_a_text_file_stays_as_it_is_with_nothing_beside_it(cli_on: Cli, path: Path, text: bytes, name: str) -> None:
    path.write_bytes(text)

    answer = cli_on(path, name)

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
def test_another_programs_database_stays_as_it_is(cli_on: Cli, path: Path, script: str, name: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(script)
    before = contents(path.parent)

    answer = cli_on(path, name)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-not-a-store"
    assert contents(path.parent) == before


@pytest.mark.parametrize("name", ASKING)
def test_an_empty_file_is_no_store_and_stays_empty(cli_on: Cli, path: Path, name: str) -> None:
    path.touch()

    answer = cli_on(path, name)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-not-a-store"
    assert contents(path.parent) == {path.name: b""}


def test_a_pipe_or_device_is_no_store(cli_on: Cli, path: Path) -> None:
    os.mkfifo(path)

    for name in ("lease list", "lease acquire", "init"):
        answer = cli_on(path, name)
        assert answer.status == 74
        assert answer.error()["code"] in ("storage-not-a-store", "storage-unreachable")
    assert contents(path.parent) == {path.name: None}


@pytest.mark.parametrize("size", [17, 50, 100, 1000, 4096, 20_000, "half", "a page less"])
@pytest.mark.parametrize("name", ["checkpoint get", "checkpoint put", "lease acquire", "status", "init"])
def test_a_truncated_store_exits_74_and_is_not_made_worse(
    cli_on: Cli, path: Path, large: bytes, name: str, size: int | str
) -> None:
    cut = large[: {"half": len(large) // 2, "a page less": len(large) - 4096}.get(str(size), size)]
    path.write_bytes(cut)

    answer = cli_on(path, name)

    assert answer.status == 74
    assert answer.error()["code"] in ("storage-corrupt", "storage-not-a-store")
    assert path.read_bytes() == cut


# Another version


@pytest.mark.parametrize("name", [*ASKING, "init"])
def test_a_newer_schema_exits_74_and_is_left_untouched(cli_on: Cli, filled: Path, name: str) -> None:
    set_version(filled, 99)
    before = filled.read_bytes()

    answer = cli_on(filled, name)
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
def test_an_older_schema_exits_74_and_names_init(cli_on: Cli, half_made: Path, name: str) -> None:
    before = half_made.read_bytes()

    answer = cli_on(half_made, name)
    error = answer.error()

    assert answer.status == 74
    assert (error["code"], error["component"], error["found"]) == ("storage-schema-version", "core", 0)
    assert "agent-checkpoint init" in error["hint"]
    assert half_made.read_bytes() == before


def test_init_finishes_what_an_earlier_init_began(cli_on: Cli, half_made: Path) -> None:
    assert cli_on(half_made, "init").status == 0
    assert cli_on(half_made, "lease acquire").value()["token"] == 1
    assert cli_on(half_made, "doctor").status == 0


def test_a_version_that_was_set_back_exits_74_and_loses_nothing(cli_on: Cli, filled: Path) -> None:
    set_version(filled, 0)

    for name in ("lease acquire", "checkpoint get", "init"):
        answer = cli_on(filled, name)
        assert answer.status == 74
        assert answer.error()["code"].startswith("storage")

    set_version(filled, 6)
    assert cli_on(filled, "checkpoint get").value()["sequence"] == 2
