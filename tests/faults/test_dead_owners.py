"""Owners that die: the next one has the scope at once, the log says why once, and nothing is taken on a guess."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import LeaseHeldError, StateStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="proof of death needs Linux")

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
# What nobody may wait longer for, on however slow a machine; the strict form is long.
GENEROUS = 2.0
STRICT_P95 = 0.1
COMMAND = (sys.executable, "-m", "agent_checkpoint")

# For each line it is told, a child that holds the scope until it is killed. The
# children are reaped at once, or never, as the first argument says.
HOLDERS = """
import os, signal, sys, time
from agent_checkpoint import StateStore
signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[2] == "reaped" else signal.SIG_DFL)
for line in sys.stdin:
    if not os.fork():
        with StateStore(sys.argv[1]) as store, store.hold("release", "holder", 300, wait_seconds=60) as held:
            os.write(1, f"{os.getpid()} {held.token}\\n".encode())
            time.sleep(600)
"""

# Holds a scope until it is killed.
HOLDER = """
import sys, time
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store, store.hold("release", "holder", float(sys.argv[2])) as held:
    print(held.token, flush=True)
    time.sleep(600)
"""

# Asks for it, bound to this process, and does not renew it.
ASKER = """
import os, sys, time
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store:
    print(store.acquire("release", "holder", float(sys.argv[2]), pid=os.getpid()).token, flush=True)
    time.sleep(600)
"""

# Waits for a scope.
WAITER = """
import sys
from agent_checkpoint import StateStore
StateStore(sys.argv[1]).acquire("release", "inside", wait_seconds=60)
"""

# Sweeps and asks, for scopes whose leases run out all the time.
SWEEPER = """
import os, random, sys, time
from agent_checkpoint import LeaseHeldError, StaleLeaseError, StateStore, StorageBusyError
path, name, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
choose = random.Random(name)
swept = 0
with StateStore(path) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        what = choose.random()
        try:
            if what < 0.3:
                swept += len(store.sweep())
            elif what < 0.9:
                pid = os.getpid() if choose.random() < 0.5 else None
                store.acquire(f"scope-{choose.randrange(10)}", name, 0.1, pid=pid, limit=2)
            else:
                lease = store.acquire(f"scope-{choose.randrange(10)}", name, 0.1, limit=2)
                time.sleep(choose.uniform(0, 0.15))
                store.release(*lease.fence)
        except (LeaseHeldError, StaleLeaseError, StorageBusyError):
            pass
print(swept)
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store in memory, where there is some: death is tested, not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        path = Path(folder) / "agents.db"
        with StateStore(path) as store:
            store.initialize()
        yield path


@pytest.fixture
def store(path: Path) -> Iterator[StateStore]:
    with StateStore(path) as opened:
        yield opened


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*command: object, **options: Any) -> subprocess.Popen[str]:
        words = [str(word) for word in command]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def python(source: str, *arguments: object) -> list[object]:
    return [sys.executable, "-c", source, *arguments]


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "it has ended: its stderr says why"
    return line


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def ends(store: StateStore) -> list[tuple[int | None, Any]]:
    return [(event.token, event.detail) for event in store.events(limit=1_000_000, kind="lease.expired")]


def zombie(process: subprocess.Popen[str]) -> None:
    """Kill it, and do not reap it."""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


# How soon the next one has it.


def failovers(path: Path, start: Start, turns: int, reaped: str) -> list[float]:
    """Kill a holder while somebody waits, again and again: the seconds from the kill to the next grant."""
    took: list[float] = []
    choose = random.Random(3)
    holders = start(*python(HOLDERS, path, reaped))
    assert holders.stdin is not None
    with StateStore(path) as store:
        for _ in range(turns):
            holders.stdin.write("\n")
            holders.stdin.flush()
            pid = int(line_of(holders).split()[0])
            killed: list[float] = []

            def kill(pid: int = pid, killed: list[float] = killed, settled: float = choose.uniform(0, 0.06)) -> None:
                until(lambda: store.status().queues)
                time.sleep(settled)
                killed.append(time.monotonic())
                os.kill(pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            lease = store.acquire("release", "next", 300, wait_seconds=LONG)
            took.append(time.monotonic() - killed[0])
            killer.join(LONG)
            store.release(*lease.fence)
        # Each of them on record once, and why.
        assert ends(store) == [(token, {"reason": "owner-dead"}) for token in range(1, 2 * turns, 2)]
        assert [event.kind for event in store.events(limit=1_000_000, scope="release")] == [
            *("lease.acquired", "lease.expired", "lease.acquired", "lease.released")
        ] * turns
    took.sort()
    print(
        f"{turns} holders killed ({reaped}), from the kill to the next grant: "
        f"median {statistics.median(took) * 1000:.0f} ms, "
        f"p95 {took[int(0.95 * turns) - 1] * 1000:.0f} ms, longest {took[-1] * 1000:.0f} ms"
    )
    return took


def test_a_killed_holder_s_scope_is_the_next_waiter_s(path: Path, start: Start) -> None:
    assert max(failovers(path, start, 20, "reaped")) < GENEROUS


def test_a_killed_holder_that_nobody_reaps_is_dead_all_the_same(path: Path, start: Start) -> None:
    assert max(failovers(path, start, 5, "unreaped")) < GENEROUS


@pytest.mark.long
@pytest.mark.parametrize("reaped", ["reaped", "unreaped"])
def test_a_killed_holder_s_scope_is_the_next_waiter_s_within_100_ms_at_p95_of_50(
    path: Path, start: Start, reaped: str
) -> None:
    took = failovers(path, start, 50, reaped)
    assert took[int(0.95 * 50) - 1] < STRICT_P95


def test_a_killed_holder_s_scope_goes_down_the_queue(path: Path, store: StateStore, start: Start) -> None:
    holder = start(*python(HOLDER, path, 300))
    line_of(holder)
    served: list[int] = []

    def wait(number: int) -> None:
        lease = store.acquire("release", f"waiter-{number}", 300, wait_seconds=LONG)
        served.append(number)
        store.release(*lease.fence)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda number=number: len(store.status().queues) == number)
    holder.kill()
    for thread in threads:
        thread.join(LONG)
    assert sorted(served) == list(range(5))
    assert ends(store) == [(1, {"reason": "owner-dead"})]


def test_each_of_several_dead_holders_frees_its_slot(path: Path, store: StateStore, start: Start) -> None:
    store.set_limit("release", 3)
    holders = [start(*python(HOLDER, path, 300)) for _ in range(3)]
    tokens = {int(line_of(holder)): holder for holder in holders}
    slots = {lease.token: lease.slot for lease in store.list_leases()}
    tokens[2].kill()
    tokens[2].wait()
    assert store.acquire("release", "next", wait_seconds=LONG).slot == slots[2]
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "other")
    assert ends(store) == [(2, {"reason": "owner-dead"})]


# What can be seen of it.


def test_a_holder_is_alive_frozen_or_not_and_dead_reaped_or_not(path: Path, store: StateStore, start: Start) -> None:
    holder = start(*python(ASKER, path, 300))
    line_of(holder)

    def seen() -> list[bool | None]:
        found = store.get_lease("release")
        assert found is not None
        return [
            found.owner_alive,
            store.check_lease(*found.fence).owner_alive,
            *(lease.owner_alive for lease in store.list_leases()),
            *(lease.owner_alive for lease in store.status().leases),
        ]

    assert seen() == [True] * 4
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    assert seen() == [True] * 4
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "next")
    zombie(holder)
    assert seen() == [False] * 4
    holder.wait()
    assert seen() == [False] * 4
    # A look changes nothing.
    assert ends(store) == []
    assert store.acquire("release", "next").token == 2


def test_the_command_binds_a_lease_to_the_shell_that_called_it(path: Path, store: StateStore, start: Start) -> None:
    command = shlex.join(
        [*COMMAND, "--db", str(path), "lease", "acquire", "release", "--owner", "shell", "--ttl", "300"]
    )
    # What becomes of the shell by exec is the same process still.
    shell = start("sh", "-c", f"{command} --pid $$ --format jsonl && exec sleep 600")
    assert json.loads(line_of(shell))["process"]["pid"] == shell.pid
    found = store.get_lease("release")
    assert found is not None
    assert found.owner_alive is True

    waiter = start(*COMMAND, "--db", path, "lease", "acquire", "release", "--owner", "next", "--wait", "forever")
    until(lambda: store.status().queues)
    time.sleep(0.2)
    killed = time.monotonic()
    zombie(shell)
    out, _ = waiter.communicate(timeout=LONG)
    assert time.monotonic() - killed < GENEROUS
    assert json.loads(out)["token"] == 2
    assert ends(store) == [(1, {"reason": "owner-dead"})]


def test_lease_wait_sees_a_death_too(path: Path, store: StateStore, start: Start) -> None:
    holder = start(*python(ASKER, path, 300))
    line_of(holder)
    waiter = start(*COMMAND, "--db", path, "lease", "wait", "release")
    time.sleep(0.5)
    killed = time.monotonic()
    holder.kill()
    assert waiter.wait(LONG) == 0
    assert time.monotonic() - killed < GENEROUS


def test_a_dead_holder_is_put_on_record_by_who_follows_the_log(path: Path, store: StateStore, start: Start) -> None:
    holder = start(*python(ASKER, path, 300))
    line_of(holder)
    follower = start(*COMMAND, "--db", path, "events", "--follow", "--format", "jsonl")
    holder.kill()
    kinds: list[str] = []
    while "lease.expired" not in kinds:
        kinds.append(json.loads(line_of(follower))["kind"])
    assert ends(store) == [(1, {"reason": "owner-dead"})]


# What is not known is not taken.


def inside(*flags: str) -> list[str]:
    """The start of a command that runs the rest of it in namespaces of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # The shell stays, so that nobody in there is the namespace's init, whose end would end all.
    prefix = ["unshare", *as_root, *flags, "--fork", "--kill-child", "sh", "-c", '"$@"; exit', "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        (pytest.fail if os.environ.get("CI") and os.geteuid() == 0 else pytest.skip)(tried.stderr)
    return prefix


NAMESPACES = [
    ("--pid", "--mount-proc"),
    ("--pid",),
    ("--time",),
    ("--time", "--boottime", "86400", "--monotonic", "86400"),
]


def kill_child_of(parent: subprocess.Popen[str]) -> None:
    """Kill the Python inside of a namespace, by its pid out here."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,comm"], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for line in found.splitlines()[1:]:
        pid, ppid, name = line.split(None, 2)
        children[int(ppid)].append((int(pid), name))
    below, last = [parent.pid], None
    while below:
        for pid, name in children[below.pop()]:
            below.append(pid)
            if name.startswith("python"):
                last = pid
    assert last is not None
    os.kill(last, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{last}"))


@pytest.mark.parametrize("flags", NAMESPACES, ids=" ".join)
def test_a_holder_in_other_namespaces_has_its_ttl_dead_or_alive(
    path: Path, store: StateStore, start: Start, flags: tuple[str, ...]
) -> None:
    ttl = 0.8
    holder = start(*inside(*flags), *python(ASKER, path, ttl))
    line_of(holder)
    granted = time.monotonic()
    found = store.get_lease("release")
    assert found is not None
    assert found.process is not None
    assert found.owner_alive is None
    assert [lease.owner_alive for lease in store.status().leases] == [None]
    kill_child_of(holder)

    found = store.get_lease("release")
    assert found is not None
    assert found.owner_alive is None
    assert store.sweep() == []
    assert store.acquire("release", "next", wait_seconds=LONG).token == 2
    assert time.monotonic() - granted > ttl - 0.2
    assert ends(store) == [(1, {"reason": "ttl"})]


ASKED = """
import json, sys
from agent_checkpoint import LeaseHeldError, StateStore
with StateStore(sys.argv[1]) as store:
    lease = store.get_lease("release")
    try:
        store.acquire("release", "inside")
        print("granted")
    except LeaseHeldError:
        print(json.dumps([lease.owner_alive, len(store.sweep())]))
"""


@pytest.mark.parametrize("flags", NAMESPACES, ids=" ".join)
@pytest.mark.parametrize("alive", [True, False])
def test_who_looks_from_other_namespaces_takes_nothing(
    path: Path, store: StateStore, start: Start, flags: tuple[str, ...], alive: bool
) -> None:
    holder = start(*python(ASKER, path, 300))
    line_of(holder)
    if not alive:
        holder.kill()
        holder.wait()
    looker = start(*inside(*flags), *python(ASKED, path))
    assert json.loads(line_of(looker)) == [None, 0]
    found = store.get_lease("release")
    assert found is not None
    assert found.owner_alive is alive


def test_a_waiter_in_another_namespace_is_gone_when_its_ticket_s_life_is_over(
    path: Path, store: StateStore, start: Start
) -> None:
    lease = store.acquire("release", "holder", 300)
    waiter = start(*inside("--pid", "--mount-proc"), *python(WAITER, path))
    until(lambda: store.status().queues)
    (queued,) = store.status().queues
    assert (queued.owner, queued.owner_alive) == ("inside", None)
    kill_child_of(waiter)
    assert len(store.status().queues) == 1
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE tickets SET beat_ticks = beat_ticks - ttl_ns, expires_at = expires_at - ttl_ns")
    assert store.status().queues == []
    store.release(*lease.fence)
    assert store.acquire("release", "next").token == 2
    with store.read() as reader:
        assert reader.rows("SELECT number FROM tickets") == []


# Exactly once, however many look.


@pytest.mark.parametrize("seconds", [3, pytest.param(20, marks=pytest.mark.long)])
def test_each_lease_comes_to_one_end_though_eight_processes_sweep_and_ask(
    path: Path, store: StateStore, start: Start, seconds: float
) -> None:
    # Some of those who held a lease are dead from the beginning.
    for number in range(10):
        dead = subprocess.Popen(["sleep", "600"])
        store.acquire(f"scope-{number}", "dead", 600, limit=2, pid=dead.pid)
        dead.kill()
        dead.wait()
    sweepers = [
        start(*python(SWEEPER, path, f"sweeper-{number}", seconds), stderr=subprocess.PIPE) for number in range(8)
    ]
    assert [line_of(sweeper) for sweeper in sweepers] == ["ready"] * 8
    for sweeper in sweepers:
        assert sweeper.stdin is not None
        sweeper.stdin.write("\n")
        sweeper.stdin.flush()
    time.sleep(0.7 * seconds)
    # Some die in the midst of it.
    for sweeper in sweepers[:3]:
        sweeper.kill()
    swept = 0
    for sweeper in sweepers[3:]:
        out, errors = sweeper.communicate(timeout=LONG)
        assert (sweeper.returncode, errors) == (0, "")
        swept += int(out)
    time.sleep(0.2)
    store.sweep()
    assert store.sweep() == []
    assert store.list_leases() == []

    live: dict[tuple[str | None, int], int | None] = {}
    tokens: Counter[str | None] = Counter()
    reasons: Counter[str] = Counter()
    for event in store.events(limit=1_000_000):
        if event.kind == "lease.acquired":
            tokens[event.scope] += 1
            assert event.token == tokens[event.scope]
            slot = (event.scope, event.detail["slot"])
            assert slot not in live, f"{event} before the end of {live[slot]}"
            live[slot] = event.token
        elif event.kind in ("lease.expired", "lease.released"):
            (slot,) = (slot for slot, token in live.items() if slot[0] == event.scope and token == event.token)
            del live[slot]
            reasons[event.detail.get("reason", "released")] += 1
    assert live == {}
    print(f"{sum(tokens.values())} leases came to their ends: {dict(reasons)}; {swept} by those who swept and lived")
    assert reasons["owner-dead"] >= 10
    assert min(reasons["ttl"], reasons["released"], swept) > 0
