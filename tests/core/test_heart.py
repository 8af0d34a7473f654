"""One thread renews what a store holds: in time, cheaply, whatever happens to the database."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import watching
from tests.watching import wait_until

from agent_checkpoint import HeldLease, StaleLeaseError, StateStore, StorageBusyError, heart
from agent_checkpoint.heart import Pulse
from agent_checkpoint.holding import Hold
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

# Only what never comes reaches it.
LONG = 30.0
# What a thread with nothing to do lingers, and as long again for a slow machine.
IDLE = 10.0


def threads(*names: str) -> list[threading.Thread]:
    wanted = {f"agent-checkpoint-{name}" for name in names or ("heartbeat", "deadline")}
    return [thread for thread in threading.enumerate() if thread.name in wanted]


def margin(ttl: float) -> float:
    return max(0.05, ttl / 20)


def renewed(clock: FakeClock, seconds: float, *held: HeldLease) -> None:
    """Let time pass, until each lease was renewed at the end of it."""
    clock.advance(seconds)
    now = clock.ticks_ns()
    whole = [now + round((each.lease.ttl_seconds - margin(each.lease.ttl_seconds)) * NS) for each in held]
    wait_until(lambda: [each.deadline_ns for each in held] == whole)


def beats(store: StateStore, scope: str) -> list[dict[str, Any]]:
    """What the log says of the heartbeats of a lease."""
    return [event.detail for event in store.events(10_000, scope=scope, kind="lease.heartbeat")]


@contextmanager
def to_be_lost(block: Hold) -> Iterator[HeldLease]:
    """A block whose lease is lost at its end."""
    with pytest.raises(StaleLeaseError), block as held:
        yield held


@pytest.fixture
def hasty_store(path: Path, clock: FakeClock) -> Iterator[StateStore]:
    """A store that waits for nobody."""
    with StateStore(path, clock=clock, busy_timeout_seconds=0.02) as store:
        store.initialize()
        yield store


@pytest.fixture
def lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Another connection, to sit on the write lock with."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=LONG, check_same_thread=False)
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def no_thread_stays(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("agent_checkpoint.alarm.LINGER_NS", NS // 20)
    before = set(threading.enumerate())
    yield

    def over() -> bool:
        clock.advance(40 * 86_400)
        return not set(threads("heartbeat", "deadline", "lost")) - before

    wait_until(over, IDLE)


# On record


def test_heartbeats_are_on_record_once_a_minute_and_at_the_end(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        for second in range(10, 140, 10):
            renewed(clock, 10, held)
            assert len(beats(store, "release")) == second // 60
    kinds = [event.kind for event in store.events(scope="release")]
    assert kinds == ["lease.acquired", *["lease.heartbeat"] * 3, "lease.released"]
    told = beats(store, "release")
    assert [each["longest_gap_seconds"] for each in told] == [10.0] * 3
    assert all(set(each) == {"count", "longest_gap_seconds"} for each in told)
    for event in store.events(kind="lease.heartbeat"):
        assert (event.owner, event.token) == ("worker-a", 1)


def test_the_record_counts_every_heartbeat_once(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        for _ in range(20):
            renewed(clock, 10, held)
    assert sum(each["count"] for each in beats(store, "release")) == 20


@pytest.mark.parametrize("ttl", [180, 600, 3600])
def test_the_heartbeats_of_a_long_lease_are_on_record_too(store: StateStore, clock: FakeClock, ttl: int) -> None:
    with store.hold("release", "worker-a", ttl) as held:
        for _ in range(5):
            renewed(clock, ttl / 3, held)
    told = beats(store, "release")
    assert sum(each["count"] for each in told) == 5
    assert max(each["longest_gap_seconds"] for each in told) == pytest.approx(ttl / 3)


def test_the_longest_gap_is_that_of_its_minute(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        for step in (10, 10, 25, 10, 10):  # 65 s
            renewed(clock, step, held)
        for step in (10, 10, 10, 10, 10, 10):
            renewed(clock, step, held)
        assert held.heartbeat_gap == 25
    assert [each["longest_gap_seconds"] for each in beats(store, "release")][:2] == [25.0, 10.0]


def test_a_lease_that_was_never_renewed_has_no_heartbeat_on_record(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30):
        clock.advance(9.9)
    assert [event.kind for event in store.events(scope="release")] == ["lease.acquired", "lease.released"]


def test_a_hundred_leases_leave_a_hundred_events_a_minute_at_most(store: StateStore, clock: FakeClock) -> None:
    with ExitStack() as block:
        held = [block.enter_context(store.hold(f"scope-{number}", "worker-a", 30)) for number in range(100)]
        before = len(store.events(10_000))
        for minute in range(1, 4):
            for _ in range(6):
                renewed(clock, 10, *held)
            assert len(store.events(10_000)) - before <= 100 * minute
        for number in range(100):
            assert len(beats(store, f"scope-{number}")) == 3


def test_more_leases_than_fit_one_transaction_are_all_renewed_at_once(store: StateStore, clock: FakeClock) -> None:
    with ExitStack() as block:
        held = [block.enter_context(store.hold(f"scope-{number}", "worker-a", 30)) for number in range(120)]
        for _ in range(7):
            renewed(clock, 10, *held)
        assert all(lease.remaining_seconds == 30 for lease in store.list_leases())
        assert len(store.list_leases()) == 120


def test_what_is_overdue_elsewhere_is_put_on_record_within_a_minute_or_so(store: StateStore, clock: FakeClock) -> None:
    store.acquire("forgotten", "worker-b", 5)
    with store.hold("release", "worker-a", 30) as held:
        for _ in range(7):
            renewed(clock, 10, held)
        wait_until(lambda: store.events(scope="forgotten", kind="lease.expired"))
        store.acquire("forgotten", "worker-b", 5)
        for _ in range(8):
            renewed(clock, 10, held)
        wait_until(lambda: len(store.events(scope="forgotten", kind="lease.expired")) == 2)


# Cheaply

HOLDS = """
import os, sys, time
from agent_checkpoint import StateStore

path, mark = sys.argv[1], os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
store = StateStore(path)
with store.hold("release", "worker-a", 1.8) as held:
    renewed = 0
    def count(deadline):
        global renewed
        renewed += 1
    held.on_extended(count)
    os.fsync(mark)
    while renewed < 3 and not held.lost.is_set():
        time.sleep(0.01)
    os.fsync(mark)
    for _ in range(3):
        store.heartbeat(*held.fence)
    os.fsync(mark)
"""


def may_trace() -> bool:
    found = shutil.which("strace")
    return found is not None and subprocess.run([found, "-o", "/dev/null", "true"], check=False).returncode == 0


@pytest.mark.skipif(not may_trace(), reason="strace is not here, or may not trace")
def test_a_heartbeat_in_the_background_flushes_nothing(store: StateStore, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [
            *("strace", "-f", "-y", "-e", "trace=fsync,fdatasync", "-o", str(trace)),
            *(sys.executable, "-c", HOLDS, store.database, str(tmp_path / "mark")),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    parts: list[int] = [0]
    for line in trace.read_text().splitlines():
        if str(tmp_path / "mark") in line and "resumed" not in line:
            parts.append(0)
        elif store.database in line and "resumed" not in line:
            parts[-1] += 1
    granted, in_background, on_purpose, _ = parts
    assert granted >= 1
    assert in_background == 0
    assert on_purpose >= 3


# When the database fails


def failing(lock: sqlite3.Connection, how: str) -> None:
    """Let every renewal fail, until ``mended``."""
    lock.execute(f"CREATE TRIGGER fail BEFORE UPDATE ON leases BEGIN SELECT RAISE(ABORT, '{how}'); END")


def mended(lock: sqlite3.Connection) -> None:
    lock.execute("DROP TRIGGER fail")


def tried(clock: FakeClock, seconds: float, held: HeldLease) -> None:
    """Let time pass, until a renewal was tried if one was due."""
    clock.advance(seconds)
    wait_until(lambda: held._pulse.next_at > clock.ticks_ns())


def test_a_heartbeat_that_fails_is_tried_again_soon_and_the_lease_is_kept(
    hasty_store: StateStore, clock: FakeClock, lock: sqlite3.Connection
) -> None:
    with hasty_store.hold("release", "worker-a", 30) as held:
        granted = held.deadline_ns
        failing(lock, "database is locked")
        for _ in range(18):
            tried(clock, 1, held)
        assert held.deadline_ns == granted
        mended(lock)
        renewed(clock, 1, held)  # the next try is a twentieth of the ttl away, at most a second
        assert held.check().token == 1
        assert held.heartbeat_gap == 19
        renewed(clock, 10, held)
    assert beats(hasty_store, "release") == [{"count": 2, "longest_gap_seconds": 19.0}]


def test_a_lease_is_lost_by_the_deadline_while_a_heartbeat_waits_for_the_database(
    path: Path, clock: FakeClock, lock: sqlite3.Connection
) -> None:
    called = threading.Event()
    with StateStore(path, clock=clock, busy_timeout_seconds=LONG) as store:
        store.initialize()
        with to_be_lost(store.hold("release", "worker-a", 30, on_lost=lambda held, reason: called.set())) as held:
            lock.execute("BEGIN IMMEDIATE")
            clock.advance(10)
            time.sleep(0.05)  # the heartbeat is on its way, and hangs
            clock.advance(18.5)
            assert held.lost.wait(LONG)
            assert called.wait(LONG)
            assert held.lost_reason == "expired"
            clock.advance(10)
            lock.execute("COMMIT")
        with store.hold("release", "worker-a", 30) as held:  # no thread was harmed
            renewed(clock, 10, held)


FAILURES = ("database is locked", "readonly database", "database or disk is full", "disk I/O error", "malformed", "?")


@pytest.mark.parametrize("how", FAILURES)
def test_whatever_the_database_says_the_lease_is_kept_when_it_ends_in_time(
    hasty_store: StateStore, clock: FakeClock, lock: sqlite3.Connection, how: str
) -> None:
    with hasty_store.hold("release", "worker-a", 30) as held:
        failing(lock, how)
        for _ in range(27):
            tried(clock, 1, held)
        mended(lock)
        renewed(clock, 1, held)
        assert held.check().token == 1
        renewed(clock, 10, held)


@pytest.mark.parametrize("how", FAILURES)
def test_whatever_the_database_says_the_lease_is_lost_by_the_deadline(
    hasty_store: StateStore, clock: FakeClock, lock: sqlite3.Connection, how: str
) -> None:
    called = threading.Event()
    block = hasty_store.hold("release", "worker-a", 30, on_lost=lambda held, reason: called.set())
    with to_be_lost(block) as held:
        failing(lock, how)
        for _ in range(28):
            tried(clock, 1, held)
        assert not held.lost.is_set()
        clock.advance(0.5)
        assert held.lost.wait(LONG)
        assert called.wait(LONG)
        assert (held.lost_reason, held.remaining()) == ("expired", 0.0)
        mended(lock)
    with hasty_store.hold("release", "worker-a", 30) as held:  # no thread was harmed
        renewed(clock, 10, held)


def test_a_lease_that_others_ended_takes_none_with_it(store: StateStore, clock: FakeClock) -> None:
    with ExitStack() as block:
        held = [block.enter_context(store.hold(f"scope-{number}", "worker-a", 30)) for number in range(5)]
        lost = block.enter_context(to_be_lost(store.hold("release", "worker-a", 30)))
        store.force_release("release", reason="stuck")
        renewed(clock, 10, *held)
        assert lost.lost.wait(LONG)


def test_the_reason_of_a_loss_is_known_though_it_cannot_be_put_on_record(
    store: StateStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:  # between the renewal that was refused and its record
        raise StorageBusyError("no lock within 10 s", database="agents.db", blocker=None)

    with to_be_lost(store.hold("release", "worker-a", 30)) as held:
        store.force_release("release", reason="stuck")
        monkeypatch.setattr(heart.leases, "heartbeat", busy)
        clock.advance(10)
        assert held.lost.wait(LONG)
        assert held.lost_reason == "released"


def test_an_error_that_nobody_foresaw_is_logged_and_the_heart_beats_on(
    store: StateStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    with store.hold("release", "worker-a", 30) as held, caplog.at_level(logging.ERROR, "agent_checkpoint"):
        with monkeypatch.context() as patch:
            patch.setattr(heart, "_renew_rows", fail)
            clock.advance(10)
            wait_until(lambda: "nobody foresaw this" in caplog.text)
        wait_until(lambda: held.remaining() == 28.5)
        renewed(clock, 10, held)


def test_a_listener_of_extensions_that_fails_costs_no_lease(store: StateStore, clock: FakeClock) -> None:
    def fail(deadline: int) -> None:
        raise ZeroDivisionError

    with ExitStack() as block:
        held = [block.enter_context(store.hold(f"scope-{number}", "worker-a", 30)) for number in range(5)]
        held[0].on_extended(fail)
        for _ in range(3):
            clock.advance(10)
            for each in held:
                wait_until(lambda each=each: each.remaining() > 18.5 - 0.001, 5)
        assert [each.lost.is_set() for each in held] == [False] * 5


# Its threads


def test_a_store_has_one_heartbeat_thread_whoever_holds_first(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
    before = set(threads())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(20):
            with StateStore(path) as store:
                start, done = threading.Barrier(8), threading.Barrier(9)

                def hold(number: int, store: StateStore = store, start: Any = start, done: Any = done) -> None:
                    start.wait(LONG)
                    with store.hold(f"scope-{number}", "worker-a", 0.6):
                        done.wait(LONG)
                        done.wait(LONG)

                holders = [threading.Thread(target=hold, args=(number,)) for number in range(8)]
                for holder in holders:
                    holder.start()
                done.wait(LONG)
                beating = len(set(threads("heartbeat")) - before)
                before |= set(threads())
                done.wait(LONG)
                for holder in holders:
                    holder.join()
            assert beating == 1, f"turn {turn}"
    finally:
        sys.setswitchinterval(interval)


def test_the_threads_end_when_nothing_is_held_and_let_go_of_the_store(path: Path) -> None:
    before = set(threading.enumerate())
    left: list[weakref.ref[Any]] = []
    for _ in range(5):
        with StateStore(path) as store:
            store.initialize()
            with store.hold("release", "worker-a", 3600):
                pass
        left.append(weakref.ref(store._database))
        del store
    wait_until(lambda: not set(threading.enumerate()) - before, IDLE)
    gc.collect()
    assert [each() for each in left] == [None] * 5


def test_threads_that_have_ended_begin_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_checkpoint.alarm.LINGER_NS", NS // 100)
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        before = set(threading.enumerate())
        for _ in range(5):
            with store.hold("release", "worker-a", 0.3) as held:
                granted = held.deadline_ns
                wait_until(lambda held=held, granted=granted: held.deadline_ns > granted)
            wait_until(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize("name", ["heartbeat", "deadline"])
def test_a_hold_that_gets_no_thread_fails_leaves_nothing_and_is_the_only_one_to(
    store: StateStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == f"agent-checkpoint-{name}":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError), store.hold("release", "worker-a", 30):
            raise AssertionError("entered")
    assert store.get_lease("release") is None
    with store.hold("release", "worker-a", 30) as held:
        renewed(clock, 10, held)
    with to_be_lost(store.hold("release", "worker-a", 30)) as held:
        clock.advance(28.6)
        assert held.lost.wait(LONG)


# One pulse


def a_pulse(store: StateStore) -> tuple[Pulse, list[str]]:
    """A pulse that began at 0, and what it told."""
    told: list[str] = []
    return Pulse(store.acquire("release", "worker-a", 30), 0, None, lambda: True, told.append), told


def test_a_pulse_is_lost_once_and_for_its_first_reason(store: StateStore) -> None:
    pulse, told = a_pulse(store)
    start = threading.Barrier(8)

    def lose(number: int) -> None:
        start.wait(LONG)
        pulse.lose(f"reason-{number}", number)

    losers = [threading.Thread(target=lose, args=(number,)) for number in range(8)]
    for loser in losers:
        loser.start()
    for loser in losers:
        loser.join()
    pulse.lose("later", 99 * NS)
    assert told == [pulse.lost_reason]
    assert pulse.longest_ns < NS
    assert not pulse.wants_beat()


def test_a_pulse_that_has_ended_is_not_lost_any_more(store: StateStore) -> None:
    pulse, told = a_pulse(store)
    pulse.ended = True
    pulse.lose("expired", 99 * NS)
    assert (pulse.lost.is_set(), pulse.lost_reason, told) == (False, None, [])
    assert not pulse.wants_beat()


def test_a_pulse_is_tried_again_after_a_twentieth_of_its_ttl_within_bounds(store: StateStore) -> None:
    pulse, _ = a_pulse(store)
    for ttl, pause in ((0.1, 0.02), (1, 0.05), (10, 0.5), (30, 1), (3600, 1)):
        pulse.ttl_ns = round(ttl * NS)
        pulse.failed(5 * NS)
        assert pulse.next_at == 5 * NS + round(pause * NS)


# These tests would notice

BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], Callable[..., None]]] = {
    "an event for each heartbeat": (
        lambda patch: patch.setattr(heart, "MINUTE_NS", 0),
        test_heartbeats_are_on_record_once_a_minute_and_at_the_end,
    ),
    "no event but at the end": (
        lambda patch: patch.setattr(heart, "MINUTE_NS", 10**6 * NS),
        test_heartbeats_are_on_record_once_a_minute_and_at_the_end,
    ),
    "no event at the end": (
        lambda patch: patch.setattr(Pulse, "summary", _summary_if_many(Pulse.summary)),
        test_heartbeats_are_on_record_once_a_minute_and_at_the_end,
    ),
    "the longest gap of all time": (
        lambda patch: patch.setattr(Pulse, "summarized", lambda self, now: _forget_count(self, now)),
        test_the_longest_gap_is_that_of_its_minute,
    ),
    "nobody sweeps": (
        lambda patch: patch.setattr(heart.leases, "sweep", lambda changes: []),
        test_what_is_overdue_elsewhere_is_put_on_record_within_a_minute_or_so,
    ),
    "only the first hundred": (
        lambda patch: patch.setattr(heart.Heart, "_renew", _only_the_first(heart.Heart._renew)),
        test_more_leases_than_fit_one_transaction_are_all_renewed_at_once,
    ),
    "no second try": (
        lambda patch: patch.setattr(Pulse, "failed", lambda self, now: setattr(self, "next_at", now + self.ttl_ns)),
        test_a_heartbeat_that_fails_is_tried_again_soon_and_the_lease_is_kept,
    ),
    "the deadline has no thread of its own": (
        lambda patch: (
            patch.setattr(heart.Heart, "_next_deadline", lambda self: None),
            patch.setattr(heart.Heart, "_beat", _and_then_look(heart.Heart._beat, heart.Heart._lose_overdue)),
        ),
        test_a_lease_is_lost_by_the_deadline_while_a_heartbeat_waits_for_the_database,
    ),
    "one that is stale spoils the rest": (
        lambda patch: patch.setattr(heart, "_renew_rows", _all_or_none(heart._renew_rows)),
        test_a_lease_that_others_ended_takes_none_with_it,
    ),
    "an error ends the thread": (
        lambda patch: patch.setattr(heart.Alarm, "_run", lambda self, mark: self._wait(mark) and self._work()),
        lambda hasty_store, clock, lock: test_whatever_the_database_says_the_lease_is_lost_by_the_deadline(
            hasty_store, clock, lock, "database is locked"
        ),
    ),
    "lost again and again": (
        lambda patch: patch.setattr(Pulse, "lose", _lose_again),
        test_a_pulse_is_lost_once_and_for_its_first_reason,
    ),
}


def _summary_if_many(summary: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: summary(self) if self.count > 2 else ()


def _forget_count(pulse: Pulse, now: int) -> None:
    pulse.count, pulse.tell_at = 0, now + 60 * NS


def _only_the_first(renew: Callable[..., Any]) -> Callable[..., Any]:
    done: set[int] = set()

    def first(self: Any, pulses: list[Pulse], telling: bool) -> None:
        now = self._clock.ticks_ns()
        if now not in done:
            done.add(now)
            renew(self, pulses, telling)

    return first


def _and_then_look(beat: Callable[..., Any], look: Callable[..., Any]) -> Callable[..., Any]:
    def both(self: Any) -> None:
        beat(self)
        look(self)

    return both


def _all_or_none(renew_rows: Callable[..., Any]) -> Callable[..., Any]:
    def renew(change: Any, pulses: list[Pulse], telling: bool) -> Any:
        stale = renew_rows(change, pulses, telling)
        return {id(pulse): next(iter(stale.values())) for pulse in pulses} if stale else {}

    return renew


def _lose_again(self: Pulse, reason: str, now: int) -> None:
    self._note_gap(now)
    self.lost_reason = reason
    self.lost.set()
    self._on_lost(reason)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_heart_is_noticed_here(
    path: Path,
    clock: FakeClock,
    hasty_store: StateStore,
    lock: sqlite3.Connection,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    break_it, notices = BROKEN[how]
    given = {"store": hasty_store, "hasty_store": hasty_store, "clock": clock, "path": path, "lock": lock}
    wanted = notices.__code__.co_varnames[: notices.__code__.co_argcount]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LONG", 0.5)
        patch.setattr(watching, "LONG", 0.5)
        break_it(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, StaleLeaseError)):
            notices(**{name: given[name] for name in wanted})
    if lock.in_transaction:
        lock.execute("ROLLBACK")
