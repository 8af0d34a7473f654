"""The server is killed and started again under load: what was answered is there, and everybody goes on."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests import postgres
from tests.postgres_store.crew import Hand, crew

from agent_checkpoint import StateStore

WORKERS = 4
SCOPES = ("alpha", "beta")

# Tells each answer after the call has returned. The only errors it may meet are
# that another holds the scope, that it was too slow, and that nobody can tell.
WORKER = """
import json, os, random, sys, threading, time
from agent_checkpoint import LeaseHeldError, OutcomeUnknownError, StaleLeaseError, StateStore

url, owner, *scopes = sys.argv[1:]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()

def tell(*line):
    os.write(1, (json.dumps(line) + "\\n").encode())

number = 0
with StateStore(url, busy_timeout_seconds=60) as store:
    while not over.is_set():
        scope = random.choice(scopes)
        try:
            lease = store.acquire(scope, owner, ttl_seconds=0.5)
            tell("granted", scope, lease.token)
            for _ in range(random.randrange(4)):
                number += 1
                saved = store.put_checkpoint(scope, {"owner": owner, "number": number}, lease=lease)
                tell("saved", scope, saved.sequence, lease.token, owner, number)
                store.heartbeat(*lease.fence)
            store.release(*lease.fence)
            tell("released", scope, lease.token)
        except LeaseHeldError:
            time.sleep(random.uniform(0, 0.02))
        except OutcomeUnknownError:
            tell("unknown", scope)
        except StaleLeaseError:
            pass
"""


class Listener:
    """Collects what the workers say."""

    def __init__(self, hands: list[Hand]) -> None:
        self.told: list[list[Any]] = []
        self._threads = [threading.Thread(target=self._read, args=(hand,)) for hand in hands]
        for thread in self._threads:
            thread.start()

    def _read(self, hand: Hand) -> None:
        assert hand.process.stdout is not None
        for line in hand.process.stdout:
            self.told.append(json.loads(line))

    def hears_all(self, since: int) -> bool:
        """Whether every worker has said more since then."""
        return {line[4] for line in self.told[since:] if line[0] == "saved"} >= {f"worker-{n}" for n in range(WORKERS)}

    def end(self) -> list[list[Any]]:
        for thread in self._threads:
            thread.join()
        return self.told


@contextmanager
def working(url: str) -> Iterator[Listener]:
    with crew(WORKER, [(url, f"worker-{number}", *SCOPES) for number in range(WORKERS)]) as hands:
        listener = Listener(hands)
        try:
            yield listener
            for hand in hands:
                hand.go()
            for hand in hands:
                assert hand.process.wait(90) == 0
                assert hand.process.stderr is not None
                assert hand.process.stderr.read() == ""
        finally:
            for hand in hands:
                hand.process.kill()
            listener.end()


def check(store: StateStore, told: list[list[Any]]) -> None:
    granted = Counter((scope, token) for what, scope, token, *_ in told if what == "granted")
    assert set(granted.values()) == {1}, "a token was granted twice"

    tokens: dict[Any, list[Any]] = defaultdict(list)
    sequences: dict[Any, list[Any]] = defaultdict(list)
    for event in store.events(after="start", limit=1_000_000):
        if event.kind == "lease.acquired":
            tokens[event.scope].append(event.token)
        if event.kind == "checkpoint.saved":
            assert event.token == tokens[event.scope][-1], "a checkpoint was saved under a lease that was superseded"
            sequences[event.workflow].append(event.sequence)
    for scope in SCOPES:
        assert tokens[scope] == list(range(1, len(tokens[scope]) + 1))
        assert sequences[scope] == list(range(1, len(sequences[scope]) + 1))
        assert {token for name, token in granted if name == scope} <= set(tokens[scope])

    saved = [line for line in told if line[0] == "saved"]
    assert saved
    for _, scope, sequence, token, owner, number in saved:
        found = store.get_checkpoint(scope, sequence=sequence)
        assert found is not None, "a checkpoint that was answered is lost"
        assert (found.token, found.data) == (token, {"owner": owner, "number": number})
    once = Counter((line[4], line[5]) for line in saved)
    assert set(once.values()) == {1}


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_server_killed_under_load_loses_nothing_and_its_clients_go_on(own: postgres.Server, kills: int) -> None:
    with StateStore(own.url()) as store:
        store.initialize()
    with working(own.url()) as listener:
        for _ in range(kills):
            since = len(listener.told)
            deadline = time.monotonic() + 60
            while not listener.hears_all(since):
                assert time.monotonic() < deadline, "a client did not go on"
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.1))  # the moment of a kill is meant to be any
            own.kill()
            own.start()
        since = len(listener.told)
        while not listener.hears_all(since):
            time.sleep(0.01)
    with StateStore(own.url()) as store:
        check(store, listener.end())


def test_what_the_server_s_last_words_were_is_no_matter(own: postgres.Server) -> None:
    with StateStore(own.url(), busy_timeout_seconds=60) as store:
        store.initialize()
        store.acquire("release", "worker-a", ttl_seconds=3600)
        for number, end in enumerate((own.stop, own.kill), start=1):
            end()
            starting = threading.Thread(target=own.start)
            starting.start()
            assert store.put_checkpoint("deploy", {"number": number}).sequence == number
            starting.join()


def test_a_session_that_the_server_ended_is_replaced(store: StateStore, server: postgres.Server) -> None:
    end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'agent-checkpoint'"
    store.put_checkpoint("deploy", {"number": 1})
    server.sql(end_all)  # idle in the pool
    assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2

    body = store.transaction(component="tests", action="test.write")
    with pytest.raises(Exception, match="terminating connection") as caught, body as part:
        part.event("test.happened")
        server.sql(end_all)  # in the midst of a transaction
        part.rows("SELECT 1")
    assert (caught.value.code, caught.value.retryable, caught.value.undone) == ("storage-unreachable", True, True)  # type: ignore[attr-defined]

    with store.read() as reader:
        server.sql(end_all)
        with pytest.raises(Exception, match="terminating connection") as caught:
            reader.rows("SELECT 1")
    assert caught.value.code == "storage-unreachable"  # type: ignore[attr-defined]
    assert store.put_checkpoint("deploy", {"number": 3}).sequence == 3
    assert store.events(kind="test.happened") == []


def test_the_server_is_told_apart_from_an_earlier_life_of_it(own: postgres.Server) -> None:
    def life() -> str:
        link = store._database.borrow(time.monotonic() + 10)  # type: ignore[attr-defined]
        store._database.links.discard(link)  # type: ignore[attr-defined]
        return str(link.life)

    with StateStore(own.url(), busy_timeout_seconds=60) as store:
        store.initialize()
        first = life()
        assert life() == first
        victim = own.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")[0][0]
        os.kill(int(str(victim)), 9)  # the postmaster lives on, and starts all others anew
        assert store.put_checkpoint("deploy", {}).sequence == 1
        crashed = life()
        own.stop()
        own.start()
        restarted = life()
    assert len({first, crashed, restarted}) == 3
