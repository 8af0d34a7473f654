"""Waiting, look by look: time is turned, processes die at a word, and each waiter looks when the test says so."""

from __future__ import annotations

import _thread
import gc
import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from agent_checkpoint import (
    AgentCheckpointError,
    InvalidInputError,
    Lease,
    LeaseHeldError,
    ReentrancyError,
    StateStore,
    WaitTimeoutError,
    holders,
    leases,
    waiting,
)
from agent_checkpoint.ledger import tickets as ticket_rows
from agent_checkpoint.rules import expiry, grant, queue
from agent_checkpoint.testing import FakeClock, FakeProcesses

# How long a free slot is kept for each ticket in front, and a ticket lives without a word, in seconds.
TURN = 0.05
LIFE = 10.0
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0


class Holder:
    """Who waits: like a thread or a task, another one for each."""


class Person:
    """One waiter, in a process of its own; it is frozen whenever the test does not let it look."""

    def __init__(self, line: Line, owner: str, wait_seconds: float, ask: grant.Ask) -> None:
        self.line = line
        self.owner = owner
        self.pid = line.begin()
        self.task = Holder()
        self.lease: Lease | None = None
        self.next_at = 0
        """When it looks next, if it sleeps as long as it is told to."""
        self.waiter = line.store._waiter(ask, wait_seconds, self.task)

    def looks(self) -> bool:
        """One step; whether it has the scope now."""
        with self.line.acting_as(self.pid):
            found = self.waiter.step()
        if isinstance(found, float):
            self.next_at = self.line.clock.now_ticks_ns + round(found * 1e9)
            return False
        self.lease = found
        return True

    def leaves(self) -> None:
        self.waiter.leave()

    def dies(self) -> None:
        self.line.processes.kill(self.pid)


class Line:
    """A store, and those who queue for its scope ``release``."""

    scope = "release"

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.processes = FakeProcesses()
        self.store = StateStore(path, synchronous="normal", clock=self.clock, processes=self.processes)
        self.store.initialize()
        self._pids = itertools.count(1_000_001)

    def begin(self) -> int:
        pid = next(self._pids)
        self.processes.start(pid)
        return pid

    @contextmanager
    def acting_as(self, pid: int) -> Iterator[None]:
        own, self.processes.pid = self.processes.pid, pid
        try:
            yield
        finally:
            self.processes.pid = own

    def held(self, owner: str = "holder", ttl: float = 3600, **options: object) -> Lease:
        return self.store.acquire(self.scope, owner, ttl, **options)  # type: ignore[arg-type]

    def joins(self, owner: str, wait_seconds: float = math.inf, *, looks: bool = True, **ask: object) -> Person:
        """Somebody who queues up; the scope is not to be had."""
        person = Person(self, owner, wait_seconds, leases.valid_ask(self.scope, owner, 3600, None, **ask))  # type: ignore[arg-type]
        if looks:
            assert not person.looks()
        return person

    def goes_on(self, people: list[Person], seconds: float) -> Person | None:
        """Let so much time pass, in which these look when they are to; the first who has the scope then."""
        end = self.clock.now_ticks_ns + round(seconds * 1e9)
        while (first := min(people, key=lambda person: person.next_at)).next_at <= end:
            self.clock.advance(max(0, first.next_at - self.clock.now_ticks_ns) / 1e9)
            if first.looks():
                return first
        self.clock.advance((end - self.clock.now_ticks_ns) / 1e9)
        return None

    def release(self, lease: Lease | None) -> None:
        assert lease is not None
        self.store.release(*lease.fence)

    def refuses(self, owner: str = "newcomer", **options: object) -> LeaseHeldError:
        """Somebody who does not wait; why it is refused."""
        with pytest.raises(LeaseHeldError) as refused:
            self.held(owner, **options)  # type: ignore[arg-type]
        assert type(refused.value) is LeaseHeldError
        return refused.value

    def numbers(self) -> list[int]:
        """The tickets in the table."""
        with self.store.read() as reader:
            return [number for (number,) in reader.rows("SELECT number FROM tickets ORDER BY number")]

    def shown(self) -> list[tuple[int, str]]:
        return [(each.position, each.owner) for each in self.store.status().queues]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events(scope=self.scope)]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is some: what is tested is not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "agents.db"


@pytest.fixture
def line(path: Path) -> Iterator[Line]:
    made = Line(path)
    yield made
    made.store.close()


# First come, first served.


def test_first_come_is_first_served_whoever_looks_first(line: Line) -> None:
    lease: Lease | None = line.held()
    people = [line.joins(f"waiter-{number}") for number in range(4)]
    while people:
        line.release(lease)
        assert not any(person.looks() for person in reversed(people[1:]))
        first = people.pop(0)
        assert first.looks()
        lease = first.lease
    assert [event.owner for event in line.store.events(kind="lease.acquired")][1:] == [
        f"waiter-{number}" for number in range(4)
    ]
    assert line.numbers() == []


def test_who_does_not_wait_is_refused_while_others_are_ahead_even_when_the_scope_is_free(line: Line) -> None:
    lease = line.held()
    first, second = line.joins("first"), line.joins("second")
    line.release(lease)

    refused = line.refuses()
    assert (refused.owner, refused.token, refused.expires_at, refused.position) == (None, None, None, 3)
    assert 0 < refused.retry_after <= 1
    assert line.store.get_lease(line.scope) is None

    assert first.looks()
    assert line.refuses().position == 2
    line.release(first.lease)
    assert second.looks()


def test_a_refusal_tells_the_place_in_the_queue(line: Line) -> None:
    line.held("holder", 30)
    assert line.refuses().position == 1
    line.joins("first")
    refused = line.refuses()
    assert (refused.owner, refused.token, refused.retry_after, refused.position) == ("holder", 1, 30.0, 2)


def test_the_queue_is_in_the_status(line: Line) -> None:
    line.held()
    assert line.store.status().queues == []
    people = [line.joins(f"waiter-{number}") for number in range(3)]
    first, second, third = line.store.status().queues
    assert [(each.position, each.owner, each.scope) for each in (first, second, third)] == [
        (1, "waiter-0", "release"),
        (2, "waiter-1", "release"),
        (3, "waiter-2", "release"),
    ]
    assert first.process is not None
    assert (first.process["pid"], first.owner_alive) == (people[0].pid, True)

    people[0].dies()
    assert line.shown() == [(1, "waiter-1"), (2, "waiter-2")]
    line.processes.hide(people[1].pid)
    assert [each.owner_alive for each in line.store.status().queues] == [None, True]


def test_the_queues_of_scopes_are_apart(line: Line) -> None:
    line.held()
    line.joins("first")
    line.scope = "deploy"
    assert line.held("someone").token == 1
    line.joins("first")
    assert [(each.scope, each.position) for each in line.store.status().queues] == [("deploy", 1), ("release", 1)]


# Who is gone.


def test_who_leaves_is_gone(line: Line) -> None:
    lease = line.held()
    first, second = line.joins("first"), line.joins("second")
    first.leaves()
    assert len(line.numbers()) == 1
    line.release(lease)
    assert second.looks()
    assert line.numbers() == []


def test_whose_time_is_over_is_gone(line: Line) -> None:
    line.held()
    first = line.joins("first", 5)
    line.clock.advance(5)
    with pytest.raises(WaitTimeoutError) as timeout:
        waiting.wait(first.waiter, line.clock.sleep)
    assert timeout.value.waited_seconds == 5.0
    assert line.numbers() == []


def test_who_died_is_gone_at_once_and_its_ticket_with_the_next_grant(line: Line) -> None:
    lease = line.held()
    people = [line.joins(f"waiter-{number}") for number in range(3)]
    line.release(lease)
    people[0].dies()
    people[1].dies()

    assert people[2].looks()
    assert line.numbers() == []


def test_who_died_keeps_nobody_out_who_does_not_wait(line: Line) -> None:
    lease = line.held()
    line.joins("first").dies()
    line.release(lease)
    assert line.held("newcomer").token == 2
    assert line.numbers() == []


def test_a_pid_that_belongs_to_another_process_now_is_no_waiter(line: Line) -> None:
    lease = line.held()
    first, second = line.joins("first"), line.joins("second")
    line.processes.recycle(first.pid)
    line.release(lease)
    assert second.looks()


def test_who_cannot_be_seen_is_gone_when_its_ticket_s_life_is_over(line: Line) -> None:
    lease = line.held()
    first = line.joins("first")
    line.processes.hide(first.pid)
    line.clock.advance(LIFE - 0.001)
    assert line.refuses().position == 2
    line.clock.advance(0.001)
    assert line.refuses().position == 1
    assert line.shown() == []
    line.release(lease)
    line.held("newcomer")
    assert line.numbers() == []


def test_who_looks_now_and_then_keeps_its_ticket_for_ever(line: Line) -> None:
    lease = line.held()
    first, second = line.joins("first"), line.joins("second")
    numbers = line.numbers()
    for _ in range(40):
        line.clock.advance(LIFE / 2)
        assert not second.looks()
        assert not first.looks()
    assert line.numbers() == numbers
    line.release(lease)
    assert not second.looks()
    assert first.looks()


def test_a_ticket_s_number_never_comes_twice(line: Line) -> None:
    lease: Lease | None = line.held()
    seen: list[int] = []
    for turn in range(12):
        person = line.joins(f"waiter-{turn}")
        (number,) = line.numbers()
        seen.append(number)
        if turn % 4 == 0:
            person.leaves()
        elif turn % 4 == 1:
            person.dies()
            line.release(lease)
            lease = line.held()
        elif turn % 4 == 2:
            line.clock.advance(LIFE + 1)
            line.release(lease)
            lease = line.held()
        else:
            line.release(lease)
            assert person.looks()
            lease = person.lease
        assert line.numbers() == []
    assert seen == sorted(set(seen))


# Who sleeps.


def test_a_free_scope_is_kept_for_its_head_for_50_ms_and_no_longer(line: Line) -> None:
    lease = line.held()
    first, second = line.joins("first"), line.joins("second")
    line.release(lease)
    line.clock.advance(0.2 * TURN)
    assert not second.looks()
    line.clock.advance(TURN)
    assert second.looks()
    assert not first.looks()


def test_each_one_in_front_has_its_50_ms(line: Line) -> None:
    lease = line.held()
    line.joins("first")
    line.joins("second")
    third = line.joins("third")
    line.release(lease)
    line.clock.advance(1.5 * TURN)
    assert not third.looks()
    line.clock.advance(2 * TURN)
    assert third.looks()


PHASES = [0.0, 0.017, 0.034, 0.05, 0.067, 0.084]
# Every other one, and the whole when there is time.
SOME_PHASES = [pytest.param(phase, marks=[pytest.mark.long] * (place % 2)) for place, phase in enumerate(PHASES)]


def served_in_their_order(line: Line, lease: Lease | None, awake: list[Person], hold: float) -> None:
    """The lease is released, and each one's after it was held for so long: whoever is awake goes in turn, and soon."""
    for person in list(awake):
        freed = line.clock.now_ticks_ns
        line.release(lease)
        first = line.goes_on(awake, 2)
        assert first is not None
        assert first.owner == person.owner
        assert line.clock.now_ticks_ns - freed < 1e9
        lease = person.lease
        awake.remove(person)
        if awake:
            assert line.goes_on(awake, hold) is None


@pytest.mark.parametrize("frozen", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("after", PHASES)
def test_those_who_are_awake_go_in_their_order_behind_any_number_of_frozen_ones(
    line: Line, frozen: int, after: float
) -> None:
    lease = line.held()
    asleep = [line.joins(f"frozen-{number}") for number in range(frozen)]
    awake = []
    for number in range(3):
        awake.append(line.joins(f"awake-{number}"))
        line.clock.advance(0.013)
    # Long enough for the longest pauses, and just not long enough for the frozen ones to be gone.
    assert line.goes_on(awake, LIFE - 1 + after) is None
    served_in_their_order(line, lease, awake, hold=0.2)
    assert not any(person.looks() for person in asleep)


@pytest.mark.parametrize("seed", range(12))
def test_those_behind_one_that_died_go_in_their_order_whenever_they_look(line: Line, seed: int) -> None:
    # Whoever frees the scope wakes the head, which is dead: the next ones are in the midst of their pauses.
    choose = random.Random(seed)
    lease = line.held()
    people = [line.joins("dead")]
    for number in range(3):
        people.append(line.joins(f"awake-{number}"))
        assert line.goes_on(people, choose.uniform(0, 1)) is None
    assert line.goes_on(people, 6 + choose.uniform(0, 0.3)) is None
    people.pop(0).dies()
    served_in_their_order(line, lease, people, hold=0.2)


@pytest.mark.parametrize("dead", [0, 1, 4])
@pytest.mark.parametrize("hold", [0, 0.005, 0.2])
@pytest.mark.parametrize("after", SOME_PHASES)
def test_those_who_came_later_and_look_more_often_overtake_nobody(
    line: Line, dead: int, hold: float, after: float
) -> None:
    lease = line.held()
    people = [line.joins(f"dead-{number}") for number in range(dead)]
    awake = [line.joins("early-0"), line.joins("early-1")]
    assert line.goes_on(people + awake, 20) is None
    for number in range(2):
        awake.append(line.joins(f"late-{number}"))
        assert line.goes_on(people + awake, 0.5) is None
    assert line.goes_on(people + awake, after) is None
    for person in people:
        person.dies()
    served_in_their_order(line, lease, awake, hold)


def test_who_was_passed_over_is_not_waited_for_again_while_it_sleeps(line: Line) -> None:
    lease = line.held()
    line.joins("first")
    people = [line.joins(f"waiter-{number}") for number in range(5)]
    line.release(lease)
    line.clock.advance(TURN)
    for person in people:
        assert person.looks()
        line.release(person.lease)


def test_who_was_passed_over_has_its_place_back_when_it_wakes(line: Line) -> None:
    lease = line.held()
    first, second, third = line.joins("first"), line.joins("second"), line.joins("third")
    number = line.numbers()[0]
    line.release(lease)
    line.clock.advance(TURN)
    assert second.looks()

    assert not first.looks()
    assert line.numbers()[0] == number
    line.release(second.lease)
    assert not third.looks()
    assert first.looks()
    line.release(first.lease)
    assert third.looks()


def test_who_was_passed_over_and_wakes_in_front_of_a_free_scope_takes_it(line: Line) -> None:
    lease = line.held()
    first, second, third = line.joins("first"), line.joins("second"), line.joins("third")
    line.release(lease)
    line.clock.advance(TURN)
    assert second.looks()
    line.release(second.lease)
    assert first.looks()
    line.release(first.lease)
    assert third.looks()


def test_who_slept_through_its_ticket_s_life_queues_up_anew_at_the_end(line: Line) -> None:
    lease = line.held()
    first = line.joins("first")
    line.clock.advance(LIFE)
    line.release(lease)
    lease = line.held("somebody")
    assert line.numbers() == []
    second = line.joins("second")

    assert not first.looks()
    assert line.shown() == [(1, "second"), (2, "first")]
    line.release(lease)
    assert not first.looks()
    assert second.looks()
    line.release(second.lease)
    assert first.looks()
    assert line.numbers() == []


def test_who_slept_through_its_ticket_s_life_goes_behind_those_who_came_meanwhile_though_the_scope_is_free(
    line: Line,
) -> None:
    lease = line.held()
    first = line.joins("first")
    line.clock.advance(LIFE)
    line.release(lease)
    lease = line.held("somebody")
    assert line.numbers() == []
    second = line.joins("second")
    line.release(lease)

    assert not first.looks()
    assert second.looks()


def test_an_end_that_nobody_saw_counts_from_when_it_is_noticed(line: Line) -> None:
    line.held("holder", 30)
    first = line.joins("first")
    second = line.joins("second")
    for _ in range(6):
        line.clock.advance(4)
        assert not first.looks()
        assert not second.looks()
    line.clock.advance(8)
    # Overdue for 2 s, but nobody looked; now the second one does, and the first one has its turn.
    assert not second.looks()
    assert line.kinds() == ["lease.acquired", "lease.expired"]
    line.clock.advance(0.9 * TURN)
    assert not second.looks()
    assert first.looks()
    assert line.kinds() == ["lease.acquired", "lease.expired", "lease.acquired"]


# Whose turn it is when the holder dies.


def test_the_head_has_the_scope_as_soon_as_the_holder_is_dead(line: Line) -> None:
    holder = line.begin()
    line.held("holder", pid=holder)
    first = line.joins("first")
    assert not first.looks()
    line.processes.kill(holder)

    assert first.looks()
    expired = [(event.owner, event.token, event.detail) for event in line.store.events(kind="lease.expired")]
    assert expired == [("holder", 1, {"reason": "owner-dead"})]


def test_a_holder_whose_pid_is_another_s_now_is_dead(line: Line) -> None:
    holder = line.begin()
    line.held("holder", pid=holder)
    first = line.joins("first")
    line.processes.recycle(holder)
    assert first.looks()
    assert [event.detail for event in line.store.events(kind="lease.expired")] == [{"reason": "owner-dead"}]


@pytest.mark.parametrize("unseen", ["hidden", "another boot"])
def test_a_holder_that_cannot_be_seen_has_its_ttl(line: Line, unseen: str) -> None:
    holder = line.begin()
    line.held("holder", 8, pid=holder)
    first = line.joins("first")
    line.processes.hide(holder)
    if unseen == "another boot":
        line.processes.boot = "boot-2"
        line.processes.kill(holder)
    found = line.store.get_lease(line.scope)
    assert found is not None
    assert found.owner_alive is None
    line.clock.advance(7.999)
    assert not first.looks()
    line.clock.advance(0.001)
    assert first.looks()
    assert [event.detail for event in line.store.events(kind="lease.expired")] == [{"reason": "ttl"}]


def test_a_dead_holder_goes_on_record_once_however_many_look(line: Line) -> None:
    holder = line.begin()
    line.held("holder", pid=holder)
    first, second = line.joins("first"), line.joins("second")
    line.processes.kill(holder)
    assert [lease.state for lease in line.store.sweep()] == ["expired"]
    assert line.store.sweep() == []
    assert not second.looks()
    assert first.looks()
    assert line.kinds() == ["lease.acquired", "lease.expired", "lease.acquired"]


def test_a_dead_holder_is_seen_as_such_until_somebody_asks(line: Line) -> None:
    holder = line.begin()
    granted = line.held("holder", pid=holder)
    assert (granted.owner_alive, granted.process and granted.process["pid"]) == (True, holder)
    line.processes.kill(holder)
    found = line.store.get_lease(line.scope)
    assert found is not None
    assert (found.state, found.owner_alive) == ("live", False)
    assert [lease.owner_alive for lease in line.store.list_leases()] == [False]
    assert [lease.owner_alive for lease in line.store.status().leases] == [False]
    beaten = line.store.heartbeat(*granted.fence)
    assert (beaten.state, beaten.owner_alive) == ("live", False)
    assert line.held("next").token == 2


# Several slots, and a limit that changes.


def test_as_many_as_there_are_free_slots_go_at_once_in_any_order(line: Line) -> None:
    holders_ = [line.held(f"holder-{number}", limit=2) for number in range(2)]
    first, second, third = line.joins("first"), line.joins("second"), line.joins("third")
    for lease in holders_:
        line.release(lease)
    assert not third.looks()
    assert second.looks()
    assert first.looks()
    assert len(line.numbers()) == 1
    line.release(first.lease)
    assert third.looks()


def test_who_had_a_slot_left_was_not_passed_over(line: Line) -> None:
    holders_ = [line.held(f"holder-{number}", limit=2) for number in range(2)]
    first, second = line.joins("first"), line.joins("second")
    for lease in holders_:
        line.release(lease)
    assert second.looks()

    # One slot is free, and it is the first one's: nobody may overtake it.
    assert line.refuses().position == 2
    assert first.looks()


def test_a_raised_limit_is_for_those_who_wait(line: Line) -> None:
    line.held()
    first = line.joins("first")
    line.store.set_limit(line.scope, 2)

    assert line.refuses().position == 2
    assert first.looks()
    assert first.lease is not None
    assert first.lease.slot == 1


def test_a_raised_limit_lets_in_as_many_as_wait_in_their_order(line: Line) -> None:
    line.held()
    people = [line.joins(f"waiter-{number}") for number in range(4)]
    line.store.set_limit(line.scope, 3)

    assert [person.looks() for person in reversed(people)] == [False, False, True, True]


def test_a_slot_that_was_free_for_long_while_the_limit_forbade_it_is_kept_for_the_head_too(line: Line) -> None:
    low, high = line.held("low", limit=2), line.held("high")
    line.store.set_limit(line.scope, 1)
    line.release(low)
    line.clock.advance(1)
    first = line.joins("first")
    line.release(high)

    assert line.refuses().position == 2
    assert first.looks()


# Waiting for oneself.


def test_waiting_for_what_the_thread_itself_holds_is_an_error_not_a_hang(line: Line) -> None:
    lease = line.held("me")
    with pytest.raises(ReentrancyError) as refused:
        line.held("me", wait_seconds=math.inf)
    assert (refused.value.scope, refused.value.owner, refused.value.token) == ("release", "me", lease.token)
    assert (refused.value.exit_status, refused.value.retryable) == (2, False)
    assert "thread" in str(refused.value)
    assert line.numbers() == []
    with pytest.raises(LeaseHeldError):
        line.held("me")


def test_waiting_for_oneself_while_a_slot_is_free_is_no_waiting(line: Line) -> None:
    assert line.held("me", limit=2).slot == 0
    assert line.held("me", wait_seconds=math.inf).slot == 1
    with pytest.raises(ReentrancyError):
        line.held("me", wait_seconds=math.inf)


def test_waiting_behind_others_for_a_slot_that_is_free_is_no_waiting_for_oneself(line: Line) -> None:
    line.held("me", limit=2)
    other = Person(line, "other", math.inf, leases.valid_ask(line.scope, "other", 3600, None))
    assert other.looks()
    line.joins("first")  # and sleeps
    line.release(other.lease)

    assert line.held("me", wait_seconds=1).slot == 1


def test_who_gave_it_back_waits_like_anybody(line: Line) -> None:
    line.release(line.held("me"))
    other = Person(line, "other", math.inf, leases.valid_ask(line.scope, "other", 3600, None))
    assert other.looks()
    with pytest.raises(WaitTimeoutError):
        line.held("me", wait_seconds=1)


def test_another_thread_waits_normally(line: Line) -> None:
    lease = line.held("me")
    found: list[object] = []

    def wait() -> None:
        try:
            line.held("other", wait_seconds=3)
        except WaitTimeoutError as error:
            found.append(error.token)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(LONG)
    assert found == [lease.token]


def ended(run: Callable[[Callable[[], None]], None], work: Callable[[], object]) -> tuple[int, object]:
    """Do it in a thread that ends; the thread's ident, and what came of it."""
    found: list[object] = []

    def inside() -> None:
        try:
            found.extend((threading.get_ident(), work()))
        except AgentCheckpointError as error:
            found.extend((threading.get_ident(), type(error)))

    run(inside)
    ident, result = found
    assert isinstance(ident, int)
    return ident, result


def by_threading(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)


def by_others(work: Callable[[], None]) -> None:
    """In a thread that threading did not start, as those of libraries in C."""
    if sys.platform != "linux":
        pytest.skip("only Linux shows when such a thread has ended")
    before = len(os.listdir("/proc/self/task"))
    _thread.start_new_thread(work, ())
    until(lambda: len(os.listdir("/proc/self/task")) <= before)


@pytest.mark.parametrize("run", [by_threading, by_others])
def test_a_thread_with_a_dead_thread_s_ident_is_another_one(
    line: Line, run: Callable[[Callable[[], None]], None]
) -> None:
    ident, token = ended(run, lambda: line.held("dead").token)
    for _ in range(100):
        again, refused = ended(run, lambda: threading.get_ident() == ident and line.held("alive", wait_seconds=0.2))
        if again == ident:
            break
    else:
        pytest.skip("this system gave no other thread the ident of a dead one")
    assert (token, refused) == (1, WaitTimeoutError)


FORKED = """
import os, sys, time
from agent_checkpoint import StateStore
store = StateStore(sys.argv[1])
lease = store.acquire("release", "parent", 60)
child = os.fork()
if not child:
    try:
        print(store.acquire("release", "child", 60, wait_seconds=30).token, flush=True)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
while not store.status().queues and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
    time.sleep(0.005)
store.release(*lease.fence)
os.waitpid(child, 0)
"""


def test_a_forked_child_waits_for_what_its_parent_holds(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
    done = subprocess.run([sys.executable, "-c", FORKED, path], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


# Taking back one's own.


def test_reclaim_is_refused_while_the_earlier_self_s_process_is_alive(line: Line) -> None:
    holder = line.begin()
    line.held("me", pid=holder)
    refused = line.refuses("me", reclaim=True)
    assert (refused.owner, refused.token, refused.retry_after) == ("me", 1, 3600.0)
    line.processes.kill(holder)
    later = line.held("me", reclaim=True)
    assert later.token == 2
    assert line.kinds() == ["lease.acquired", "lease.expired", "lease.acquired"]


def test_a_refused_reclaim_tells_its_position_as_every_lease_held_error_does(line: Line) -> None:
    line.held("me", pid=line.begin())
    assert line.refuses("me", reclaim=True).position == 1


def test_reclaim_is_granted_where_nobody_can_tell_whether_the_earlier_self_lives(line: Line) -> None:
    holder = line.begin()
    earlier = line.held("me", pid=holder)
    line.processes.hide(holder)
    later = line.held("me", reclaim=True)
    assert (later.token, later.slot) == (earlier.token + 1, earlier.slot)
    assert line.kinds() == ["lease.acquired", "lease.reclaimed"]


def test_who_waits_to_reclaim_from_a_living_process_waits(line: Line) -> None:
    line.held("me", pid=line.begin())
    person = line.joins("me", 5, reclaim=True)
    line.clock.advance(5)
    with pytest.raises(WaitTimeoutError):
        waiting.wait(person.waiter, line.clock.sleep)
    assert line.numbers() == []


def test_who_reclaims_while_it_queues_leaves_no_ticket(line: Line) -> None:
    lease = line.held("somebody")
    first = line.joins("me")
    second = line.joins("me", reclaim=True)
    line.release(lease)
    assert first.looks()
    assert second.looks()

    assert line.kinds()[-1] == "lease.reclaimed"
    assert line.numbers() == []


# What ends a wait.


def test_a_limit_that_is_set_meanwhile_ends_the_wait_of_who_asked_for_another_and_leaves_no_ticket(line: Line) -> None:
    line.held()
    person = line.joins("first", limit=1)
    line.store.set_limit(line.scope, 2)
    with pytest.raises(InvalidInputError) as refused:
        waiting.wait(person.waiter, line.clock.sleep)
    assert refused.value.field == "limit"
    assert line.numbers() == []


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_whatever_ends_a_wait_takes_its_ticket_along(line: Line, ends: type[BaseException]) -> None:
    line.held()
    person = line.joins("first")

    def strike(seconds: float) -> None:
        raise ends

    with pytest.raises(ends):
        waiting.wait(person.waiter, strike)
    assert line.numbers() == []


class Paused(BaseException):
    pass


class Strike:
    """An interrupt at the so-many-th call or return of a function of ours."""

    # They give the write lock back: until that is done nobody could take the ticket away. In the last two it is lost.
    LEFT_ALONE = ("_leave", "leave", "_pass_on", "give_back", "__del__", "<genexpr>")

    def __init__(self, step: int) -> None:
        self.left = step
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if "/agent_checkpoint/" not in code.co_filename or event not in ("call", "return"):
            return
        if code.co_name in self.LEFT_ALONE:
            return
        self.left -= 1
        if self.left == 0:
            self.where = f"{event} of {code.co_name} in {Path(code.co_filename).name}"
            sys.setprofile(None)
            raise KeyboardInterrupt


# A connection that was interrupted while it was lent is closed by the garbage collector, of which Python 3.13 tells.
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_an_interrupt_at_any_step_on_the_way_into_the_queue_leaves_no_ticket(line: Line) -> None:
    line.held()
    ask = leases.valid_ask(line.scope, "waiter", 3600, None)
    left = []

    def pause(seconds: float) -> None:
        sys.setprofile(None)
        raise Paused

    for step in itertools.count(1):
        strike = Strike(step)
        waiter = line.store._waiter(ask, LONG, Holder())
        try:
            sys.setprofile(strike)
            waiting.wait(waiter, pause)
        except KeyboardInterrupt:
            pass
        except Paused:
            break
        finally:
            sys.setprofile(None)
        if line.numbers():
            left.append(strike.where)
            with line.store.transaction(component="tests", action="tests.clean") as part:
                part.run("DELETE FROM tickets")
    gc.collect()
    assert step > 100
    assert left == []


def test_pauses_grow_for_the_head_and_stay_below_a_turn_behind_it(line: Line) -> None:
    line.held()
    first, second = line.joins("first"), line.joins("second")
    for waited, head in ((0, 0.001), (1, 0.011), (4, 0.041), (60, 0.048)):
        line.clock.advance(waited - (line.clock.now_ticks_ns / 1e9 - 1000))
        with line.acting_as(first.pid):
            pause = first.waiter.step()
        assert pause == pytest.approx(head, rel=0.2)
        with line.acting_as(second.pid):
            assert pause <= second.waiter.step() < 0.05  # type: ignore[operator]


def test_no_pause_is_longer_than_what_is_left_of_the_wait(line: Line) -> None:
    line.held()
    person = line.joins("first", 20)
    line.clock.advance(19.99)
    assert person.waiter.step() == pytest.approx(0.01)


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


# Broken on purpose: what these tests are for is caught by them.

Variant = Callable[[pytest.MonkeyPatch], None]


def anyone_may_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "may_pass", lambda *_: True)


def nobody_may_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "may_pass", lambda ahead, *_: ahead == 0)


def the_queue_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "look", lambda *_: queue.NOBODY)


def the_newest_ticket_is_first(patch: pytest.MonkeyPatch) -> None:
    original = queue.look

    def look(line: list[object], mine: int, *rest: object) -> queue.Queue:
        flipped = [each._replace(number=-each.number) for each in line]  # type: ignore[attr-defined]
        found = original(flipped, -mine, *rest)  # type: ignore[arg-type]
        return queue.Queue(tuple(-number for number in found.ahead), tuple(-number for number in found.gone))

    patch.setattr(queue, "look", look)


def nobody_is_found_dead(patch: pytest.MonkeyPatch) -> None:
    def left(row: object, moment: object, alive: object) -> expiry.Remaining:
        return expiry.remaining(row, moment)  # type: ignore[arg-type]

    for module in (expiry, grant, queue):
        patch.setattr(module, "left", left)


def tickets_live_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "left", lambda *_: expiry.Remaining(1, "ttl"))


def the_passed_are_not_noted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ticket_rows, "pass_over", lambda *_: None)


def the_passed_stay_passed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ticket_rows, "RENEW", ticket_rows.RENEW.replace(", passed = 0", ""))


def numbers_begin_again(patch: pytest.MonkeyPatch) -> None:
    again = ticket_rows.ADD.replace("(scope, owner", "(number, scope, owner").replace(
        "VALUES (?", "VALUES ((SELECT COALESCE(MAX(number), 0) + 1 FROM tickets), ?"
    )
    patch.setattr(ticket_rows, "ADD", again)


def nobody_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waiting.Waiter, "leave", lambda self: None)


def who_is_served_keeps_its_ticket(patch: pytest.MonkeyPatch) -> None:
    original = grant.acquire

    def acquire(standing: grant.Standing, ask: grant.Ask, moment: object) -> object:
        decision = original(standing, ask, moment)  # type: ignore[arg-type]
        return decision._replace(gone=()) if isinstance(decision, grant.Granted) else decision

    patch.setattr(grant, "acquire", acquire)


def nobody_waits_for_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holders.Holders, "refuse_waiting", lambda *_: None)


def threads_are_told_apart_by_ident(patch: pytest.MonkeyPatch) -> None:
    by_ident: dict[int, Holder] = {}

    class ByIdent:
        @property
        def thread(self) -> Holder:
            return by_ident.setdefault(threading.get_ident(), Holder())

    patch.setattr(holders, "_mine", ByIdent())


def unseen_ends_count_from_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grant, "_free_for", lambda *_: grant.FOR_EVER)


def the_dead_go_unrecorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grant, "_expired", lambda row, remaining: grant._happened("lease.heartbeat", row, {}))


def the_living_can_be_reclaimed_from(patch: pytest.MonkeyPatch) -> None:
    original = grant._reclaim
    patch.setattr(grant, "_reclaim", lambda standing, *rest: original(standing._replace(alive={}), *rest))


@pytest.mark.parametrize(
    ("variant", "caught_by"),
    [
        (anyone_may_pass, test_first_come_is_first_served_whoever_looks_first),
        (anyone_may_pass, test_who_does_not_wait_is_refused_while_others_are_ahead_even_when_the_scope_is_free),
        (anyone_may_pass, test_a_free_scope_is_kept_for_its_head_for_50_ms_and_no_longer),
        (nobody_may_pass, test_a_free_scope_is_kept_for_its_head_for_50_ms_and_no_longer),
        (nobody_may_pass, test_each_one_in_front_has_its_50_ms),
        (the_queue_is_not_looked_at, test_first_come_is_first_served_whoever_looks_first),
        (the_newest_ticket_is_first, test_first_come_is_first_served_whoever_looks_first),
        (nobody_is_found_dead, test_the_head_has_the_scope_as_soon_as_the_holder_is_dead),
        (nobody_is_found_dead, test_who_died_is_gone_at_once_and_its_ticket_with_the_next_grant),
        (nobody_is_found_dead, test_a_dead_holder_goes_on_record_once_however_many_look),
        (tickets_live_for_ever, test_who_cannot_be_seen_is_gone_when_its_ticket_s_life_is_over),
        (the_passed_are_not_noted, test_who_was_passed_over_is_not_waited_for_again_while_it_sleeps),
        (the_passed_stay_passed, test_who_was_passed_over_has_its_place_back_when_it_wakes),
        (numbers_begin_again, test_a_ticket_s_number_never_comes_twice),
        (nobody_leaves, test_whose_time_is_over_is_gone),
        (nobody_leaves, test_who_leaves_is_gone),
        (who_is_served_keeps_its_ticket, test_first_come_is_first_served_whoever_looks_first),
        (nobody_waits_for_itself, test_waiting_for_oneself_while_a_slot_is_free_is_no_waiting),
        (
            threads_are_told_apart_by_ident,
            lambda line: test_a_thread_with_a_dead_thread_s_ident_is_another_one(line, by_threading),
        ),
        (unseen_ends_count_from_the_end, test_an_end_that_nobody_saw_counts_from_when_it_is_noticed),
        (the_dead_go_unrecorded, test_the_head_has_the_scope_as_soon_as_the_holder_is_dead),
        (the_living_can_be_reclaimed_from, test_reclaim_is_refused_while_the_earlier_self_s_process_is_alive),
    ],
)
def test_a_broken_variant_is_caught(
    line: Line, monkeypatch: pytest.MonkeyPatch, variant: Variant, caught_by: Callable[[Line], None]
) -> None:
    variant(monkeypatch)
    # A wait that would never end is as good as a failed assertion.
    turned, end = line.clock.sleep, line.clock.now_ticks_ns + 10**12

    def sleep(seconds: float) -> None:
        turned(seconds)
        assert line.clock.now_ticks_ns < end, "it waits for ever"

    line.clock.sleep = sleep
    with pytest.raises((AssertionError, AgentCheckpointError, pytest.fail.Exception)):
        caught_by(line)
