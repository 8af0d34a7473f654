"""An action outside is recorded before and after it, so that it is not done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import (
    EffectRunningError,
    EffectUnknownError,
    FenceRefusedError,
    InvalidInputError,
    Lease,
    ReentrancyError,
    StaleLeaseError,
    StateStore,
    Write,
    hookimpl,
)
from agent_checkpoint.testing import EPOCH_NS, FakeClock
from agent_checkpoint.times import utc


@pytest.fixture
def lease(store: StateStore) -> Lease:
    return store.acquire("release", "worker-a", ttl_seconds=30)


def effects_of(store: StateStore) -> list[tuple[str, dict[str, Any]]]:
    """The events of effects, with their details."""
    return [(event.kind, event.detail) for event in store.events() if event.kind.startswith("effect.")]


def state_of(store: StateStore, key: str = "publish") -> str:
    found = store.get_effect(key)
    assert found is not None
    return found.state


def break_off(store: StateStore, lease: Lease, key: str = "publish") -> None:
    """Begin, and go away in the middle of it."""
    with pytest.raises(ZeroDivisionError), store.effect(key, lease=lease):
        raise ZeroDivisionError


def test_one_caller_may_act_and_every_later_one_gets_what_was_recorded(store: StateStore, lease: Lease) -> None:
    assert store.get_effect("publish") is None
    with store.effect("publish", lease=lease) as effect:
        assert effect.fresh
        assert effect.result is None
        assert effect.done({"id": 7}) is None
        assert effect.result == {"id": 7}

    store.release(*lease.fence)
    other = store.acquire("another", "worker-b", 30)
    for _ in range(2):
        with store.effect("publish", lease=other) as again:
            assert not again.fresh
            assert again.result == {"id": 7}
    assert effects_of(store) == [
        ("effect.begun", {"key": "publish", "request_digest": None}),
        ("effect.done", {"key": "publish"}),
    ]


def test_begun_is_on_record_before_the_action(path: Path | str, clock: FakeClock, store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    with store.effect("publish", lease=lease) as effect, StateStore(path, clock=clock) as beside:
        found = beside.get_effect("publish")
        assert found is not None
        assert (found.state, found.begun_at, found.done_at) == ("begun", utc(EPOCH_NS), None)
        assert (found.scope, found.owner, found.token) == lease.fence
        assert found.idempotency_key == effect.idempotency_key
        effect.done()
    assert state_of(store) == "done"


def test_nothing_is_begun_under_a_lease_that_is_not_live(store: StateStore, lease: Lease, clock: FakeClock) -> None:
    clock.advance(30)
    with pytest.raises(StaleLeaseError) as stale, store.effect("publish", lease=lease):
        pytest.fail("it was let in")

    assert stale.value.reason == "expired"
    assert store.get_effect("publish") is None
    (refused,) = store.events(kind="write.refused")
    assert refused.detail["action"] == "effect.begin"


def test_a_checkpoint_is_saved_with_the_word_that_it_happened(store: StateStore, lease: Lease) -> None:
    with store.effect("publish", lease=lease) as effect:
        saved = effect.done("7", workflow="deploy", data={"stage": "published"})

    assert saved is not None
    assert saved == store.get_checkpoint("deploy")
    assert (saved.token, saved.data) == (lease.token, {"stage": "published"})
    assert [event.kind for event in store.events()][-2:] == ["effect.done", "checkpoint.saved"]


def test_that_it_happened_is_recorded_even_where_the_checkpoint_is_refused(store: StateStore, lease: Lease) -> None:
    store.put_checkpoint("deploy", 1, lease=store.acquire("another", "worker-b", 30))

    with pytest.raises(StaleLeaseError) as refused, store.effect("publish", lease=lease) as effect:
        effect.done(7, workflow="deploy", data=2)
    assert refused.value.reason == "scope-mismatch"
    assert state_of(store) == "done"
    assert store.checkpoint_history("deploy")[0].sequence == 1

    with store.effect("announce", lease=lease) as effect:
        saved = effect.done(workflow="deploy", data=3, rebind=True)
    assert saved is not None
    assert saved.scope == "release"


def test_a_call_beside_one_that_is_under_way_has_to_wait_be_it_its_own(store: StateStore, lease: Lease) -> None:
    other = store.acquire("another", "worker-b", 30)
    with store.effect("publish", lease=lease) as effect:
        for each in (lease, other):
            with pytest.raises(EffectRunningError) as running, store.effect("publish", lease=each):
                pytest.fail("it was let in")
            assert (running.value.exit_status, running.value.retryable) == (75, True)
            assert (running.value.scope, running.value.owner, running.value.token) == lease.fence
        effect.done(7)
    assert len(effects_of(store)) == 2


def test_what_was_begun_under_a_lease_that_ended_is_unknown_for_ever(
    store: StateStore, lease: Lease, clock: FakeClock
) -> None:
    began = store.effect("publish", lease=lease).__enter__()
    clock.advance(30)

    for _ in range(3):
        with pytest.raises(EffectUnknownError) as unknown:
            store.effect("publish", lease=store.acquire("release", "worker-b", 30)).__enter__()
        assert (unknown.value.exit_status, unknown.value.retryable) == (76, False)
        assert (unknown.value.key, unknown.value.owner, unknown.value.token) == ("publish", "worker-a", 1)
        assert unknown.value.facts["begun_at"] == "2030-01-01T00:00:00.000000Z"
        clock.advance(30)
    assert state_of(store) == "unknown"
    assert began.fresh


def test_a_wall_clock_that_is_set_lets_nobody_act_beside(store: StateStore, lease: Lease, clock: FakeClock) -> None:
    with store.effect("publish", lease=lease) as effect:
        for seconds in (-86_400, 2 * 86_400):
            clock.step_wall(seconds)
            with pytest.raises((EffectRunningError, StaleLeaseError)):  # the server's clock is the wall's
                store.effect("publish", lease=lease).__enter__()
        effect.done(7)
    assert state_of(store) == "done"


def test_it_can_be_told_late_that_it_happened_but_nothing_is_saved_with_it(
    store: StateStore, lease: Lease, clock: FakeClock
) -> None:
    with pytest.raises(StaleLeaseError) as refused, store.effect("publish", lease=lease) as effect:
        clock.advance(30)
        store.acquire("release", "worker-b", 30)
        effect.done(7, workflow="deploy", data=1)

    assert refused.value.reason == "superseded"
    assert effect.late
    assert store.get_checkpoint("deploy") is None
    found = store.get_effect("publish")
    assert found is not None
    assert (found.state, found.result, found.late, found.token) == ("done", 7, True, 1)
    assert effects_of(store)[-1] == ("effect.done", {"key": "publish", "late": True})
    assert [event.detail["action"] for event in store.events(kind="write.refused")] == ["checkpoint.put"]


def test_what_surely_did_not_happen_may_be_tried_again(store: StateStore, lease: Lease) -> None:
    for _ in range(2):
        with pytest.raises(TimeoutError), store.effect("publish", lease=lease) as effect:
            assert effect.fresh
            effect.failed()
            raise TimeoutError
        assert state_of(store) == "failed"
    with store.effect("publish", lease=lease) as effect:
        assert effect.fresh
        effect.done()

    kinds = [kind for kind, _ in effects_of(store)]
    assert kinds == [*("effect.begun", "effect.failed") * 2, "effect.begun", "effect.done"]


def test_an_exception_in_the_block_leaves_it_unknown_at_once(store: StateStore, lease: Lease) -> None:
    break_off(store, lease)

    with pytest.raises(EffectUnknownError):
        store.effect("publish", lease=lease).__enter__()
    assert state_of(store) == "unknown"
    assert effects_of(store)[-1] == ("effect.unknown", {"key": "publish", "why": "ZeroDivisionError in the block"})


def test_a_block_that_says_nothing_is_told_so(store: StateStore, lease: Lease) -> None:
    with pytest.raises(EffectUnknownError, match="without done"), store.effect("publish", lease=lease) as effect:
        pass

    assert state_of(store) == "unknown"
    effect.done(7)  # the caller finds out after all
    assert (state_of(store), effect.late) == ("done", False)


def test_whoever_left_it_open_on_purpose_has_nothing_more_to_tell(store: StateStore, lease: Lease) -> None:
    with store.effect("publish", lease=lease) as effect:
        effect.leave("the line went dead")
        with pytest.raises(InvalidInputError):
            effect.done()

    assert effects_of(store)[-1] == ("effect.unknown", {"key": "publish", "why": "the line went dead"})


def test_only_who_may_act_has_something_to_tell_and_once(store: StateStore, lease: Lease) -> None:
    effect = store.effect("publish", lease=lease)
    with pytest.raises(InvalidInputError):
        effect.done()
    with effect:
        effect.done(7)
        for tell in (effect.done, effect.failed):
            with pytest.raises(InvalidInputError):
                tell()
    with store.effect("publish", lease=lease) as again, pytest.raises(InvalidInputError):
        again.done(8)

    found = store.get_effect("publish")
    assert found is not None
    assert found.result == 7


def test_one_block_can_be_gone_through_again(store: StateStore, lease: Lease) -> None:
    effect = store.effect("publish", lease=lease)
    with effect:
        effect.failed()
    with effect:
        assert effect.fresh
        effect.done(7)
    with effect:
        assert (effect.fresh, effect.result) == (False, 7)


def test_a_block_that_is_not_let_in_again_has_nothing_to_tell(store: StateStore, lease: Lease) -> None:
    effect = store.effect("publish", lease=lease)
    with effect:
        effect.failed()
    with store.effect("publish", lease=lease) as other:
        with pytest.raises(EffectRunningError):
            effect.__enter__()
        with pytest.raises(InvalidInputError):
            effect.failed()
        other.done()
    assert state_of(store) == "done"


def test_in_a_scope_with_several_leases_each_answers_for_its_own_effects(store: StateStore, clock: FakeClock) -> None:
    first, second = (store.acquire("pool", owner, ttl, limit=2) for owner, ttl in (("a", 30), ("b", 60)))
    for key, each in (("one", first), ("two", second)):
        store.effect(key, lease=each).__enter__()
    clock.advance(30)
    third = store.acquire("pool", "c", 30)

    with pytest.raises(EffectUnknownError):
        store.effect("one", lease=third).__enter__()
    with pytest.raises(EffectRunningError):
        store.effect("two", lease=third).__enter__()


def test_an_effect_of_an_earlier_self_is_unknown_after_a_reclaim(store: StateStore, lease: Lease) -> None:
    earlier = store.effect("publish", lease=lease).__enter__()
    later = store.acquire("release", "worker-a", 30, reclaim=True)

    with pytest.raises(EffectUnknownError):
        store.effect("publish", lease=later).__enter__()
    earlier.done(7)
    with store.effect("publish", lease=later) as effect:
        assert (effect.fresh, effect.result, earlier.late) == (False, 7, True)


class Veto:
    """Refuses one action; notes what a hook finds when it calls the store."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.asked: list[Write] = []
        self.store: StateStore | None = None

    @hookimpl
    def check_fence(self, write: Write) -> None:
        self.asked.append(write)
        if self.store is not None:
            with pytest.raises(ReentrancyError):
                self.store.get_effect("publish")
        if write.action == self.action:
            raise FenceRefusedError("not today")


def vetoed(path: Path | str, action: str) -> tuple[StateStore, Veto]:
    veto = Veto(action)
    veto.store = StateStore(path, plugins=[veto])
    veto.store.initialize()
    return veto.store, veto


def test_a_veto_lets_nothing_begin(path: Path | str) -> None:
    store, veto = vetoed(path, "effect.begin")
    with store:
        lease = store.acquire("release", "worker-a", 30)
        with pytest.raises(FenceRefusedError, match="not today"), store.effect("publish", lease=lease):
            pytest.fail("it was let in")

        assert store.get_effect("publish") is None
        assert veto.asked == [Write("core", "effect.begin", *lease.fence, None, None, {"key": "publish"})]
        assert len(store.events(kind="write.refused")) == 1


def test_a_veto_against_the_checkpoint_does_not_hide_that_it_happened(path: Path | str) -> None:
    store, _ = vetoed(path, "checkpoint.put")
    with store:
        lease = store.acquire("release", "worker-a", 30)
        with pytest.raises(FenceRefusedError), store.effect("publish", lease=lease) as effect:
            effect.done(7, workflow="deploy", data=1)

        assert state_of(store) == "done"
        assert store.get_checkpoint("deploy") is None
