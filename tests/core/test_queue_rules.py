"""Who is next, and what that leaves behind: the rules alone, and a scope that anything may happen to."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from agent_checkpoint import InvalidInputError, Lease, LeaseHeldError, StateStore, leases
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.ledger import tickets as ticket_rows
from agent_checkpoint.names import NS
from agent_checkpoint.records import LeaseRow, LimitRow, Moment, Ticket
from agent_checkpoint.rules import expiry, grant, queue
from agent_checkpoint.rules.decision import Granted, Refused
from agent_checkpoint.testing import FakeClock, FakeProcesses
from agent_checkpoint.waiting import Waiter

WALL = 1_900_000_000 * NS
TICKS = 5_000 * NS
NOW = Moment(WALL, TICKS, "boot-1", True)
TURN = 50_000_000
LIFE = 10 * NS


def ticket(number: int, *, silent: float = 0, passed: int = 0, process: str = "") -> Ticket:
    """One whose waiter said its last word so many seconds ago."""
    since = round(silent * NS)
    return Ticket(
        number, "s", f"w{number}", LIFE, WALL, WALL + LIFE - since, "boot-1", TICKS - since, passed, process, ""
    )


def row(slot: int, token: int, *, state: str = "live", age: float = 0, ttl: float = 30, process: str = "") -> LeaseRow:
    """A lease that was renewed, or ended, so many seconds ago."""
    since, lasts = round(age * NS), round(ttl * NS)
    times = (WALL - since, WALL - since, WALL - since + lasts)
    return LeaseRow("s", slot, f"h{token}", token, state, lasts, *times, "boot-1", TICKS - since, "{}", process)  # type: ignore[arg-type]


def ask(ticket: int = 0, **more: Any) -> grant.Ask:
    return grant.Ask("s", "asker", 30 * NS, "{}", False, ticket=ticket, **more)


def limited(limit: int | None) -> LimitRow | None:
    """A limit that was set long ago."""
    return None if limit is None else LimitRow(limit, "boot-1", 0)


def decide(rows: list[LeaseRow], limit: int | None = None, tickets: tuple[Ticket, ...] = (), **more: Any) -> Any:
    alive = more.pop("alive", {})
    return grant.acquire(grant.Standing(rows, limited(limit), tickets, alive), ask(**more), NOW)


# The queue.


def test_nobody_is_ahead_of_the_first_and_everybody_of_who_has_no_ticket() -> None:
    line = [ticket(3), ticket(5), ticket(9)]
    assert queue.look(line, 3, NOW, {}) == ((), ())
    assert queue.look(line, 5, NOW, {}) == ((3,), ())
    assert queue.look(line, 0, NOW, {}) == ((3, 5, 9), ())


def test_whoever_is_silent_dead_or_passed_over_is_not_waited_for() -> None:
    line = [ticket(1, silent=10), ticket(2, process="dead"), ticket(3, passed=1), ticket(4, process="unknown")]
    assert queue.look(line, 0, NOW, {"dead": False, "unknown": None}) == ((4,), (1, 2))
    assert queue.look([ticket(1, silent=9.999)], 0, NOW, {}) == ((1,), ())


def test_a_ticket_of_another_boot_of_the_only_kernel_is_gone() -> None:
    assert queue.look([ticket(1)._replace(domain="boot-0")], 0, NOW, {}) == ((), (1,))


def test_a_ticket_from_before_the_wall_clock_was_set_back_keeps_nobody_waiting() -> None:
    unknown = NOW._replace(domain="", wall_ns=WALL - 3_600 * NS)
    assert queue.look([ticket(1)], 2, unknown, {}) == ((), (1,))
    # A step that is noise costs nobody its place.
    assert queue.look([ticket(1)], 2, NOW._replace(domain="", wall_ns=WALL - NS), {}) == ((1,), ())
    # Where ticks decide, the wall clock does not.
    assert queue.look([ticket(1)], 2, NOW._replace(wall_ns=WALL - 3_600 * NS), {}) == ((1,), ())


def test_the_queue_has_50_ms_for_each_in_front() -> None:
    assert queue.may_pass(0, 0)
    assert not queue.may_pass(1, TURN - 1)
    assert queue.may_pass(1, TURN)
    assert not queue.may_pass(3, 3 * TURN - 1)
    assert queue.may_pass(3, 3 * TURN)


tickets_ = st.lists(
    st.builds(
        ticket,
        st.integers(1, 30),
        silent=st.sampled_from([0, 5, 9.9, 10, 11]),
        passed=st.integers(0, 1),
        process=st.sampled_from(["", "alive", "dead", "unknown"]),
    ),
    unique_by=lambda each: each.number,
).map(lambda line: sorted(line, key=lambda each: each.number))
ALIVE = {"alive": True, "dead": False, "unknown": None}


@given(st.data(), tickets_)
def test_who_is_ahead_is_alive_awake_and_came_earlier(data: st.DataObject, line: list[Ticket]) -> None:
    mine = data.draw(st.sampled_from([0, *(each.number for each in line)]))
    found = queue.look(line, mine, NOW, ALIVE)
    by_number = {each.number: each for each in line}
    kept = mine in by_number and TICKS - by_number[mine].beat_ticks < LIFE
    assert not set(found.ahead) & set(found.gone)
    assert mine not in {*found.ahead, *found.gone}
    for number, each in by_number.items():
        over = TICKS - each.beat_ticks >= LIFE or each.process == "dead"
        assert (number in found.gone) == (over and number != mine)
        waits = not over and not each.passed and number != mine and (number < mine or not kept)
        assert (number in found.ahead) == waits


# The grant.


def test_the_head_has_a_free_slot_to_the_nanosecond_for_50_ms() -> None:
    free = [row(0, 7, state="released", age=(TURN - 1) / NS)]
    line = (ticket(1), ticket(2))
    assert isinstance(decide(free, tickets=line, ticket=2), Refused)
    assert isinstance(decide(free, tickets=line, ticket=1), Granted)

    free = [row(0, 7, state="released", age=TURN / NS)]
    granted = decide(free, tickets=line, ticket=2)
    assert (granted.row.token, granted.passed, granted.gone) == (8, (1,), (2,))


def test_an_end_that_is_not_on_record_has_only_just_been_noticed() -> None:
    for over, alive in ((row(0, 7, age=60), {}), (row(0, 7, process="p"), {"p": False})):
        refused = decide([over], tickets=(ticket(1), ticket(2)), ticket=2, alive=alive)
        assert isinstance(refused, Refused)
        (noted,) = refused.rows
        assert (noted.state, noted.token, noted.beat_ticks) == ("expired", 7, TICKS)
        assert [event.kind for event in refused.events] == ["lease.expired"]
        assert refused.events[0].detail == {"reason": "owner-dead" if alive else "ttl"}


def test_an_end_by_another_clock_keeps_the_head_s_turn() -> None:
    long_ago = row(0, 7, state="released", age=60)._replace(domain="boot-0")
    assert isinstance(decide([long_ago], tickets=(ticket(1),), ticket=2), Refused)


def test_a_grant_removes_the_tickets_of_the_dead_and_one_s_own() -> None:
    line = (ticket(1, process="dead"), ticket(2), ticket(3, silent=11))
    granted = decide([], tickets=line, ticket=2, alive={"dead": False})
    assert (granted.gone, granted.passed) == ((1, 3, 2), ())


slots = st.lists(
    st.builds(
        row,
        st.integers(0, 5),
        st.integers(1, 2**40),
        state=st.sampled_from(["live", "live", "live", "released", "expired", "force-released"]),
        age=st.floats(0, 60),
        process=st.sampled_from(["", "alive", "dead", "unknown"]),
    ),
    unique_by=(lambda each: each.slot, lambda each: each.token),
    max_size=6,
).map(lambda rows: sorted(rows, key=lambda each: each.slot))


@given(st.data(), slots, st.sampled_from([None, 1, 2, 3, 4, 5]), tickets_)
def test_a_grant_takes_the_lowest_free_slot_and_the_next_token_and_leaves_its_events(
    data: st.DataObject, rows: list[LeaseRow], limit: int | None, line: list[Ticket]
) -> None:
    mine = data.draw(st.sampled_from([0, *(each.number for each in line)]))
    live = [
        each
        for each in rows
        if each.state == "live" and each.process != "dead" and TICKS - each.beat_ticks < each.ttl_ns
    ]
    over = [each for each in rows if each.state == "live" and each not in live]
    decision = grant.acquire(grant.Standing(rows, limited(limit), line, ALIVE), ask(mine), NOW)
    ahead = queue.look(line, mine, NOW, ALIVE).ahead

    if isinstance(decision, Refused):
        assert isinstance(decision.error, LeaseHeldError)
        assert len(live) >= (limit or 1) or ahead
        assert decision.error.position == len(ahead) + 1
        assert [(each.slot, each.state) for each in decision.rows] == [
            (each.slot, "expired") for each in over if len(live) < (limit or 1)
        ]
        assert [event.token for event in decision.events] == [each.token for each in decision.rows]
        return
    assert len(live) < (limit or 1)
    taken = {each.slot for each in live}
    assert decision.row.slot == min(set(range(7)) - taken)
    assert decision.row.token == max([each.token for each in rows], default=0) + 1
    replaced = [each.token for each in over if each.slot == decision.row.slot]
    assert [(event.kind, event.token) for event in decision.events] == [
        *(("lease.expired", token) for token in replaced),
        ("lease.acquired", decision.row.token),
    ]


# A scope that anything may happen to.


class World:
    """One store for all that is tried: each try has a scope of its own."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.processes = FakeProcesses()
        self.store = StateStore(path, synchronous="normal", clock=self.clock, processes=self.processes)
        self.store.initialize()
        self.numbers = itertools.count(1)
        self.pids = itertools.count(1_000_001)
        self.highest_ticket = 0

    def begin(self) -> int:
        pid = next(self.pids)
        self.processes.start(pid)
        return pid

    @contextmanager
    def acting_as(self, pid: int) -> Iterator[None]:
        own, self.processes.pid = self.processes.pid, pid
        try:
            yield
        finally:
            self.processes.pid = own


class Held:
    """A lease as the model knows it; ``end`` is when nobody renews it."""

    def __init__(self, lease: Lease, pid: int | None, now: int) -> None:
        self.lease = lease
        self.pid = pid
        self.end = now + lease.row.ttl_ns
        self.dead = False

    def lives(self, now: int) -> bool:
        return not self.dead and now < self.end


class Task:
    """Who waits."""


class Queued:
    """A waiter as the model knows it."""

    def __init__(self, world: World, scope: str, owner: str, ttl: float) -> None:
        self.pid = world.begin()
        self.task = Task()
        self.owner = owner
        asked = leases.valid_ask(scope, owner, ttl, None)
        self.waiter: Waiter = world.store._waiter(asked, math.inf, self.task)
        self.asleep_since = world.clock.now_ticks_ns
        self.passed = False

    @property
    def number(self) -> int:
        return self.waiter._ask.ticket


class Scope(RuleBasedStateMachine):
    """What may happen to a scope in any order, and what must be true whatever did."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.store, self.clock = world, world.store, world.clock
        self.scope = f"scope-{next(world.numbers)}"
        self.limit: int | None = None
        self.token = 0
        self.held: list[Held] = []
        self.waiting: list[Queued] = []
        self.free_since = self.now
        self.limits_set = 0

    @property
    def now(self) -> int:
        return self.clock.now_ticks_ns

    def live(self, at: int | None = None) -> list[Held]:
        return [each for each in self.held if each.lives(self.now if at is None else at)]

    @property
    def most(self) -> int:
        return self.limit or 1

    def changed(self, was_full: bool, at: int | None = None) -> None:
        """Note since when there has been a free slot."""
        if was_full and len(self.live()) < self.most:
            self.free_since = self.now if at is None else at

    def ahead(self, number: int) -> list[Queued]:
        """Who is known to wait and to be awake, or not to have been passed over yet."""
        rows = {each.number: each for each in self.tickets()}
        return [
            each
            for each in self.waiting
            if each.number in rows
            and not each.passed
            and self.now - rows[each.number].beat_ticks < LIFE
            and (number == 0 or each.number < number)
        ]

    def tickets(self) -> list[Ticket]:
        with self.store.read() as reader:
            return ticket_rows.of_scope(reader, self.scope)

    def granted(self, lease: Lease, ahead: list[Queued], pid: int | None) -> None:
        """A grant, judged by the model as it was before."""
        live = self.live()
        free = self.most - len(live)
        assert free > 0, f"slot {lease.slot} was granted beside {len(live)} others, the limit is {self.most}"
        assert lease.slot == min(set(range(len(live) + 1)) - {each.lease.slot for each in live})
        assert lease.token == self.token + 1
        idle = self.now - self.free_since
        if len(ahead) >= free:
            assert idle >= TURN * len(ahead), f"{lease.owner} overtook {[each.owner for each in ahead]} after {idle} ns"
            for each in ahead:
                each.passed = True
        self.token = lease.token
        self.held = [each for each in self.held if each.lease.slot != lease.slot]
        self.held.append(Held(lease, pid, self.now))

    def ask(self, owner: str, ttl: float, pid: int | None, **options: Any) -> None:
        ahead = self.ahead(0)
        full = len(self.live()) >= self.most
        try:
            lease = self.store.acquire(self.scope, owner, ttl, pid=pid, **options)
        except LeaseHeldError as error:
            told_free = error.owner is None
        else:
            told_free = None
        if told_free is not None:
            assert full or ahead, "a free scope was refused though nobody waits"
            assert told_free == (not full)
            return
        if options.get("limit") and self.limit is None and self.token == 0:
            self.limit = options["limit"]
            self.limits_set += self.limit > 1
        self.granted(lease, ahead, pid)

    @rule(owner=st.sampled_from("ab"), ttl=st.sampled_from([0.1, 1, 20, 600]), bound=st.booleans(), told=st.booleans())
    def somebody_asks(self, owner: str, ttl: float, bound: bool, told: bool) -> None:
        pid = self.world.begin() if bound else None
        self.ask(owner, ttl, pid, limit=self.most if told else None)

    @precondition(lambda self: self.token == 0 and self.limit is None)
    @rule(limit=st.integers(1, 4))
    def the_first_one_fixes_the_limit(self, limit: int) -> None:
        self.ask("a", 600, None, limit=limit)

    @precondition(lambda self: self.token)
    @rule(limit=st.integers(1, 5))
    def somebody_asks_for_another_limit(self, limit: int) -> None:
        if limit == self.most:
            return
        with pytest.raises(InvalidInputError):
            self.store.acquire(self.scope, "c", limit=limit)

    @rule(owner=st.sampled_from("ab"))
    def somebody_reclaims(self, owner: str) -> None:
        if self.most > 1:
            with pytest.raises(InvalidInputError):
                self.store.acquire(self.scope, owner, reclaim=True)
            return
        if len(self.live()) > 1:
            return  # left over from a higher limit
        mine = [each for each in self.live() if each.lease.owner == owner]
        if not mine:
            self.ask(owner, 600, None, reclaim=True)
            return
        (earlier,) = mine
        try:
            lease = self.store.acquire(self.scope, owner, 600, reclaim=True)
        except LeaseHeldError:
            assert earlier.pid is not None
            assert self.world.processes.stat(earlier.pid) is not None, "refused, though nobody knows that it lives"
            return
        assert earlier.pid is None or self.world.processes.stat(earlier.pid) is None
        assert (lease.slot, lease.token) == (earlier.lease.slot, self.token + 1)
        self.token = lease.token
        self.held.remove(earlier)
        self.held.append(Held(lease, None, self.now))

    @rule(owner=st.sampled_from("vw"), ttl=st.sampled_from([1, 20, 600]))
    def somebody_queues_up(self, owner: str, ttl: float) -> None:
        person = Queued(self.world, self.scope, owner, ttl)
        self.waiting.append(person)
        self.looks(person)

    def looks(self, person: Queued) -> bool:
        number = person.number
        # Who slept through the life of its ticket has lost its place, though the row may be there still.
        had_life = any(each.number == number and self.now - each.beat_ticks < LIFE for each in self.tickets())
        ahead = self.ahead(number if had_life else 0)
        with self.world.acting_as(person.pid):
            found = person.waiter.step()
        if not isinstance(found, float):
            self.waiting.remove(person)
            self.granted(found, [each for each in ahead if each is not person], None)
            return True
        person.passed = False
        person.asleep_since = self.now
        if person.number != number:
            assert person.number > self.world.highest_ticket, "a ticket's number came twice"
            self.world.highest_ticket = person.number
        return False

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiter_looks(self, data: st.DataObject) -> None:
        self.looks(data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiter_leaves(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.waiting))
        number = person.number
        with self.world.acting_as(person.pid):
            person.waiter.leave()
        self.waiting.remove(person)
        assert number not in {each.number for each in self.tickets()}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiter_dies(self, data: st.DataObject) -> None:
        person = data.draw(st.sampled_from(self.waiting))
        self.world.processes.kill(person.pid)
        self.waiting.remove(person)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiter_cannot_be_seen_any_more(self, data: st.DataObject) -> None:
        self.world.processes.hide(data.draw(st.sampled_from(self.waiting)).pid)

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.05, 0.05, 0.1, 0.3, 1, 4, 11, 25]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        was_full, ends = len(self.live()) >= self.most, sorted(each.end for each in self.live())
        self.clock.advance(seconds)
        over = [end for end in ends if end <= self.now and len(self.live(end)) < self.most]
        self.changed(was_full, over[0] if over else None)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), how=st.sampled_from(["release", "release", "force", "beat"]))
    def a_lease_is_ended_or_renewed(self, data: st.DataObject, how: str) -> None:
        mine = data.draw(st.sampled_from(self.live()))
        was_full = len(self.live()) >= self.most
        if how == "beat":
            self.store.heartbeat(*mine.lease.fence)
            mine.end = self.now + mine.lease.row.ttl_ns
            return
        if how == "release":
            self.store.release(*mine.lease.fence)
        else:
            self.store.force_release(self.scope, reason="test", token=mine.lease.token)
        self.held.remove(mine)
        self.changed(was_full)

    @precondition(lambda self: any(each.pid for each in self.live()))
    @rule(data=st.data(), again=st.booleans())
    def a_holder_dies(self, data: st.DataObject, again: bool) -> None:
        mine = data.draw(st.sampled_from([each for each in self.live() if each.pid]))
        was_full = len(self.live()) >= self.most
        assert mine.pid is not None
        (self.world.processes.recycle if again else self.world.processes.kill)(mine.pid)
        mine.dead = True
        self.changed(was_full)

    @precondition(lambda self: any(each.pid for each in self.live()))
    @rule(data=st.data())
    def a_holder_cannot_be_seen_any_more(self, data: st.DataObject) -> None:
        mine = data.draw(st.sampled_from([each for each in self.live() if each.pid]))
        self.world.processes.hide(mine.pid)

    @rule(limit=st.integers(1, 4))
    def the_limit_is_set(self, limit: int) -> None:
        was_full = len(self.live()) >= self.most
        self.limits_set += limit != self.most
        assert self.store.set_limit(self.scope, limit) == (self.scope, limit, self.most)
        self.limit = limit
        self.changed(was_full)

    @rule()
    def somebody_sweeps(self) -> None:
        for lease in self.store.sweep():
            if lease.scope == self.scope:
                assert lease.token not in {each.lease.token for each in self.live()}
        assert not any(lease.scope == self.scope for lease in self.store.sweep())

    @invariant()
    def the_live_leases_are_those_of_the_model(self) -> None:
        with self.store.read() as reader:
            rows = lease_rows.of_scope(reader, self.scope)
        recorded = {each.token for each in rows if each.state == "live"}
        assert {each.lease.token for each in self.live()} <= recorded
        assert len({each.slot for each in rows}) == len(rows)

    @invariant()
    def who_is_awake_has_its_ticket(self) -> None:
        numbers = {each.number for each in self.tickets()}
        for each in self.waiting:
            if self.now - each.asleep_since < LIFE * 2 // 3:
                assert each.number in numbers

    def teardown(self) -> None:
        self._everybody_is_served()
        self._each_change_has_its_event()

    def _everybody_is_served(self) -> None:
        """Holders come to their end, waiters look: everybody has its turn, and nobody is left in the table."""
        for _ in range(200):
            if not self.waiting:
                break
            self.pass_time(0.1)
            for mine in self.live():
                was_full = len(self.live()) >= self.most
                self.store.release(*mine.lease.fence)
                self.held.remove(mine)
                self.changed(was_full)
            for person in sorted(self.waiting, key=lambda each: -each.number):
                self.looks(person)
        assert not self.waiting, f"{len(self.waiting)} wait for ever"

    def _each_change_has_its_event(self) -> None:
        """Told again by the log, the scope comes to where it is."""
        self.store.sweep()
        told: dict[int, int] = {}
        owners: dict[int, str | None] = {}
        last = sets = 0
        for event in self.store.events(limit=1_000_000, scope=self.scope):
            if event.kind == "lease.limit-set":
                sets += 1
                continue
            assert event.token is not None
            if event.kind == "lease.acquired":
                assert event.detail["slot"] not in told, "a slot was granted before its lease had ended"
                assert event.token == last + 1
                last = event.token
                told[event.detail["slot"]] = event.token
            elif event.kind == "lease.reclaimed":
                assert owners[told[event.detail["slot"]]] == event.owner
                assert event.token == last + 1
                last = event.token
                told[event.detail["slot"]] = event.token
            elif event.kind != "lease.heartbeat":
                assert event.kind in ("lease.released", "lease.expired", "lease.force-released")
                (slot,) = (slot for slot, token in told.items() if token == event.token)
                del told[slot]
            owners[event.token] = event.owner
        assert sets == self.limits_set
        assert set(told.values()) == {each.lease.token for each in self.live()}
        assert last == self.token
        for each in self.live():
            self.store.release(*each.lease.fence)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


@contextmanager
def a_world() -> Iterator[World]:
    """In memory, where there is some: what is tested is not the disk."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        made = World(Path(folder) / "agents.db")
        yield made
        made.store.close()


CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def anything_may_happen(world: World, examples: int, steps: int = 40, **more: Any) -> None:
    run_state_machine_as_test(
        lambda: Scope(world),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=CALM, **more
        ),
    )


def test_whatever_happens_to_a_scope_its_promises_hold(world: World) -> None:
    anything_may_happen(world, 30, 30)


@pytest.mark.long
def test_whatever_happens_to_a_scope_its_promises_hold_for_long(world: World) -> None:
    anything_may_happen(world, 2_000, 60)


# Broken on purpose: the promises are caught when they do not hold.


def anyone_may_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "may_pass", lambda *_: True)


def nobody_is_found_dead(patch: pytest.MonkeyPatch) -> None:
    def left(row: LeaseRow, moment: Moment, alive: object) -> expiry.Remaining:
        return expiry.remaining(row, moment)

    for module in (expiry, grant, queue):
        patch.setattr(module, "left", left)


def a_free_slot_is_always_old(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grant, "_free_for", lambda *_: grant.FOR_EVER)


def the_next_slot_is_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(grant, "_lowest_free", len)


def one_more_is_let_in(patch: pytest.MonkeyPatch) -> None:
    original = grant._limit

    def limit(*given: Any) -> tuple[int, bool]:
        found, changed = original(*given)
        return found + (found > 1), changed

    patch.setattr(grant, "_limit", limit)


def tokens_count_in_their_slot(patch: pytest.MonkeyPatch) -> None:
    original = grant._grant
    patch.setattr(
        grant,
        "_grant",
        lambda rows, slot, *rest: original([each for each in rows if each.slot == slot], slot, *rest),
    )


def ends_are_told_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(expiry, "ended", lambda row, *_: row)
    patch.setattr(grant, "ended", lambda row, *_: row)


def numbers_begin_again(patch: pytest.MonkeyPatch) -> None:
    again = ticket_rows.ADD.replace("(scope, owner", "(number, scope, owner").replace(
        "VALUES (?", "VALUES ((SELECT COALESCE(MAX(number), 0) + 1 FROM tickets), ?"
    )
    patch.setattr(ticket_rows, "ADD", again)


VARIANTS = [
    anyone_may_pass,
    nobody_is_found_dead,
    a_free_slot_is_always_old,
    the_next_slot_is_counted,
    one_more_is_let_in,
    tokens_count_in_their_slot,
    ends_are_told_twice,
    numbers_begin_again,
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_broken_variant_is_caught(
    monkeypatch: pytest.MonkeyPatch, variant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    variant(monkeypatch)
    once = {"phases": [Phase.generate], "derandomize": True, "database": None, "report_multiple_bugs": False}
    with a_world() as world, pytest.raises(Exception):  # noqa: B017, PT011 -- whatever it is that breaks
        anything_may_happen(world, 400, **once)
