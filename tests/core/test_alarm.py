"""A thread that works when something is due, and is not there when nothing is."""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, pairwise
from types import FrameType
from typing import Any

import pytest
from tests import watching
from tests.watching import wait_until

from agent_checkpoint import alarm
from agent_checkpoint.alarm import Alarm
from agent_checkpoint.clock import Clock
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

NAME = "agent-checkpoint-test"
# Only what never comes reaches it.
LONG = 10.0


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


class Plan:
    """What is to be done when, and what was done when, by whom."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: list[int] = []
        self.done: list[int] = []
        self.calls = 0
        self.workers: set[int] = set()
        self.fail: Exception | None = None

    def due(self) -> int | None:
        return min(self.times, default=None)

    def work(self) -> None:
        self.calls += 1
        self.workers.add(threading.get_ident())
        now = self.clock.ticks_ns()
        for at in [at for at in list(self.times) if at <= now]:
            self.times.remove(at)
            self.done.append(at)
        if self.fail is not None:
            fail, self.fail = self.fail, None
            raise fail


def planned(clock: Clock, name: str = NAME) -> tuple[Plan, Alarm, Callable[[float], int]]:
    """A plan, its alarm, and what adds to it: work in so many seconds."""
    plan = Plan(clock)
    made = Alarm(name, clock, plan.due, plan.work)

    def add(seconds: float) -> int:
        at = clock.ticks_ns() + round(seconds * NS)
        plan.times.append(at)
        made.set(at)
        return at

    return plan, made, add


@pytest.fixture(autouse=True)
def no_thread_stays(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(alarm, "LINGER_NS", NS // 20)
    yield

    def over() -> bool:
        clock.advance(100)
        return not running()

    wait_until(over)


def test_work_is_done_when_it_is_due_and_not_before(clock: FakeClock) -> None:
    plan, _, add = planned(clock)
    at = add(10)
    clock.advance(9.999)
    time.sleep(0.02)  # time enough to do it too early
    assert (plan.calls, len(running())) == (0, 1)
    clock.advance(0.001)
    wait_until(lambda: plan.done == [at])


def test_what_is_due_earlier_than_all_else_is_done_first(clock: FakeClock) -> None:
    plan, _, add = planned(clock)
    late, early, between = add(30), add(10), add(20)
    for expected in ([early], [early, between], [early, between, late]):
        clock.advance(10)
        wait_until(lambda expected=expected: plan.done == expected)
    assert len(plan.workers) == 1


def test_what_is_due_already_is_done_at_once() -> None:
    plan, _, add = planned(Clock())
    add(0)
    add(-5)
    wait_until(lambda: len(plan.done) == 2)


def test_real_time_passes_by_itself() -> None:
    plan, _, add = planned(Clock())
    started = time.monotonic()
    add(0.2)
    add(0.1)
    wait_until(lambda: len(plan.done) == 2)
    assert time.monotonic() - started >= 0.2


def test_a_thread_that_waits_for_long_wakes_up_for_what_is_due_before(clock: FakeClock) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alarm, "LINGER_NS", 3600 * NS)  # it is woken, or it is not
        plan, made, add = planned(Clock())
        late = add(3600)
        wait_until(lambda: made._wakes_at == late)
        early = add(0.05)
        try:
            wait_until(lambda: plan.done == [early])
        finally:
            plan.times.clear()
            with made._changed:
                made._changed.notify()


def test_a_thread_with_nothing_to_do_lingers_and_ends(clock: FakeClock) -> None:
    plan, _, add = planned(clock)
    add(1)
    clock.advance(1)
    wait_until(lambda: plan.done)
    assert len(running()) == 1
    (thread,) = running()
    add(1)  # it is there still
    clock.advance(1)
    wait_until(lambda: len(plan.done) == 2)
    assert running() == [thread]
    wait_until(lambda: clock.advance(alarm.LINGER_NS / NS) or not running())
    add(1)
    clock.advance(1)
    wait_until(lambda: len(plan.done) == 3)
    assert running() != [thread]


def test_an_alarm_that_nobody_has_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "LINGER_NS", NS // 100)
    plan, made, add = planned(Clock())
    add(0)
    wait_until(lambda: plan.done and not running())
    left = weakref.ref(made)
    del made, add
    gc.collect()
    assert left() is None


def test_nothing_is_missed_however_threads_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "LINGER_NS", NS // 2000)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        plan, _, add = planned(Clock())
        choose = random.Random(3)
        for turn in range(500):
            add(choose.choice((0, 0, 0.0002, 0.001)))
            if choose.random() < 0.5:
                wait_until(lambda turn=turn: len(plan.done) == turn + 1)
                time.sleep(choose.choice((0, 0.0004, 0.0005, 0.0006, 0.001)))
            assert len(running()) <= 1
        wait_until(lambda: len(plan.done) == 500)
    finally:
        sys.setswitchinterval(interval)


def test_many_may_set_it_at_once() -> None:
    plan, _, add = planned(Clock())
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait(LONG)
        for _ in range(50):
            add(0.001 * number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wait_until(lambda: len(plan.done) == 400)
    assert len(plan.workers) == 1


def test_work_that_fails_is_logged_and_the_thread_goes_on(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    plan, _, add = planned(clock)
    plan.fail = ZeroDivisionError("foreseen by nobody")
    with caplog.at_level(logging.ERROR, "agent_checkpoint"):
        add(1)
        clock.advance(1)
        wait_until(lambda: plan.done and plan.fail is None)
        at = add(1)
        clock.advance(1)
        wait_until(lambda: at in plan.done)
    assert "foreseen by nobody" in caplog.text


def test_work_that_fails_at_once_again_does_not_take_the_machine() -> None:
    clock, tries = Clock(), []

    def work() -> None:
        tries.append(clock.ticks_ns())
        if len(tries) < 3:
            raise ZeroDivisionError

    made = Alarm(NAME, clock, lambda: 0 if len(tries) < 3 else None, work)
    made.set(0)
    wait_until(lambda: len(tries) == 3)
    assert min(later - earlier for earlier, later in pairwise(tries)) >= 0.4 * NS


def test_a_thread_that_runs_out_of_memory_over_its_plan_does_not_end_for_good(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[bool] = []

    def due() -> int | None:
        if not failed:
            failed.append(True)
            raise MemoryError
        return plan.due()

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    plan = Plan(clock)
    made = Alarm(NAME, clock, due, plan.work)
    made.set(clock.ticks_ns() + NS)
    wait_until(lambda: failed)
    time.sleep(0.01)
    at = clock.ticks_ns() + NS
    plan.times.append(at)
    made.set(at)
    wait_until(lambda: clock.advance(1) or plan.done == [at])


def test_a_thread_that_could_not_be_started_is_started_next_time(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    plan, _, add = planned(clock)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            add(1)
    at = add(1)
    clock.advance(2)
    wait_until(lambda: at in plan.done)


def test_an_interrupt_while_the_thread_is_woken_does_not_let_it_sleep_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "LINGER_NS", 3600 * NS)
    plan, made, add = planned(Clock())
    late = add(3600)
    wait_until(lambda: made._wakes_at == late)

    def struck() -> None:
        del made._changed.notify  # type: ignore[method-assign]
        raise KeyboardInterrupt

    made._changed.notify = struck  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyboardInterrupt):
        add(0.05)
    early = add(0.1)
    try:
        wait_until(lambda: early in plan.done)
    finally:
        plan.times.clear()
        monkeypatch.undo()
        with made._changed:
            made._changed.notify()


class Striking:
    """Strikes the thread that it traces once, at the ``moment``-th call of a Python function or return from one.

    That is where the interpreter looks for signals. ``struck``: whether it came to that.
    """

    def __init__(self, moment: int) -> None:
        self.moment = moment
        self.struck = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> Striking:
        if event in ("call", "return") and frame.f_code is not Alarm.set.__code__:
            self.moment -= 1
            if self.moment == 0:
                self.struck = True
                raise KeyboardInterrupt
        return self


# Struck in a callback of the garbage collector, the interrupt is lost there: Python says so, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("waiting", [False, True])
def test_an_interrupt_at_any_moment_does_not_end_the_alarm_for_good(
    waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(alarm, "LINGER_NS", 20 * NS)  # it is woken, or it is not
    traced = sys.gettrace()
    ended_for_good: list[int] = []
    for moment in count(1):
        plan, made, add = planned(Clock(), f"{NAME}-struck")
        if waiting:
            add(3600)
            wait_until(lambda made=made: made._wakes_at is not None)
        strike = Striking(moment)
        sys.settrace(strike)
        try:
            made.set(plan.clock.ticks_ns() + NS // 50)
        except (KeyboardInterrupt, RuntimeError):  # threading itself does not take every one of them well
            pass
        finally:
            sys.settrace(traced)
        adder = threading.Thread(target=add, args=(0.03,), daemon=True)  # it may wait for ever
        adder.start()
        with suppress(AssertionError):
            wait_until(lambda plan=plan: plan.done, 1)
        if not plan.done:
            ended_for_good.append(moment)
        plan.times.clear()
        if not strike.struck:
            break
    assert moment > 2
    assert ended_for_good == []


def test_time_that_is_turned_between_a_look_at_the_clock_and_the_wait_is_not_missed() -> None:
    clock = FakeClock()
    plan, _, add = planned(clock)
    now = clock.ticks_ns
    turned: list[bool] = []

    def turned_by_another() -> int:
        before = now()
        if threading.current_thread().name == NAME and not turned:
            turned.append(True)
            # Another thread turns the clock, just after this one has looked at it.
            other = threading.Thread(target=clock.advance, args=(20,))
            other.start()
            other.join(0.1)  # it may wait for the lock that this thread has
        return before

    clock.ticks_ns = turned_by_another
    at = add(10)
    try:
        wait_until(lambda: at in plan.done)
    finally:
        wait_until(lambda: clock.advance(100) or not running())


# These tests would notice


def _end_at_once(self: Alarm, mark: object) -> bool:
    with self._changed:
        if self._due() is None:
            self._serving = None
            return False
    return _wait(self, mark)


_set, _wait = Alarm.set, Alarm._wait

BROKEN: dict[str, tuple[str, Callable[..., Any], Callable[..., None]]] = {
    "it never wakes up earlier": (
        "set",
        lambda self, at: None if self._serving else _set(self, at),
        test_a_thread_that_waits_for_long_wakes_up_for_what_is_due_before,
    ),
    "it ends as soon as nothing is due": (
        "_wait",
        _end_at_once,
        test_a_thread_with_nothing_to_do_lingers_and_ends,
    ),
    "it works before its time": (
        "_wait",
        lambda self, mark: self._due() is not None or _wait(self, mark),
        test_work_is_done_when_it_is_due_and_not_before,
    ),
    "it works once": (
        "_run",
        lambda self, mark: self._wait(mark) and self._work(),
        test_what_is_due_earlier_than_all_else_is_done_first,
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_alarm_is_noticed_here(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    name, broken, notices = BROKEN[how]
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "LONG", 0.5)
        patch.setattr(watching, "LONG", 0.5)
        patch.setattr(Alarm, name, broken)
        with pytest.raises(AssertionError):
            notices(clock)
