"""Many threads, few connections; and an end that is an end."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests import postgres
from tests.postgres_store.crew import crew

from agent_checkpoint import InvalidInputError, LeaseHeldError, StateStore, StorageBusyError
from agent_checkpoint.errors import ReentrancyError

SESSIONS = "SELECT COUNT(*) FROM pg_stat_activity WHERE application_name = '{name}'"


def named(url: str, name: str, *options: str) -> str:
    return "&".join((url, f"application_name={name}", *options))


def sessions(server: postgres.Server, name: str) -> int:
    return int(str(server.sql(SESSIONS.format(name=name))[0][0]))


def test_thirty_threads_share_three_connections(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    with StateStore(named(url, schema, "pool_size=3"), busy_timeout_seconds=60) as few:

        def work(number: int) -> list[int]:
            lease = few.acquire(f"scope-{number}", "worker")
            sequences = [few.put_checkpoint("deploy", {"by": number}).sequence for _ in range(3)]
            assert few.check_lease(*lease.fence).token == 1
            few.release(*lease.fence)
            return sequences

        with ThreadPoolExecutor(30) as pool:
            done = [sequence for sequences in pool.map(work, range(30)) for sequence in sequences]
        assert sorted(done) == list(range(1, 91))
        assert 1 <= sessions(server, schema) <= 3


def test_who_gets_no_connection_in_time_is_told_why(store: StateStore, url: str) -> None:
    with StateStore(url + "&pool_size=1", busy_timeout_seconds=0.2) as few:
        few.list_leases()
        body = few.transaction(component="tests", action="test.write")
        with body, ThreadPoolExecutor(1) as pool:
            with pytest.raises(StorageBusyError, match="all 1 connections of this process") as caught:
                pool.submit(few.list_leases).result()
            assert "pool_size" in caught.value.hint
        assert few.list_leases() == []


def test_who_gets_no_lock_in_time_is_told_so(store: StateStore, url: str) -> None:
    with StateStore(url, busy_timeout_seconds=0.2) as impatient:
        with store.transaction(component="tests", action="test.write", locks=("scope:release",)):
            with pytest.raises(StorageBusyError, match="no lock within the busy timeout"):
                impatient.acquire("release", "worker-a")
            assert impatient.acquire("build", "worker-a").token == 1
        assert impatient.acquire("release", "worker-a").token == 1


def test_no_patience_is_no_reason_to_get_no_connection(store: StateStore, url: str) -> None:
    with StateStore(url, busy_timeout_seconds=0) as impatient:
        assert impatient.acquire("release", "worker-a").token == 1
        assert impatient.list_leases()[0].token == 1


def test_a_server_without_a_connection_left_is_waited_for(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    role = f"role_{schema}"
    server.sql(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1; GRANT ALL ON SCHEMA {schema} TO {role}")
    server.sql(f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}")
    theirs = url.replace("postgres@", f"{role}@")
    with StateStore(theirs) as first, StateStore(theirs, busy_timeout_seconds=0.5) as second:
        assert first.list_leases() == []
        with pytest.raises(StorageBusyError, match="no connection left") as caught:
            second.list_leases()
        assert caught.value.retryable
    with StateStore(theirs) as first, StateStore(theirs, busy_timeout_seconds=60) as second:
        assert first.list_leases() == []
        closing = threading.Timer(0.3, first.close)
        closing.start()
        assert second.acquire("release", "worker-a").token == 1
        closing.join()
    server.sql(f"DROP OWNED BY {role}; DROP ROLE {role}")


INTERRUPTED = """
import json, signal, sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1], busy_timeout_seconds=60) as store:
    store.list_leases()
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    print(json.dumps("asking"), flush=True)
    try:
        store.acquire("release", "worker-a")
    except KeyboardInterrupt:
        print(json.dumps("interrupted"), flush=True)
    sys.stdin.readline()
    print(json.dumps(store.acquire("release", "worker-a").token))
"""


def test_a_wait_for_a_lock_can_be_interrupted_and_nothing_of_it_is_left(
    store: StateStore, url: str, server: postgres.Server
) -> None:
    waiting = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with crew(INTERRUPTED, [(url,)]) as (hand,):
        assert hand.answer() == "ready"
        with store.transaction(component="tests", action="test.write", locks=("scope:release",)):
            hand.go()
            assert hand.answer() == "asking"
            while server.sql(waiting) == [(0,)]:
                threading.Event().wait(0.01)
            hand.process.send_signal(signal.SIGINT)
            assert hand.answer() == "interrupted"
            assert server.sql(waiting) == [(0,)]
        hand.go()
        assert hand.end() == [1]
    assert [event.kind for event in store.events(scope="release")] == ["lease.acquired"]


def test_the_body_of_a_transaction_cannot_call_the_store(store: StateStore) -> None:
    with store.transaction(component="tests", action="test.write") as part:
        with pytest.raises(ReentrancyError):
            store.acquire("release", "worker-a")
        part.event("test.happened")
    assert [event.kind for event in store.events()] == ["store.initialized", "test.happened"]
    assert store.acquire("release", "worker-a").token == 1


def test_a_closed_store_is_closed_for_good_and_leaves_no_session(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    opened = StateStore(named(url, schema))
    store.acquire("build", "worker-a")
    with opened.hold("release", "worker-a"), pytest.raises(LeaseHeldError):
        opened.acquire("build", "worker-b", wait_seconds=0.1)
    opened.close()
    opened.close()
    with pytest.raises(InvalidInputError, match="closed"):
        opened.list_leases()
    wait_for_none(server, schema)


def test_what_is_in_use_while_the_store_is_closed_ends_well_and_is_closed_then(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    opened = StateStore(named(url, schema))
    body = opened.transaction(component="tests", action="test.write")
    with body as part, opened.read() as reader:
        opened.close()
        part.event("test.happened")
        assert reader.rows("SELECT COUNT(*) FROM leases") == [(0,)]
    assert len(store.events(kind="test.happened")) == 1
    wait_for_none(server, schema)


def wait_for_none(server: postgres.Server, name: str) -> None:
    """The server notices a moment later that a session has ended."""
    for _ in range(500):
        if sessions(server, name) == 0:
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{sessions(server, name)} sessions are left")
