"""What a lease promises, on every database."""

from __future__ import annotations

from datetime import timedelta

import pytest

from agent_checkpoint import InvalidInputError, Lease, LeaseHeldError, NotFoundError, StaleLeaseError, StateStore
from agent_checkpoint.testing import FakeClock
from agent_checkpoint.times import rfc3339


def kinds(store: StateStore, **filters: str) -> list[str]:
    return [event.kind for event in store.events(**filters)]  # type: ignore[arg-type]


def test_the_first_grant_of_a_scope_has_token_1(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30, metadata={"host": "build-7"})

    assert (lease.scope, lease.slot, lease.owner, lease.token) == ("release", 0, "worker-a", 1)
    assert (lease.state, lease.ttl_seconds, lease.remaining_seconds) == ("live", 30.0, 30.0)
    assert lease.expires_at - lease.acquired_at == timedelta(seconds=30)
    assert lease.metadata == {"host": "build-7"}
    assert store.get_lease("release") == lease


def test_a_live_lease_refuses_everybody_its_own_owner_included(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(10)

    for owner in ("worker-a", "worker-b"):
        with pytest.raises(LeaseHeldError) as held:
            store.acquire("release", owner, ttl_seconds=5)
        assert (held.value.owner, held.value.token, held.value.retry_after) == ("worker-a", 1, 20.0)
        assert held.value.expires_at == lease.expires_at
        assert held.value.facts["expires_at"] == rfc3339(lease.expires_at)
        assert held.value.retryable
    assert kinds(store, scope="release") == ["lease.acquired"]


def test_an_expired_lease_is_replaced_with_the_next_token_and_leaves_its_event(
    store: StateStore, clock: FakeClock
) -> None:
    store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(30)

    assert store.get_lease("release") is None
    assert store.acquire("release", "worker-b", ttl_seconds=30).token == 2
    events = store.events(scope="release")
    assert [(event.kind, event.owner, event.token) for event in events] == [
        ("lease.acquired", "worker-a", 1),
        ("lease.expired", "worker-a", 1),
        ("lease.acquired", "worker-b", 2),
    ]
    assert events[1].detail == {"reason": "ttl"}


def test_expiry_is_judged_by_the_lease_s_own_ttl_never_by_the_contender_s(store: StateStore, clock: FakeClock) -> None:
    store.acquire("release", "worker-a", ttl_seconds=600)
    clock.advance(599)

    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-b", ttl_seconds=1)
    clock.advance(1)
    assert store.acquire("release", "worker-b", ttl_seconds=1).token == 2


def test_a_token_is_never_reused_over_releases_expiries_and_force(store: StateStore, clock: FakeClock) -> None:
    tokens = []
    for turn in range(12):
        lease = store.acquire("release", f"worker-{turn}", ttl_seconds=30)
        tokens.append(lease.token)
        if turn % 3 == 0:
            store.release(*lease.fence)
        elif turn % 3 == 1:
            clock.advance(31)
        else:
            store.force_release("release", reason="test")
    assert tokens == list(range(1, 13))


def test_scopes_count_their_tokens_apart(store: StateStore) -> None:
    assert store.acquire("a", "w", 30).token == 1
    assert store.acquire("b", "w", 30).token == 1


def test_a_heartbeat_extends_a_live_lease_and_keeps_its_token(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(20)
    beaten = store.heartbeat(*lease.fence)

    assert (beaten.token, beaten.remaining_seconds, beaten.ttl_seconds) == (1, 30.0, 30.0)
    assert beaten.acquired_at == lease.acquired_at
    assert beaten.heartbeat_at == lease.acquired_at + timedelta(seconds=20)
    clock.advance(29)
    assert store.check_lease(*lease.fence).remaining_seconds == 1.0


def test_a_heartbeat_can_change_the_length(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    assert store.heartbeat(*lease.fence, ttl_seconds=90).remaining_seconds == 90.0
    clock.advance(89)
    assert store.heartbeat(*lease.fence).ttl_seconds == 90.0
    assert [event.detail for event in store.events(kind="lease.heartbeat")] == [{"ttl_seconds": 90.0}, {}]


def test_an_expired_lease_is_refused_even_when_nobody_took_over(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(30)

    for call in (store.heartbeat, store.release, store.check_lease):
        with pytest.raises(StaleLeaseError) as stale:
            call(*lease.fence)
        assert stale.value.reason == "expired"
        assert not stale.value.retryable


@pytest.mark.parametrize(
    ("scope", "owner", "token", "reason"),
    [
        ("release", "worker-b", 2, "wrong-owner"),
        ("release", "worker-a", 1, "superseded"),
        ("release", "worker-c", 3, "unknown"),
        ("nothing", "worker-c", 1, "unknown"),
    ],
)
def test_a_fence_that_matches_no_live_lease_says_why(
    store: StateStore, scope: str, owner: str, token: int, reason: str
) -> None:
    store.release(*store.acquire("release", "worker-a", 30).fence)
    store.acquire("release", "worker-c", 30)

    with pytest.raises(StaleLeaseError) as stale:
        store.check_lease(scope, owner, token)
    assert stale.value.reason == reason


def test_a_second_release_is_stale(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    assert store.release(*lease.fence).state == "released"
    with pytest.raises(StaleLeaseError) as stale:
        store.release(*lease.fence)
    assert stale.value.reason == "released"


def test_a_refused_heartbeat_is_on_record_once_and_then_counted(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", 30)
    clock.advance(31)
    for _ in range(3):
        with pytest.raises(StaleLeaseError) as stale:
            store.heartbeat(*lease.fence)
        assert stale.value.recorded

    (event,) = store.events(kind="write.refused")
    assert (event.scope, event.owner, event.token) == ("release", "worker-a", 1)
    assert event.detail == {"action": "lease.heartbeat", "component": "core", "reason": "expired"}
    (counter,) = store.status().refusals
    assert (counter.scope, counter.token, counter.action, counter.reason, counter.times) == (
        *("release", 1, "lease.heartbeat"),
        *("expired", 3),
    )


def test_reclaim_takes_one_s_own_live_lease_back_and_fences_the_earlier_self(store: StateStore) -> None:
    earlier = store.acquire("release", "worker-a", 30)
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-b", 30, reclaim=True)

    later = store.acquire("release", "worker-a", 30, reclaim=True)

    assert later.token == 2
    with pytest.raises(StaleLeaseError) as stale:
        store.check_lease(*earlier.fence)
    assert stale.value.reason == "superseded"
    assert kinds(store, scope="release") == ["lease.acquired", "lease.reclaimed"]


def test_reclaim_of_a_free_scope_is_an_ordinary_grant(store: StateStore) -> None:
    assert store.acquire("release", "worker-a", 30, reclaim=True).token == 1
    assert kinds(store, scope="release") == ["lease.acquired"]


def test_force_release_ends_a_live_lease_and_says_why_on_record(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    assert store.force_release("release", reason="host is gone").state == "force-released"

    (event,) = store.events(kind="lease.force-released")
    assert (event.owner, event.token, event.detail) == ("worker-a", 1, {"reason": "host is gone"})
    with pytest.raises(StaleLeaseError) as stale:
        store.heartbeat(*lease.fence)
    assert stale.value.reason == "released"
    with pytest.raises(NotFoundError):
        store.force_release("release", reason="again")


def test_force_release_with_a_token_never_hits_a_successor(store: StateStore) -> None:
    store.release(*store.acquire("release", "worker-a", 30).fence)
    successor = store.acquire("release", "worker-b", 30)

    with pytest.raises(StaleLeaseError) as stale:
        store.force_release("release", reason="stuck", token=1)
    assert stale.value.reason == "superseded"
    assert store.check_lease(*successor.fence).token == 2
    assert store.force_release("release", reason="stuck", token=2).token == 2


def test_force_release_of_a_token_that_is_not_live_says_so_and_whose_it_was(store: StateStore) -> None:
    for owner in ("worker-a", "worker-b"):
        store.release(*store.acquire("release", owner, 30).fence)

    refused = {}
    for token in (1, 2, 99):
        with pytest.raises(StaleLeaseError, match=f"no live lease on scope 'release' has token {token}") as stale:
            store.force_release("release", reason="stuck", token=token)
        assert "lease list" in stale.value.hint
        refused[token] = stale.value
    assert [error.reason for error in refused.values()] == ["superseded", "released", "unknown"]
    assert (refused[2].owner, refused[99].owner) == ("worker-b", None)


def test_the_last_lease_of_a_scope_can_be_looked_at(store: StateStore, clock: FakeClock) -> None:
    store.acquire("a", "w", 30)
    clock.advance(10)
    store.release(*store.acquire("b", "w", 30).fence)
    clock.advance(25)
    live = store.acquire("c", "w", 30)

    assert store.get_lease("a") is None
    found = store.get_lease("a", include_expired=True)
    assert found is not None
    assert (found.state, found.remaining_seconds) == ("expired", 0.0)
    assert store.list_leases() == [live]
    assert [(lease.scope, lease.state) for lease in store.list_leases(include_expired=True)] == [
        ("c", "live"),
        ("b", "released"),
        ("a", "expired"),
    ]
    assert store.get_lease("never", include_expired=True) is None


@pytest.mark.parametrize("ttl", [0, -1, 0.05, 30 * 86_400 + 1, 1e300, float("nan"), float("inf"), True, "60", None])
def test_a_ttl_outside_the_rule_is_refused_and_named(store: StateStore, ttl: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.acquire("release", "worker-a", ttl)  # type: ignore[arg-type]
    assert refused.value.field == "ttl_seconds"
    assert store.get_lease("release", include_expired=True) is None


@pytest.mark.parametrize("ttl", [0.1, 1, 30 * 86_400, 0.1 + 0.2])
def test_a_ttl_within_the_rule_lasts_that_long(store: StateStore, clock: FakeClock, ttl: float) -> None:
    lease = store.acquire("release", "worker-a", ttl)
    assert lease.ttl_seconds == pytest.approx(ttl)
    clock.advance(ttl - 0.001)
    assert store.check_lease(*lease.fence).state == "live"
    clock.advance(0.002)
    assert store.get_lease("release") is None


@pytest.mark.parametrize("name", ["", "x" * 513, "é" * 257, "a\nb", "a\x7fb", "a\x85b", "\ud800", 7, None, b"bytes"])
def test_a_name_outside_the_rule_is_refused_and_named(store: StateStore, name: object) -> None:
    for field, call in (
        ("scope", lambda: store.acquire(name, "w", 30)),  # type: ignore[arg-type]
        ("owner", lambda: store.acquire("s", name, 30)),  # type: ignore[arg-type]
        ("scope", lambda: store.get_lease(name)),  # type: ignore[arg-type]
        ("workflow", lambda: store.put_checkpoint(name, {})),  # type: ignore[arg-type]
        ("workflow", lambda: store.get_checkpoint(name)),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInputError) as refused:
            call()
        assert refused.value.field == field
    assert len(store.events()) == 1


@pytest.mark.parametrize("name", ["x" * 512, "é" * 256, "langgraph/thread-42", " ", "'; DROP TABLE leases; --", "日本"])
def test_a_name_within_the_rule_is_compared_byte_for_byte(store: StateStore, name: str) -> None:
    assert store.acquire(name, name, 30).owner == name
    assert store.get_lease(name) is not None


def test_names_that_differ_in_case_or_composition_are_different_scopes(store: StateStore) -> None:
    for name in ("Release", "release", "\u00e9", "e\u0301", "a ", "a"):
        assert store.acquire(name, "w", 30).token == 1


@pytest.mark.parametrize("token", [0, -1, 2**63, True, 1.0, "1", None])
def test_a_token_outside_the_rule_is_refused_and_named(store: StateStore, token: object) -> None:
    for call in (store.heartbeat, store.release, store.check_lease):
        with pytest.raises(InvalidInputError) as refused:
            call("release", "worker-a", token)  # type: ignore[arg-type]
        assert refused.value.field == "token"


@pytest.mark.parametrize("metadata", [[1], "text", {"x": float("nan")}, {1: 2}, {"big": "x" * 70_000}])
def test_metadata_is_a_small_json_object(store: StateStore, metadata: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.acquire("release", "worker-a", 30, metadata=metadata)  # type: ignore[arg-type]
    assert refused.value.field == "metadata"


def test_a_lease_is_a_value(store: StateStore) -> None:
    import copy
    import pickle

    lease = store.acquire("release", "worker-a", 30, metadata={"a": 1})
    assert pickle.loads(pickle.dumps(lease)) == copy.deepcopy(lease) == lease
    assert "token=1" in repr(lease)
    assert isinstance(lease, Lease)
    assert set(lease.asdict()) == {
        *("scope", "slot", "owner", "token", "state", "ttl_seconds", "acquired_at", "heartbeat_at"),
        *("expires_at", "remaining_seconds", "metadata", "process", "owner_alive"),
    }
