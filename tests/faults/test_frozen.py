"""A writer frozen at any moment: the others get through, or are told in time who is in the way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

from agent_checkpoint import StateStore, StorageBusyError
from agent_checkpoint.testing import freeze, kill

BUSY_SECONDS = 1.0
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0

# Writes for ever to its own workflow; tells each answer after the call has
# returned, in one write. With "anew" it opens the store for each write, as the command does.
WRITER = """
import json, os, sys
from agent_checkpoint import StateStore, StorageBusyError
path, name, busy_seconds, anew = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "anew"

def tell(*line):
    os.write(1, (json.dumps(line) + "\\n").encode())

store = StateStore(path, busy_timeout_seconds=busy_seconds)
number = 0
while True:
    try:
        saved = store.put_checkpoint(f"work-{name}", {"number": number})
    except StorageBusyError as error:
        tell("busy", name, error.facts.get("blocker"), str(error))
    else:
        tell("saved", name, saved.sequence, number)
        number += 1
    if anew:
        store.close()
        store = StateStore(path, busy_timeout_seconds=busy_seconds)
"""

# Sits in a transaction, in a read or at the gate until it is told to go on.
SITTER = """
import sys
from agent_checkpoint import StateStore
from agent_checkpoint.sqlite.gate import gate_at

def sit():
    print("sits", flush=True)
    sys.stdin.readline()

with StateStore(sys.argv[1]) as store:
    if sys.argv[2] == "transaction":
        with store.transaction(component="tests", action="test.write") as part:
            part.event("test.happened")
            sit()
    elif sys.argv[2] == "read":
        with store.read() as reader:
            reader.rows("SELECT COUNT(*) FROM events")
            sit()
    else:
        gate = gate_at(sys.argv[1])
        assert gate.enter(60)
        sit()
        gate.leave()
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
    return path


@pytest.fixture
def sitter(path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def sit(where: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SITTER, str(path), where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "sits\n"
        return process

    yield sit
    for process in started:
        kill(process)
        process.communicate()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


class Writers:
    """Processes that write, and what each of them told so far."""

    def __init__(self, path: Path, names: str, how: str, busy_seconds: float = BUSY_SECONDS) -> None:
        self.told: list[list[Any]] = []
        reading, writing = os.pipe()
        self._errors = path.with_name("errors.txt").open("w+")
        self.processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), name, str(busy_seconds), how],
                stdout=writing,
                stderr=self._errors,
            )
            for name in names
        }
        os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()

    def _read(self, reading: int) -> None:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                self.told.append(json.loads(line))

    def since(self, place: int, what: str | None = None) -> Counter[str]:
        """How often each writer told something since then."""
        return Counter(line[1] for line in self.told[place:] if what in (None, line[0]))

    def end(self) -> str:
        for process in self.processes.values():
            kill(process)
        self._reader.join()
        self._errors.seek(0)
        with self._errors as errors:
            return errors.read()


@pytest.mark.parametrize("times", [10, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["open", "anew"])
def test_a_writer_frozen_at_any_moment_stops_nobody_who_is_not_told(path: Path, times: int, how: str) -> None:
    times = times if how == "open" else times // 2
    writers = Writers(path, "abc", how)
    try:
        wait_until(lambda: len(writers.since(0, "saved")) == 3)
        for _ in range(times):
            name = random.choice("abc")
            frozen, others = writers.processes[name], set("abc") - {name}
            time.sleep(random.uniform(0.005, 0.05))  # the moment is meant to be any
            with freeze(frozen):
                place = len(writers.told)
                # The first answer may be to a call that was over before.
                wait_until(lambda place=place, others=others: all(writers.since(place)[other] >= 2 for other in others))
                busy = [line for line in writers.told[place:] if line[0] == "busy" and line[1] in others]
                place = len(writers.told)
            for _, _, blocker, message in busy:
                assert blocker is not None, message
                assert (blocker["pid"], blocker["stopped"]) == (frozen.pid, True), message
                assert f"process {frozen.pid} " in message
            wait_until(lambda place=place: len(writers.since(place, "saved")) == 3)
    finally:
        errors = writers.end()
    assert errors == ""

    with StateStore(path) as store:
        for name in "abc":
            said = [(line[2], line[3]) for line in writers.told if line[0] == "saved" and line[1] == name]
            assert [sequence for sequence, _ in said] == list(range(1, len(said) + 1))
            history = store.checkpoint_history(f"work-{name}")
            # One more may have been saved by a writer that was killed before it told.
            assert len(said) <= len(history) <= len(said) + 1
            for sequence, number in random.sample(said, min(20, len(said))):
                found = store.get_checkpoint(f"work-{name}", sequence=sequence)
                assert found is not None
                assert found.data == {"number": number}
        assert {check.check: check.verdict for check in store.doctor()}["integrity"] == "ok"


def test_a_holder_of_the_write_lock_that_is_frozen_is_named_within_the_busy_timeout(
    path: Path, sitter: Callable[[str], Any]
) -> None:
    frozen = sitter("transaction")
    with StateStore(path, busy_timeout_seconds=BUSY_SECONDS) as store:
        with freeze(frozen):
            for _ in range(2):
                started = time.monotonic()
                with pytest.raises(StorageBusyError) as busy:
                    store.acquire("release", "worker-b")
                assert time.monotonic() - started < 10 * BUSY_SECONDS
                assert busy.value.blocker is not None
                assert (busy.value.blocker["pid"], busy.value.blocker["stopped"]) == (frozen.pid, True)
            assert store.get_lease("release") is None  # nobody is kept from reading

        go_on(frozen)
        assert store.acquire("release", "worker-b").token == 1
        assert [event.kind for event in store.events()] == ["store.initialized", "test.happened", "lease.acquired"]


def test_a_frozen_holder_that_is_killed_takes_nothing_with_it(path: Path, sitter: Callable[[str], Any]) -> None:
    frozen = sitter("transaction")
    with freeze(frozen):
        kill(frozen)

    with StateStore(path, busy_timeout_seconds=BUSY_SECONDS) as store:
        assert store.acquire("release", "worker-b").token == 1
        assert [event.kind for event in store.events()] == ["store.initialized", "lease.acquired"]


def test_a_frozen_reader_stops_nobody(path: Path, sitter: Callable[[str], Any]) -> None:
    frozen = sitter("read")
    with StateStore(path, busy_timeout_seconds=BUSY_SECONDS) as store:
        with freeze(frozen):
            assert [store.put_checkpoint("deploy", number).sequence for number in range(30)] == list(range(1, 31))
        go_on(frozen)
        assert store.put_checkpoint("deploy", {}).sequence == 31


def test_while_the_holder_of_the_gate_is_frozen_only_the_first_write_waits_for_it(
    path: Path, sitter: Callable[[str], Any]
) -> None:
    # If each write waited half of the busy timeout there would be four of them.
    frozen = sitter("gate")
    written = 0
    with StateStore(path, busy_timeout_seconds=2 * BUSY_SECONDS) as store:
        with freeze(frozen):
            deadline = time.monotonic() + 4 * BUSY_SECONDS
            while time.monotonic() < deadline and written < 100:
                written += 1
                assert store.put_checkpoint("deploy", {}).sequence == written
        assert written >= 20

        go_on(frozen)
        assert store.put_checkpoint("deploy", {}).sequence == written + 1


def test_while_the_holder_of_the_gate_is_frozen_many_writers_go_around_it(
    path: Path, sitter: Callable[[str], Any]
) -> None:
    frozen = sitter("gate")
    thaw = freeze(frozen).thaw
    writers = Writers(path, "abc", "open", busy_seconds=2 * BUSY_SECONDS)
    try:
        wait_until(lambda: len(writers.since(0, "saved")) == 3)
        place, deadline = len(writers.told), time.monotonic() + 2 * BUSY_SECONDS
        while time.monotonic() < deadline and writers.since(place, "saved").total() < 100:
            time.sleep(0.01)
        written = writers.since(place, "saved")
        thaw()
        go_on(frozen)
        place = len(writers.told)
        wait_until(lambda: len(writers.since(place, "saved")) == 3)
    finally:
        errors = writers.end()
    assert errors == ""
    assert written.total() >= 30, written  # two of each, if each write waited
    for _, _, blocker, message in (line for line in writers.told if line[0] == "busy"):
        assert blocker is not None, message
        assert (blocker["pid"], blocker["stopped"]) == (frozen.pid, True), message


def test_threads_go_around_a_frozen_holder_of_the_gate_together(path: Path, sitter: Callable[[str], Any]) -> None:
    frozen = sitter("gate")
    errors: list[Exception] = []
    with StateStore(path, busy_timeout_seconds=2 * BUSY_SECONDS) as store:

        def write(name: str) -> None:
            try:
                for number in range(10):
                    store.put_checkpoint(name, number)
            except Exception as error:
                errors.append(error)

        with freeze(frozen):
            threads = [threading.Thread(target=write, args=(f"work-{number}",)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
        assert errors == []
        assert [info.sequence for info in store.list_checkpoints()] == [10] * 4
        go_on(frozen)


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.long)])
def test_a_store_is_made_past_a_frozen_founder(tmp_path: Path, times: int) -> None:
    # Frozen at any moment of making it: others make it, or are told who is in the way.
    source = """
import sys
from agent_checkpoint import StateStore
import agent_checkpoint.sqlite.schema, agent_checkpoint.migrations
print("ready", flush=True)
with StateStore(sys.argv[1]) as store:
    store.initialize()
    print("done", flush=True)
"""
    for number in range(times):
        path = tmp_path / f"store-{number}" / "agents.db"
        founder = subprocess.Popen(
            [sys.executable, "-c", source, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert founder.stdout is not None
            assert founder.stdout.readline() == "ready\n"
            time.sleep(random.uniform(0, 0.03))
            os.kill(founder.pid, signal.SIGSTOP)  # if it has not ended
            with StateStore(path, busy_timeout_seconds=0.2) as store:
                try:
                    store.initialize()
                    assert store.acquire("release", "worker-a").token == 1
                except StorageBusyError as busy:
                    blocker = busy.facts["blocker"]
                    assert blocker is None or blocker["pid"] == founder.pid
                os.kill(founder.pid, signal.SIGCONT)
                out, errors = founder.communicate(timeout=LONG)
                assert (out, errors) == ("done\n", "")
                store.initialize()
                assert [event.kind for event in store.events()].count("store.initialized") == 1
        finally:
            founder.kill()
            founder.communicate()
