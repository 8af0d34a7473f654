"""A reader that follows by cursor sees each event once, however slow its writer was to commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from tests import postgres
from tests.postgres_store.crew import crew

from agent_checkpoint import StateStore
from agent_checkpoint.records import Check, Event
from agent_checkpoint_postgres import transactions

WRITERS = 8
ROUNDS = 15

WRITER = """
import json, random, sys, time
from agent_checkpoint import StateStore
url, by, rounds = sys.argv[1:]
with StateStore(url) as store:
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    for number in range(int(rounds)):
        with store.transaction(component="tests", action="test.write") as part:
            for half in range(2):
                part.event("test.happened", {"by": by, "number": 2 * number + half})
            time.sleep(random.uniform(0, 0.03))
"""


def follow(store: StateStore, seen: list[Event]) -> None:
    """Read what is behind the last event that was seen."""
    while True:
        found = store.events(after=seen[-1].cursor if seen else "start", limit=7, kind="test.happened")
        seen += found
        if len(found) < 7:
            return


def test_a_reader_misses_no_event_of_many_slow_writers(store: StateStore, url: str) -> None:
    seen: list[Event] = []
    with crew(WRITER, [(url, number, ROUNDS) for number in range(WRITERS)]) as writers:
        for writer in writers:
            assert writer.answer() == "ready"
        for writer in writers:
            writer.go()
        while any(writer.process.poll() is None for writer in writers):
            follow(store, seen)
        for writer in writers:
            writer.end()
    follow(store, seen)

    told = [(event.detail["by"], event.detail["number"]) for event in seen]
    assert sorted(told) == sorted((str(by), number) for by in range(WRITERS) for number in range(2 * ROUNDS))
    assert [event.id for event in seen] == sorted({event.id for event in seen})
    for by in range(WRITERS):
        assert [number for writer, number in told if writer == str(by)] == list(range(2 * ROUNDS))


def seen_beside_a_slow_writer(store: StateStore) -> list[str]:
    """Whose events a reader sees that looks before and after the slower of two writers commits."""
    seen: list[Event] = []

    def quick() -> None:
        with store.transaction(component="tests", action="test.write") as part:
            part.event("test.happened", {"by": "quick"})

    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened", {"by": "slow"})
        other = threading.Thread(target=quick)
        other.start()
        other.join()
        reader = threading.Thread(target=follow, args=(store, seen))
        reader.start()
        reader.join()
    follow(store, seen)
    return [event.detail["by"] for event in seen]


def test_an_event_is_not_shown_before_what_may_still_come_before_it(store: StateStore) -> None:
    assert seen_beside_a_slow_writer(store) == ["slow", "quick"]


def test_a_reader_that_went_on_to_the_end_would_miss_the_slow_one(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "settled", lambda oldest, ahead: 2**63 - 1)

    assert seen_beside_a_slow_writer(store) == ["quick"]


@contextmanager
def elsewhere(server: postgres.Server) -> Iterator[psycopg.Connection]:
    """A connection to another database of the server, with a transaction that has written."""
    server.sql("DROP DATABASE IF EXISTS elsewhere")
    server.sql("CREATE DATABASE elsewhere")
    try:
        with psycopg.connect(f"host=127.0.0.1 port={server.port} user=postgres dbname=elsewhere") as connection:
            connection.execute("CREATE TABLE mine (number INT)")
            yield connection
    finally:
        server.sql("DROP DATABASE elsewhere WITH (FORCE)")


def horizon(store: StateStore) -> Check:
    return next(check for check in store.doctor() if check.check == "event_horizon")


def kinds(store: StateStore) -> list[str]:
    return [event.kind for event in store.events(after="start")]


def test_doctor_names_the_transaction_of_another_database_that_holds_back_events(
    store: StateStore, server: postgres.Server
) -> None:
    assert horizon(store).verdict == "ok"
    with elsewhere(server) as connection:
        store.acquire("release", "worker-a")
        assert kinds(store) == ["store.initialized"]
        check = horizon(store)
        assert check.verdict == "warning"
        assert (check.value["pid"], check.value["database"]) == (connection.info.backend_pid, "elsewhere")
        assert str(connection.info.backend_pid) in check.message
        connection.rollback()
        assert kinds(store) == ["store.initialized", "lease.acquired"]
    assert horizon(store).verdict == "ok"


def test_doctor_names_the_prepared_transaction_that_holds_back_events(
    store: StateStore, server: postgres.Server
) -> None:
    with elsewhere(server) as connection:
        connection.execute("PREPARE TRANSACTION 'forgotten'")
        connection.rollback()  # psycopg's view of it; the prepared one goes on
        store.acquire("release", "worker-a")
        assert kinds(store) == ["store.initialized"]
        check = horizon(store)
        assert check.verdict == "warning"
        assert (check.value["prepared"], check.value["database"]) == ("forgotten", "elsewhere")
        connection.autocommit = True
        connection.execute("ROLLBACK PREPARED 'forgotten'")
    assert kinds(store) == ["store.initialized", "lease.acquired"]
