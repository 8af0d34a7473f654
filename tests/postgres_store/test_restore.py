"""A dump that is restored into a younger cluster: nothing is hidden, and what comes after is behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import postgres
from tests.postgres_store.crew import work

from agent_checkpoint import StateStore

NEXT = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
BURN = "DO $$ BEGIN FOR i IN 1..5000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
STARTERS = 8

STARTER = """
import json, sys
from agent_checkpoint import StateStore
url, owner = sys.argv[1:]
print(json.dumps("ready"), flush=True)
sys.stdin.readline()
with StateStore(url) as store:
    store.initialize()
    print(store.acquire(owner, owner).token)
"""


@pytest.fixture
def elder(own: postgres.Server) -> postgres.Server:
    """A server that has given out many numbers."""
    own.sql(BURN)
    return own


@pytest.fixture
def younger() -> Iterator[postgres.Server]:
    server = postgres.Server(*postgres.QUICK).start()
    yield server
    server.remove()


def move(source: postgres.Server, target: postgres.Server) -> None:
    assert target.sql(NEXT) < source.sql(NEXT), "the younger cluster must be behind"
    dump = source.run("pg_dump", *source.reached(), "--schema=agent_checkpoint")
    target.run("psql", *target.reached(), "-q", "-v", "ON_ERROR_STOP=1", text=dump)


def test_a_restored_store_goes_on_behind_its_own_events(elder: postgres.Server, younger: postgres.Server) -> None:
    with StateStore(elder.url()) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", ttl_seconds=3600)
        for number in range(5):
            store.put_checkpoint("deploy", {"number": number}, lease=lease)
        before = store.events(after="start")
    seen = before[3]
    move(elder, younger)

    with StateStore(younger.url()) as store:
        assert store.events(after="start") == before
        store.put_checkpoint("deploy", {"number": 5}, lease=lease)
        store.release(*lease.fence)
        after = store.events(after="start")

        assert after[: len(before)] == before
        assert [event.kind for event in after[len(before) :]] == ["checkpoint.saved", "lease.released"]
        assert [event.id for event in after] == sorted({event.id for event in after})
        assert store.events(after=seen.cursor) == after[4:]
        assert store.acquire("release", "worker-b").token == 2
        assert [check for check in store.doctor() if check.verdict == "broken"] == []


def test_many_that_start_at_once_on_a_restored_store_write_no_event_twice(
    elder: postgres.Server, younger: postgres.Server
) -> None:
    with StateStore(elder.url()) as store:
        store.initialize()
        store.acquire("release", "worker-a")
        before = store.events(after="start")
    move(elder, younger)

    said = work(STARTER, [(younger.url(), f"starter-{number}") for number in range(STARTERS)])

    assert said == [[1]] * STARTERS
    with StateStore(younger.url()) as store:
        after = store.events(after="start")
    assert after[: len(before)] == before
    assert {event.scope for event in after[len(before) :]} == {f"starter-{number}" for number in range(STARTERS)}
    assert [event.id for event in after] == sorted({event.id for event in after})


def test_numbers_that_were_set_back_on_the_same_cluster_are_noticed_too(elder: postgres.Server) -> None:
    with StateStore(elder.url()) as store:
        store.initialize()
        store.acquire("release", "worker-a")
        before = store.events(after="start")
    dump = elder.run("pg_dump", *elder.reached(), "--schema=agent_checkpoint")
    elder.sql("DROP SCHEMA agent_checkpoint CASCADE")
    raised = dump.replace(f"{before[-1].id}\t", f"{before[-1].id + (10_000_000 << 16)}\t")
    assert raised != dump
    elder.run("psql", *elder.reached(), "-q", "-v", "ON_ERROR_STOP=1", text=raised)

    with StateStore(elder.url()) as store:
        store.acquire("build", "worker-a")
        assert [event.scope for event in store.events(after="start")] == [None, "release", "build"]
