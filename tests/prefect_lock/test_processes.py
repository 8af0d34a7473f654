"""Real processes on one store: crashed, frozen, forked, spawned. There is no Prefect server."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.testing import FakeClock
from agent_checkpoint_prefect import FencedLock, current_lease, stores

from .conftest import WATCHDOG_SECONDS, Locks, elsewhere, events, wait_until, waiting
from .forking import in_fork, needs_fork

WORKERS = Path(__file__).with_name("fork_worker.py")
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process that forks workers."""
    with subprocess.Popen(
        [sys.executable, WORKERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(WATCHDOG_SECONDS)


class Crew:
    """Workers in a folder, and what they note."""

    def __init__(self, forks: subprocess.Popen[str], folder: Path) -> None:
        self._forks = forks
        self._folder = folder
        self._pids: dict[str, int] = {}

    def start(self, worker: str, does: str, **more: Any) -> int:
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        job = {"worker": worker, "does": does, "folder": str(self._folder), **more}
        self._forks.stdin.write(json.dumps(job) + "\n")
        self._forks.stdin.flush()
        self._pids[worker] = int(self._forks.stdout.readline())
        return self._pids[worker]

    def send(self, worker: str, number: signal.Signals) -> int:
        """Send a signal; the monotonic time just before."""
        before = time.monotonic_ns()
        os.kill(self._pids[worker], number)
        return before

    def tell(self, name: str) -> None:
        (self._folder / name).touch()

    def notes(self, what: str | None = None, worker: str | None = None) -> list[dict[str, Any]]:
        notes = self._folder / "notes"
        found = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        return [each for each in found if what in (None, each["what"]) and worker in (None, each["worker"])]

    def wait_for(self, what: str, count: int = 1, worker: str | None = None) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.notes(what, worker)) >= count or self.notes("failed"))
        assert self.notes("failed") == []
        return self.notes(what, worker)

    def end(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def crew(forks: subprocess.Popen[str], tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(forks, tmp_path)
    yield crew
    crew.end()


def test_eight_processes_have_one_name_one_after_the_other(crew: Crew, lock: FencedLock) -> None:
    lock.acquire("warm-up").release()
    for number in range(8):
        crew.start(f"worker-{number}", "rounds", rounds=5)
    crew.wait_for("ready", 8)
    crew.tell("go")
    crew.wait_for("done", 8)

    inside = [(each["what"], each["token"]) for each in crew.notes() if each["what"] in ("enter", "leave")]
    assert inside == [(what, token) for token in range(1, 41) for what in ("enter", "leave")]
    turns = crew.notes("enter")
    longest = max(each["waited"] for each in turns)
    assert longest < 30 * SECOND_NS
    # Fair: while somebody waits, nobody has it twice as often as there are others.
    for worker in {each["worker"] for each in turns}:
        mine = [each["token"] for each in turns if each["worker"] == worker]
        assert max(later - earlier for earlier, later in pairwise(mine)) <= 16


def test_after_a_kill_the_next_one_has_the_name_at_once(crew: Crew, lock: FencedLock) -> None:
    crew.start("killed", "hold", options={"ttl_seconds": 3600})
    crew.wait_for("held")
    crew.start("next", "want", options={"ttl_seconds": 3600})
    crew.wait_for("wants")
    wait_until(lambda: waiting(lock))
    killed_at = crew.send("killed", signal.SIGKILL)
    (held,) = crew.wait_for("held", worker="next")

    assert held["token"] == 2
    assert held["at"] - killed_at < SECOND_NS
    (event,) = events(lock, "lease.expired")
    assert event.detail["reason"] == "owner-dead"


def test_after_a_kill_the_next_one_has_the_record_at_once(crew: Crew, lock: FencedLock) -> None:
    crew.start("killed", "lock_record", holder="killed", options={"ttl_seconds": 3600})
    crew.wait_for("asked")
    assert not lock.acquire_lock("key", "next", acquire_timeout=0)
    crew.send("killed", signal.SIGKILL)
    assert lock.acquire_lock("key", "next", acquire_timeout=30)
    assert lock.is_lock_holder("key", "next")


def test_a_holder_that_was_frozen_is_refused_when_it_wakes_up(crew: Crew, lock: FencedLock) -> None:
    crew.start("frozen", "hold", options={"ttl_seconds": 0.5})
    crew.wait_for("held")
    crew.send("frozen", signal.SIGSTOP)
    successor = lock.acquire("orders")
    assert successor.token == 2
    crew.tell("go")
    crew.send("frozen", signal.SIGCONT)
    (lost,) = crew.wait_for("lost")

    assert crew.notes("checked") == []
    assert lost["token"] in (1, None)
    successor.check()


def test_a_transaction_that_was_frozen_saves_no_result_when_it_wakes_up(crew: Crew, lock: FencedLock) -> None:
    crew.start("frozen", "compute", until="go", options={"ttl_seconds": 0.5})
    crew.wait_for("runs", worker="frozen")
    crew.send("frozen", signal.SIGSTOP)
    crew.tell("successor")
    crew.start("next", "compute", until="successor")
    crew.wait_for("over", worker="next")
    crew.tell("go")
    crew.send("frozen", signal.SIGCONT)
    (over,) = crew.wait_for("over", worker="frozen")

    assert [each["token"] for each in crew.notes("runs")] == [1, 2]
    assert over["state"] == "ROLLED_BACK"
    refused = [event.detail["action"] for event in events(lock, "write.refused")]
    assert "prefect.save-result" in refused


def test_of_three_processes_one_computes_a_result(crew: Crew) -> None:
    for number in range(3):
        crew.start(f"worker-{number}", "compute", until="go")
    crew.wait_for("runs")
    crew.tell("go")
    crew.wait_for("over", 3)
    assert len(crew.notes("runs")) == 1
    assert [each["state"] for each in crew.notes("over")] == ["COMMITTED"] * 3


def test_the_same_holder_has_a_record_again_in_another_process(crew: Crew, lock: FencedLock) -> None:
    lock.acquire_lock("key", "holder")
    crew.start("other", "lock_record", holder="stranger")
    crew.start("same", "lock_record", holder="holder")
    crew.wait_for("asked", 2)
    assert [each["granted"] for each in crew.notes("asked", "other")] == [False]
    assert [each["holds"] for each in crew.notes("asked", "same")] == [True]
    assert [each["granted"] for each in crew.notes("asked", "same")] == [True]


# The wall clock: a process cannot have one of its own, so core's FakeClock turns that of the lock's store.


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_step_of_the_wall_clock_takes_nothing_away(locks: Locks, path: Path, hours: int) -> None:
    clock = FakeClock()
    store = stores._stores[os.path.realpath(path), "full"] = StateStore(path, clock=clock)
    store.initialize()
    lock = locks()
    lease = lock.acquire("orders")
    lock.acquire_lock("key", "one")
    clock.step_wall(hours * 3600)

    lease.check()
    assert elsewhere(lock.try_acquire, "orders") is None
    assert lock.is_lock_holder("key", "one")
    assert not lock.acquire_lock("key", "two", acquire_timeout=0)
    lease.release()
    lock.release_lock("key", "one")
    assert elsewhere(lock.acquire, "orders").token == 2


# Forked and spawned


@needs_fork
def test_a_forked_child_holds_nothing_and_takes_nothing_away(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:

        def child() -> tuple[bool, bool]:
            lease.release()
            return lock.inspect("orders") is not None, elsewhere(lock.try_acquire, "orders") is None

        assert in_fork(child) == (True, True)
        lease.check()
    assert in_fork(lambda: lock.acquire("orders").token) == 2


@needs_fork
def test_a_forked_child_that_leaves_the_block_ends_no_lease_of_its_parent(lock: FencedLock) -> None:
    parent = os.getpid()
    told: list[Any] = []
    with lock.lease("orders") as lease:
        told.append(in_fork(lambda: _leave(lock, lease)))
        lease.check()
        held = lock.inspect("orders")
        assert held is not None
        assert held.token == lease.token
    assert os.getpid() == parent
    assert told == [None]


def _leave(lock: FencedLock, lease: Any) -> Any:
    lease.release()
    return None if current_lease() is None else current_lease().token  # type: ignore[union-attr]


@needs_fork
def test_a_forked_child_gives_back_no_record_of_its_parent(lock: FencedLock) -> None:
    lock.acquire_lock("key", "holder")
    in_fork(lambda: lock.release_lock("key", "holder"))
    assert lock.is_lock_holder("key", "holder")
    lock.release_lock("key", "holder")
    assert not lock.is_locked("key")


@needs_fork
def test_a_forked_child_uses_its_parents_lock_for_itself(locks: Locks) -> None:
    lock = locks(ttl_seconds=1)

    def child() -> tuple[int, int]:
        with lock.lease("child's") as lease:
            granted = lock.list_leases()[0].heartbeat_at
            wait_until(lambda: lock.list_leases()[0].heartbeat_at > granted)  # it is renewed in the child too
            lease.check()
        assert lock.acquire_lock("key", "child")
        assert not lock.acquire_lock("key", "parent", acquire_timeout=0)
        lock.release_lock("key", "child")
        return lease.token, os.getpid()

    with lock.lease("parent's") as lease:
        token, pid = in_fork(child)
        lease.check()
    assert (token, pid != os.getpid()) == (1, True)


@needs_fork
def test_a_pickled_lock_is_the_same_lock_in_another_process(lock: FencedLock) -> None:
    pickled = pickle.dumps(lock)
    with lock.lease("orders"):
        assert in_fork(lambda: pickle.loads(pickled).try_acquire("orders")) is None
    assert in_fork(lambda: pickle.loads(pickled).acquire("orders").token) == 2


POOL = """
import multiprocessing, sys

def work(lock, number):
    with lock.lease("orders") as lease:
        lease.check()
        return lease.token

if __name__ == "__main__":
    from agent_checkpoint_prefect import FencedLock, LeaseStore
    lock = FencedLock(store=LeaseStore(path=sys.argv[1]))
    with lock.lease("other"), multiprocessing.get_context("spawn").Pool(2) as pool:
        print(sorted(pool.starmap(work, [(lock, number) for number in range(6)])))
"""


@pytest.mark.long  # each of its processes imports Prefect
def test_a_pickled_lock_works_in_a_pool_of_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "agents.db"],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=True,
    )
    assert json.loads(done.stdout) == [1, 2, 3, 4, 5, 6]
