"""Many processes queue for one scope, and are killed, frozen and cancelled: one at a time, in turn, and none for long.

What happens inside the scope is written down outside the store, in a file that
every process appends to: the kernel puts the lines in one order.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
# Nobody may wait longer: eight others, 5 ms each, and whoever is frozen in between.
TOO_LONG = 2.0
HOLD = 0.005

# Asks, enters, leaves, again and again; how, its options say. All see the same monotonic clock.
WORKER = """
import asyncio, json, os, random, sys, time
from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint.aio import AsyncStateStore

path, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[4])
log = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
choose = random.Random(name)
pid = os.getpid()
limit = options.get("limit")

def tell(what, **facts):
    line = {"what": what, "pid": pid, "name": name, "at": time.monotonic(), **facts}
    os.write(log, (json.dumps(line) + "\\n").encode())

def inside(lease, asked):
    now = time.monotonic()
    tell("enter", token=lease.token, slot=lease.slot, waited=now - asked)
    time.sleep(options["hold"])
    tell("leave", token=lease.token)

def goes_on():
    return time.monotonic() < until

def patient(store):
    while goes_on():
        asked = time.monotonic()
        lease = store.acquire("release", name, 300, wait_seconds=60, limit=limit, pid=pid)
        inside(lease, asked)
        store.release(*lease.fence)

def holding(store):
    while goes_on():
        asked = time.monotonic()
        with store.hold("release", name, 300, wait_seconds=60, limit=limit) as held:
            inside(held, asked)

def impatient(store):
    while goes_on():
        asked, wait = time.monotonic(), choose.uniform(0, 0.05)
        try:
            lease = store.acquire("release", name, 300, wait_seconds=wait, limit=limit, pid=pid)
        except LeaseHeldError:
            tell("gave up", late=time.monotonic() - asked - wait)
            continue
        inside(lease, asked)
        store.release(*lease.fence)

def hasty(store):
    while goes_on():
        asked = time.monotonic()
        try:
            lease = store.acquire("release", name, 300, limit=limit, pid=pid)
        except LeaseHeldError:
            time.sleep(choose.uniform(0, 0.002))
            continue
        inside(lease, asked)
        store.release(*lease.fence)

async def one_that_is_cancelled(store):
    while goes_on():
        asked = time.monotonic()
        asking = asyncio.create_task(store.acquire("release", name, 300, wait_seconds=60, limit=limit, pid=pid))
        await asyncio.wait([asking], timeout=choose.uniform(0, 0.05))
        asking.cancel()
        try:
            lease = await asking
        except asyncio.CancelledError:
            continue
        inside(lease, asked)
        await store.release(*lease.fence)

tell("ready")
until = float(sys.stdin.readline())

async def cancelled():
    async with AsyncStateStore(path) as store:
        await one_that_is_cancelled(store)

if options["how"] == "cancelled":
    asyncio.run(cancelled())
else:
    with StateStore(path) as store:
        globals()[options["how"]](store)
"""

# Queues up once, and gives back what it has waited for.
WAITER = """
import sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store:
    lease = store.acquire("release", sys.argv[2], 300, wait_seconds=60)
    store.release(*lease.fence)
"""

Line = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store in memory, where there is some: waiting is tested, not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        path = Path(folder) / "agents.db"
        with StateStore(path) as store:
            store.initialize()
        yield path


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def tickets(path: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT number, owner FROM tickets ORDER BY number").fetchall()


class Crowd:
    """Processes that want into one scope, and what each of them wrote down."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.log = path.with_name("log.jsonl")
        self.options = {"hold": HOLD, **options}
        self.until = 0.0
        self.processes: list[subprocess.Popen[str]] = []
        self.killed: dict[int, float] = {}
        self.frozen: list[tuple[int, float, float]] = []

    def add(self, how: str) -> subprocess.Popen[str]:
        name = f"{how}-{len(self.processes)}"
        options = json.dumps({**self.options, "how": how})
        command = [sys.executable, "-c", WORKER, str(self.path), name, str(self.log), options]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        if self.until:
            self._let_go(process)
        return process

    def start(self, seconds: float) -> None:
        """Let them go all at once, for so long."""
        ready = len(self.processes)
        until(lambda: self.log.exists() and self.log.read_bytes().count(b"\n") == ready)
        self.until = time.monotonic() + seconds
        for process in self.processes:
            self._let_go(process)

    def _let_go(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write(f"{self.until}\n")
        process.stdin.flush()

    def kill(self, process: subprocess.Popen[str]) -> None:
        self.killed[process.pid] = time.monotonic()
        process.kill()

    def freeze(self, process: subprocess.Popen[str], seconds: float) -> None:
        began = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        process.send_signal(signal.SIGCONT)
        self.frozen.append((process.pid, began, time.monotonic()))

    def end(self) -> list[Line]:
        """Wait for those who were not killed; everything that was written down."""
        for process in self.processes:
            _, errors = process.communicate(timeout=LONG)
            assert errors == "" or process.pid in self.killed, errors
            assert process.returncode == (-signal.SIGKILL if process.pid in self.killed else 0)
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def clean_up(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def waited(self, line: Line) -> float:
        """How long somebody waited, without the time in which it was frozen itself."""
        began, ended = line["at"] - line["waited"], line["at"]
        asleep = (min(ended, to) - max(began, since) for pid, since, to in self.frozen if pid == line["pid"])
        return float(line["waited"] - sum(max(0.0, each) for each in asleep))


@pytest.fixture
def crowd(path: Path) -> Iterator[Callable[..., Crowd]]:
    made: list[Crowd] = []

    def make(**options: Any) -> Crowd:
        made.append(Crowd(path, **options))
        return made[-1]

    yield make
    for each in made:
        each.clean_up()


def never_more_than(limit: int, lines: list[Line], killed: dict[int, float] | None = None) -> None:
    """As the file outside tells: how many were inside at once, and in which slots."""
    inside: dict[int, Line] = {}
    for line in lines:
        if line["what"] == "leave":
            del inside[line["token"]]
        elif line["what"] == "enter":
            for token, other in list(inside.items()):
                if (killed or {}).get(other["pid"], line["at"]) < line["at"]:
                    del inside[token]
            assert len(inside) < limit, f"{line} beside {inside}"
            assert line["slot"] in range(limit)
            assert line["slot"] not in {other["slot"] for other in inside.values()}
            inside[line["token"]] = line
    tokens = [line["token"] for line in lines if line["what"] == "enter"]
    assert len(tokens) == len(set(tokens))
    if limit == 1:
        assert tokens == sorted(tokens)


def the_log_tells_the_same(path: Path) -> None:
    """As the events tell: tokens go up, a slot has one lease at a time, each came to one end, the limit held."""
    with StateStore(path) as store:
        store.sweep()
        limit, last, live = 1, 0, {}
        for event in store.events(limit=1_000_000, scope="release"):
            if event.kind == "lease.limit-set":
                limit = event.detail["limit"]
            elif event.kind == "lease.acquired":
                assert event.token == last + 1
                assert len(live) < limit
                assert event.detail["slot"] == min(set(range(limit)) - set(live))
                last = event.token
                live[event.detail["slot"]] = event.token
            elif event.kind in ("lease.released", "lease.expired"):
                (slot,) = (slot for slot, token in live.items() if token == event.token)
                del live[slot]
        assert live == {}
        assert store.list_leases() == []
        # Nobody is left in the queue once somebody was granted the scope.
        store.acquire("release", "last", wait_seconds=LONG)
    assert tickets(path) == []


def tell(what: str, waits: list[float]) -> None:
    cuts = statistics.quantiles(waits, n=20)
    print(
        f"{what}: {len(waits)} grants, waited median {statistics.median(waits) * 1000:.1f} ms, "
        f"p95 {cuts[18] * 1000:.1f} ms, longest {max(waits) * 1000:.1f} ms"
    )


def test_eight_processes_are_inside_one_at_a_time_and_in_turn(path: Path, crowd: Callable[..., Crowd]) -> None:
    busy = crowd()
    for number in range(8):
        busy.add("holding" if number % 2 else "patient")
    busy.start(2)
    lines = busy.end()

    never_more_than(1, lines)
    the_log_tells_the_same(path)
    enters = [line for line in lines if line["what"] == "enter"]
    waits = [line["waited"] for line in enters]
    tell("eight processes", waits)
    assert max(waits) < TOO_LONG
    # From when the last one came to when the first one went all have had as many turns.
    began = max(
        min(line["at"] for line in enters if line["name"] == name) for name in {each["name"] for each in enters}
    )
    turns = Counter(line["name"] for line in enters if began <= line["at"] < busy.until - 0.3)
    print(f"turns of each: {sorted(turns.values())}")
    assert len(turns) == 8
    assert max(turns.values()) <= 1.5 * min(turns.values()) + 3


def test_those_who_do_not_wait_do_not_starve_those_who_do(path: Path, crowd: Callable[..., Crowd]) -> None:
    busy = crowd()
    for how in ("patient", "hasty") * 3:
        busy.add(how)
    busy.start(1.5)
    lines = busy.end()

    never_more_than(1, lines)
    the_log_tells_the_same(path)
    waits = [line["waited"] for line in lines if line["what"] == "enter" and line["name"].startswith("patient")]
    tell("three who wait beside three who do not", waits)
    assert max(waits) < TOO_LONG


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.long)])
def test_whoever_is_killed_frozen_or_cancelled_nobody_waits_for_long(
    path: Path, crowd: Callable[..., Crowd], seconds: int
) -> None:
    choose = random.Random(11)
    busy = crowd()
    hows = ("patient", "holding", "impatient", "cancelled")
    running = [busy.add(how) for how in hows * 2]
    busy.start(seconds)
    struck: Counter[str] = Counter()
    while time.monotonic() < busy.until - 0.5:
        time.sleep(choose.uniform(0, 0.1))
        victim = choose.choice(running)
        if choose.random() < 0.6:
            # Whatever it is doing: waiting, inside, or in the midst of a write.
            busy.freeze(victim, choose.choice((0.06, 0.1, 0.3)))
            struck["frozen"] += 1
        elif len(busy.killed) < 2 * seconds:
            busy.kill(victim)
            running.remove(victim)
            running.append(busy.add(choose.choice(hows)))
            struck["killed"] += 1
    lines = busy.end()

    never_more_than(1, lines, busy.killed)
    the_log_tells_the_same(path)
    waits = [busy.waited(line) for line in lines if line["what"] == "enter"]
    struck["gave up"] = sum(line["what"] == "gave up" for line in lines)
    tell(f"with {dict(struck)}", waits)
    assert max(waits) < TOO_LONG
    assert len(waits) > 10 * seconds


def test_ten_processes_are_never_more_than_three_inside(path: Path, crowd: Callable[..., Crowd]) -> None:
    busy = crowd(limit=3)
    for how in ("patient", "holding", "impatient", "hasty", "cancelled") * 2:
        busy.add(how)
    busy.start(2)
    lines = busy.end()

    never_more_than(3, lines)
    the_log_tells_the_same(path)
    slots = Counter(line["slot"] for line in lines if line["what"] == "enter")
    waits = [line["waited"] for line in lines if line["what"] == "enter"]
    tell(f"ten processes, three slots {dict(sorted(slots.items()))}", waits)
    assert set(slots) == {0, 1, 2}
    assert max(waits) < TOO_LONG


def test_a_limit_that_goes_up_and_down_holds_for_each_grant(path: Path, crowd: Callable[..., Crowd]) -> None:
    choose = random.Random(5)
    busy = crowd()
    for how in ("patient", "holding", "impatient", "cancelled") * 2:
        busy.add(how)
    busy.start(1.5)
    with StateStore(path) as store:
        while time.monotonic() < busy.until:
            store.set_limit("release", choose.randint(1, 3))
            time.sleep(choose.uniform(0, 0.05))
    lines = busy.end()

    never_more_than(3, lines)
    waits = [line["waited"] for line in lines if line["what"] == "enter"]
    tell("eight processes, a limit that changes", waits)
    assert max(waits) < TOO_LONG
    with StateStore(path) as store:
        limit, live = 1, set()
        for event in store.events(limit=1_000_000, scope="release"):
            if event.kind == "lease.limit-set":
                assert event.detail["previous"] == limit
                limit = event.detail["limit"]
            elif event.kind == "lease.acquired":
                assert len(live) < limit
                live.add(event.token)
            elif event.kind == "lease.released":
                live.remove(event.token)
        assert live == set()


# One after the other, as the test says.


class Waiters:
    """Processes that queue up one behind the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = StateStore(path)
        self.processes: list[subprocess.Popen[str]] = []

    def join(self, owner: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WAITER, str(self.path), owner], stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        until(lambda: owner in {each for _, each in tickets(self.path)})
        return process

    def freeze(self, process: subprocess.Popen[str]) -> None:
        """While it pauses: not in the midst of a write, which others would wait for."""
        time.sleep(0.2)
        while True:
            process.send_signal(signal.SIGSTOP)
            until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            with closing(sqlite3.connect(self.path, timeout=0, isolation_level=None)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    process.send_signal(signal.SIGCONT)
                    continue
                return

    def close(self) -> None:
        self.store.close()
        for process in self.processes:
            process.kill()
            process.communicate()


def served_in_turn(store: StateStore, owners: list[str]) -> None:
    """As the log tells, they had the scope in this order: whoever was not the first found it free for 50 ms for each.

    Where the machine is that slow, that is their right.
    """
    left, freed = list(owners), None
    for event in store.events(limit=1_000_000, scope="release"):
        if event.kind != "lease.acquired":
            freed = event.at
        elif event.owner in left:
            assert freed is not None
            overtaken = left.index(event.owner)
            idle = (event.at - freed).total_seconds()
            assert idle > 0.049 * overtaken, f"{event.owner} was before {left[0]} after {idle} s"
            left.remove(event.owner)
    assert left == []


def done(processes: list[subprocess.Popen[str]]) -> None:
    """All of them had their turn."""
    for process in processes:
        _, errors = process.communicate(timeout=LONG)
        assert (process.returncode, errors) == (0, "")


def idle_times(store: StateStore) -> list[float]:
    """How long the scope was free before each grant, as the log tells."""
    found, freed = [], None
    for event in store.events(limit=1_000_000, scope="release"):
        if event.kind == "lease.acquired" and freed is not None:
            found.append((event.at - freed).total_seconds())
        freed = event.at
    return found


@pytest.fixture
def waiters(path: Path) -> Iterator[Waiters]:
    made = Waiters(path)
    yield made
    made.close()


linux = pytest.mark.skipif(sys.platform != "linux", reason="proof of death, and a process's state, need Linux")


@linux
@pytest.mark.parametrize("frozen", [1, 3])
def test_frozen_heads_do_not_idle_the_scope_and_have_their_places_back(waiters: Waiters, frozen: int) -> None:
    lease = waiters.store.acquire("release", "holder", 300)
    asleep = [waiters.join(f"frozen-{number}") for number in range(frozen)]
    awake = [waiters.join(f"awake-{number}") for number in range(3)]
    for each in asleep:
        waiters.freeze(each)
    waiters.store.release(*lease.fence)
    done(awake)
    idle = idle_times(waiters.store)
    print(f"{frozen} frozen in front: idle for {[f'{each * 1000:.0f} ms' for each in idle]}")
    assert max(idle) < TOO_LONG
    assert [owner for _, owner in tickets(waiters.path)] == [f"frozen-{number}" for number in range(frozen)]

    # Whoever wakes up now is in front again of who came after it.
    lease = waiters.store.acquire("release", "another", 300, wait_seconds=LONG)
    last = waiters.join("last")
    for each in asleep:
        each.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    waiters.store.release(*lease.fence)
    done([*asleep, last])
    served_in_turn(waiters.store, [f"frozen-{number}" for number in range(frozen)] + ["last"])
    assert tickets(waiters.path) == []


@linux
@pytest.mark.parametrize("reaped", [True, False])
def test_killed_heads_do_not_idle_the_scope_and_vanish(waiters: Waiters, reaped: bool) -> None:
    lease = waiters.store.acquire("release", "holder", 300)
    dead = [waiters.join(f"dead-{number}") for number in range(4)]
    alive = [waiters.join(f"alive-{number}") for number in range(2)]
    for each in dead:
        each.kill()
        if reaped:
            each.wait()
        else:
            os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)
    assert [each.owner for each in waiters.store.status().queues] == ["alive-0", "alive-1"]

    waiters.store.release(*lease.fence)
    done(alive)
    idle = idle_times(waiters.store)
    print(f"four dead in front: idle for {[f'{each * 1000:.0f} ms' for each in idle]}")
    assert max(idle) < TOO_LONG
    served_in_turn(waiters.store, ["alive-0", "alive-1"])
    assert tickets(waiters.path) == []


@linux
def test_a_waiter_that_was_frozen_for_its_ticket_s_whole_life_queues_up_anew(waiters: Waiters) -> None:
    lease = waiters.store.acquire("release", "holder", 300)
    asleep = waiters.join("asleep")
    waiters.freeze(asleep)
    ((number, _),) = tickets(waiters.path)
    # Its life is over, as if ten seconds had passed.
    with closing(sqlite3.connect(waiters.path)) as connection, connection:
        connection.execute("UPDATE tickets SET beat_ticks = beat_ticks - ttl_ns, expires_at = expires_at - ttl_ns")
    waiters.store.release(*lease.fence)
    lease = waiters.store.acquire("release", "another", 300)
    assert tickets(waiters.path) == []
    last = waiters.join("last")
    asleep.send_signal(signal.SIGCONT)
    until(lambda: len(tickets(waiters.path)) == 2)

    assert [owner for _, owner in tickets(waiters.path)] == ["last", "asleep"]
    assert tickets(waiters.path)[1][0] > number
    waiters.store.release(*lease.fence)
    done([last, asleep])
    served_in_turn(waiters.store, ["last", "asleep"])


def test_processes_are_served_in_the_order_in_which_they_came(waiters: Waiters) -> None:
    lease = waiters.store.acquire("release", "holder", 300)
    line = [waiters.join(f"waiter-{number}") for number in range(8)]
    waiters.store.release(*lease.fence)
    done(line)
    idle = [f"{each * 1000:.1f} ms" for each in idle_times(waiters.store)]
    print(f"from a release to the next one's grant, in another process: {idle}")
    served_in_turn(waiters.store, [f"waiter-{number}" for number in range(8)])
