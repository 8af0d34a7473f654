"""Backups and restores beside processes that go on, and killed at any moment."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import Event, LeaseHeldError, StateStore

WRITERS = 8
SIDECARS = ("", "-wal", "-shm", "-gate")
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0

# Tells each answer after the call has returned, in one write: a line is whole or not there.
WORKER = """
import json, os, random, sys, time
from agent_checkpoint import StaleLeaseError, StateStore

path, owner, scopes, pause = sys.argv[1], sys.argv[2], sys.argv[3].split(), float(sys.argv[4])

def tell(*line):
    os.write(1, (json.dumps(line) + "\\n").encode())

store = StateStore(path)
while True:
    scope = random.choice(scopes)
    lease = store.acquire(scope, owner, ttl_seconds=30, wait_seconds=60)
    tell("granted", scope, lease.token)
    data = {"owner": owner, "filling": "x" * random.randrange(4000)}
    saved = store.put_checkpoint(f"work-{scope}", data, lease=lease)
    tell("saved", f"work-{scope}", saved.sequence)
    if random.random() < 0.2:
        key = os.urandom(8).hex()
        with store.effect(key, lease=lease) as effect:
            assert effect.fresh
            effect.done(None)
        tell("done", key)
    store.release(*lease.fence)
    time.sleep(random.uniform(0, pause))
"""

# Forks children that do argv[2] to the store argv[1], and kills them at any moment; tells how many were done before.
KILLER = """
import os, random, signal, sys, time
from agent_checkpoint import StateStore, restoring
from agent_checkpoint.sqlite import copying
path, step, times, longest = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
done = 0
for number in range(times):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store = StateStore(path)
            eval(step)
            status = 0
        finally:
            os._exit(status)
    time.sleep(random.uniform(0, longest))
    os.kill(pid, signal.SIGKILL)
    done += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print(done)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agents.db"


@contextmanager
def working(path: Path, *scopes_of_each: str, pause: float) -> Iterator[list[list[Any]]]:
    """Processes that work on the store; what they tell. At the end they are killed, and had nothing to complain of."""
    told: list[list[Any]] = []
    reading, writing = os.pipe()

    def read() -> None:
        with open(reading, encoding="ascii") as lines:
            told.extend(json.loads(line) for line in lines)

    reader = threading.Thread(target=read)
    with (path.parent / "errors.txt").open("w+") as errors:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, path, f"worker-{number}", scopes, str(pause)],
                stdout=writing,
                stderr=errors,
            )
            for number, scopes in enumerate(scopes_of_each)
        ]
        os.close(writing)
        reader.start()
        try:
            yield told
            assert [process.poll() for process in running] == [None] * len(running), (
                path.parent / "errors.txt"
            ).read_text()
        finally:
            for process in running:
                process.kill()
                process.wait()
            reader.join()


def until(told: list[list[Any]], count: int) -> None:
    deadline = time.monotonic() + LONG
    while len(told) < count:
        assert time.monotonic() < deadline, "nobody gets anything done"
        time.sleep(0.001)


def verdict(store: StateStore) -> str:
    return {check.check: check.verdict for check in store.doctor()}["integrity"]


def restore(store: StateStore, file: Path) -> None:
    """Restore in a moment when no lease is live."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            store.restore(file)
            return
        except LeaseHeldError:
            assert time.monotonic() < deadline, "there is always a live lease"


def test_a_backup_beside_writers_is_sound_and_has_what_was_answered_before(path: Path, tmp_path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        with working(path, *(f"scope-{number}" for number in range(WRITERS)), pause=0) as told:
            for number in range(3):
                until(told, len(told) + 100)
                before = list(told)
                store.backup(tmp_path / f"backup-{number}.db")
                with StateStore(tmp_path / f"backup-{number}.db") as copy:
                    assert verdict(copy) == "ok"
                    check_has(copy, before)


def check_has(copy: StateStore, told: list[list[Any]]) -> None:
    events = copy.events(limit=100_000)
    granted = {(event.scope, event.token) for event in events if event.kind == "lease.acquired"}
    saved = {(event.workflow, event.sequence) for event in events if event.kind == "checkpoint.saved"}
    kept = [each for info in copy.list_checkpoints() for each in copy.checkpoint_history(info.workflow)]
    done = {effect.key for effect in copy.list_effects(100_000) if effect.state == "done"}
    assert {tuple(rest) for what, *rest in told if what == "granted"} <= granted
    assert {tuple(rest) for what, *rest in told if what == "saved"} <= saved
    assert saved == {(each.workflow, each.sequence) for each in kept}
    assert {rest[0] for what, *rest in told if what == "done"} <= done


def test_workers_go_on_over_restores_and_nothing_is_given_out_twice(path: Path, tmp_path: Path) -> None:
    restores = 5
    with StateStore(path) as store:
        store.initialize()
        with following(path) as events, working(path, *["alpha beta"] * 4, pause=0.03) as told:
            until(told, 40)
            store.backup(tmp_path / "backup.db")
            for _ in range(restores):
                until(told, len(told) + 40)
                restore(store, tmp_path / "backup.db")
            until(told, len(told) + 40)
        assert verdict(store) == "ok"
        done = {effect.key for effect in store.list_effects(100_000) if effect.state == "done"}

    for what in ("granted", "saved"):
        times = Counter(tuple(rest) for kind, *rest in told if kind == what)
        assert set(times.values()) == {1}, f"{what} twice: {[each for each, count in times.items() if count > 1]}"
    assert {rest[0] for what, *rest in told if what == "done"} <= done, "an effect was forgotten"
    check_followed(events, restores)


@contextmanager
def following(path: Path) -> Iterator[list[Event]]:
    """Read the log on and on from the cursor of the event that was read last."""
    seen: list[Event] = []
    over = threading.Event()

    def follow() -> None:
        cursor = "start"
        with StateStore(path) as store:
            while True:
                last_look = over.is_set()
                if found := store.events(limit=1000, after=cursor):
                    seen.extend(found)
                    cursor = found[-1].cursor
                elif last_look:
                    return
                time.sleep(0.005)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield seen
    finally:
        over.set()
        follower.join()


def check_followed(events: list[Event], restores: int) -> None:
    """Each restore was seen, and between two of them tokens and sequences without a gap."""
    assert sorted(event.id for event in events) == [event.id for event in events]
    assert sum(event.kind == "store.restored" for event in events) == restores
    tokens: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "store.restored":
            tokens.clear()
        if event.kind == "lease.acquired" and event.scope and event.token:
            tokens[event.scope].append(event.token)
            assert tokens[event.scope] == list(range(tokens[event.scope][0], event.token + 1))


@pytest.mark.parametrize("kills", [40, pytest.param(400, marks=pytest.mark.long)])
def test_a_restore_that_is_killed_has_happened_or_not(path: Path, tmp_path: Path, kills: int) -> None:
    file = tmp_path / "backup.db"
    with StateStore(path) as store:
        store.initialize()
        for number in range(200):
            store.put_checkpoint("before", {"number": number, "filling": "x" * 2000})
        store.backup(file)
        for number in range(100):
            store.put_checkpoint("after", {"number": number, "filling": "x" * 2000})

    killed(path, f"store.restore({str(file)!r})", kills, longest=0.1)

    with StateStore(path) as store:
        assert verdict(store) == "ok"
        restored = len(store.events(limit=100_000, kind="store.restored"))
        assert len(store.checkpoint_history("before")) == 200
        assert len(store.checkpoint_history("after")) == (0 if restored else 100)
        store.restore(file)
        assert store.put_checkpoint("before", {}).sequence == 201
        assert store.put_checkpoint("after", {}).sequence == 101
    with StateStore(path) as store:
        assert verdict(store) == "ok"
    assert {each.name for each in tmp_path.iterdir()} <= {"backup.db", *(f"agents.db{end}" for end in SIDECARS)}


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.long)])
def test_a_backup_that_is_killed_is_whole_or_not_there(path: Path, tmp_path: Path, kills: int) -> None:
    with StateStore(path) as store:
        store.initialize()
        for number in range(100):
            store.put_checkpoint("before", {"number": number, "filling": "x" * 2000})

    killed(path, f"store.backup({str(tmp_path)!r} + f'/backup-{{number}}.db')", kills, longest=0.06)

    for file in tmp_path.glob("backup-*.db"):
        if not file.stat().st_size:
            continue  # the name was taken, a moment before the copy gets it
        with StateStore(file) as copy:
            assert verdict(copy) == "ok"
            assert len(copy.checkpoint_history("before")) == 100
    with StateStore(path) as store:
        assert verdict(store) == "ok"


def killed(path: Path, step: str, times: int, longest: float) -> None:
    words = [sys.executable, "-c", KILLER, path, step, str(times), str(longest * random.uniform(0.5, 1))]
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, timeout=LONG * 5)
