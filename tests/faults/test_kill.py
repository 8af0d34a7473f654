"""kill -9 at any moment: what was answered is there, and no token is granted twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

SCOPES = ("alpha", "beta", "gamma")
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0

# Tells each answer after the call has returned, in one write: a line is whole or not there.
WORKER = """
import json, os, random, sys, time
from agent_checkpoint import LeaseHeldError, StaleLeaseError, StateStore

path, owner, scopes = sys.argv[1], sys.argv[2], sys.argv[3:]

def tell(*line):
    os.write(1, (json.dumps(line) + "\\n").encode())

store = StateStore(path)
store.initialize()
number = 0
while True:
    scope = random.choice(scopes)
    try:
        lease = store.acquire(scope, owner, ttl_seconds=0.2)
    except LeaseHeldError:
        time.sleep(random.uniform(0, 0.01))
        continue
    tell("granted", scope, lease.token)
    try:
        for _ in range(random.randrange(4)):
            number += 1
            data = {"owner": owner, "number": number, "filling": "x" * random.randrange(8000)}
            saved = store.put_checkpoint(f"work-{scope}", data, lease=lease)
            tell("saved", scope, saved.sequence, lease.token, owner, number)
        if random.random() < 0.7:
            store.release(*lease.fence)
            tell("released", scope, lease.token)
    except StaleLeaseError:
        pass  # it was too slow, and another took over
"""


class Workers:
    """Processes that are killed and started again, and everything that they told."""

    def __init__(self, path: Path, how_many: int) -> None:
        self.path = path
        self.told: list[list[Any]] = []
        self.kills = 0
        self._started = 0
        reading, self._writing = os.pipe()
        self._errors = path.with_name("errors.txt").open("w+")
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()
        self.running = [self._start() for _ in range(how_many)]

    def _read(self, reading: int) -> None:
        with open(reading, encoding="ascii") as lines:
            for line in lines:
                self.told.append(json.loads(line))

    def _start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        arguments = [str(self.path), f"worker-{self._started}", *SCOPES]
        return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=self._writing, stderr=self._errors)

    def kill_one(self) -> None:
        """At any moment, but not so often that nobody gets anything done."""
        so_far = len(self.told)
        deadline = time.monotonic() + LONG
        while len(self.told) == so_far:
            assert time.monotonic() < deadline, "nobody gets anything done"
            time.sleep(0.001)
        time.sleep(random.uniform(0.02, 0.25))
        place = random.randrange(len(self.running))
        self._kill(self.running[place])
        self.running[place] = self._start()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        assert process.wait() == -signal.SIGKILL, "a worker ended by itself"
        self.kills += 1

    def end(self) -> str:
        """Kill them all; what they wrote to stderr."""
        for process in self.running:
            process.kill()
            process.wait()
        os.close(self._writing)
        self._reader.join()
        self._errors.seek(0)
        with self._errors as errors:
            return errors.read()


def check(store: StateStore, told: list[list[Any]]) -> None:
    granted = Counter((scope, token) for what, scope, token, *_ in told if what == "granted")
    assert granted
    assert set(granted.values()) == {1}, "a token was granted twice"

    tokens: dict[str, list[int]] = defaultdict(list)
    sequences: dict[str, list[int]] = defaultdict(list)
    for event in store.events(limit=1_000_000):
        if event.kind == "lease.acquired":
            assert event.scope is not None
            assert event.token is not None
            tokens[event.scope].append(event.token)
        if event.kind == "checkpoint.saved":
            assert event.scope is not None
            assert event.sequence is not None
            assert event.token == tokens[event.scope][-1], "a checkpoint was saved under a lease that was superseded"
            sequences[event.scope].append(event.sequence)
    for scope in SCOPES:
        assert tokens[scope] == list(range(1, len(tokens[scope]) + 1))
        assert sequences[scope] == list(range(1, len(sequences[scope]) + 1))
        history = store.checkpoint_history(f"work-{scope}")
        assert [info.sequence for info in reversed(history)] == sequences[scope]
    assert all(token <= len(tokens[scope]) for scope, token in granted)

    saved = [line for line in told if line[0] == "saved"]
    assert saved
    for _, scope, sequence, token, owner, number in saved:
        found = store.get_checkpoint(f"work-{scope}", sequence=sequence)
        assert found is not None
        assert (found.token, found.data["owner"], found.data["number"]) == (token, owner, number)

    released = {(scope, token) for what, scope, token, *_ in told if what == "released"}
    on_record = {(e.scope, e.token) for e in store.events(limit=1_000_000, kind="lease.released")}
    assert released <= on_record
    assert {check.check: check.verdict for check in store.doctor()}["integrity"] == "ok"


@pytest.mark.parametrize("kills", [30, pytest.param(400, marks=pytest.mark.long)])
def test_workers_killed_at_any_moment_lose_nothing_and_repeat_no_token(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "agents.db"
    workers = Workers(path, how_many=4)
    try:
        for _ in range(kills):
            workers.kill_one()
    finally:
        errors = workers.end()

    assert errors == ""
    assert workers.kills == kills
    with StateStore(path) as store:
        check(store, workers.told)
        # And all goes on: the next grant has the next token.
        for scope in SCOPES:
            last = store.get_lease(scope, include_expired=True)
            assert last is not None
            # The last lease may be live yet, or end at any moment.
            assert store.acquire(scope, "after", wait_seconds=LONG).token == last.token + 1


# Forks children that make a store and are killed while they do.
FOUNDERS = """
import os, random, signal, sys, time
from agent_checkpoint import StateStore
import agent_checkpoint.sqlite.schema, agent_checkpoint.migrations
for number in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        try:
            with StateStore(f"{sys.argv[1]}/store-{number}/agents.db") as store:
                store.initialize()
        finally:
            os._exit(0)
    time.sleep(random.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_a_store_whose_founder_was_killed_is_made_by_the_next(tmp_path: Path) -> None:
    stores = 40
    subprocess.run([sys.executable, "-c", FOUNDERS, str(tmp_path), str(stores)], check=True)

    for number in range(stores):
        path = tmp_path / f"store-{number}" / "agents.db"
        with StateStore(path) as store:
            store.initialize()
            assert store.acquire("release", "worker-a").token == 1
            assert [event.kind for event in store.events()] == ["store.initialized", "lease.acquired"]
            assert {check.check: check.verdict for check in store.doctor()}["integrity"] == "ok"
        assert path.stat().st_mode & 0o777 == 0o600
