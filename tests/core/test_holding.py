"""A renewal lasts as long as somebody is there who holds the lease, and what ends a block ends it whole."""

from __future__ import annotations

import gc
import json
import os
import random
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

from agent_checkpoint import (
    AgentCheckpointError,
    HeldLease,
    InvalidInputError,
    Lease,
    NotFoundError,
    ReentrancyError,
    StaleLeaseError,
    StateStore,
    StorageBusyError,
    heart,
    holding,
)
from agent_checkpoint.holding import Hold
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

# Only what never comes reaches it.
LONG = 30.0


def threads(*names: str) -> set[threading.Thread]:
    wanted = {f"agent-checkpoint-{name}" for name in names or ("heartbeat", "deadline", "lost")}
    return {thread for thread in threading.enumerate() if thread.name in wanted}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def renewed(clock: FakeClock, seconds: float, *held: HeldLease) -> None:
    """Let time pass, until each lease (of 30 s) was renewed at the end of it."""
    clock.advance(seconds)
    whole = clock.ticks_ns() + round(28.5 * NS)
    wait_until(lambda: all(each.deadline_ns == whole for each in held))


def beat_of(store: StateStore, scope: str) -> int:
    """When the latest lease of a scope was granted or renewed last."""
    found = store.get_lease(scope, include_expired=True)
    assert found is not None
    return found.row.beat_ticks


def tickets(store: StateStore) -> int:
    with store.read() as reader:
        return int(reader.rows("SELECT COUNT(*) FROM tickets")[0][0])


@contextmanager
def to_be_lost(block: Hold) -> Iterator[HeldLease]:
    """A block whose lease is lost at its end."""
    with pytest.raises(StaleLeaseError), block as held:
        yield held


@pytest.fixture
def pacemaker(store: StateStore) -> Iterator[HeldLease]:
    """Another lease, by whose renewals a test sees that the heart beats."""
    with ExitStack() as block:
        yield block.enter_context(store.hold("pacemaker", "test", 30))
        block.pop_all()  # what became of it is of no interest


@pytest.fixture(autouse=True)
def no_thread_stays(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("agent_checkpoint.alarm.LINGER_NS", NS // 20)
    before = threads()
    yield

    def over() -> bool:
        clock.advance(40 * 86_400)
        return not threads() - before

    wait_until(over, 10)


# Dropped


def ignore(held: HeldLease, reason: str) -> None:
    """An ``on_lost`` that is there."""


@pytest.mark.parametrize("options", [{}, {"on_lost": ignore}, {"max_lifetime_seconds": 3600}])
def test_a_dropped_object_ends_its_renewal(
    store: StateStore, clock: FakeClock, pacemaker: HeldLease, options: dict[str, Any]
) -> None:
    held = store.hold("release", "worker-a", 30, **options).__enter__()
    renewed(clock, 10, held, pacemaker)
    last = beat_of(store, "release")
    del held
    gc.collect()
    for _ in range(3):
        renewed(clock, 10, pacemaker)
        assert beat_of(store, "release") == last
    assert store.get_lease("release") is None
    assert store.acquire("release", "worker-b").token == 2


def test_an_object_that_is_dropped_in_a_circle_ends_its_renewal_too(
    store: StateStore, clock: FakeClock, pacemaker: HeldLease
) -> None:
    class Worker:
        def __init__(self) -> None:
            self.held = store.hold("release", "worker-a", 30, on_lost=self.lost).__enter__()

        def lost(self, held: HeldLease, reason: str) -> None:
            raise AssertionError("nobody is there to be told")

    worker = weakref.ref(Worker())
    gc.collect()
    assert worker() is None
    last = beat_of(store, "release")
    for _ in range(4):
        renewed(clock, 10, pacemaker)
    assert beat_of(store, "release") == last
    assert not threads("lost")


def test_a_generator_that_is_dropped_inside_its_block_gives_the_lease_back(store: StateStore) -> None:
    def work() -> Iterator[int]:
        with store.hold("release", "worker-a", 30) as held:
            yield held.token

    working = work()
    assert next(working) == 1
    del working
    gc.collect()
    assert store.get_lease("release") is None


def test_an_old_object_that_is_collected_after_a_takeover_touches_nothing(
    store: StateStore, clock: FakeClock, pacemaker: HeldLease
) -> None:
    held = store.hold("release", "worker-a", 30).__enter__()
    clock.advance(31)
    successor = store.acquire("release", "worker-b", 600)
    last = store.events()[-1]
    del held
    gc.collect()
    for _ in range(3):
        clock.advance(10)
        time.sleep(0.01)
    assert store.check_lease(*successor.fence).row == successor.row
    assert [event for event in store.events(after=last.cursor) if event.scope == "release"] == []


@pytest.mark.parametrize("left", [1, 2])
def test_the_store_object_may_go_while_its_lease_is_held(path: Path, clock: FakeClock, left: int) -> None:
    store = StateStore(path, clock=clock)
    store.initialize()
    with store.hold("release", "worker-a", 30) as held:
        del store
        gc.collect()
        for _ in range(left):
            renewed(clock, 10, held)
        assert held.check().token == 1
    with StateStore(path, clock=clock) as other:
        assert other.get_lease("release") is None


def test_many_dropped_objects_leave_nothing_in_memory(store: StateStore, clock: FakeClock) -> None:
    held = [store.hold(f"scope-{number}", "worker-a", 30).__enter__() for number in range(50)]
    left = [weakref.ref(each) for each in held] + [weakref.ref(each._pulse) for each in held]
    del held
    gc.collect()
    assert [each() for each in left[:50]] == [None] * 50
    # The heart's part goes when its time is over.
    wait_until(lambda: clock.advance(31) or not any(each() for each in left))


# The thread of the block


def test_a_dead_thread_renews_nothing_though_somebody_has_its_object(
    store: StateStore, clock: FakeClock, pacemaker: HeldLease
) -> None:
    kept: list[HeldLease] = []
    heard: list[str] = []
    block = store.hold("release", "worker-a", 30, on_lost=lambda held, reason: heard.append(reason))
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        kept.append(block.__enter__())
        inside.set()
        go_on.wait(LONG)

    worker = threading.Thread(target=work)
    worker.start()
    assert inside.wait(LONG)
    renewed(clock, 10, kept[0], pacemaker)
    last = beat_of(store, "release")
    go_on.set()
    worker.join()
    for _ in range(2):
        renewed(clock, 10, pacemaker)
        assert beat_of(store, "release") == last
    assert kept[0].check().token == 1  # it lasts as long as it was granted
    clock.advance(8.5)
    assert kept[0].lost.wait(LONG)
    wait_until(lambda: heard == ["expired"])
    with pytest.raises(StaleLeaseError):
        kept[0].check()


def test_a_block_may_be_left_by_another_thread_than_entered_it(
    store: StateStore, clock: FakeClock, pacemaker: HeldLease
) -> None:
    block = store.hold("release", "worker-a", 30)
    held = block.__enter__()
    renewed(clock, 10, held)
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            errors.append(error)

    leaver = threading.Thread(target=leave)
    leaver.start()
    leaver.join()
    assert errors == []
    assert store.get_lease("release") is None


def test_one_block_that_many_threads_enter_at_once_leaves_nothing_held(store: StateStore) -> None:
    block = store.hold("pool", "worker-a", 30, limit=8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            start, refused = threading.Barrier(8), []

            def enter(start: Any = start, refused: Any = refused) -> None:
                start.wait(LONG)
                try:
                    with block:
                        time.sleep(0.001)
                except ReentrancyError:
                    refused.append(True)

            enterers = [threading.Thread(target=enter) for _ in range(8)]
            for enterer in enterers:
                enterer.start()
            for enterer in enterers:
                enterer.join()
            assert store.list_leases() == []
    finally:
        sys.setswitchinterval(interval)


def test_hundreds_of_holds_by_threads_exclude_each_other_and_leave_nothing(path: Path) -> None:
    alone = {f"scope-{number}": threading.Lock() for number in range(3)}
    errors: list[BaseException] = []
    before = set(threading.enumerate())
    with StateStore(path, synchronous="normal") as store:
        store.initialize()
        open_before = descriptors()

        def work(number: int) -> None:
            choose = random.Random(number)
            try:
                for _ in range(20):
                    scope = choose.choice(sorted(alone))
                    with store.hold(scope, f"worker-{number}", 30, wait_seconds=LONG) as held:
                        assert alone[scope].acquire(blocking=False)
                        if choose.random() < 0.3:
                            assert held.check().token == held.token
                        time.sleep(choose.choice((0, 0.001)))
                        alone[scope].release()
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert errors == []
        assert (store.list_leases(), tickets(store)) == ([], 0)
        assert len(store.events(10_000, kind="lease.released")) == 16 * 20
        assert len(set(threading.enumerate()) - before) <= 3  # heartbeat, deadline, gate
        # Connections are kept, eight at most; no bell is.
        gc.collect()
        assert descriptors() <= open_before + 3 * 8


def test_real_time_is_kept_up_with(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        with store.hold("release", "worker-a", 1) as held:
            extended: list[int] = []
            held.on_extended(extended.append)
            wait_until(lambda: len(extended) >= 4 or held.lost.is_set())
            assert held.check().token == 1
            assert extended == sorted(set(extended))
            assert 0.3 < held.heartbeat_gap < 1


# Errors at the end


def locked(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    return connection


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-gate"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


class Gone:
    """What may become of a store while a lease is held, and the error that the release has then."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.path = path
        self.store = StateStore(path, clock=clock, busy_timeout_seconds=0.02)
        self.store.initialize()
        self._lock: sqlite3.Connection | None = None

    def locked(self) -> type[Exception]:
        self._lock = locked(self.path)
        return StorageBusyError

    def closed(self) -> type[Exception]:
        self.store.close()
        return InvalidInputError

    def deleted(self) -> type[Exception]:
        remove(self.path)
        return NotFoundError

    def replaced(self) -> type[Exception]:
        remove(self.path)
        with StateStore(self.path) as other:
            other.initialize()
        return StaleLeaseError

    def end(self) -> None:
        self.store.close()
        if self._lock is not None:
            self._lock.close()


@pytest.fixture
def gone(path: Path, clock: FakeClock) -> Iterator[Gone]:
    made = Gone(path, clock)
    yield made
    made.end()


HOW = ("locked", "closed", "deleted", "replaced")


@pytest.mark.parametrize("how", HOW)
def test_a_release_that_fails_does_not_hide_the_body_s_exception(gone: Gone, how: str) -> None:
    with pytest.raises(ZeroDivisionError), gone.store.hold("release", "worker-a", 30):
        getattr(gone, how)()
        _ = 1 / 0


@pytest.mark.parametrize("how", HOW)
def test_a_release_that_fails_does_not_hide_an_interrupt(gone: Gone, how: str) -> None:
    with pytest.raises(KeyboardInterrupt), gone.store.hold("release", "worker-a", 30):
        getattr(gone, how)()
        raise KeyboardInterrupt


@pytest.mark.parametrize("how", HOW)
def test_a_release_that_fails_says_so_when_the_body_was_fine(gone: Gone, how: str) -> None:
    with pytest.raises(AgentCheckpointError) as failed, gone.store.hold("release", "worker-a", 30):
        expected = getattr(gone, how)()
    assert type(failed.value) is expected


@pytest.mark.parametrize("how", HOW)
def test_a_lease_that_is_lost_is_worse_news_than_a_release_that_fails(gone: Gone, clock: FakeClock, how: str) -> None:
    heard: list[str] = []
    block = gone.store.hold("release", "worker-a", 30, on_lost=lambda held, reason: heard.append(reason))
    with pytest.raises(StaleLeaseError) as stale, block as held:
        getattr(gone, how)()
        clock.advance(28.6)
        assert held.lost.wait(LONG)
    assert stale.value.reason == held.lost_reason
    wait_until(lambda: heard == [held.lost_reason])
    assert held.lost_reason == ("unknown" if how == "replaced" and held.lost_reason == "unknown" else "expired")


def test_a_store_that_was_replaced_knows_nothing_of_the_lease(gone: Gone, clock: FakeClock) -> None:
    with to_be_lost(gone.store.hold("release", "worker-a", 30)) as held:
        gone.replaced()
        clock.advance(10)
        assert held.lost.wait(LONG)
        assert held.lost_reason == "unknown"
    with gone.store.hold("release", "worker-b", 30) as held:
        renewed(clock, 10, held)


@pytest.mark.parametrize("how", ["locked", "deleted"])
def test_check_says_that_the_store_cannot_be_asked_until_the_deadline_says_more(
    gone: Gone, clock: FakeClock, how: str
) -> None:
    with to_be_lost(gone.store.hold("release", "worker-a", 30)) as held:
        if how == "deleted":
            gone.deleted()
            with pytest.raises(NotFoundError):
                held.check()
        else:
            gone.locked()
            assert held.check().token == 1  # reads go on beside a writer
        assert not held.lost.is_set()
        clock.advance(28.5)
        with pytest.raises(StaleLeaseError):
            held.check()


def test_a_closed_store_s_lease_is_lost_and_its_threads_end(gone: Gone, clock: FakeClock) -> None:
    before = threads()
    with to_be_lost(gone.store.hold("release", "worker-a", 30)) as held:
        gone.closed()
        for _ in range(29):
            clock.advance(1)
        assert held.lost.wait(LONG)
    wait_until(lambda: clock.advance(10) or not threads() - before)
    with pytest.raises(InvalidInputError), gone.store.hold("release", "worker-a"):
        raise AssertionError("entered")


# Interrupts


def test_an_interrupt_of_the_body_gives_the_lease_back(store: StateStore) -> None:
    with pytest.raises(KeyboardInterrupt), store.hold("release", "worker-a", 30):
        raise KeyboardInterrupt
    assert [event.kind for event in store.events(scope="release")] == ["lease.acquired", "lease.released"]


@pytest.mark.parametrize("turn", [1, 2, 30])
def test_an_interrupt_of_the_wait_leaves_no_place_in_the_queue(store: StateStore, clock: FakeClock, turn: int) -> None:
    first = threading.Thread(target=store.acquire, args=("release", "worker-a", 600))
    first.start()
    first.join()
    left = [turn]

    def sleep(seconds: float) -> None:
        left[0] -= 1
        if not left[0]:
            assert tickets(store) == 1
            raise KeyboardInterrupt
        clock.advance(seconds)

    clock.sleep = sleep
    with pytest.raises(KeyboardInterrupt), store.hold("release", "worker-b", 30, wait_seconds=100):
        raise AssertionError("entered")
    assert tickets(store) == 0
    assert store.get_lease("release", include_expired=True).token == 1  # type: ignore[union-attr]


# In a process of its own: an alarm strikes whatever runs, the test's tools too.
STRUCK = """
import json, os, random, signal, sys, threading, time
from agent_checkpoint import AgentCheckpointError, StateStore

def strike(*_):
    raise KeyboardInterrupt

sys.unraisablehook = lambda _: None  # one that strikes in a finalizer is reported, not raised
path, turns = sys.argv[1], int(sys.argv[2])
store = StateStore(path, synchronous="normal", busy_timeout_seconds=10)
store.initialize()
choose = random.Random(5)
over = threading.Event()
rival_store = StateStore(path, synchronous="normal", busy_timeout_seconds=10)

def rival():
    while not over.is_set():
        with rival_store.hold("release", "rival", 30, wait_seconds=30):
            time.sleep(choose.uniform(0, 0.002))
        time.sleep(choose.uniform(0, 0.002))

def tickets():
    with store.read() as reader:
        return [row[0] for row in reader.rows("SELECT number FROM tickets WHERE owner = 'victim'")]

for each in (store, rival_store):  # so that none strikes in an import
    with each.hold("warm", "victim", 600):
        try:
            each.acquire("warm", "victim", wait_seconds=0.01)
        except AgentCheckpointError:
            pass
waiter = threading.Thread(target=lambda: rival_store.acquire("warm", "rival", 0.1, wait_seconds=1))
with store.hold("warm", "victim", 600):
    waiter.start()
    time.sleep(0.02)
waiter.join()
against = threading.Thread(target=rival)
against.start()
signal.signal(signal.SIGALRM, strike)
interrupted, left_leases, left_tickets = 0, 0, set()
for turn in range(turns):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.0001, 0.008))
        with store.hold("release", "victim", 600, wait_seconds=30):
            time.sleep(0.002)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    found = store.get_lease("release")
    if found is not None and found.owner == "victim":
        left_leases += 1
        store.force_release("release", reason="left behind", token=found.token)
    left_tickets |= set(tickets())
    signal.signal(signal.SIGALRM, strike)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
over.set()
against.join()
with store.hold("steady", "victim", 3) as held:
    extended = threading.Event()
    held.on_extended(lambda deadline: extended.set())
    renewed = extended.wait(20)
print(json.dumps([interrupted, left_leases, len(left_tickets), renewed, threading.active_count()]))
"""


@pytest.mark.parametrize("turns", [200, pytest.param(3000, marks=pytest.mark.long)])
def test_interrupts_at_random_moments_leave_nothing_behind(path: Path, turns: int) -> None:
    # Not measured: an interrupt in the midst of the measuring tool leaves its lock held.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, str(path), str(turns)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 + turns / 10,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    interrupted, left_leases, left_tickets, renewed, active = json.loads(done.stdout)
    assert interrupted > turns / 10
    # Between the commit and the next line of Python there is a moment that no code can guard.
    assert left_leases <= turns / 50
    assert left_tickets <= turns / 50
    assert renewed
    assert active <= 8


# Inside of other blocks


def test_a_hold_inside_a_transaction_is_refused_and_leaves_nothing(store: StateStore) -> None:
    with store.transaction(component="tests", action="test.write") as part:
        with pytest.raises(ReentrancyError), store.hold("release", "worker-a"):
            raise AssertionError("entered")
        part.event("test.happened")
    assert store.list_leases(include_expired=True) == []


def test_a_transaction_inside_a_hold_delays_its_renewal_and_ends_nothing(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        with store.transaction(component="tests", action="test.write", fence=held.fence):
            clock.advance(10)
            time.sleep(0.02)
        wait_until(lambda: held.remaining() == 28.5)


def test_a_lease_is_not_held_by_reading_it(store: StateStore) -> None:
    with store.hold("release", "worker-a") as held:
        found = store.get_lease("release")
        assert isinstance(found, Lease)
        assert not isinstance(held, Lease)
        assert repr(held.lease).startswith("Lease(")


# These tests would notice

_alive = holding._is_alive

BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], Callable[..., None]]] = {
    "whatever was added is renewed": (
        lambda patch: patch.setattr(heart.Pulse, "wants_beat", lambda self: not self.ended and not self.lost.is_set()),
        lambda store, clock, pacemaker: test_a_dropped_object_ends_its_renewal(store, clock, pacemaker, {}),
    ),
    "a dead thread is taken for alive": (
        lambda patch: patch.setattr(holding, "_is_alive", lambda thread: True),
        test_a_dead_thread_renews_nothing_though_somebody_has_its_object,
    ),
    "the object is kept alive": (
        lambda patch: patch.setattr(weakref, "ref", lambda target: lambda: target),
        lambda store, clock, pacemaker: test_a_dropped_object_ends_its_renewal(store, clock, pacemaker, {}),
    ),
    "a waiter that is interrupted stays in the queue": (
        lambda patch: patch.setattr("agent_checkpoint.waiting.Waiter.leave", lambda self: None),
        lambda store, clock: test_an_interrupt_of_the_wait_leaves_no_place_in_the_queue(store, clock, 2),
    ),
    "an error of the release comes first": (
        lambda patch: patch.setattr(Hold, "give_back", _always_tell(Hold.give_back)),
        lambda gone: test_a_release_that_fails_does_not_hide_the_body_s_exception(gone, "locked"),
    ),
    "a failing release comes before the loss": (
        lambda patch: patch.setattr(Hold, "give_back", _release_only),
        lambda gone, clock: test_a_lease_that_is_lost_is_worse_news_than_a_release_that_fails(gone, clock, "locked"),
    ),
}


def _always_tell(give_back: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, held, tell: give_back(self, held, True)


def _release_only(self: Hold, held: HeldLease, tell: bool) -> None:
    holding.leases.release(self.changes, held.fence)


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_hold_is_noticed_here(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    break_it, notices = BROKEN[how]
    wanted = notices.__code__.co_varnames[: notices.__code__.co_argcount]
    given = {name: request.getfixturevalue(name) for name in wanted}
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LONG", 0.5)
        patch.setattr(watching, "LONG", 0.5)
        break_it(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, AgentCheckpointError)):
            notices(**given)
