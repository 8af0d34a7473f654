"""What a scope with several leases at once promises, on every database."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_checkpoint import (
    InvalidInputError,
    LeaseHeldError,
    NotFoundError,
    StaleLeaseError,
    StateStore,
    WaitTimeoutError,
)
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint.testing import FakeClock


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is some: what is tested is not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "agents.db"


@pytest.fixture
def other(path: Path, clock: FakeClock, store: StateStore) -> Iterator[StateStore]:
    """The same store, as another process has it."""
    with StateStore(path, clock=clock) as opened:
        yield opened


def limit_of(store: StateStore, scope: str) -> int:
    """What a caller who asks for an absurd limit is told it is."""
    with pytest.raises(InvalidInputError) as refused:
        store.acquire(scope, "nobody", limit=9_999)
    return int(refused.value.facts["limit"])


# How a limit comes to be.


def test_a_scope_has_one_lease_unless_its_first_grant_says_otherwise(store: StateStore) -> None:
    store.acquire("release", "worker-a")
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-b")
    assert limit_of(store, "release") == 1
    assert store.events(kind="lease.limit-set") == []


def test_the_first_grant_fixes_the_limit_on_record(store: StateStore) -> None:
    store.acquire("release", "worker-a", limit=3)

    assert limit_of(store, "release") == 3
    events = store.events(scope="release")
    assert [(event.kind, event.detail) for event in events] == [
        ("lease.limit-set", {"limit": 3}),
        ("lease.acquired", {"ttl_seconds": 60.0, "slot": 0}),
    ]
    # It stays when they are all gone.
    store.release("release", "worker-a", 1)
    assert [store.acquire("release", f"worker-{number}").slot for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("first", "then", "known"), [(3, 2, 3), (3, 4, 3), (3, 1, 3), (None, 2, 1), (1, 2, 1)])
def test_another_limit_than_the_scope_s_is_refused_and_both_are_named(
    store: StateStore, first: int | None, then: int, known: int
) -> None:
    lease = store.acquire("release", "worker-a", limit=first)
    for _ in range(2):
        with pytest.raises(InvalidInputError) as refused:
            store.acquire("release", "worker-b", limit=then)
        error = refused.value
        assert (error.field, error.facts["limit"], error.facts["asked"]) == ("limit", known, then)
        assert str(known) in error.message
        assert str(then) in error.message
        # Whether it is held or not.
        if lease is not None:
            store.release(*lease.fence)
            lease = None
    assert [event.kind for event in store.events(scope="release")].count("lease.acquired") == 1


def test_the_same_limit_may_be_said_again_and_again_or_left_out(store: StateStore) -> None:
    assert [store.acquire("release", "worker", limit=limit).slot for limit in (3, None, 3)] == [0, 1, 2]
    assert len(store.events(kind="lease.limit-set")) == 1


def test_a_limit_of_one_may_be_said(store: StateStore) -> None:
    store.acquire("release", "worker-a", limit=1)
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-b", limit=1)
    assert store.events(kind="lease.limit-set") == []


def test_a_refused_caller_fixes_no_limit(store: StateStore) -> None:
    with pytest.raises(InvalidInputError):
        store.acquire("release", "worker-a", ttl_seconds=-1, limit=5)
    store.acquire("release", "worker-a", limit=2)
    assert limit_of(store, "release") == 2


def test_the_limits_of_scopes_are_apart(store: StateStore) -> None:
    store.acquire("a", "worker", limit=2)
    store.acquire("b", "worker", limit=3)
    store.acquire("c", "worker")
    assert [limit_of(store, scope) for scope in "abc"] == [2, 3, 1]


@pytest.mark.parametrize("limit", [0, -1, 10_001, 10**30, True, 2.0, "2", float("nan")])
def test_a_limit_outside_the_rule_is_refused_and_named(store: StateStore, limit: object) -> None:
    for call in (
        lambda: store.acquire("release", "worker-a", limit=limit),  # type: ignore[arg-type]
        lambda: store.acquire("release", "worker-a", limit=limit, wait_seconds=1),  # type: ignore[arg-type]
        lambda: store.hold("release", "worker-a", limit=limit),  # type: ignore[arg-type]
        lambda: store.set_limit("release", limit),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError) as refused:
            call()
        assert refused.value.field == "limit"
    with pytest.raises(InvalidInputError):
        store.set_limit("release", None)  # type: ignore[arg-type]
    assert len(store.events()) == 1


def test_the_largest_limit_is_a_limit(store: StateStore) -> None:
    assert store.acquire("release", "worker-a", limit=10_000).slot == 0
    assert store.acquire("release", "worker-a").slot == 1


# How a limit changes.


def test_set_limit_says_what_it_was_and_goes_on_record_once(store: StateStore) -> None:
    assert store.set_limit("release", 3) == ("release", 3, 1)
    assert store.set_limit("release", 3) == ("release", 3, 3)
    assert store.set_limit("release", 2) == ("release", 2, 3)
    assert [event.detail for event in store.events(kind="lease.limit-set")] == [
        {"limit": 3, "previous": 1},
        {"limit": 2, "previous": 3},
    ]
    assert [event.scope for event in store.events(kind="lease.limit-set")] == ["release", "release"]


def test_a_limit_that_was_set_before_the_first_grant_is_the_scope_s(store: StateStore) -> None:
    store.set_limit("release", 2)
    with pytest.raises(InvalidInputError) as refused:
        store.acquire("release", "worker-a", limit=3)
    assert refused.value.facts["limit"] == 2
    store.set_limit("deploy", 1)
    with pytest.raises(InvalidInputError):
        store.acquire("deploy", "worker-a", limit=2)
    assert [store.acquire("release", "worker-a", limit=2).slot for _ in range(2)] == [0, 1]


def test_a_raised_limit_opens_slots_at_once(store: StateStore) -> None:
    store.acquire("release", "worker-a")
    store.set_limit("release", 3)
    assert [store.acquire("release", f"worker-{number}").slot for number in range(2)] == [1, 2]
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-d")


def test_a_lowered_limit_leaves_those_that_are_live_alone(store: StateStore) -> None:
    leases = [store.acquire("release", f"worker-{number}", limit=3) for number in range(3)]
    store.set_limit("release", 1)

    for lease in leases:
        assert store.check_lease(*lease.fence).state == "live"
        assert store.heartbeat(*lease.fence).slot == lease.slot
    for lease in leases:
        with pytest.raises(LeaseHeldError):
            store.acquire("release", "worker-d")
        store.release(*lease.fence)
    assert (granted := store.acquire("release", "worker-d")).slot == 0
    assert granted.token == 4


def test_a_lowered_limit_counts_those_in_slots_beyond_it(store: StateStore) -> None:
    leases = [store.acquire("release", f"worker-{number}", limit=3) for number in range(3)]
    store.set_limit("release", 2)
    store.release(*leases[0].fence)
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-d")
    store.release(*leases[1].fence)
    assert store.acquire("release", "worker-d").slot == 0
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-e")
    assert sorted(lease.slot for lease in store.list_leases()) == [0, 2]


def test_a_raised_limit_lets_a_waiter_in(store: StateStore, other: StateStore, clock: FakeClock) -> None:
    other.acquire("release", "worker-a", 300)
    turned = clock.sleep

    def sleep(seconds: float) -> None:
        turned(seconds)
        other.set_limit("release", 2)

    clock.sleep = sleep
    assert store.acquire("release", "worker-b", wait_seconds=5).slot == 1


def test_the_limit_is_set_in_asyncio_too(path: Path) -> None:
    import asyncio

    async def scenario() -> None:
        async with AsyncStateStore(path) as store:
            await store.initialize()
            assert (await store.acquire("release", "worker-a", limit=2)).slot == 0
            assert (await store.acquire("release", "worker-b", limit=2)).slot == 1
            with pytest.raises(LeaseHeldError):
                await store.acquire("release", "worker-c")
            assert (await store.set_limit("release", 3)).previous == 2
            assert (await store.acquire("release", "worker-c")).slot == 2

    asyncio.run(scenario())


# Slots and tokens.


def test_the_lowest_free_slot_is_granted_and_tokens_go_on_over_all_slots(store: StateStore, clock: FakeClock) -> None:
    leases = [store.acquire("release", "worker", 60, limit=4) for _ in range(4)]
    assert [(lease.slot, lease.token) for lease in leases] == [(0, 1), (1, 2), (2, 3), (3, 4)]

    store.release(*leases[2].fence)
    store.release(*leases[1].fence)
    assert [
        (lease.slot, lease.token) for lease in (store.acquire("release", "x", 60), store.acquire("release", "x", 60))
    ] == [
        (1, 5),
        (2, 6),
    ]
    store.force_release("release", reason="test", token=6)
    assert (store.acquire("release", "x", 30).slot, store.get_lease("release").token) == (2, 7)  # type: ignore[union-attr]
    clock.advance(30)
    # The one that ran out is replaced, with its end on record first.
    lease = store.acquire("release", "x", 60)
    assert (lease.slot, lease.token) == (2, 8)
    assert [(event.kind, event.token) for event in store.events(scope="release")][-2:] == [
        ("lease.expired", 7),
        ("lease.acquired", 8),
    ]


def test_the_highest_token_may_be_in_any_slot(store: StateStore) -> None:
    first, second = store.acquire("release", "worker", limit=2), store.acquire("release", "worker")
    for token in range(3, 9):
        store.release(*first.fence)
        first = store.acquire("release", "worker")
        assert (first.slot, first.token) == (0, token)
    store.release(*second.fence)
    assert (store.acquire("release", "worker").slot, store.get_lease("release").token) == (1, 9)  # type: ignore[union-attr]


def test_a_full_scope_tells_of_the_lease_that_ends_first(store: StateStore, clock: FakeClock) -> None:
    for owner, ttl in (("worker-a", 60), ("worker-b", 20), ("worker-c", 40)):
        store.acquire("release", owner, ttl, limit=3)
    clock.advance(5)
    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-d")
    assert (held.value.owner, held.value.token, held.value.retry_after) == ("worker-b", 2, 15.0)
    assert "2 more" in held.value.message
    with pytest.raises(WaitTimeoutError):
        store.wait_until_free("release", 1)


def test_an_older_token_in_another_slot_stays_valid(store: StateStore) -> None:
    older = store.acquire("release", "worker-a", limit=2)
    newer = store.acquire("release", "worker-b")

    assert store.check_lease(*older.fence).slot == 0
    assert store.heartbeat(*older.fence).token == 1
    assert store.put_checkpoint("deploy", 1, lease=older).sequence == 1
    assert store.put_checkpoint("deploy", 2, lease=newer).sequence == 2
    assert store.release(*older.fence).state == "released"
    assert store.check_lease(*newer.fence).slot == 1


def test_a_lease_is_superseded_only_when_its_own_slot_was_taken(store: StateStore, clock: FakeClock) -> None:
    low = store.acquire("release", "low", 30, limit=2)
    high = store.acquire("release", "high", 30)
    clock.advance(30)
    taken = store.acquire("release", "taker", 600)
    assert taken.slot == low.slot

    def reason(fence: tuple[str, str, int]) -> str:
        with pytest.raises(StaleLeaseError) as stale:
            store.check_lease(*fence)
        with pytest.raises(StaleLeaseError) as refused:
            store.put_checkpoint("deploy", 1, lease_scope=fence[0], owner=fence[1], token=fence[2])
        assert refused.value.reason == stale.value.reason
        return stale.value.reason

    assert reason(low.fence) == "superseded"
    assert reason(high.fence) == "expired"
    assert reason(("release", "taker", 4)) == "unknown"
    assert reason(("release", "low", 3)) == "wrong-owner"
    store.acquire("release", "other", 600)
    assert reason(high.fence) == "superseded"


@pytest.mark.parametrize(("end", "reason"), [("release", "released"), ("force", "released"), ("sweep", "expired")])
def test_a_lease_that_ended_in_its_slot_says_how_while_others_go_on(
    store: StateStore, clock: FakeClock, end: str, reason: str
) -> None:
    low, high = store.acquire("release", "low", 30, limit=2), store.acquire("release", "high", 600)
    if end == "release":
        store.release(*low.fence)
    elif end == "force":
        store.force_release("release", reason="test", token=low.token)
    else:
        clock.advance(30)
        assert [lease.token for lease in store.sweep()] == [low.token]
    for call in (store.heartbeat, store.release, store.check_lease):
        with pytest.raises(StaleLeaseError) as stale:
            call(*low.fence)
        assert stale.value.reason == reason
    assert store.check_lease(*high.fence).state == "live"


# What acts on one of several.


def test_force_release_needs_a_token_where_several_are_live(store: StateStore) -> None:
    leases = [store.acquire("release", f"worker-{number}", limit=3) for number in range(3)]
    with pytest.raises(InvalidInputError) as refused:
        store.force_release("release", reason="stuck")
    assert refused.value.field == "token"
    assert refused.value.facts["tokens"] == [1, 2, 3]
    assert len(store.list_leases()) == 3

    assert store.force_release("release", reason="stuck", token=2).owner == "worker-1"
    with pytest.raises(StaleLeaseError):
        store.force_release("release", reason="stuck", token=2)
    store.release(*leases[0].fence)
    # One is left: no token is needed.
    assert store.force_release("release", reason="stuck").token == 3
    with pytest.raises(NotFoundError):
        store.force_release("release", reason="stuck")
    assert [event.token for event in store.events(kind="lease.force-released")] == [2, 3]


def test_reclaim_is_for_scopes_with_one_lease(store: StateStore) -> None:
    store.acquire("release", "worker-a", limit=2)
    for _ in range(2):
        with pytest.raises(InvalidInputError) as refused:
            store.acquire("release", "worker-a", reclaim=True)
        assert refused.value.field == "reclaim"
        assert "2" in refused.value.message
        store.set_limit("release", 2)
    with pytest.raises(InvalidInputError):
        store.acquire("never", "worker-a", reclaim=True, limit=2)


def test_reclaim_of_one_s_own_works_in_whatever_slot_it_is(store: StateStore) -> None:
    store.acquire("release", "worker-a", limit=2)
    store.acquire("release", "worker-b")
    store.set_limit("release", 1)
    store.release("release", "worker-a", 1)
    taken = store.acquire("release", "worker-b", reclaim=True)
    assert (taken.slot, taken.token) == (1, 3)


def test_reclaim_finds_one_s_own_lease_beside_another_s_that_a_lowered_limit_left(store: StateStore) -> None:
    store.acquire("release", "worker-a", limit=2)
    store.acquire("release", "worker-b")
    store.set_limit("release", 1)
    taken = store.acquire("release", "worker-b", reclaim=True)
    assert (taken.slot, taken.token) == (1, 3)
    assert store.check_lease("release", "worker-a", 1).slot == 0


# How several are looked at.


def test_get_lease_gives_the_one_that_was_granted_last(store: StateStore, clock: FakeClock) -> None:
    leases = [store.acquire("release", f"worker-{number}", 60, limit=3) for number in range(3)]
    store.release(*leases[0].fence)
    newest = store.acquire("release", "worker-3", 30)
    assert newest.slot == 0

    found = store.get_lease("release")
    assert found is not None
    assert found.token == newest.token
    clock.advance(30)
    found = store.get_lease("release")
    assert found is not None
    assert (found.token, found.slot) == (3, 2)
    found = store.get_lease("release", include_expired=True)
    assert found is not None
    assert (found.token, found.state) == (4, "expired")


def test_lists_and_status_have_a_line_for_each_slot(store: StateStore, clock: FakeClock) -> None:
    for number in range(3):
        store.acquire("release", f"worker-{number}", 60, limit=3)
        clock.advance(1)
    store.acquire("deploy", "worker-9", 60)
    store.release("release", "worker-1", 2)

    assert [(lease.scope, lease.slot, lease.token) for lease in store.list_leases()] == [
        ("deploy", 0, 1),
        ("release", 2, 3),
        ("release", 0, 1),
    ]
    everyone = store.list_leases(include_expired=True)
    assert [(lease.scope, lease.slot, lease.state) for lease in everyone] == [
        ("deploy", 0, "live"),
        ("release", 2, "live"),
        ("release", 1, "released"),
        ("release", 0, "live"),
    ]
    assert [(lease.scope, lease.slot, lease.state) for lease in store.status().leases] == [
        (lease.scope, lease.slot, lease.state) for lease in everyone
    ]


def test_the_sweep_ends_each_overdue_lease_once(store: StateStore, clock: FakeClock) -> None:
    for number, ttl in enumerate((30, 60, 30)):
        store.acquire("release", f"worker-{number}", ttl, limit=3)
    store.acquire("deploy", "worker-9", 30)
    assert store.sweep() == []
    clock.advance(30)

    swept = store.sweep()
    assert sorted((lease.scope, lease.slot, lease.state) for lease in swept) == [
        ("deploy", 0, "expired"),
        ("release", 0, "expired"),
        ("release", 2, "expired"),
    ]
    assert store.sweep() == []
    assert [lease.slot for lease in store.list_leases()] == [1]
    assert store.acquire("release", "worker-3", 30).slot == 0
    events = [(event.scope, event.token, event.detail) for event in store.events(kind="lease.expired")]
    assert sorted(events) == [
        (scope, token, {"reason": "ttl"}) for scope, token in (("deploy", 1), ("release", 1), ("release", 3))
    ]


def test_the_sweep_takes_any_number_of_leases(store: StateStore, clock: FakeClock) -> None:
    for number in range(230):
        store.acquire(f"scope-{number % 115}", "worker", 30, limit=2)
    clock.advance(30)
    assert len(store.sweep()) == 230
    assert len(store.events(limit=1000, kind="lease.expired")) == 230
    assert store.sweep() == []


def test_a_lease_that_was_granted_beside_an_overdue_one_leaves_that_for_the_sweep(
    store: StateStore, clock: FakeClock
) -> None:
    store.acquire("release", "worker-0", 30, limit=2)
    store.acquire("release", "worker-1", 30)
    clock.advance(30)
    assert store.acquire("release", "worker-2", 30).slot == 0
    assert [lease.token for lease in store.sweep()] == [2]
    assert [event.token for event in store.events(kind="lease.expired")] == [1, 2]
