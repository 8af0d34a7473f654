"""What holding a lease promises, on every database.

Time is turned by hand, and the threads of the store follow it: each test turns
it, then waits until what must have come of it has come.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from tests import watching
from tests.watching import wait_until

from agent_checkpoint import (
    FencedWrite,
    HeldLease,
    InvalidInputError,
    LeaseHeldError,
    ReentrancyError,
    StaleLeaseError,
    StateStore,
    WaitTimeoutError,
    heart,
    holding,
)
from agent_checkpoint.holding import Hold
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

# Only what never comes reaches it.
LONG = 30.0


def kinds(store: StateStore, **filters: str) -> list[str]:
    return [event.kind for event in store.events(**filters)]  # type: ignore[arg-type]


def elsewhere(call: Callable[[], Any]) -> Any:
    """Call it in another thread: who holds a scope itself does not wait for it."""
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(call()))
    caller.start()
    caller.join()
    return answers[0]


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"agent-checkpoint-{name}"]


def margin(ttl: float) -> float:
    """The rule, said once more: the holder's deadline is before the store's by a twentieth, at least 50 ms."""
    return max(0.05, ttl / 20)


def renewed(clock: FakeClock, seconds: float, *held: HeldLease) -> None:
    """Let time pass, until each lease was renewed at the end of it."""
    clock.advance(seconds)
    now = clock.ticks_ns()
    whole = [now + round((each.lease.ttl_seconds - margin(each.lease.ttl_seconds)) * NS) for each in held]
    wait_until(lambda: [each.deadline_ns for each in held] == whole)


def a_beat_passes(store: StateStore, clock: FakeClock) -> None:
    """Let the heart of the store beat once more: for another lease, which is short."""
    with store.hold("pacemaker", "test", 0.3) as pacemaker:
        renewed(clock, 0.1, pacemaker)


def waiting(store: StateStore) -> int:
    """How many tickets there are, whatever became of who holds them."""
    with store.read() as reader:
        return int(reader.rows("SELECT COUNT(*) FROM tickets")[0][0])


@contextmanager
def to_be_lost(block: Hold) -> Iterator[HeldLease]:
    """A block whose lease is lost at its end."""
    with pytest.raises(StaleLeaseError), block as held:
        yield held


class Heard:
    """An ``on_lost`` that notes what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, str]] = []

    def __call__(self, held: Any, reason: str) -> None:
        self.calls.append((held, reason))

    @property
    def reasons(self) -> list[str]:
        """All of them, once nobody is about to call."""
        wait_until(lambda: self.calls and not threads("lost"))
        return [reason for _, reason in self.calls]


@pytest.fixture(autouse=True)
def no_thread_stays(clock: FakeClock) -> Iterator[None]:
    """Whatever a test left held: once its time is over, and a little more, no thread works for it."""
    before = set(threading.enumerate())
    yield

    def over() -> bool:
        clock.advance(40 * 86_400)
        return not [
            thread
            for thread in (*threads("heartbeat"), *threads("deadline"), *threads("lost"))
            if thread not in before and thread.is_alive()
        ]

    wait_until(over)


# The block


def test_a_block_holds_the_lease_and_gives_it_back(store: StateStore) -> None:
    with store.hold("release", "worker-a", 30, metadata={"host": "build-7"}) as held:
        assert isinstance(held, HeldLease)
        assert (held.scope, held.slot, held.owner, held.token) == ("release", 0, "worker-a", 1)
        assert held.fence == held.lease.fence == ("release", "worker-a", 1)
        assert held.lease.metadata == {"host": "build-7"}
        assert (held.lost.is_set(), held.lost_reason, held.heartbeat_gap) == (False, None, 0.0)
        assert isinstance(held.lost, threading.Event)
        found = store.get_lease("release")
        assert found is not None
        assert found.process is not None
        # Of another machine's processes nobody can know.
        alive = None if "://" in store.database else True
        assert (found.process["pid"], found.owner_alive) == (os.getpid(), alive)
        assert held.check() == found
        with pytest.raises(LeaseHeldError):
            store.acquire("release", "worker-b")

    assert store.get_lease("release") is None
    assert kinds(store, scope="release") == ["lease.acquired", "lease.released"]
    assert not held.lost.is_set()


def test_a_scope_that_is_held_is_refused_at_the_start_of_the_block(store: StateStore) -> None:
    store.acquire("release", "worker-a", 600)
    entered = False

    with pytest.raises(LeaseHeldError) as refused, store.hold("release", "worker-b"):
        entered = True

    assert not entered
    assert not isinstance(refused.value, WaitTimeoutError)
    assert refused.value.owner == "worker-a"


def test_a_block_may_wait_for_its_lease(store: StateStore) -> None:
    elsewhere(lambda: store.acquire("release", "worker-a", 3))

    with store.hold("release", "worker-b", 30, wait_seconds=10) as held:
        assert held.token == 2
        assert held.remaining() == pytest.approx(28.5)
    assert waiting(store) == 0


def test_a_block_waits_no_longer_than_it_was_told(store: StateStore) -> None:
    elsewhere(lambda: store.acquire("release", "worker-a", 600))

    with pytest.raises(WaitTimeoutError) as refused, store.hold("release", "worker-b", 30, wait_seconds=5):
        raise AssertionError("entered")

    assert refused.value.waited_seconds == pytest.approx(5, abs=0.1)
    assert waiting(store) == 0


def test_a_thread_does_not_wait_for_what_it_holds_itself(store: StateStore) -> None:
    with store.hold("release", "worker-a"):
        with pytest.raises(ReentrancyError), store.hold("release", "worker-b", wait_seconds=5):
            raise AssertionError("entered")
        with pytest.raises(ReentrancyError):
            store.acquire("release", "worker-b", wait_seconds=5)
    with store.hold("release", "worker-a", wait_seconds=5):
        pass
    assert waiting(store) == 0


def test_a_scope_with_a_limit_is_held_as_often(store: StateStore) -> None:
    with ExitStack() as block:
        held = [block.enter_context(store.hold("pool", "worker-a", limit=3)) for _ in range(3)]
        assert [(each.slot, each.token) for each in held] == [(0, 1), (1, 2), (2, 3)]
        with pytest.raises(LeaseHeldError), store.hold("pool", "worker-a", limit=3):
            raise AssertionError("entered")
        for each in held:
            assert each.check().slot == each.slot
    assert store.list_leases() == []


def test_one_hold_serves_one_block_after_another_and_none_beside(store: StateStore) -> None:
    again = store.hold("pool", "worker-a", limit=2)
    tokens = []
    for _ in range(3):
        with again as held:
            tokens.append(held.token)
            with pytest.raises(ReentrancyError), again:
                raise AssertionError("entered")
            assert held.check().token == held.token
    assert tokens == [1, 2, 3]
    assert store.list_leases() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scope", ""),
        ("owner", "a\nb"),
        *(("ttl_seconds", value) for value in (0, 0.05, -1, True, float("nan"), float("inf"), "30", None)),
        *(("wait_seconds", value) for value in (-1, True, float("nan"), "1", None)),
        *(("limit", value) for value in (0, -1, True, 1.5, "2")),
        *(("metadata", value) for value in ([1], "text", {"x": float("nan")})),
        *(("max_lifetime_seconds", value) for value in (0, -1, True, float("nan"), float("inf"), "30")),
    ],
)
def test_a_value_that_breaks_its_rule_is_refused_where_it_is_given(store: StateStore, field: str, value: Any) -> None:
    arguments = {"scope": "release", "owner": "worker-a", field: value}
    with pytest.raises(InvalidInputError) as refused:
        store.hold(**arguments)
    assert refused.value.field == field
    assert store.list_leases(include_expired=True) == []


def test_another_limit_than_the_scope_s_is_refused(store: StateStore) -> None:
    store.release(*store.acquire("pool", "worker-a", limit=2).fence)
    with pytest.raises(InvalidInputError) as refused, store.hold("pool", "worker-a", limit=3):
        raise AssertionError("entered")
    assert refused.value.field == "limit"


def test_the_body_s_exception_is_the_block_s_and_the_lease_is_given_back(store: StateStore) -> None:
    with pytest.raises(ZeroDivisionError), store.hold("release", "worker-a"):
        _ = 1 / 0
    assert kinds(store, scope="release") == ["lease.acquired", "lease.released"]


def test_a_write_that_presents_what_is_held_is_protected(store: StateStore) -> None:
    with store.hold("release", "worker-a") as held:
        assert store.put_checkpoint("deploy", 1, lease=held).token == 1
        assert store.put_checkpoint("deploy", 2, lease=held.fence).token == 1
        assert store.put_checkpoint("deploy", 3, lease=held.lease).token == 1
        (outcome,) = store.write_all([FencedWrite("tests", "test.write", lambda part: "done", held)])
        assert (outcome.answer, outcome.error) == ("done", None)
        with store.transaction(component="tests", action="test.write", fence=held):
            pass
    with pytest.raises(StaleLeaseError) as stale:
        store.put_checkpoint("deploy", 4, lease=held)
    assert stale.value.reason == "released"
    assert len(store.checkpoint_history("deploy")) == 3


# Renewal


def test_a_held_lease_is_renewed_every_third_of_its_ttl(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        for third in range(1, 13):
            clock.advance(9.8)
            a_beat_passes(store, clock)
            assert held.check().heartbeat_at - held.lease.acquired_at == timedelta(seconds=10 * (third - 1))
            renewed(clock, 0.1, held)
            found = held.check()
            assert found.heartbeat_at - found.acquired_at == timedelta(seconds=10 * third)
            assert (found.token, found.remaining_seconds) == (1, 30.0)
        assert held.heartbeat_gap == pytest.approx(10)


def test_a_renewal_keeps_the_length_and_what_came_with_the_grant(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 45, metadata={"host": "build-7"}) as held:
        renewed(clock, 15, held)
        found = held.check()
        assert (found.ttl_seconds, found.metadata) == (45.0, {"host": "build-7"})
        assert found.process == held.lease.process


def test_leases_of_every_length_are_renewed_each_in_its_own_time(store: StateStore, clock: FakeClock) -> None:
    with ExitStack() as block:
        short, middle, long = [
            block.enter_context(store.hold(f"scope-{ttl}", "worker-a", ttl)) for ttl in (0.9, 30, 3600)
        ]
        for _ in range(34):
            renewed(clock, 0.3, short)
        wait_until(lambda: middle.remaining() > 28)
        assert long.remaining() == pytest.approx(3600 - 180 - 34 * 0.3)
        assert [each.lost.is_set() for each in (short, middle, long)] == [False] * 3


# The deadline


@pytest.mark.parametrize("ttl", [0.1, 0.5, 1, 3, 30, 600, 30 * 86_400])
def test_the_holder_s_deadline_is_before_the_store_s_by_the_margin(
    store: StateStore, clock: FakeClock, ttl: float
) -> None:
    with store.hold("release", "worker-a", ttl) as held:
        assert held.deadline_ns - clock.ticks_ns() == round((ttl - margin(ttl)) * NS)
        assert held.remaining() == pytest.approx(ttl - margin(ttl))
        renewed(clock, ttl / 3 + 1e-6, held)
        assert held.remaining() == pytest.approx(ttl - margin(ttl))


def test_the_deadline_counts_from_before_the_request_that_granted(store: StateStore, clock: FakeClock) -> None:
    wall_ns = clock.wall_ns

    def slow() -> int:
        clock.now_ticks_ns += 2 * NS  # the store reads the clock late: it waited for a lock
        return wall_ns()

    before = clock.ticks_ns()
    clock.wall_ns = slow
    block = store.hold("release", "worker-a", 30)
    held = block.__enter__()
    clock.wall_ns = wall_ns

    assert held.lease.row.beat_ticks > before
    assert held.deadline_ns == before + round(28.5 * NS)
    block.__exit__(None, None, None)


def test_the_deadline_counts_from_before_the_request_that_extended(store: StateStore, clock: FakeClock) -> None:
    with store.hold("release", "worker-a", 30) as held:
        wall_ns, granted = clock.wall_ns, held.deadline_ns

        def slow() -> int:
            clock.now_ticks_ns += 2 * NS
            return wall_ns()

        clock.wall_ns = slow
        clock.advance(10)
        wait_until(lambda: held.deadline_ns != granted)
        clock.wall_ns = wall_ns
        assert held.deadline_ns == granted + 10 * NS
        assert clock.ticks_ns() > granted - round(28.5 * NS) + 10 * NS


def test_a_lease_that_nobody_renewed_is_lost_while_the_store_would_still_say_live(
    store: StateStore, clock: FakeClock
) -> None:
    heard = Heard()
    with pytest.raises(StaleLeaseError) as at_the_end, store.hold("release", "worker-a", 30, on_lost=heard) as held:
        clock.advance(28.6)  # in one step: as if the process had been frozen
        assert held.lost.wait(LONG)
        assert (held.lost_reason, held.remaining()) == ("expired", 0.0)
        assert store.check_lease(*held.fence).remaining_seconds == pytest.approx(1.4)
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
    assert heard.reasons == ["expired"]
    assert heard.calls[0][0] is held
    for error in (stale.value, at_the_end.value):
        assert (error.reason, error.scope, error.owner, error.token) == ("expired", "release", "worker-a", 1)
        assert error.heartbeat_gap == error.facts["heartbeat_gap"] == held.heartbeat_gap == pytest.approx(28.6)
        assert "28.6 s" in str(error)
    # The store still had it: leaving the block gave it back.
    assert kinds(store, scope="release") == ["lease.acquired", "lease.released"]


def test_check_judges_by_the_deadline_before_it_asks_the_store(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        wait_until(lambda: len(clock._waiting) == 2)
        for sleeper in list(clock._waiting):
            with sleeper:  # the heart's threads are asleep: whoever is about to be has this lock
                pass
        clock.now_ticks_ns += round(28.5 * NS) - 1  # nobody is woken up
        held.check()
        clock.now_ticks_ns += 1
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
        assert stale.value.reason == "expired"
        assert held.lost.is_set()
        assert store.check_lease(*held.fence).token == 1


def test_a_lost_lease_is_lost_for_good(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        clock.advance(28.6)
        assert held.lost.wait(LONG)
        for _ in range(5):
            a_beat_passes(store, clock)
            with pytest.raises(StaleLeaseError):
                held.check()
            assert store.check_lease(*held.fence).heartbeat_at == held.lease.heartbeat_at
        # Not even somebody who extends it on purpose brings it back.
        store.heartbeat(*held.fence)
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
        assert (stale.value.reason, held.lost_reason, held.remaining()) == ("expired", "expired", 0.0)


def test_a_lease_whose_renewal_could_not_start_in_time_is_not_extended_after_it_is_lost(
    store: StateStore, clock: FakeClock
) -> None:
    """The request waits in front of a transaction of somebody else, past the deadline, not past the ttl."""
    inside, go_on = threading.Event(), threading.Event()

    def sit() -> None:
        with store.transaction(component="tests", action="test.write", locks=("scope:release",)):
            inside.set()
            assert go_on.wait(LONG)

    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        extended: list[int] = []
        held.on_extended(extended.append)
        granted = held.lease.row.beat_ticks
        sitter = threading.Thread(target=sit)
        sitter.start()
        assert inside.wait(LONG)
        clock.advance(10)
        time.sleep(0.1)  # until the heartbeat waits for the lock; too short, this test proves less
        clock.advance(18.6)
        assert held.lost.wait(LONG)
        go_on.set()
        sitter.join()
        a_beat_passes(store, clock)

        found = store.get_lease("release", include_expired=True)
        assert found is not None
        assert found.row.beat_ticks == granted
        assert (extended, held.remaining()) == ([], 0.0)


def test_a_lease_that_was_given_another_length_is_still_lost_to_its_holder_first(
    store: StateStore, clock: FakeClock
) -> None:
    with store.hold("release", "worker-a", 30) as held:
        for ttl in (12, 100):
            before = held.deadline_ns
            store.heartbeat(*held.fence, ttl_seconds=ttl)
            clock.advance(10)
            wait_until(lambda before=before: held.deadline_ns != before)
            assert held.remaining() < held.check().remaining_seconds


# Taken away by others

TAKEN: dict[str, tuple[Callable[[StateStore, HeldLease], object], str]] = {
    "force-released": (lambda store, held: store.force_release("release", reason="stuck"), "released"),
    "released": (lambda store, held: store.release(*held.fence), "released"),
    "expired": (lambda store, held: store.expire(*held.fence), "expired"),
    "reclaimed": (
        lambda store, held: store.acquire("release", held.owner, 600, reclaim=True, pid=os.getpid()),
        "superseded",
    ),
    "succeeded": (
        lambda store, held: (store.release(*held.fence), store.acquire("release", "worker-b", 600)),
        "superseded",
    ),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_lease_that_others_ended_is_lost_at_the_next_heartbeat_with_the_right_reason(
    store: StateStore, clock: FakeClock, how: str
) -> None:
    take, reason = TAKEN[how]
    heard = Heard()
    with pytest.raises(StaleLeaseError) as at_the_end, store.hold("release", "worker-a", 30, on_lost=heard) as held:
        take(store, held)
        assert not held.lost.is_set()
        clock.advance(10)
        assert held.lost.wait(LONG)
        assert (held.lost_reason, held.remaining()) == (reason, 0.0)
        for _ in range(5):
            a_beat_passes(store, clock)
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
        assert stale.value.reason == reason
        refused = [event.detail for event in store.events(kind="write.refused", scope="release")]
        assert refused == [
            {"action": "lease.heartbeat", "component": "core", "reason": reason, **_successor(reason, refused)}
        ]
        assert [each.times for each in store.status().refusals] == [1]
    assert heard.reasons == [reason]
    assert at_the_end.value.reason == reason


def _successor(reason: str, refused: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: refused[0][name] for name in ("current_owner", "current_token")} if reason == "superseded" else {}


@pytest.mark.parametrize("how", TAKEN)
def test_check_finds_out_at_once_what_others_ended(store: StateStore, how: str) -> None:
    take, reason = TAKEN[how]
    heard = Heard()
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30, on_lost=heard) as held:
        take(store, held)
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
        assert (stale.value.reason, held.lost_reason, held.lost.is_set()) == (reason, reason, True)
        assert stale.value.heartbeat_gap == stale.value.facts["heartbeat_gap"] == held.heartbeat_gap
    assert heard.reasons == [reason]


def test_leaving_the_block_of_a_lease_that_others_ended_touches_nothing_of_theirs(
    store: StateStore, clock: FakeClock
) -> None:
    with pytest.raises(StaleLeaseError) as stale, store.hold("release", "worker-a", 30):
        store.force_release("release", reason="stuck")
        successor = store.acquire("release", "worker-b", 600)
    assert stale.value.reason == "superseded"
    assert store.check_lease(*successor.fence).heartbeat_at == successor.heartbeat_at


def test_the_body_s_exception_wins_over_the_loss(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError), store.hold("release", "worker-a", 30) as held:
        clock.advance(31)
        assert held.lost.wait(LONG)
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), store.hold("release", "worker-a", 30):
        store.force_release("release", reason="stuck")
        _ = 1 / 0


def test_a_lease_that_is_given_back_in_the_block_was_lost_to_it(store: StateStore) -> None:
    heard = Heard()
    with pytest.raises(StaleLeaseError) as stale, store.hold("release", "worker-a", on_lost=heard) as held:
        store.release(*held.fence)
    assert stale.value.reason == "released"


def test_a_lost_lease_can_be_written_under_no_more(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        store.put_checkpoint("deploy", 1, lease=held.fence)
        clock.advance(30)
        store.acquire("release", "worker-b", 600)
        with pytest.raises(StaleLeaseError):
            store.put_checkpoint("deploy", 2, lease=held.fence)
    assert len(store.checkpoint_history("deploy")) == 1


# The longest life


def test_a_lease_reaches_its_longest_life_however_well_it_is_renewed(store: StateStore, clock: FakeClock) -> None:
    heard = Heard()
    block = store.hold("release", "worker-a", 30, on_lost=heard, max_lifetime_seconds=45)
    with pytest.raises(StaleLeaseError) as at_the_end, block as held:
        renewed(clock, 10, held)
        clock.advance(10)
        wait_until(lambda: held.remaining() == pytest.approx(25))  # the rest of its life, not the ttl
        clock.advance(10)
        wait_until(lambda: held.heartbeat_gap >= 10 and store.check_lease(*held.fence).remaining_seconds == 30)
        clock.advance(14.9)
        assert held.check().token == 1
        clock.advance(0.1)
        assert held.lost.wait(LONG)
        assert held.lost_reason == "max-lifetime"
        with pytest.raises(StaleLeaseError) as stale:
            held.check()
    assert (stale.value.reason, at_the_end.value.reason) == ("max-lifetime", "max-lifetime")
    assert heard.reasons == ["max-lifetime"]
    # Its holder gave it back: nobody has to wait for the ttl.
    assert kinds(store, scope="release")[-1] == "lease.released"


def test_a_life_shorter_than_the_ttl_ends_first(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 600, max_lifetime_seconds=5) as held:
        assert held.remaining() == pytest.approx(5)
        clock.advance(5)
        assert held.lost.wait(LONG)
        assert held.lost_reason == "max-lifetime"


def test_a_life_that_is_too_long_to_mean_anything_is_refused_for_that(store: StateStore) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.hold("release", "worker-a", max_lifetime_seconds=1e300)
    assert refused.value.field == "max_lifetime_seconds"
    assert "more than 0" not in str(refused.value), "it is"


# Telling the holder


def test_on_lost_is_called_once_however_many_find_out(store: StateStore, clock: FakeClock) -> None:
    heard = Heard()
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30, on_lost=heard) as held:
        start = threading.Barrier(9)

        def find_out() -> None:
            start.wait(LONG)
            with pytest.raises(StaleLeaseError):
                held.check()

        finders = [threading.Thread(target=find_out) for _ in range(8)]
        for finder in finders:
            finder.start()
        store.force_release("release", reason="stuck")
        start.wait(LONG)
        clock.advance(28.6)
        for finder in finders:
            finder.join()
        assert held.lost.wait(LONG)
    assert len(heard.reasons) == 1
    assert heard.calls[0][1] == held.lost_reason


def test_on_lost_may_call_the_store(store: StateStore, clock: FakeClock) -> None:
    done: list[str] = []

    def on_lost(held: HeldLease, reason: str) -> None:
        with pytest.raises(StaleLeaseError):
            held.check()
        with store.hold("alarm", "worker-a") as other:
            store.put_checkpoint("losses", {"scope": held.scope, "reason": reason}, lease=other.fence)
        done.append(store.acquire("release", "worker-a", 600).owner)

    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30, on_lost=on_lost):
        store.force_release("release", reason="stuck")
        clock.advance(10)
        wait_until(lambda: done)
    assert done == ["worker-a"]
    saved = store.get_checkpoint("losses")
    assert saved is not None
    assert saved.data == {"scope": "release", "reason": "released"}


def test_an_on_lost_that_fails_is_logged_and_the_others_go_on(
    store: StateStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(held: HeldLease, reason: str) -> None:
        raise ValueError("cannot be told")

    heard = Heard()
    with store.hold("other", "worker-a", 30) as other:
        first, second = (store.hold(scope, "worker-a", 30, on_lost=call) for scope, call in (("a", fail), ("b", heard)))
        with caplog.at_level(logging.ERROR, "agent_checkpoint"), to_be_lost(first), to_be_lost(second):
            for scope in "ab":
                store.force_release(scope, reason="stuck")
            renewed(clock, 10, other)
            assert heard.reasons == ["released"]
        assert "cannot be told" in caplog.text
        renewed(clock, 10, other)


def test_an_on_lost_that_takes_its_time_delays_no_heartbeat(store: StateStore, clock: FakeClock) -> None:
    called, go_on = threading.Event(), threading.Event()

    def slow(held: HeldLease, reason: str) -> None:
        called.set()
        go_on.wait()

    heard = Heard()
    with to_be_lost(store.hold("other", "worker-a", 30)) as other:
        with to_be_lost(store.hold("release", "worker-a", 30, on_lost=slow)):
            store.force_release("release", reason="stuck")
            clock.advance(10)
            try:
                assert called.wait(LONG)
                for _ in range(12):
                    renewed(clock, 10, other)
                with to_be_lost(store.hold("late", "worker-a", 30, on_lost=heard)) as late:
                    renewed(clock, 10, other, late)
                    clock.advance(28.6)
                    assert late.lost.wait(LONG)  # nor does it delay another loss
                    wait_until(lambda: heard.calls)
            finally:
                go_on.set()
        assert other.lost.wait(LONG)


def test_nobody_is_told_of_the_end_of_the_block(store: StateStore, clock: FakeClock) -> None:
    heard = Heard()
    with store.hold("release", "worker-a", 30, on_lost=heard) as held:
        pass
    with pytest.raises(StaleLeaseError) as stale:
        held.check()
    assert stale.value.reason == "released"
    clock.advance(40)
    with pytest.raises(StaleLeaseError):
        held.check()
    a_beat_passes(store, clock)
    assert heard.calls == []
    assert not held.lost.is_set()


def test_what_is_held_says_how_it_stands(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        clock.advance(8.5)
        assert repr(held) == "HeldLease('release', 'worker-a', token 1, 20.0 s left)"
        clock.advance(30)
        assert held.lost.wait(LONG)
        assert repr(held) == "HeldLease('release', 'worker-a', token 1, lost: expired)"


def test_what_was_given_back_has_no_time_left(store: StateStore) -> None:
    with store.hold("release", "worker-a", 30) as held:
        pass
    assert held.remaining() == 0.0
    assert "left" not in repr(held)


# These tests would notice

BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], Callable[..., None]]] = {
    "no margin": (
        lambda patch: patch.setattr(heart, "margin_ns", lambda ttl_ns: 0),
        lambda store, clock: test_the_holder_s_deadline_is_before_the_store_s_by_the_margin(store, clock, 30),
    ),
    "half the margin": (
        lambda patch: patch.setattr(heart, "margin_ns", lambda ttl_ns: max(50_000_000, ttl_ns // 40)),
        lambda store, clock: test_the_holder_s_deadline_is_before_the_store_s_by_the_margin(store, clock, 30),
    ),
    "the deadline counts from the grant": (
        lambda patch: patch.setattr(
            heart.Pulse, "_extend", _after(heart.Pulse._extend, lambda pulse: _add_ns(pulse, 2 * NS))
        ),
        lambda store, clock: test_the_deadline_counts_from_before_the_request_that_granted(store, clock),
    ),
    "renewed at the end of its ttl": (
        lambda patch: patch.setattr(heart, "BEATS", 1),
        lambda store, clock: test_a_held_lease_is_renewed_every_third_of_its_ttl(store, clock),
    ),
    "renewed twice as often": (
        lambda patch: patch.setattr(heart, "BEATS", 6),
        lambda store, clock: test_a_held_lease_is_renewed_every_third_of_its_ttl(store, clock),
    ),
    "nobody renews": (
        lambda patch: patch.setattr(heart.Heart, "_beat", lambda self: None),
        lambda store, clock: test_a_held_lease_is_renewed_every_third_of_its_ttl(store, clock),
    ),
    "nobody watches the deadline": (
        lambda patch: patch.setattr(heart.Heart, "_lose_overdue", lambda self: None),
        lambda store, clock: test_a_lease_that_nobody_renewed_is_lost_while_the_store_would_still_say_live(
            store, clock
        ),
    ),
    "check does not look at the deadline": (
        lambda patch: patch.setattr(holding.Held, "_check_deadline", lambda self: None),
        lambda store, clock: test_check_judges_by_the_deadline_before_it_asks_the_store(store, clock),
    ),
    "check does not ask the store": (
        lambda patch: patch.setattr(holding.Held, "_check_store", lambda self: self.lease),
        lambda store, clock: test_check_finds_out_at_once_what_others_ended(store, "force-released"),
    ),
    "check keeps to itself what the store said": (
        lambda patch: patch.setattr(heart.Pulse, "lose", _only_for(heart.Pulse.lose, "expired")),
        lambda store, clock: test_check_finds_out_at_once_what_others_ended(store, "force-released"),
    ),
    "what the store refused is tried again": (
        lambda patch: patch.setattr(heart.Heart, "_refuse", lambda self, pulse: pulse.failed(self._clock.ticks_ns())),
        lambda store, clock: test_a_lease_that_others_ended_is_lost_at_the_next_heartbeat_with_the_right_reason(
            store, clock, "reclaimed"
        ),
    ),
    "a lost lease is renewed": (
        lambda patch: (
            patch.setattr(heart.Pulse, "wants_beat", lambda self: True),
            patch.setattr(heart.Heart, "_lose_overdue", _keep_the_lost),
            patch.setattr(heart.Heart, "_renew", _renew_whatever),
        ),
        lambda store, clock: test_a_lost_lease_is_lost_for_good(store, clock),
    ),
    "on_lost is called by the heart itself": (
        lambda patch: patch.setattr(holding, "_call", lambda on_lost, held, reason: on_lost(held, reason)),
        lambda store, clock: test_an_on_lost_that_takes_its_time_delays_no_heartbeat(store, clock),
    ),
    "on_lost is never called": (
        lambda patch: patch.setattr(holding, "_call", lambda on_lost, held, reason: None),
        lambda store, clock: test_check_finds_out_at_once_what_others_ended(store, "released"),
    ),
    "nothing is given back": (
        lambda patch: patch.setattr(holding.Hold, "give_back", lambda self, held, tell: None),
        lambda store, clock: test_a_block_holds_the_lease_and_gives_it_back(store),
    ),
    "the loss hides the body's exception": (
        lambda patch: patch.setattr(holding.Hold, "give_back", _always_tell(holding.Hold.give_back)),
        lambda store, clock: test_the_body_s_exception_wins_over_the_loss(store, clock),
    ),
    "the gap is not measured": (
        lambda patch: patch.setattr(heart.Pulse, "_note_gap", lambda self, now: None),
        lambda store, clock: test_a_lease_that_nobody_renewed_is_lost_while_the_store_would_still_say_live(
            store, clock
        ),
    ),
    "a life has no end": (
        lambda patch: patch.setattr(holding, "_lifetime_ns", lambda seconds: 2**62),
        lambda store, clock: test_a_lease_reaches_its_longest_life_however_well_it_is_renewed(store, clock),
    ),
    "the lease is bound to no process": (
        lambda patch: patch.setattr(holding.Hold, "waiter", _unbound(holding.Hold.waiter)),
        lambda store, clock: test_a_block_holds_the_lease_and_gives_it_back(store),
    ),
}


def _after(call: Callable[..., Any], then: Callable[[Any], object]) -> Callable[..., Any]:
    def called(self: Any, *arguments: Any) -> Any:
        answer = call(self, *arguments)
        then(self)
        return answer

    return called


def _add_ns(pulse: heart.Pulse, ns: int) -> None:
    pulse.deadline += ns


def _only_for(lose: Callable[..., Any], reason: str) -> Callable[..., Any]:
    return lambda self, why, now: lose(self, why, now) if why == reason else None


def _keep_the_lost(self: heart.Heart) -> None:
    now = self._clock.ticks_ns()
    for pulse in self._all():
        if now >= pulse.deadline:
            pulse.lose("expired", now)


def _renew_whatever(self: heart.Heart, pulses: list[heart.Pulse], telling: bool) -> None:
    asked_at = self._clock.ticks_ns()
    locks = tuple(sorted({f"scope:{pulse.fence.scope}" for pulse in pulses}))
    self._changes.run(locks, lambda change: heart._renew_rows(change, pulses, False), terms=heart.QUIET)
    for pulse in pulses:
        pulse.beaten(asked_at)


def _always_tell(give_back: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, held, tell: give_back(self, held, True)


def _unbound(waiter: Callable[..., Any]) -> Callable[..., Any]:
    def made(self: Any, holder: object = None) -> Any:
        found = waiter(self, holder)
        found._ask = found._ask._replace(process="")
        return found

    return made


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_hold_is_noticed_here(
    store: StateStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    break_it, notices = BROKEN[how]
    monkeypatch.setitem(globals(), "LONG", 0.3)
    monkeypatch.setattr(watching, "LONG", 0.3)
    with monkeypatch.context() as patch:
        break_it(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, StaleLeaseError)):
            notices(store, clock)
    monkeypatch.setitem(globals(), "LONG", 30.0)
    monkeypatch.setattr(watching, "LONG", 30.0)


# The cheap look


def test_a_held_lease_can_be_confirmed_until_it_is_lost(store: StateStore, clock: FakeClock) -> None:
    reasons = []
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        held.confirm()
        store.force_release("release", reason="test")
        for _ in range(2):
            with pytest.raises(StaleLeaseError) as stale:
                held.confirm()
            reasons.append(stale.value.reason)
    assert (reasons, held.lost.is_set()) == (["released", "released"], True)


def test_a_lease_that_somebody_shortened_is_not_confirmed_beyond_its_end(store: StateStore, clock: FakeClock) -> None:
    with pytest.raises(StaleLeaseError), store.hold("release", "worker-a", 30) as held:
        store.heartbeat(*held.fence, ttl_seconds=0.1)
        clock.advance(1)
        held.confirm()
