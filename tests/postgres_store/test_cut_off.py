"""A client that is cut off or frozen: it knows first, and its late write is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests import postgres
from tests.postgres_store.crew import Hand, crew
from tests.postgres_store.proxy import Proxy

from agent_checkpoint import StateStore

TTL = 1.5

# Says when it took its lease for lost, then writes all the same as soon as it is told to.
HOLDER = """
import json, sys, time
from agent_checkpoint import AgentCheckpointError, StateStore
url, ttl = sys.argv[1:]
def say(*facts):
    print(json.dumps(facts), flush=True)
with StateStore(url) as store:
    try:
        with store.hold("release", "worker-a", ttl_seconds=float(ttl)) as held:
            say("held", held.token)
            assert held.lost.wait(60)
            say("lost", time.clock_gettime(time.CLOCK_BOOTTIME), held.lost_reason)
            sys.stdin.readline()
            try:
                store.put_checkpoint("deploy", {"by": "late"}, lease=held)
                say("saved")
            except AgentCheckpointError as error:
                say(error.code, error.facts.get("reason"))
    except AgentCheckpointError as error:
        say(error.code, error.facts.get("reason"))
"""


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def take_over(store: StateStore) -> tuple[int, float]:
    """Wait for the scope; the token that was granted, and when the answer was there."""
    return store.acquire("release", "worker-b", ttl_seconds=3600, wait_seconds=60).token, now()


def test_a_holder_behind_a_wire_that_went_dead_knows_before_anybody_is_granted(
    store: StateStore, server: postgres.Server, schema: str
) -> None:
    proxy = Proxy(server.port)
    url = f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?schema={schema}"
    with crew(HOLDER, [(url, TTL)]) as (holder,):
        assert holder.answer() == ["held", 1]
        proxy.stall()
        token, granted_at = take_over(store)
        what, lost_at, reason = holder.answer()
        assert (what, reason, token) == ("lost", "expired", 2)
        assert lost_at < granted_at
        proxy.flow()
        holder.go()
        assert holder.answer() == ["stale-lease", "superseded"]
        proxy.close()
        assert holder.answer()[0] == "stale-lease"  # of the block, at its end
        holder.end()
    assert store.get_checkpoint("deploy") is None


@dataclass
class Island:
    """A network namespace whose only way out is a link that can be taken down."""

    name: str
    outside: str
    host: str = "10.213.77.1"

    def link(self, state: str) -> None:
        ip("link", "set", self.outside, state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def island() -> Iterator[Island]:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        reason = "network namespaces need Linux, root and ip"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    made = Island(f"checkpoint-{os.getpid()}", f"ckpt{os.getpid()}a")
    inside = f"ckpt{os.getpid()}b"
    try:
        ip("netns", "add", made.name)
        ip("link", "add", made.outside, "type", "veth", "peer", "name", inside)
        ip("link", "set", inside, "netns", made.name)
        ip("address", "add", f"{made.host}/30", "dev", made.outside)
        made.link("up")
        ip("-n", made.name, "address", "add", "10.213.77.2/30", "dev", inside)
        ip("-n", made.name, "link", "set", inside, "up")
        yield made
    except subprocess.CalledProcessError as error:
        assert not os.environ.get("CI"), error.stderr  # noqa: PT017 -- there a skip is a failure
        pytest.skip(f"no network namespace: {error.stderr!r}")
    finally:
        subprocess.run(["ip", "link", "delete", made.outside], capture_output=True)
        subprocess.run(["ip", "netns", "delete", made.name], capture_output=True)


@pytest.fixture
def reachable(island: Island) -> Iterator[postgres.Server]:
    server = postgres.Server(*postgres.QUICK, f"listen_addresses=127.0.0.1,{island.host}")
    server.hba(f"host all all {island.host}/30 trust")
    server.start()
    yield server
    server.remove()


class Exile(Hand):
    """A process in the namespace."""

    def __init__(self, island: Island, source: str, *arguments: object) -> None:
        words = ["ip", "netns", "exec", island.name, sys.executable, "-c", source, *map(str, arguments)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def test_a_holder_on_another_host_whose_link_is_down_knows_before_anybody_is_granted(
    island: Island, reachable: postgres.Server
) -> None:
    url = f"postgresql://postgres@{island.host}:{reachable.port}/postgres"
    with StateStore(reachable.url()) as store:
        store.initialize()
        holder = Exile(island, HOLDER, url, TTL)
        try:
            assert holder.answer() == ["held", 1]
            island.link("down")
            token, granted_at = take_over(store)
            what, lost_at, reason = holder.answer()
            assert (what, reason, token) == ("lost", "expired", 2)
            assert lost_at < granted_at
            island.link("up")
            holder.go()
            assert holder.answer() == ["stale-lease", "superseded"]
            assert holder.answer()[0] == "stale-lease"
            holder.end()
        finally:
            holder.process.kill()
            holder.process.communicate()
        assert store.get_checkpoint("deploy") is None


FROZEN = """
import json, sys
from agent_checkpoint import AgentCheckpointError, StateStore
with StateStore(sys.argv[1]) as store:
    lease = store.acquire("release", "worker-a", ttl_seconds=1)
    try:
        with store.transaction(component="tests", action="test.write", fence=lease) as part:
            part.event("test.happened")
            print(json.dumps("inside"), flush=True)
            sys.stdin.readline()
    except AgentCheckpointError as error:
        print(json.dumps([error.code, error.retryable]))
    print(json.dumps(store.acquire("build", "worker-a").token))
"""


# As every change with two events does it, right before its commit.
FROZEN_BEHIND_MANY = """
import json, sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store:
    with store._database.transaction(("scope:release",)) as transaction:
        transaction.executemany("DELETE FROM tickets WHERE number = ?", [(-1,), (-2,)])
        print(json.dumps("inside"), flush=True)
        sys.stdin.readline()
"""


def test_a_client_that_is_frozen_before_its_commit_keeps_nobody_for_long(store: StateStore, url: str) -> None:
    store.acquire("build", "worker-b")
    with crew(FROZEN_BEHIND_MANY, [(url,)]) as (frozen,):
        assert frozen.answer() == "inside"
        os.kill(frozen.process.pid, signal.SIGSTOP)
        with StateStore(url, busy_timeout_seconds=60) as other:
            assert other.acquire("release", "worker-b").token == 1
        os.kill(frozen.process.pid, signal.SIGCONT)


def test_a_client_that_is_frozen_in_a_transaction_keeps_nobody_for_long(store: StateStore, url: str) -> None:
    with crew(FROZEN, [(url,)]) as (frozen,):
        assert frozen.answer() == "inside"
        os.kill(frozen.process.pid, signal.SIGSTOP)
        with StateStore(url, busy_timeout_seconds=60) as other:
            assert other.acquire("release", "worker-b", wait_seconds=60).token == 2
        os.kill(frozen.process.pid, signal.SIGCONT)
        frozen.go()
        assert frozen.end() == [["storage-unreachable", True], 1]
    assert store.events(kind="test.happened") == []
