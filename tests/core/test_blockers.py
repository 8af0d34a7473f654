"""Who sits on a lock: named by the kernel, without our opening the locked file."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

from agent_checkpoint import StateStore, StorageBusyError
from agent_checkpoint.sqlite.blockers import blocker

LONG = 30.0

# Sits inside a transaction until it is told to go on.
WRITER = """
import sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store:
    with store.transaction(component="tests", action="test.write"):
        print("inside", flush=True)
        sys.stdin.readline()
    print("outside", flush=True)
    sys.stdin.readline()
"""

# Sits on the gate alone.
AT_THE_GATE = """
import sys
from agent_checkpoint.sqlite.gate import gate_at
gate = gate_at(sys.argv[1])
print("inside" if gate.enter(30) else "around", flush=True)
sys.stdin.readline()
gate.leave()
print("outside", flush=True)
"""

ASKED_ELSEWHERE = """
import json, sys
from agent_checkpoint import StateStore, StorageBusyError
with StateStore(sys.argv[1], busy_timeout_seconds=0.2) as store:
    try:
        store.acquire("release", "worker-b")
    except StorageBusyError as error:
        print(json.dumps([str(error), error.blocker]))
"""


@pytest.fixture
def start(path: Path, store: StateStore, unmeasured: None) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go_on(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


def test_nobody_blocks_a_store_at_rest(store: StateStore, path: Path) -> None:
    assert blocker(str(path)) is None
    assert blocker(str(path.with_name("missing.db"))) is None


def test_the_holder_of_the_write_lock_is_named(path: Path, start: Callable[[str], Any]) -> None:
    writer = start(WRITER)
    found = blocker(str(path))

    assert found is not None
    assert (found["lock"], found["pid"], found["stopped"]) == ("write", writer.pid, False)
    assert found["command"].startswith("python")
    assert go_on(writer) == "outside\n"
    assert blocker(str(path)) is None


def test_a_stopped_holder_is_said_to_be_stopped(path: Path, start: Callable[[str], Any]) -> None:
    writer = start(WRITER)
    stop(writer)
    found = blocker(str(path))
    assert found is not None
    assert (found["pid"], found["stopped"]) == (writer.pid, True)

    os.kill(writer.pid, signal.SIGCONT)
    assert go_on(writer) == "outside\n"


def test_the_holder_of_the_gate_is_named_when_nobody_writes(path: Path, start: Callable[[str], Any]) -> None:
    sitting = start(AT_THE_GATE)
    found = blocker(str(path))

    assert found is not None
    assert (found["lock"], found["pid"], found["stopped"]) == ("gate", sitting.pid, False)


def test_a_writer_is_named_before_somebody_at_the_gate(path: Path, start: Callable[[str], Any]) -> None:
    start(AT_THE_GATE)
    with sqlite3.connect(path, isolation_level=None) as going_around:
        going_around.execute("BEGIN IMMEDIATE")
        found = blocker(str(path))
    going_around.close()

    assert found is not None
    assert (found["lock"], found["pid"]) == ("write", os.getpid())


def test_whoever_waits_is_not_taken_for_the_holder(path: Path, start: Callable[[str], Any]) -> None:
    holder = start(AT_THE_GATE)
    waiting = subprocess.Popen([sys.executable, "-c", AT_THE_GATE, str(path)], stdin=subprocess.PIPE, text=True)
    try:
        inode = f":{path.with_name('agents.db-gate').stat().st_ino} "
        wait_until(lambda: any("->" in row and inode in row for row in Path("/proc/locks").read_text().splitlines()))
        found = blocker(str(path))
    finally:
        waiting.kill()
        waiting.communicate()

    assert found is not None
    assert found["pid"] == holder.pid


def test_asking_does_not_drop_the_locks_of_whoever_asks(store: StateStore, path: Path) -> None:
    # A POSIX close of the locked file would: then the other process could write.
    with store.transaction(component="tests", action="test.write"):
        for _ in range(10):
            blocker(str(path))
        asked = subprocess.run(
            [sys.executable, "-c", ASKED_ELSEWHERE, str(path)], capture_output=True, text=True, check=True
        )
    assert f"held by process {os.getpid()} " in asked.stdout


def test_a_busy_error_names_a_frozen_writer_and_how_to_wake_it(path: Path, start: Callable[[str], Any]) -> None:
    writer = start(WRITER)
    stop(writer)
    with (
        StateStore(path, busy_timeout_seconds=0.3) as waiting,
        pytest.raises(StorageBusyError, match=rf"within 0\.3 s, held by process {writer.pid} .*SIGCONT") as busy,
    ):
        waiting.acquire("release", "worker-b")
    assert busy.value.blocker is not None
    assert (busy.value.blocker["pid"], busy.value.blocker["stopped"]) == (writer.pid, True)
    assert busy.value.facts["blocker"] == busy.value.blocker
    assert busy.value.retryable

    os.kill(writer.pid, signal.SIGCONT)
    assert go_on(writer) == "outside\n"
    with StateStore(path, busy_timeout_seconds=LONG) as later:
        assert later.acquire("release", "worker-b").token == 1


def test_a_frozen_holder_of_the_gate_alone_stops_nobody(path: Path, start: Callable[[str], Any]) -> None:
    stop(start(AT_THE_GATE))
    with StateStore(path, busy_timeout_seconds=1) as around:
        assert [around.put_checkpoint("deploy", number).sequence for number in range(20)] == list(range(1, 21))


def test_doctor_says_who_sits_on_the_lock_and_is_stopped(store: StateStore, start: Callable[[str], Any]) -> None:
    writer = start(WRITER)
    stop(writer)
    (check,) = [check for check in store.doctor() if check.check == "write_lock"]

    assert check.verdict == "warning"
    assert check.value["pid"] == writer.pid
    assert "is stopped" in check.message


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda store: store.get_lease("release"), id="read"),
        pytest.param(lambda store: store.acquire("release", "worker-b"), id="write"),
        pytest.param(lambda store: store.initialize(), id="initialize"),
    ],
)
def test_every_busy_error_has_a_blocker_known_or_none(store: StateStore, path: Path, call: Callable[..., Any]) -> None:
    store.close()
    greedy = sqlite3.connect(path, isolation_level=None)
    greedy.execute("PRAGMA locking_mode=EXCLUSIVE")
    greedy.execute("BEGIN EXCLUSIVE")
    greedy.execute("CREATE TABLE mine (column_1)")
    try:
        with StateStore(path, busy_timeout_seconds=0.1) as waiting, pytest.raises(StorageBusyError) as busy:
            call(waiting)
        assert "blocker" in busy.value.facts
        assert busy.value.blocker is None or busy.value.blocker["pid"] == os.getpid()
    finally:
        greedy.execute("ROLLBACK")
        greedy.close()


def test_a_holder_that_the_kernel_does_not_show_is_not_guessed(store: StateStore, path: Path) -> None:
    prefix = ["unshare", "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0:
        prefix[1:1] = ["--user", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        (pytest.fail if os.environ.get("CI") and os.geteuid() == 0 else pytest.skip)("no pid namespaces here")
    with store.transaction(component="tests", action="test.write"):
        asked = subprocess.run(
            [*prefix, sys.executable, "-c", ASKED_ELSEWHERE, str(path)], capture_output=True, text=True, check=True
        )
    assert "held by another connection" in asked.stdout
    assert asked.stdout.rstrip().endswith("null]")
