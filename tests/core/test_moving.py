"""Moving a store into another file: all of it, once, whoever dies or comes in between; the old one is sealed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests import dying
from tests.moving import MANY, everything, fill, goes_on, is_empty, last_cursor

from agent_checkpoint import (
    InvalidInputError,
    LeaseHeldError,
    NotFoundError,
    StaleLeaseError,
    StateStore,
    StorageBusyError,
)
from agent_checkpoint.errors import SchemaVersionError, StoreMovedError
from agent_checkpoint.testing import FakeClock

from .conftest import COMMAND, WATCHDOG_SECONDS, Cli, held, process
from .test_cli_disks import needs_mounts

MOVE = """
    from agent_checkpoint import StateStore
    with StateStore(words[0]) as source, StateStore(words[1]) as target:
        source.move_to(target)
"""


@pytest.fixture
def store(path: Path) -> Iterator[StateStore]:
    """By the real clock: processes join in. It may lose the last commits in a power cut, which no test makes."""
    with StateStore(path, synchronous="normal") as opened:
        opened.initialize()
        yield opened


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "elsewhere" / "new.db"


@pytest.fixture
def target(place: Path) -> Iterator[StateStore]:
    with StateStore(place, synchronous="normal") as opened:
        yield opened


def is_sealed(store: StateStore) -> bool:
    try:
        store.put_checkpoint("probe", 1)
    except StoreMovedError:
        return True
    return False


def test_everything_arrives_and_goes_on(store: StateStore, target: StateStore) -> None:
    fill(store)
    cursor = last_cursor(store)

    moved = store.move_to(target)

    assert everything(target) == everything(store)
    assert (moved.source, moved.target, moved.already) == (store.database, target.database, False)
    assert moved.rows["checkpoints"] == MANY - 5 + 1
    goes_on(target, cursor)


def test_progress_is_told_by_table(store: StateStore, target: StateStore) -> None:
    fill(store)
    told: list[tuple[str, int, int]] = []
    store.move_to(target, lambda *facts: told.append(facts))

    of_checkpoints = [(done, total) for table, done, total in told if table == "checkpoints"]
    assert of_checkpoints == [(200, 226), (226, 226)]


def test_a_page_is_no_larger_than_fits_into_memory(store: StateStore, target: StateStore) -> None:
    for _ in range(3):
        store.put_checkpoint("large", "x" * (5 << 20))
    told: list[int] = []
    store.move_to(target, lambda table, done, _: told.append(done) if table == "checkpoints" else None)

    assert told == [1, 2, 3]


# The old store


OPEN_BEFORE = """
import json, sys
from agent_checkpoint import StateStore
from agent_checkpoint.errors import StoreMovedError
store = StateStore(sys.argv[1])
store.put_checkpoint("early", 1)
print("open", flush=True)
sys.stdin.readline()
calls = {
    "acquire": lambda: store.acquire("free", "worker-b"),
    "wait": lambda: store.acquire("free", "worker-b", wait_seconds=30),
    "hold": lambda: store.hold("free", "worker-b").__enter__(),
    "put": lambda: store.put_checkpoint("early", 2),
    "limit": lambda: store.set_limit("free", 2),
    "retention": lambda: store.set_retention("checkpoints.keep_last", 1),
    "prune": lambda: store.prune_checkpoints(1),
    "resolve": lambda: store.resolve_effect("mail", retry=True),
}
for name, call in calls.items():
    try:
        call()
    except StoreMovedError as error:
        print(json.dumps([name, error.moved_to, error.exit_status]), flush=True)
"""


def test_a_process_that_had_it_open_before_is_refused_and_told_where_to(
    path: Path, store: StateStore, target: StateStore
) -> None:
    fill(store)
    command = [sys.executable, "-c", OPEN_BEFORE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        store.move_to(target)
        other.stdin.write("\n")
        out = other.communicate(timeout=WATCHDOG_SECONDS)[0]

    names = ["acquire", "wait", "hold", "put", "limit", "retention", "prune", "resolve"]
    assert [json.loads(line) for line in out.splitlines()] == [[name, target.database, 74] for name in names]
    assert everything(target) == everything(store)


def test_who_held_a_lease_that_was_taken_away_hears_it_from_a_sealed_store_too(
    store: StateStore, target: StateStore
) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", ttl_seconds=0.6) as held:
        store.force_release("release", reason="the store moves")
        store.move_to(target)
        assert held.lost.wait(WATCHDOG_SECONDS)

    assert everything(target) == everything(store)


def test_what_is_in_a_sealed_store_can_still_be_read(store: StateStore, target: StateStore) -> None:
    fill(store)
    store.move_to(target)

    assert store.get_checkpoint("many") == target.get_checkpoint("many")
    assert store.sweep() == []
    (schema,) = [check for check in store.doctor() if check.check == "schema"]
    assert (schema.verdict, target.database in schema.message) == ("warning", True)


def test_other_programs_are_refused_too(path: Path, store: StateStore, target: StateStore) -> None:
    import sqlite3
    from contextlib import closing

    fill(store)
    store.move_to(target)
    changes = ("UPDATE leases SET token = 1", "DELETE FROM floors", "INSERT INTO retention VALUES ('a', 'b', NULL)")
    with closing(sqlite3.connect(path)) as connection:
        for change in changes[:1] + changes[2:]:
            with pytest.raises(sqlite3.IntegrityError, match="this store was moved to"):
                connection.execute(change)


# What is refused


def test_a_live_lease_is_refused_and_the_source_goes_on(store: StateStore, target: StateStore) -> None:
    lease = store.acquire("release", "worker-a")

    with pytest.raises(LeaseHeldError) as refused:
        store.move_to(target)

    assert (refused.value.scope, refused.value.token) == ("release", lease.token)
    assert store.heartbeat(*lease.fence).token == 1
    assert "store.sealed" not in [event.kind for event in store.events()]
    store.release(*lease.fence)
    store.move_to(target)


def test_a_lease_that_is_over_but_not_on_record_is_no_live_one(path: Path, place: Path, clock: FakeClock) -> None:
    with StateStore(path, clock=clock) as store, StateStore(place, clock=clock) as target:
        store.initialize()
        store.acquire("release", "worker-a", ttl_seconds=30)
        clock.advance(30)
        store.move_to(target)
        assert "lease.expired" in [event.kind for event in target.events()]


def test_whoever_holds_a_lease_is_told_as_where_a_scope_is_asked_for(
    path: Path, target: StateStore, clock: FakeClock
) -> None:
    with StateStore(path, clock=clock) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", ttl_seconds=30)
        with pytest.raises(LeaseHeldError, match="nothing was changed") as refused:
            store.move_to(target)

    error = refused.value
    assert (error.owner, error.expires_at, error.retry_after, error.position) == ("worker-a", lease.expires_at, 30.0, 1)


def test_leases_that_are_over_are_swept_with_the_patience_of_the_store(
    path: Path, target: StateStore, clock: FakeClock
) -> None:
    with StateStore(path, clock=clock, busy_timeout_seconds=0.4) as store:
        store.initialize()
        store.acquire("release", "worker-a", ttl_seconds=30)
        clock.advance(30)
        with held(path), pytest.raises(StorageBusyError, match=r"within 0\.4 s"):
            store.move_to(target)


@pytest.mark.parametrize("place", [None, "new.db", 7])
def test_what_is_no_store_is_no_target(store: StateStore, place: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a StateStore") as refused:
        store.move_to(place)
    assert refused.value.field == "target"


def test_a_place_with_a_store_is_refused_and_the_source_goes_on(store: StateStore, target: StateStore) -> None:
    target.initialize()
    with pytest.raises(InvalidInputError, match="has a store already"):
        store.move_to(target)

    assert not is_sealed(store)


def test_the_store_itself_is_no_target(path: Path, store: StateStore, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(path)
    with StateStore(tmp_path / "link.db") as same, pytest.raises(InvalidInputError, match="is the store itself"):
        store.move_to(same)


def test_a_store_that_was_moved_is_not_moved_elsewhere(store: StateStore, target: StateStore, tmp_path: Path) -> None:
    store.move_to(target)
    with StateStore(tmp_path / "third.db") as third, pytest.raises(StoreMovedError) as refused:
        store.move_to(third)

    assert refused.value.moved_to == target.database
    assert not (tmp_path / "third.db").exists()


def test_the_same_move_again_is_harmless(store: StateStore, target: StateStore) -> None:
    first = store.move_to(target)
    target.put_checkpoint("new", 1)

    again = store.move_to(target)

    assert (again.already, again.sha256) == (True, first.sha256)
    assert target.get_checkpoint("new") is not None
    assert is_sealed(store)


def test_another_store_at_the_old_place_is_not_the_one_that_was_moved(path: Path, target: StateStore) -> None:
    for _ in range(2):
        with StateStore(path) as store:
            store.initialize()
            store.put_checkpoint("deploy", 1)
            with suppress(InvalidInputError):
                store.move_to(target)
            second_is_sealed = is_sealed(store)
        path.rename(path.with_name(f"moved-{path.stat().st_ino}"))
        for sidecar in path.parent.glob(f"{path.name}-*"):
            sidecar.unlink()

    assert not second_is_sealed
    assert [event.kind for event in target.events()].count("store.moved") == 1


def _strange(folder: Path) -> dict[str, list[str]]:
    file = folder / "0001_strange.sql"
    file.write_text("CREATE TABLE strange_things (name TEXT PRIMARY KEY);")
    return {"sqlite": [str(file)]}


def test_tables_of_a_package_that_is_not_here_are_refused(
    store: StateStore, target: StateStore, tmp_path: Path
) -> None:
    store.migrate("strange", _strange(tmp_path))
    with pytest.raises(InvalidInputError, match="'strange': install its package here too"):
        store.move_to(target)

    assert not is_sealed(store)


def test_a_table_that_no_package_makes_is_refused(path: Path, store: StateStore, target: StateStore) -> None:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(InvalidInputError, match="table 'notes' that no installed package makes"):
        store.move_to(target)

    assert not is_sealed(store)
    assert [event.kind for event in store.events()] == ["store.initialized", "checkpoint.saved"]


def test_a_store_of_another_version_is_refused(path: Path, store: StateStore, target: StateStore) -> None:
    import sqlite3
    from contextlib import closing

    store.close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE components SET version = 1 WHERE component = 'core'")
    with StateStore(path) as older, pytest.raises(SchemaVersionError):
        older.move_to(target)


# Accidents


def test_a_move_that_fails_in_the_middle_leaves_the_source_as_it_was(
    store: StateStore, target: StateStore, place: Path
) -> None:
    fill(store)

    def interrupt(table: str, *_: object) -> None:
        if table == "events":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.move_to(target, interrupt)

    assert not is_sealed(store)
    assert store.events(2)[0].kind == "store.unsealed"
    assert is_empty(place)
    store.move_to(target)
    assert everything(target) == everything(store)


def test_a_second_mover_that_gives_up_leaves_the_seal_of_the_first(
    path: Path, place: Path, store: StateStore, target: StateStore
) -> None:
    fill(store)
    failed: list[Exception] = []

    def beside() -> None:
        with StateStore(path) as source, StateStore(place, busy_timeout_seconds=0.1) as there:
            try:
                source.move_to(there)
            except StorageBusyError as error:
                failed.append(error)

    def meanwhile(table: str, *_: object) -> None:
        if table == "checkpoints" and not failed:
            second = threading.Thread(target=beside)
            second.start()
            second.join(WATCHDOG_SECONDS)

    store.move_to(target, meanwhile)

    assert len(failed) == 1
    assert is_sealed(store)
    assert everything(target) == everything(store)


def test_of_many_movers_at_once_one_moves_and_all_are_told_so(path: Path, place: Path, store: StateStore) -> None:
    fill(store)
    command = [*COMMAND, "migrate-store", str(path), str(place)]
    movers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [json.loads(mover.communicate(timeout=WATCHDOG_SECONDS)[0]) for mover in movers]

    assert sorted(answer["already"] for answer in answers) == [False, True, True, True]
    assert len({answer["sha256"] for answer in answers}) == 1
    with StateStore(place) as target:
        assert everything(target) == everything(store)
    assert is_sealed(store)


def test_whenever_a_mover_is_killed_there_is_one_store_and_the_same_move_again_finishes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def prepared(number: int) -> tuple[Path, Path]:
        path = tmp_path / f"from-{number}.db"
        with StateStore(path, synchronous="normal") as store:
            store.initialize()
            fill(store)
        return path, tmp_path / f"to-{number}.db"

    steps = dying.run(MOVE, prepared(0))
    assert steps
    killed = 0
    for step in dying.spread(steps, 200 if request.config.getoption("--long") else 9):
        path, place = prepared(step)
        killed += dying.run(MOVE, (path, place), step) is None
        with StateStore(path) as store, StateStore(place) as target:
            assert is_sealed(store) or is_empty(place), step
            store.move_to(target)
            assert everything(target) == everything(store), step
            assert is_sealed(store), step
    assert killed >= 10


@needs_mounts
def test_a_disk_that_is_full_leaves_the_source_as_it_was(path: Path, store: StateStore, tmp_path: Path) -> None:
    for _ in range(20):
        store.put_checkpoint("large", "x" * 100_000)
    disk = tmp_path / "small"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    words: tuple[Any, ...] = (*COMMAND, "migrate-store", path, disk / "new.db")
    answer = process("unshare", "-m", "sh", "-c", mount, disk, *words)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-full"
    assert not is_sealed(store)


# The command


def test_the_command_moves_and_later_writes_exit_74_naming_where_to(
    bare_cli: Cli, path: Path, place: Path, store: StateStore
) -> None:
    fill(store)
    moved = bare_cli("migrate-store", path, place).value()
    assert (moved["source"], moved["target"]) == (str(path), str(place))

    late = bare_cli("--db", path, "checkpoint", "put", "deploy", "--data", "1")
    assert late.status == 74
    assert (late.error()["code"], late.error()["moved_to"]) == ("storage-moved", str(place))
    assert bare_cli("--db", place, "checkpoint", "put", "deploy", "--data", "1").status == 0


@pytest.mark.parametrize(
    ("prepare", "status"),
    [
        (lambda store, _: store.acquire("release", "worker-a"), 75),
        (lambda _, target: target.initialize(), 2),
        (lambda _, __: None, 0),
    ],
    ids=["a live lease", "a full target", "nothing"],
)
def test_the_command_says_why_not(
    bare_cli: Cli,
    store: StateStore,
    target: StateStore,
    prepare: Callable[[StateStore, StateStore], object],
    status: int,
) -> None:
    prepare(store, target)
    assert bare_cli("migrate-store", store.database, target.database).status == status


def test_a_source_that_is_not_there_is_66_and_makes_no_target(bare_cli: Cli, path: Path, place: Path) -> None:
    assert bare_cli("migrate-store", path, place).status == NotFoundError.exit_status
    assert not place.exists()
