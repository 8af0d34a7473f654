"""A holder that is frozen, stalled, forked or killed, and a database that fails under a held lease.

Real processes, real time. Each holder is a program of its own, which tells what
happens to it as lines of JSON, each with the time by the clock that all share.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint.testing import freeze, kill

# Only what never comes reaches it.
LONG = 60.0
# How late a busy machine may be.
SLACK = 2.0

PRELUDE = """
import ctypes, json, os, signal, sqlite3, subprocess, sys, threading, time, warnings
from agent_checkpoint import AgentCheckpointError, NotFoundError, ReentrancyError, StaleLeaseError
from agent_checkpoint import StateStore, StorageError

# Python 3.12 and later warn of any fork beside threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
path = sys.argv[1]

def say(what, **facts):
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **facts}) + "\\n"
    os.write(1, line.encode())  # one write: whole lines, also from children

def on_lost(held, reason):
    say("on_lost", scope=held.scope, reason=reason)

def checked(held):
    try:
        held.check()
        say("checked")
    except StaleLeaseError as stale:
        say("stale", reason=stale.reason, gap=stale.facts["heartbeat_gap"], text=str(stale))
    except (StorageError, NotFoundError) as error:
        say("unknown", code=error.code)

def written(held):
    try:
        say("written", sequence=store.put_checkpoint("deploy", {"by": held.token}, lease=held.fence).sequence)
    except StaleLeaseError as stale:
        say("refused", reason=stale.reason, recorded=stale.recorded)

def told_to_go_on():
    sys.stdin.readline()

def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)

def left(block):
    "The end of a block, and how it came out."
    try:
        block.__exit__(None, None, None)
        say("left")
    except AgentCheckpointError as error:
        say("left", error=error.code, reason=getattr(error, "reason", None))

store = StateStore(path, busy_timeout_seconds=10)
"""


class Holder:
    """A program that runs, and what it told so far."""

    def __init__(self, path: Path, program: str, *before: str) -> None:
        self.told: list[dict[str, Any]] = []
        words = [*before, sys.executable, "-c", PRELUDE + program, str(path)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._readers = [threading.Thread(target=read) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.told.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as errors:
            self.errors = errors.read()

    def all(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.told if line["what"] == what]

    def first(self, what: str) -> dict[str, Any]:
        """Wait until it tells that."""
        wait_until(lambda: self.all(what) or self.process.poll() is not None)
        wait_until(lambda: self.all(what) or not self._readers[0].is_alive())
        assert self.all(what), (self.told, getattr(self, "errors", ""))
        return self.all(what)[0]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """Wait until it has ended, as it should; all that it told."""
        try:
            self.process.wait(LONG)
        finally:
            self.kill()
        assert (self.process.returncode, self.errors) == (0, "")
        return self.told

    def kill(self) -> None:
        kill(self.process)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        for reader in self._readers:
            reader.join(LONG)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
    return path


@pytest.fixture
def run(path: Path) -> Iterator[Callable[..., Holder]]:
    started: list[Holder] = []

    def start(program: str, *before: str) -> Holder:
        holder = Holder(path, program, *before)
        started.append(holder)
        return holder

    yield start
    for holder in started:
        holder.kill()


def kinds(path: Path, scope: str = "release") -> list[str]:
    with StateStore(path) as store:
        return [event.kind for event in store.events(10_000, scope=scope)]


# Frozen

FROZEN = """
block = store.hold("release", "worker-a", 1, on_lost=on_lost)
held = block.__enter__()
written(held)
say("held", token=held.token)
told_to_go_on()
checked(held)
written(held)
say("after", lost=held.lost.is_set(), remaining=held.remaining())
left(block)
until(lambda: not any(thread.name == "agent-checkpoint-lost" for thread in threading.enumerate()))
"""


@pytest.mark.parametrize("first", ["check", "write"])
def test_a_holder_frozen_past_its_ttl_and_superseded_learns_so_when_it_is_thawed(
    path: Path, run: Callable[..., Holder], first: str
) -> None:
    program = (
        FROZEN
        if first == "check"
        else FROZEN.replace("checked(held)\nwritten(held)\n", "written(held)\nchecked(held)\n")
    )
    holder = run(program)
    assert holder.first("held")["token"] == 1
    frozen = freeze(holder.process)
    frozen_at = time.monotonic()
    with StateStore(path) as store, store.hold("release", "worker-b", 30, wait_seconds=LONG) as successor:
        assert successor.token == 2
        store.put_checkpoint("deploy", {"by": 2}, lease=successor.fence)
        frozen_for = time.monotonic() - frozen_at
        holder.go_on()
        frozen.thaw()
        told = holder.end()
        assert successor.check().token == 2
        history = store.checkpoint_history("deploy")
        (event,) = store.events(kind="write.refused", workflow="deploy")
    (stale,) = holder.all("stale")
    assert stale["gap"] >= frozen_for - 0.05
    assert [(line["scope"], line["reason"]) for line in holder.all("on_lost")] == [("release", stale["reason"])]
    assert [line["reason"] for line in holder.all("refused")] == ["superseded"]
    assert (event.token, event.owner) == (1, "worker-a")
    assert holder.all("after")[0]["lost"]
    assert (holder.all("left")[0]["error"], holder.all("left")[0]["reason"]) == ("stale-lease", stale["reason"])
    assert [info.token for info in history] == [2, 1]
    assert not [line for line in told if line["what"] == "checked"]


def test_a_holder_frozen_for_less_than_its_ttl_keeps_its_lease(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(FROZEN.replace('"worker-a", 1,', '"worker-a", 20,'))
    holder.first("held")
    with freeze(holder.process):
        time.sleep(0.5)
        holder.go_on()
    holder.end()
    assert holder.all("checked")
    assert len(holder.all("written")) == 2
    assert "error" not in holder.all("left")[0]
    assert holder.all("on_lost") == []


WORKER = """
import random
store = StateStore(path, busy_timeout_seconds=1)
while True:
    try:
        with store.hold("release", str(os.getpid()), 0.6, wait_seconds=60, on_lost=on_lost) as held:
            say("held", token=held.token)
            for step in range(1000):
                held.check()
                store.put_checkpoint("deploy", {"token": held.token}, lease=held.fence)
                say("wrote", token=held.token)
                time.sleep(random.uniform(0, 0.01))
                if random.random() < 0.05:
                    break
    except StaleLeaseError as stale:
        say("stale", reason=stale.reason)
    except StorageError as error:  # somebody is frozen with the write lock
        say("busy", by=error.facts["blocker"])
"""


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.long)])
def test_workers_frozen_at_any_moment_never_write_behind_their_successor(
    path: Path, run: Callable[..., Holder], rounds: int
) -> None:
    choose = random.Random(rounds)
    workers = [run(WORKER) for _ in range(3)]
    for worker in workers:
        wait_until(lambda worker=worker: worker.told or worker.process.poll() is not None)
    for _ in range(rounds):
        chosen = choose.choice(workers)
        frozen = freeze(chosen.process)
        others = [worker for worker in workers if worker is not chosen]
        told = {worker: len(worker.told) for worker in others}
        time.sleep(choose.uniform(0.1, 1.0))

        def goes_on(others: list[Holder] = others, told: dict[Holder, int] = told) -> bool:
            since = [line for worker in others for line in worker.told[told[worker] :]]
            return any(line["what"] == "wrote" or (line["what"] == "busy" and line["by"]["stopped"]) for line in since)

        wait_until(goes_on)
        frozen.thaw()
        time.sleep(choose.uniform(0, 0.2))
    for worker in workers:
        worker.kill()
        assert worker.errors == ""
    with StateStore(path) as store:
        tokens = [info.token for info in reversed(store.checkpoint_history("deploy"))]
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 3
        # A holder that was told of a loss was told once, and knew why.
        for worker in workers:
            told = [line["reason"] for line in worker.all("on_lost")]
            assert set(told) <= {"expired", "superseded"}
            assert len(told) <= len(worker.all("held"))


def test_a_holder_that_is_killed_is_succeeded_at_once(path: Path, run: Callable[..., Holder]) -> None:
    holder = run('block = store.hold("release", "worker-a", 600)\nblock.__enter__()\nsay("held")\ntold_to_go_on()\n')
    holder.first("held")
    with StateStore(path) as store:
        with pytest.raises(LeaseHeldError):
            store.acquire("release", "worker-b")
        kill(holder.process)
        started = time.monotonic()
        with store.hold("release", "worker-b", 30, wait_seconds=LONG) as held:
            assert held.token == 2
        assert time.monotonic() - started < 10


# Stalled


@pytest.mark.parametrize(("ttl", "seconds"), [(1, 1.5), pytest.param(3, 5, marks=pytest.mark.long)])
def test_a_holder_whose_threads_could_not_run_knows_it_and_for_how_long(
    path: Path, run: Callable[..., Holder], ttl: int, seconds: float
) -> None:
    holder = run(
        f"""
stall = ctypes.PyDLL(None).usleep  # in C, with the GIL
block = store.hold("release", "worker-a", {ttl}, on_lost=on_lost)
held = block.__enter__()
began = time.monotonic()
stall({int(seconds * 1_000_000)})
say("stalled", seconds=time.monotonic() - began)
checked(held)
written(held)
until(held.lost.is_set)
say("gap", gap=held.heartbeat_gap)
left(block)
time.sleep(0.1)
"""
    )
    holder.end()
    stalled = holder.first("stalled")["seconds"]
    assert stalled >= seconds
    (stale,) = holder.all("stale")
    assert stale["reason"] == "expired"
    assert seconds - 0.05 <= stale["gap"] <= stalled + SLACK
    assert f"{stale['gap']:.1f} s" in stale["text"]
    assert holder.all("gap")[0]["gap"] == pytest.approx(stale["gap"])
    assert [line["reason"] for line in holder.all("refused")] == ["expired"]
    assert [line["reason"] for line in holder.all("on_lost")] == ["expired"]
    assert holder.all("left")[0]["error"] == "stale-lease"


def test_a_holder_stalled_for_less_than_its_ttl_keeps_its_lease_and_tells_the_gap(
    path: Path, run: Callable[..., Holder]
) -> None:
    holder = run(
        """
block = store.hold("release", "worker-a", 20, on_lost=on_lost)
held = block.__enter__()
extended = threading.Event()
held.on_extended(lambda deadline: extended.set())
ctypes.PyDLL(None).usleep(1_000_000)
checked(held)
left(block)
"""
    )
    holder.end()
    assert holder.all("checked")
    assert "error" not in holder.all("left")[0]


# The database fails

# Holds, tells, and lets the other side make the database fail; tells when it knows
# of the loss, and whether the store serves another hold once the database is well.
FAILS = """
ttl = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
block = store.hold("release", "worker-a", ttl, on_lost=on_lost)
held = block.__enter__()
def extended(deadline):
    say("extended", deadline=deadline / 1e9)
held.on_extended(extended)
say("held", deadline=held.deadline_ns / 1e9)
"""

WATCHES = """
until(held.lost.is_set)
say("lost", reason=held.lost_reason, deadline=held.deadline_ns / 1e9, remaining=held.remaining())
checked(held)
told_to_go_on()
left(block)
until(lambda: not any(thread.name == "agent-checkpoint-lost" for thread in threading.enumerate()))
"""

AGAIN = """
with store.hold("again", "worker-a", 1) as again:
    renewed = threading.Event()
    again.on_extended(lambda deadline: renewed.set())
    assert renewed.wait(30)
    say("again", token=again.check().token)
"""

KEEPS = """
told_to_go_on()
checked(held)
say("kept", lost=held.lost.is_set())
left(block)
"""


def known_lost(holder: Holder, reason: str = "expired") -> dict[str, Any]:
    """The holder knew of its loss by the deadline at the latest, and was told once."""
    lost = holder.first("lost")
    assert (lost["reason"], lost["remaining"]) == (reason, 0.0)
    (told,) = holder.all("on_lost")
    assert told["reason"] == reason
    deadline = max([holder.first("held")["deadline"], *(line["deadline"] for line in holder.all("extended"))])
    assert lost["deadline"] == deadline
    assert lost["at"] <= deadline + SLACK
    assert told["at"] <= deadline + SLACK
    (stale,) = holder.all("stale")
    assert stale["reason"] == reason
    left = holder.first("left")
    assert (left["error"], left["reason"]) == ("stale-lease", reason)
    return lost


def renewed(holder: Holder) -> None:
    """The lease goes on: it was renewed before it was lost."""
    wait_until(lambda: holder.all("extended") or holder.all("on_lost") or holder.process.poll() is not None)
    assert holder.all("extended"), holder.told


def lock(path: Path) -> sqlite3.Connection:
    """As another process does that sits in BEGIN IMMEDIATE."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=LONG)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def test_a_lock_that_another_process_sits_on_loses_the_lease_by_the_deadline(
    path: Path, run: Callable[..., Holder]
) -> None:
    holder = run(FAILS + WATCHES + AGAIN)
    holder.first("held")
    blocker = lock(path)
    holder.first("lost")
    blocker.execute("COMMIT")
    blocker.close()
    holder.go_on()
    holder.end()
    known_lost(holder)
    assert holder.all("again")
    # It was lost while the store still had it, and was not extended after that.
    extended = [line["at"] for line in holder.all("extended")]
    assert all(at < holder.first("lost")["at"] for at in extended)


def test_a_lock_that_is_let_go_in_time_loses_nothing(path: Path, run: Callable[..., Holder]) -> None:
    holder = run("sys.argv.append('6')\n" + FAILS + KEEPS)
    granted = holder.first("held")
    blocker = lock(path)
    wait_until(lambda: time.monotonic() > granted["at"] + 2.5)  # a heartbeat is on its way since 2 s
    assert holder.all("extended") == []
    blocker.execute("COMMIT")
    blocker.close()
    renewed(holder)
    holder.go_on()
    holder.end()
    assert holder.all("kept")[0]["lost"] is False
    assert holder.all("checked")
    assert holder.all("on_lost") == []
    assert kinds(path)[-1] == "lease.released"


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-gate"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def test_a_deleted_store_loses_the_lease_by_the_deadline(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(FAILS + WATCHES + "store.initialize()\n" + AGAIN)
    holder.first("held")
    remove(path)
    holder.first("lost")
    holder.go_on()
    holder.end()
    known_lost(holder)
    assert holder.all("again")[0]["token"] == 1


def test_a_store_that_is_moved_away_and_back_in_time_loses_nothing(path: Path, run: Callable[..., Holder]) -> None:
    holder = run("sys.argv.append('6')\n" + FAILS + KEEPS)
    holder.first("held")
    away = path.with_name("away.db")
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{away}{suffix}")
    time.sleep(2.3)  # a heartbeat fails
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.rename(f"{away}{suffix}", f"{path}{suffix}")
    renewed(holder)
    holder.go_on()
    holder.end()
    assert holder.all("kept")[0]["lost"] is False
    assert holder.all("on_lost") == []


def test_a_store_that_was_replaced_knows_no_such_lease(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(FAILS + WATCHES + AGAIN)
    holder.first("held")
    with StateStore(path.with_name("next.db")) as following:
        following.initialize()
    remove(path)
    os.replace(path.with_name("next.db"), path)
    holder.first("lost")
    holder.go_on()
    holder.end()
    known_lost(holder, "unknown")
    assert holder.all("again")[0]["token"] == 1
    assert kinds(path)[:1] == ["write.refused"]


# Disks, in a mount namespace of their own

CAP_SYS_ADMIN = 21


def may_mount() -> bool:
    """Whether this process may mount; in CI it must, and a refusal there is a failure, not a skip."""
    if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    (capabilities,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(capabilities, 16) >> CAP_SYS_ADMIN & 1) and shutil.which("unshare") is not None


needs_mounts = pytest.mark.skipif(not may_mount(), reason="only root on Linux may mount a small or read-only disk")

DISK = """
disk = os.path.dirname(path)

def fill_up():
    with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass

def free():
    os.remove(os.path.join(disk, "filler"))

store.initialize()
# A reader of an old state: the log cannot begin anew, so that every write needs room.
reader = sqlite3.connect(path, isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT COUNT(*) FROM events").fetchone()
"""


@pytest.fixture
def on_a_small_disk(tmp_path: Path) -> Iterator[Callable[[str], Holder]]:
    """Run a program on a disk of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=512k tmpfs "{disk}" && exec "$@"'
    started: list[Holder] = []

    def start(program: str) -> Holder:
        holder = Holder(disk / "agents.db", program, "unshare", "-m", "sh", "-c", mount, "sh")
        started.append(holder)
        return holder

    yield start
    for holder in started:
        holder.kill()


@needs_mounts
def test_a_full_disk_loses_the_lease_by_the_deadline(on_a_small_disk: Callable[[str], Holder]) -> None:
    holder = on_a_small_disk(DISK + FAILS + "fill_up()\n" + WATCHES + "free()\nreader.close()\n" + AGAIN)
    holder.first("lost")
    holder.go_on()
    holder.end()
    known_lost(holder)
    assert holder.all("again")


@needs_mounts
def test_a_disk_that_has_room_again_in_time_loses_nothing(on_a_small_disk: Callable[[str], Holder]) -> None:
    holder = on_a_small_disk(
        "sys.argv.append('6')\n" + DISK + FAILS + "fill_up()\ntime.sleep(2.5)\nsay('full')\nfree()\n" + KEEPS
    )
    holder.first("full")
    assert holder.all("extended") == []
    renewed(holder)
    holder.go_on()
    holder.end()
    assert holder.all("kept")[0]["lost"] is False
    assert holder.all("on_lost") == []


READ_ONLY = """
# Whoever opens the store from here on finds it on a mount that may only be read.
subprocess.run(["mount", "--bind", disk, disk], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
"""


@needs_mounts
def test_a_read_only_disk_loses_the_lease_by_the_deadline(on_a_small_disk: Callable[[str], Holder]) -> None:
    holder = on_a_small_disk(
        DISK
        + FAILS
        # Main sits on the connection that is open, so that the heartbeat needs another one.
        + "reader.close()\nwith store.read():\n"
        + "    "
        + READ_ONLY.strip().replace("\n", "\n    ")
        + "\n    until(held.lost.is_set)\n"
        + WATCHES.replace(
            "left(block)", "subprocess.run(['mount', '-o', 'remount,bind,rw', disk], check=True)\nleft(block)"
        )
        + AGAIN
    )
    holder.first("lost")
    holder.go_on()
    holder.end()
    known_lost(holder)
    assert holder.all("again")


@needs_mounts
def test_a_disk_that_may_be_written_again_in_time_loses_nothing(on_a_small_disk: Callable[[str], Holder]) -> None:
    holder = on_a_small_disk(
        "sys.argv.append('6')\n"
        + DISK
        + FAILS
        + READ_ONLY
        + """
reader.close()
if os.fork() == 0:  # before which every idle connection is closed
    os._exit(0)
os.wait()
time.sleep(2.2)
say("read-only")
subprocess.run(["mount", "-o", "remount,bind,rw", disk], check=True)
"""
        + KEEPS
    )
    holder.first("read-only")
    assert holder.all("extended") == []
    renewed(holder)
    holder.go_on()
    holder.end()
    assert holder.all("kept")[0]["lost"] is False
    assert holder.all("on_lost") == []


# Forked


def test_a_forked_child_neither_renews_nor_gives_back_nor_hears(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(
        """
with store.hold("release", "worker-a", 1, on_lost=on_lost) as held:
    pid = os.fork()
    if pid == 0:
        say("child", threads=threading.active_count())
        checked(held)  # it may look
        until(lambda: held.remaining() == 0)  # nobody renews its copy
        checked(held)
        with store.hold("child", "worker-b", 1) as own:
            renewed = threading.Event()
            own.on_extended(lambda deadline: renewed.set())
            assert renewed.wait(30)
            say("own", token=own.check().token)
    else:
        say("ended", status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        checked(held)
        written(held)
say("out")
"""
    )
    told = holder.end()
    parent = holder.process.pid
    by_child = [line["what"] for line in told if line["pid"] != parent]
    assert by_child == ["child", "checked", "stale", "own", "out"]
    assert holder.all("child")[0]["threads"] == 1
    assert [line["what"] for line in told if line["pid"] == parent] == ["ended", "checked", "written", "out"]
    assert holder.all("ended")[0]["status"] == 0
    assert holder.all("on_lost") == []
    assert kinds(path).count("lease.released") == 1
    assert "write.refused" not in kinds(path)


@pytest.mark.parametrize("way", ["sys.exit(3)", "raise ValueError(3)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_child_that_ends_inside_the_block_leaves_the_lease_to_its_parent(
    path: Path, run: Callable[..., Holder], way: str
) -> None:
    holder = run(
        f"""
sys.excepthook = lambda *_: None
with store.hold("release", "worker-a", 30, on_lost=on_lost) as held:
    pid = os.fork()
    if pid == 0:
        {way}
    say("ended", status=os.waitpid(pid, 0)[1] != 0)
    checked(held)
    written(held)
"""
    )
    holder.end()
    assert holder.all("ended")[0]["status"]
    assert holder.all("checked")
    assert holder.all("written")
    assert kinds(path).count("lease.released") == 1


def test_a_child_that_outlives_its_parent_does_not_keep_its_lease_alive(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(
        """
block = store.hold("release", "worker-a", 1, on_lost=on_lost)
held = block.__enter__()
if os.fork():
    say("held")
    told_to_go_on()
    os._exit(0)
say("child")
until(lambda: os.getppid() == 1 or store.get_lease("release").token == 2, 60)
until(lambda: (store.get_lease("release") or held).token == 2, 60)
checked(held)
written(held)
left(block)
"""
    )
    holder.first("child")
    holder.first("held")
    holder.go_on()
    with StateStore(path) as store, store.hold("release", "worker-b", 30, wait_seconds=LONG) as successor:
        wait_until(lambda: holder.all("left"))
        assert successor.check().token == 2
    holder.end()
    assert holder.all("stale")
    assert [line["reason"] for line in holder.all("refused")] == ["superseded"]
    assert "error" not in holder.all("left")[0]
    assert holder.all("on_lost") == []


def test_children_of_multiprocessing_hold_leases_of_their_own(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(
        """
import multiprocessing

def work(number):
    with store.hold(f"scope-{number % 3}", f"worker-{number}", 30, wait_seconds=60) as own:
        return own.check().token

with store.hold("release", "worker-a", 3, on_lost=on_lost) as held:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        tokens = pool.map(work, range(30), chunksize=1)
        pool.close()
        pool.join()
    say("tokens", tokens=tokens)
    checked(held)
"""
    )
    holder.end()
    assert sorted(holder.all("tokens")[0]["tokens"]) == sorted([*range(1, 11)] * 3)
    assert holder.all("checked")
    assert holder.all("on_lost") == []
    with StateStore(path) as store:
        assert store.list_leases() == []


@pytest.mark.parametrize("forks", [40, pytest.param(500, marks=pytest.mark.long)])
def test_forks_in_the_midst_of_renewals_hang_nobody_and_lose_nothing(
    path: Path, run: Callable[..., Holder], forks: int
) -> None:
    holder = run(
        f"""
import contextlib, random
blocks = contextlib.ExitStack()
held = []
for number in range(20):  # their heartbeats come one after the other
    held.append(blocks.enter_context(store.hold(f"scope-{{number}}", "worker-a", 3, on_lost=on_lost)))
    time.sleep(0.05)
ended = []
for number in range({forks}):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            with store.hold(f"child-{{number}}", "child", 5) as own:
                own.check()
        except ReentrancyError:
            os._exit(1)
        except BaseException as error:
            say("failed", error=repr(error))
            os._exit(2)
        os._exit(0)
    time.sleep(random.uniform(0, 0.03))
    ended.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
say("ended", statuses=ended)
for each in held:
    checked(each)
blocks.close()
"""
    )
    holder.end()
    statuses = holder.all("ended")[0]["statuses"]
    assert set(statuses) <= {0, 1}, holder.all("failed")
    # One that was forked while the heartbeat wrote is told so; most were not.
    assert statuses.count(0) > forks / 2
    assert len(holder.all("checked")) == 20
    assert holder.all("on_lost") == []


def test_a_thread_that_waits_while_others_fork_is_served(path: Path, run: Callable[..., Holder]) -> None:
    holder = run(
        """
def wait():
    with store.hold("release", "waiter", 3, wait_seconds=60, on_lost=on_lost) as own:
        say("served", token=own.check().token)

with store.hold("release", "worker-a", 3, on_lost=on_lost) as held:
    waiter = threading.Thread(target=wait)
    waiter.start()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.01)
    checked(held)
waiter.join()
"""
    )
    holder.end()
    assert holder.all("served")[0]["token"] == 2
    with StateStore(path) as store, store.read() as reader:
        assert reader.rows("SELECT COUNT(*) FROM tickets") == [(0,)]
