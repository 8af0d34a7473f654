"""What background threads did is told to plugins from a thread of its own, which holds nobody up."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.watching import wait_until

from agent_checkpoint import Event, FenceRefusedError, HeldLease, ReentrancyError, StateStore, Write, hookimpl, notifier
from agent_checkpoint.names import NS
from agent_checkpoint.notifier import Notifier
from agent_checkpoint.plugins import Plugins
from agent_checkpoint.testing import FakeClock

# Only what never comes reaches it.
LONG = 30.0


def renewed(clock: FakeClock, seconds: float, *held: HeldLease) -> None:
    clock.advance(seconds)
    whole = clock.ticks_ns() + round(28.5 * NS)
    wait_until(lambda: all(each.deadline_ns == whole for each in held))


def notifiers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "agent-checkpoint-notifier"}


class Listener:
    """Hears events, as fast as it is let."""

    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.threads: set[int] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.inside = threading.Event()
        self.fail: BaseException | None = None
        self.call: Callable[[], object] = lambda: None

    @hookimpl
    def event_recorded(self, event: Event) -> None:
        self.inside.set()
        self.go_on.wait()
        self.call()
        self.heard.append(event)
        self.threads.add(threading.get_ident())
        if self.fail is not None:
            fail, self.fail = self.fail, None
            raise fail


def notifying(*listeners: Listener) -> Notifier:
    """A notifier, asked first whether anybody listens, as before each change."""
    made = Notifier(Plugins(listeners))
    assert made.listening()
    return made


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.go_on.set()


@pytest.fixture
def heard_store(path: Path, clock: FakeClock, listener: Listener) -> Iterator[StateStore]:
    with StateStore(path, clock=clock, plugins=[listener]) as store:
        store.initialize()
        yield store


@pytest.fixture
def events(store: StateStore) -> list[Event]:
    for number in range(20):
        store.put_checkpoint("deploy", number)
    return store.events(kind="checkpoint.saved")


def test_events_are_told_in_order_from_one_other_thread(events: list[Event], listener: Listener) -> None:
    told = notifying(listener)
    told.tell(events[:7])
    for event in events[7:]:
        told.tell([event])
    wait_until(lambda: len(listener.heard) == len(events))
    assert listener.heard == events
    assert len(listener.threads) == 1
    assert threading.get_ident() not in listener.threads


def test_whoever_tells_does_not_wait_for_the_listener(events: list[Event], listener: Listener) -> None:
    listener.go_on.clear()
    told = notifying(listener)
    told.tell(events)
    assert listener.inside.wait(LONG)
    assert listener.heard == []
    told.tell(events)
    listener.go_on.set()
    wait_until(lambda: listener.heard == [*events, *events])


def test_what_a_slow_listener_leaves_no_room_for_is_dropped_with_a_word_in_the_log(
    events: list[Event], listener: Listener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MOST_WAITING", 5)
    listener.go_on.clear()
    told = notifying(listener)
    told.tell(events[:1])
    assert listener.inside.wait(LONG)
    with caplog.at_level(logging.ERROR, "agent_checkpoint.plugins"):
        told.tell(events[1:9])
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    for event, record in zip(events[6:9], caplog.records, strict=True):
        assert str(event.id) in record.getMessage()
        assert event.kind in record.getMessage()
    listener.go_on.set()
    wait_until(lambda: len(listener.heard) == 6)
    told.tell(events[9:11])  # there is room again
    wait_until(lambda: listener.heard == [*events[:6], *events[9:11]])


def test_the_queue_has_an_end() -> None:
    assert 100 <= notifier.MOST_WAITING <= 100_000


@pytest.mark.parametrize("error", [ZeroDivisionError("its own"), SystemExit("its own"), asyncio.CancelledError()])
def test_a_listener_that_fails_is_told_the_next_event_and_others_hear_all(
    events: list[Event], listener: Listener, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    other = Listener()
    told = notifying(listener, other)
    listener.fail = error
    told.tell(events[:3])
    wait_until(lambda: len(listener.heard) == 3 and len(other.heard) == 3, 5)
    told.tell(events[3:])
    wait_until(lambda: (listener.heard, other.heard) == (events, events), 5)


def test_vetoes_and_the_question_whether_anybody_listens_are_passed_on(listener: Listener) -> None:
    class Veto:
        @hookimpl
        def check_fence(self, write: Write) -> None:
            raise FenceRefusedError("no")

    write = Write("tests", "test.write", "release", "worker-a", 1, None, None, {})
    assert Notifier(Plugins([listener])).listening()
    assert not Notifier(Plugins([Veto()])).listening()
    assert Notifier(Plugins([listener])).check_fence(write) is None
    refused = Notifier(Plugins([Veto()])).check_fence(write)
    assert refused is not None
    assert refused.facts["reason"] == "no"


# Beside a heart


def test_events_of_heartbeats_are_told_by_the_notifier_and_all_others_by_their_callers(
    heard_store: StateStore, clock: FakeClock, listener: Listener
) -> None:
    heard_store.acquire("forgotten", "worker-b", 5)
    with heard_store.hold("release", "worker-a", 30) as held:
        assert listener.threads == {threading.get_ident()}
        start = len(listener.heard)
        for _ in range(12):
            renewed(clock, 10, held)
        in_background = ["lease.heartbeat", "lease.expired", "lease.heartbeat"]
        wait_until(lambda: [event.kind for event in listener.heard[start:]] == in_background)
        assert len(listener.threads) == 2
    assert listener.heard[-1].kind == "lease.released"
    # Each event is told once, as it is in the log.
    assert sorted(listener.heard, key=lambda event: event.id) == heard_store.events(after="start")


def test_a_slow_listener_delays_no_heartbeat(heard_store: StateStore, clock: FakeClock, listener: Listener) -> None:
    with heard_store.hold("release", "worker-a", 30) as held, heard_store.hold("other", "worker-a", 30) as other:
        listener.inside.clear()
        listener.go_on.clear()
        try:
            for _ in range(30):
                renewed(clock, 10, held, other)
            assert listener.inside.wait(LONG)
        finally:
            listener.go_on.set()
        # They are told in their order.
        wait_until(lambda: sum(event.kind == "lease.heartbeat" for event in listener.heard) == 10)
        told = [event for event in listener.heard if event.kind == "lease.heartbeat"]
        assert told == heard_store.events(kind="lease.heartbeat")


def test_a_loss_is_told_while_the_listener_is_slow(
    heard_store: StateStore, clock: FakeClock, listener: Listener
) -> None:
    block = heard_store.hold("release", "worker-a", 30)
    with pytest.raises(RuntimeError), block as held, heard_store.hold("other", "worker-a", 30) as other:
        heard_store.force_release("release", reason="stuck")
        listener.inside.clear()
        listener.go_on.clear()
        renewed(clock, 10, other)
        assert held.lost.wait(LONG)
        assert held.lost_reason == "released"
        assert listener.inside.wait(LONG)  # it was told of the heartbeat that was refused
        for _ in range(12):
            renewed(clock, 10, other)
        listener.go_on.set()
        wait_until(lambda: "write.refused" in [event.kind for event in listener.heard])


def test_a_listener_may_not_call_the_store_from_the_notifier_either(
    heard_store: StateStore, clock: FakeClock, listener: Listener
) -> None:
    refused: list[str] = []

    def call() -> None:
        if threading.current_thread() is not threading.main_thread():
            with pytest.raises(ReentrancyError):
                heard_store.get_lease("release")
            refused.append("yes")

    listener.call = call
    with heard_store.hold("release", "worker-a", 30) as held:
        for _ in range(7):
            renewed(clock, 10, held)
        wait_until(lambda: refused)


def test_a_notifier_ends_with_its_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_checkpoint.alarm.LINGER_NS", NS // 20)
    before = notifiers()
    for turn in range(3):
        clock, listener = FakeClock(), Listener()
        with StateStore(path, clock=clock, plugins=[listener]) as store:
            store.initialize()
            with store.hold(f"scope-{turn}", "worker-a", 30) as held:
                for _ in range(7):
                    renewed(clock, 10, held)
                wait_until(lambda listener=listener: listener.heard[-1].kind == "lease.heartbeat")
        del store, held, listener

        def over(clock: FakeClock = clock) -> bool:
            clock.advance(100)
            gc.collect()
            return not notifiers() - before

        wait_until(over, 10)


# After a fork

FORKED = """
import json, os, sys, threading, time, warnings
from agent_checkpoint import StateStore, hookimpl

warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
heard = []

class Listener:
    @hookimpl
    def event_recorded(self, event):
        heard.append((event.kind, event.scope, threading.current_thread().name))

def lose(scope):
    "An event of the background: a heartbeat that is refused."
    with store.hold(scope, "worker-a", 0.3) as held:
        store.force_release(scope, reason="test")
        assert held.lost.wait(30)
        until = time.monotonic() + 30
        while not any(kind == "write.refused" and where == scope for kind, where, _ in heard):
            assert time.monotonic() < until
            time.sleep(0.001)

def told(scope):
    try:
        lose(scope)
    except RuntimeError:
        pass
    return [name for kind, where, name in heard if kind == "write.refused" and where == scope][:1]

store = StateStore(sys.argv[1], plugins=[Listener()])
store.initialize()
first = told("parent")
heard.clear()
reading, writing = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(writing, json.dumps([told("child"), sorted({where for _, where, _ in heard})]).encode())
    os._exit(0)
status = os.waitpid(pid, 0)[1]
print(json.dumps([first, json.loads(os.read(reading, 10_000)), list(heard), told("again"), status]))
"""


def test_parent_and_child_each_have_a_notifier_and_tell_their_own(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, str(path)], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stderr) == (0, "")
    name = ["agent-checkpoint-notifier"]
    assert json.loads(done.stdout) == [name, [name, ["child"]], [], name, 0]


# These tests would notice


def test_a_notifier_that_tells_at_once_is_noticed_here(
    heard_store: StateStore, clock: FakeClock, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(self: Notifier, events: list[Event]) -> None:
        self._plugins.tell(events)

    with monkeypatch.context() as patch:
        patch.setattr(Notifier, "tell", at_once)
        patch.setattr(wait_until, "__defaults__", (0.5,))
        with pytest.raises((AssertionError, RuntimeError)):
            test_a_slow_listener_delays_no_heartbeat(heard_store, clock, listener)
