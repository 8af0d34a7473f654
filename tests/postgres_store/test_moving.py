"""Moving a store into PostgreSQL, out of it, and within it: nothing is lost, and the old one is sealed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import postgres
from tests.moving import everything, fill, goes_on, last_cursor

from agent_checkpoint import InvalidInputError, LeaseHeldError, StaleLeaseError, StateStore, StorageError
from agent_checkpoint.errors import StoreMovedError

WATCHDOG_SECONDS = 60
LARGEST = 16 << 20
DIRECTIONS = ("sqlite to postgresql", "postgresql to sqlite", "postgresql to postgresql")

Places = Callable[[str], str]


@pytest.fixture
def places(server: postgres.Server, schema: str, tmp_path: Path) -> Places:
    """Where a store on a database is, by the word for it; a second one in PostgreSQL is in a schema of its own."""
    numbers = iter(range(9))
    return lambda word: (
        str(tmp_path / f"agents-{next(numbers)}.db") if word == "sqlite" else server.url(f"{schema}_{next(numbers)}")
    )


@pytest.fixture(params=DIRECTIONS)
def ends(request: pytest.FixtureRequest, places: Places) -> Iterator[tuple[StateStore, StateStore]]:
    """A store, and where it is to be."""
    with ExitStack() as stack:
        source, target = (stack.enter_context(StateStore(places(word))) for word in request.param.split(" to "))
        source.initialize()
        yield source, target


def is_sealed(store: StateStore) -> bool:
    try:
        store.put_checkpoint("probe", 1)
    except StoreMovedError:
        return True
    return False


def test_everything_arrives_and_goes_on(ends: tuple[StateStore, StateStore]) -> None:
    source, target = ends
    fill(source)
    cursor = last_cursor(source)

    source.move_to(target)

    assert everything(target) == everything(source)
    assert is_sealed(source)
    goes_on(target, cursor)


def test_and_back_again(places: Places) -> None:
    with ExitStack() as stack:
        line = [stack.enter_context(StateStore(places(word))) for word in ("sqlite", "postgresql", "sqlite")]
        line[0].initialize()
        fill(line[0])
        whole = everything(line[0])
        for source, target in pairwise(line):
            source.move_to(target)

        there = everything(line[2])
        assert {name: rows for name, rows in there.items() if name != "events"} == {
            name: rows for name, rows in whole.items() if name != "events"
        }
        ids = [event.id for event in line[2].events(1_000, after="start")]
        assert ids == sorted(set(ids))
        assert [event.kind for event in line[2].events(2)] == ["store.sealed", "store.moved"]


def test_the_largest_checkpoint_arrives(ends: tuple[StateStore, StateStore]) -> None:
    source, target = ends
    data = "x" * (LARGEST - 2)
    source.put_checkpoint("large", data)
    source.put_checkpoint("large", data[:-1] + "y")
    source.move_to(target)

    assert [each.size_bytes for each in target.checkpoint_history("large")] == [LARGEST, LARGEST]
    latest = target.get_checkpoint("large")
    assert latest is not None
    assert latest.data == data[:-1] + "y"


def test_a_reader_of_the_old_store_goes_on_in_the_new_one(ends: tuple[StateStore, StateStore]) -> None:
    source, target = ends
    fill(source)
    whole = source.events(1_000, after="start")
    source.move_to(target)

    for place in (0, 7, len(whole) - 2):
        found = target.events(1_000, after=whole[place].cursor)
        assert found[: len(whole) - place - 1] == whole[place + 1 :]


# LangGraph's tables


def test_threads_of_langgraph_arrive_and_go_on(ends: tuple[StateStore, StateStore]) -> None:
    pytest.importorskip("langgraph.checkpoint.base", reason="its package brings the tables")
    from agent_checkpoint_langgraph import AgentCheckpointSaver

    source, target = ends
    blob = bytes(range(256)) * 8 + "Ünï ☃".encode()

    def put(saver: Any, number: int) -> None:
        made = {
            "v": 4,
            "id": f"id-{number:04}",
            "ts": "2030-01-01T00:00:00+00:00",
            "channel_values": {"blob": blob + bytes([number])},
            "channel_versions": {"blob": f"{number}"},
            "versions_seen": {},
            "updated_channels": None,
        }
        config = {"configurable": {"thread_id": "thread-1", "checkpoint_ns": ""}}
        head = saver.put(config, made, {"source": "loop", "step": number}, made["channel_versions"])
        saver.put_writes(head, [("blob", blob)], f"task-{number}")

    old, new = AgentCheckpointSaver(source), AgentCheckpointSaver(target)
    for number in range(5):
        put(old, number)
    before = list(old.list(None))
    source.move_to(target)

    assert list(new.list(None)) == before
    put(new, 5)
    found = new.get_tuple({"configurable": {"thread_id": "thread-1", "checkpoint_ns": ""}})
    assert found is not None
    assert found.checkpoint["channel_values"]["blob"] == blob + bytes([5])
    with pytest.raises(StoreMovedError):
        put(old, 6)
    old.close()
    new.close()


# The old store

OPEN_BEFORE = """
import json, sys
from agent_checkpoint import StateStore
from agent_checkpoint.errors import StoreMovedError
store = StateStore(sys.argv[1])
store.put_checkpoint("early", 1)
print("open", flush=True)
sys.stdin.readline()
for call in (
    lambda: store.acquire("free", "worker-b"),
    lambda: store.acquire("free", "worker-b", wait_seconds=30),
    lambda: store.put_checkpoint("early", 2),
):
    try:
        call()
    except StoreMovedError as error:
        print(json.dumps([error.moved_to, error.exit_status]), flush=True)
"""


def test_a_process_that_had_it_open_before_is_refused_and_told_where_to(ends: tuple[StateStore, StateStore]) -> None:
    source, target = ends
    command = [sys.executable, "-c", OPEN_BEFORE, source.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "open\n"
        source.move_to(target)
        out = other.communicate("\n", timeout=WATCHDOG_SECONDS)[0]

    assert [json.loads(line) for line in out.splitlines()] == [[target.database, 74]] * 3


def test_the_background_heartbeat_of_a_lease_that_was_taken_away_writes_nothing(
    ends: tuple[StateStore, StateStore],
) -> None:
    source, target = ends
    with pytest.raises(StaleLeaseError), source.hold("release", "worker-a", ttl_seconds=0.9) as held:
        source.force_release("release", reason="the store moves")
        source.move_to(target)
        assert held.lost.wait(WATCHDOG_SECONDS)

    assert everything(target) == everything(source)


def test_writers_that_go_on_while_it_moves_have_written_before_it_or_are_refused(
    ends: tuple[StateStore, StateStore],
) -> None:
    source, target = ends
    saved: list[tuple[str, int]] = []
    refused: list[str] = []
    writing = threading.Barrier(5)

    def write(name: str) -> None:
        writing.wait(WATCHDOG_SECONDS)
        with StateStore(source.address) as store:
            try:
                while True:
                    saved.append((name, store.put_checkpoint(name, 1).sequence))
            except StoreMovedError as error:
                refused.append(error.moved_to)

    writers = [threading.Thread(target=write, args=(f"workflow-{number}",)) for number in range(4)]
    for writer in writers:
        writer.start()
    writing.wait(WATCHDOG_SECONDS)
    while len(saved) < 20:
        assert any(writer.is_alive() for writer in writers)
    source.move_to(target)
    for writer in writers:
        writer.join(WATCHDOG_SECONDS)

    assert refused == [target.database] * 4
    for name, last in dict(saved).items():
        assert [each.sequence for each in target.checkpoint_history(name)] == list(range(last, 0, -1))
    assert everything(target) == everything(source)


# What is refused, and accidents


def test_a_name_that_leads_elsewhere_later_is_not_the_place_that_it_was_moved_to(
    places: Places, server: postgres.Server, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("production", "testing"):
        server.sql(f"CREATE DATABASE {schema}_{name}")
    url = f"postgresql://postgres@127.0.0.1:{server.port}?schema=agent_checkpoint"
    with StateStore(places("sqlite")) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a")
        store.release(*lease.fence)
        monkeypatch.setenv("PGDATABASE", f"{schema}_production")
        with StateStore(url) as target:
            store.move_to(target)
        monkeypatch.setenv("PGDATABASE", f"{schema}_testing")
        with StateStore(url) as another, pytest.raises(StoreMovedError, match="leads to another place now") as refused:
            store.move_to(another)
        assert f"{schema}_production" in refused.value.hint
        monkeypatch.setenv("PGDATABASE", f"{schema}_production")
        with StateStore(url) as target:
            assert store.move_to(target).already
            assert target.acquire("release", "worker-a").token == 2


def test_a_live_lease_is_refused_and_the_source_goes_on(ends: tuple[StateStore, StateStore]) -> None:
    source, target = ends
    lease = source.acquire("release", "worker-a")
    with pytest.raises(LeaseHeldError):
        source.move_to(target)

    source.release(*lease.fence)
    source.move_to(target)


def test_a_schema_with_tables_of_another_program_is_refused_before_anything_is_sealed(
    server: postgres.Server, schema: str, tmp_path: Path
) -> None:
    server.sql(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.invoices (number int)")
    with StateStore(tmp_path / "agents.db") as source, StateStore(server.url(schema)) as target:
        source.initialize()
        with pytest.raises(InvalidInputError, match="is no empty place: it has a table 'invoices'"):
            source.move_to(target)
        assert [event.kind for event in source.events()] == ["store.initialized"]


def test_a_server_that_dies_in_the_middle_leaves_the_source_as_it_was_and_a_later_move_finishes(
    own: postgres.Server, tmp_path: Path
) -> None:
    def die(table: str, *_: object) -> None:
        if table == "events":
            own.kill()

    with StateStore(tmp_path / "agents.db") as source:
        source.initialize()
        fill(source)
        with StateStore(own.url(), busy_timeout_seconds=0.5) as target:
            with pytest.raises(StorageError):
                source.move_to(target, die)
            assert not is_sealed(source)
        own.start()
        with StateStore(own.url()) as target:
            source.move_to(target)
            assert everything(target) == everything(source)
    assert not source.database.startswith("postgresql")


KILLED = """
import os, signal, sys
from agent_checkpoint import StateStore

def die(table, *_):
    if table == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

with StateStore(sys.argv[1]) as source, StateStore(sys.argv[2]) as target:
    source.move_to(target, die)
"""


@pytest.mark.parametrize("table", ["checkpoints", "refusals"])
def test_a_mover_that_is_killed_leaves_a_sealed_store_and_the_same_move_again_finishes(
    ends: tuple[StateStore, StateStore], table: str
) -> None:
    source, target = ends
    fill(source)
    killed = subprocess.run([sys.executable, "-c", KILLED, source.address, target.address, table])
    assert killed.returncode == -9
    assert is_sealed(source)

    moved = source.move_to(target)

    assert not moved.already
    assert everything(target) == everything(source)
