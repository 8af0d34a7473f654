"""Behind a proxy that shares sessions a transaction at a time nothing depends on the session."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest
from tests import postgres
from tests.postgres_store import pooler
from tests.postgres_store.crew import work
from tests.watching import wait_until

from agent_checkpoint import LeaseHeldError, StaleLeaseError, StateStore

pytestmark = pytest.mark.skipif(not pooler.is_installed(), reason="pgbouncer is not installed")

PROCESSES = 5
ROUNDS = 15

WORKER = """
import json, random, sys, time
from agent_checkpoint import LeaseHeldError, StateStore
url, owner, rounds = sys.argv[1:]
with StateStore(url) as store:
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    for number in range(int(rounds)):
        while True:
            try:
                lease = store.acquire("release", owner, ttl_seconds=3600)
                break
            except LeaseHeldError:
                time.sleep(random.uniform(0.001, 0.02))
        saved = store.put_checkpoint("deploy", {"by": owner, "number": number}, lease=lease)
        store.heartbeat(*lease.fence)
        store.release(*lease.fence)
        print(json.dumps([lease.token, saved.sequence, owner, number]))
"""


@pytest.fixture
def shared(store: StateStore, server: postgres.Server) -> Iterator[pooler.Pooler]:
    """Two sessions for all."""
    made = pooler.Pooler(server.port, sessions=2)
    yield made
    made.close()


def test_many_processes_share_two_sessions_without_a_token_or_sequence_twice(
    shared: pooler.Pooler, store: StateStore, schema: str
) -> None:
    said = work(WORKER, [(shared.url(schema), f"worker-{number}", ROUNDS) for number in range(PROCESSES)])

    done = sorted(line for lines in said for line in lines)
    everything = list(range(1, PROCESSES * ROUNDS + 1))
    assert [token for token, _, _, _ in done] == everything
    assert [sequence for _, sequence, _, _ in done] == everything
    events = store.events(after="start", limit=10_000, kind="checkpoint.saved")
    assert [event.sequence for event in events] == everything


def test_holding_and_waiting_work_by_polling(shared: pooler.Pooler, schema: str) -> None:
    with StateStore(shared.url(schema)) as first, StateStore(shared.url(schema)) as second:
        found: list[int] = []
        waiting = threading.Thread(
            target=lambda: found.append(second.acquire("release", "worker-b", wait_seconds=60).token)
        )
        with first.hold("release", "worker-a", ttl_seconds=0.6) as held:
            waiting.start()
            threading.Event().wait(1.2)
            assert held.check().token == 1
        waiting.join(60)
        assert found == [2]
        with pytest.raises(StaleLeaseError):
            first.put_checkpoint("deploy", {}, lease=held)
        with pytest.raises(LeaseHeldError):
            first.acquire("release", "worker-a")
        assert [check for check in first.doctor() if check.verdict == "broken"] == []


def test_nothing_goes_on_listening_in_the_sessions_that_others_use_next(
    shared: pooler.Pooler, store: StateStore, schema: str
) -> None:
    with StateStore(shared.url(schema)) as waiting:
        lease = store.acquire("release", "worker-a", ttl_seconds=600)
        waits = threading.Thread(target=waiting.acquire, args=("release", "worker-b"), kwargs={"wait_seconds": 60})
        waits.start()
        wait_until(lambda: store.status().queues)
        store.release(*lease.fence)
        waits.join()
    with psycopg.connect(shared.url(schema).partition("?")[0], prepare_threshold=None) as others:
        assert others.execute("SELECT pg_listening_channels()").fetchall() == []
