"""Creating a store, and meeting files that are none."""

from __future__ import annotations

import sqlite3
import stat
import threading
import time
from pathlib import Path

import pytest

from agent_checkpoint import (
    InvalidInputError,
    LeaseHeldError,
    NewerSchemaError,
    NotAStoreError,
    NotFoundError,
    SchemaVersionError,
    StateStore,
)
from agent_checkpoint.sqlite import schema
from agent_checkpoint.sqlite.health import has_wal_reset_bug


def test_initialize_is_idempotent_and_says_whether_it_made_the_store(path: Path) -> None:
    with StateStore(path) as store:
        assert store.initialize() is True
        assert store.initialize() is False
        assert [event.kind for event in store.events()] == ["store.initialized"]


def test_files_are_private_and_so_are_the_folders_that_were_made(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "agents.db"
    with StateStore(path) as store:
        store.initialize()
        store.acquire("release", "worker-a", 30)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes.keys() >= {"agents.db", "agents.db-wal", "agents.db-shm", "agents.db-gate"}
    assert set(modes.values()) == {0o600}
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o700, 0o700]


def test_the_default_folder_is_kept_out_of_git(tmp_path: Path) -> None:
    with StateStore(tmp_path / ".agent-checkpoint" / "state.db") as store:
        store.initialize()
    assert (tmp_path / ".agent-checkpoint" / ".gitignore").read_text().splitlines()[-1] == "*"


def test_a_new_store_has_a_write_ahead_log_and_can_shrink(path: Path) -> None:
    StateStore(path).initialize()
    raw = sqlite3.connect(path)
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert raw.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    raw.close()


def test_many_threads_initialize_at_once(path: Path) -> None:
    made, errors = [], []

    def start() -> None:
        try:
            with StateStore(path) as store:
                made.append(store.initialize())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (errors, sorted(made)) == ([], [False] * 15 + [True])


def test_without_a_store_every_call_says_so_and_makes_none(path: Path) -> None:
    store = StateStore(path)
    for call in (lambda: store.acquire("s", "w", 30), lambda: store.get_lease("s"), store.events, store.status):
        with pytest.raises(NotFoundError):
            call()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"hello", b"x" * 5000])
def test_a_file_that_is_no_store_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(NotAStoreError):
        StateStore(path).acquire("s", "w", 30)
    if content:
        with pytest.raises(NotAStoreError):
            StateStore(path).initialize()
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_another_program_s_database_is_left_as_it_is(path: Path) -> None:
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE mine (x)")
    raw.commit()
    raw.close()
    before = path.read_bytes()
    for call in (StateStore(path).initialize, lambda: StateStore(path).acquire("s", "w", 30)):
        with pytest.raises(NotAStoreError):
            call()
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_store_when_asked(path: Path) -> None:
    path.touch()
    assert StateStore(path).initialize() is True


def set_version(path: Path, version: int) -> None:
    raw = sqlite3.connect(path)
    raw.execute("UPDATE components SET version = ? WHERE component = 'core'", (version,))
    raw.commit()
    raw.close()


def test_a_newer_schema_is_refused_untouched(path: Path) -> None:
    StateStore(path).initialize()
    set_version(path, 99)
    before = path.read_bytes()
    for call in (StateStore(path).initialize, lambda: StateStore(path).acquire("s", "w", 30), StateStore(path).status):
        with pytest.raises(NewerSchemaError) as newer:
            call()
        assert (newer.value.found, newer.value.supported, newer.value.component) == (99, 6, "core")
    assert path.read_bytes() == before


def test_an_older_schema_says_what_to_run(path: Path) -> None:
    StateStore(path).initialize()
    set_version(path, 0)
    with pytest.raises(SchemaVersionError) as older:
        StateStore(path).acquire("s", "w", 30)
    assert "init" in older.value.hint
    assert not isinstance(older.value, NewerSchemaError)


def store_of_version_1(path: Path) -> None:
    """As the first release left it: with one lease that was released, and one that is live."""
    schema.create(str(path), 1.0)
    first = Path(schema.__file__).with_name("migrations") / "0001_core.sql"
    raw = sqlite3.connect(path)
    for statement in schema.statements(first.read_text()):
        raw.execute(statement)
    raw.execute("INSERT INTO components VALUES ('core', 1, '0.1.0', 1)")
    for scope, token, state in (("release", 7, "released"), ("deploy", 3, "live")):
        far = time.time_ns() + 600 * 10**9
        row = (scope, 0, "worker-a", token, state, 600 * 10**9, 1, 1, far, "", 0, '{"a": 1}')
        raw.execute(f"INSERT INTO leases VALUES ({', '.join('?' * len(row))})", row)
    raw.commit()
    raw.close()


def test_a_store_of_the_first_version_waits_for_init_and_keeps_its_tokens(path: Path) -> None:
    store_of_version_1(path)
    with StateStore(path) as store:
        with pytest.raises(SchemaVersionError, match="version 1 of the core tables"):
            store.acquire("release", "worker-b")

        assert store.initialize() is False

        assert store.acquire("release", "worker-b").token == 8
        kept = store.get_lease("deploy")
        assert kept is not None
        assert (kept.token, kept.metadata, kept.process, kept.owner_alive) == (3, {"a": 1}, None, None)
        with pytest.raises(LeaseHeldError):
            store.acquire("deploy", "worker-b")
        migrated = store.events()[0]
        assert (migrated.kind, migrated.detail["from_version"], migrated.detail["to_version"]) == (
            "store.migrated",
            1,
            6,
        )


def store_of_version_5(path: Path) -> None:
    """As the release before the sums left it: with a row of everything that is rewritten."""
    schema.create(str(path), 1.0)
    raw = sqlite3.connect(path)
    for script in sorted(Path(schema.__file__).with_name("migrations").iterdir())[:5]:
        for statement in schema.statements(script.read_text()):
            raw.execute(statement)
    raw.execute("INSERT INTO components VALUES ('core', 5, '0.1.0', 1)")
    lease = ("release", 0, "worker-a", 7, "released", 10**9, 1, 1, 2, "", 0, '{"a": 1}', "")
    raw.execute(f"INSERT INTO leases VALUES ({', '.join('?' * len(lease))})", lease)
    for number, sequence in ((5, 3), (9, 4)):
        raw.execute(
            "INSERT INTO checkpoints VALUES (?, 'deploy', ?, 9, 1, 'release', 'worker-a', 7, ?)",
            (number, sequence, f'{{"n":{sequence}}}'),
        )
    raw.execute("INSERT INTO effects VALUES ('refund', 'release', 'worker-a', 7, 'done', NULL, '8', 1, 2, 0, '')")
    raw.execute("INSERT INTO events VALUES (1, 1, 'store.initialized', NULL, NULL, NULL, NULL, NULL, '{}')")
    raw.execute("INSERT INTO floors VALUES ('build', 40)")
    raw.commit()
    raw.close()


def test_rows_of_before_the_sums_stay_and_get_theirs(path: Path) -> None:
    store_of_version_5(path)
    with StateStore(path) as store:
        assert store.initialize() is False

        found = store.get_checkpoint("deploy")
        assert found is not None
        assert (found.sequence, found.data, found.token) == (4, {"n": 4}, 7)
        assert [each.sequence for each in store.checkpoint_history("deploy")] == [4, 3]
        effect = store.get_effect("refund")
        assert effect is not None
        assert effect.result == 8
        (sums,) = [check for check in store.doctor() if check.check == "sums"]
        assert (sums.verdict, sums.value["without"]) == ("ok", 6)

        lease = store.acquire("release", "worker-b")
        assert lease.token == 8
        assert store.put_checkpoint("deploy", 1, lease=lease).sequence == 5
        assert store.put_checkpoint("build", 1).sequence == 41
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT id, sum IS NULL FROM checkpoints ORDER BY id").fetchall() == [
        *((5, 1), (9, 1)),
        *((10, 0), (11, 0)),
    ]
    assert raw.execute("SELECT sum IS NULL FROM leases").fetchall() == [(0,)]
    assert raw.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    raw.close()


def test_many_threads_bring_an_old_store_up_to_date_at_once(path: Path) -> None:
    store_of_version_5(path)
    errors = []

    def start() -> None:
        try:
            with StateStore(path) as store:
                store.initialize()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with StateStore(path) as store:
        assert [event.kind for event in store.events()] == ["store.initialized", "store.migrated"]
        assert len(store.checkpoint_history("deploy")) == 2


@pytest.mark.parametrize("database", ["", "a\0b", "\ud800.db", 7, None, b"bytes.db", ":memory:", "oracle://host/db"])
def test_what_cannot_name_a_store_is_invalid(database: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        StateStore(database)  # type: ignore[arg-type]
    assert refused.value.field == "database"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"busy_timeout_seconds": -1}, "busy_timeout_seconds"),
        ({"busy_timeout_seconds": float("nan")}, "busy_timeout_seconds"),
        ({"busy_timeout_seconds": 1e9}, "busy_timeout_seconds"),
        ({"synchronous": "off"}, "synchronous"),
        ({"max_payload_bytes": 0}, "max_payload_bytes"),
    ],
)
def test_an_option_outside_its_rule_is_named(path: Path, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        StateStore(path, **options)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize("name", ["with space.db", "per%cent?#.db", "é日本.db", "semi;colon.db", "-dash.db"])
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    with StateStore(tmp_path / name) as store:
        store.initialize()
        assert store.acquire("s", "w", 30).token == 1
    assert (tmp_path / name).exists()


def test_a_closed_store_says_so(path: Path) -> None:
    store = StateStore(path)
    store.initialize()
    store.close()
    store.close()
    with pytest.raises(InvalidInputError):
        store.get_lease("s")


def test_the_log_and_the_tokens_cannot_be_changed_behind_the_store(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        store.acquire("s", "w", 30)
    raw = sqlite3.connect(path)
    for statement in ("DELETE FROM events", "UPDATE events SET kind = 'x'", "DELETE FROM leases"):
        with pytest.raises(sqlite3.IntegrityError):
            raw.execute(statement)
    raw.close()


@pytest.mark.parametrize(
    ("version", "has_bug"),
    [
        *(((3, 37, 0), True), ((3, 40, 1), True), ((3, 44, 5), True), ((3, 44, 6), False), ((3, 45, 9), True)),
        *(((3, 49, 2), True), ((3, 50, 6), True), ((3, 50, 7), False), ((3, 51, 2), True), ((3, 51, 3), False)),
        *(((3, 52, 0), False), ((4, 0, 0), False)),
    ],
)
def test_doctor_knows_which_sqlite_has_the_wal_reset_bug(version: tuple[int, int, int], has_bug: bool) -> None:
    assert has_wal_reset_bug(version) is has_bug
