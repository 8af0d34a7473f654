"""What nobody can tell of, somebody who looks outside decides: a person, or a function."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agent_checkpoint import (
    Effect,
    EffectRunningError,
    EffectUnknownError,
    InvalidInputError,
    Lease,
    NotFoundError,
    Resolution,
    StaleLeaseError,
    StateStore,
)
from agent_checkpoint.acting import Acting
from agent_checkpoint.testing import FakeClock
from agent_checkpoint.times import rfc3339

HAPPENED = Resolution(True, "it is there")
DID_NOT = Resolution(False)


@pytest.fixture
def lost(store: StateStore, clock: FakeClock) -> Acting:
    """An effect that was begun, and whose lease has ended since."""
    effect = store.effect("publish", lease=store.acquire("release", "worker-a", 30)).__enter__()
    clock.advance(30)
    return effect


@pytest.fixture
def lease(store: StateStore, lost: Acting) -> Lease:
    """The next one's lease."""
    return store.acquire("release", "worker-b", 30)


def state_of(store: StateStore) -> str:
    found = store.get_effect("publish")
    assert found is not None
    return found.state


def test_a_person_who_found_that_it_happened_has_it_never_done_again(store: StateStore, lease: Lease) -> None:
    resolved = store.resolve_effect("publish", done={"id": 7}, by="ada")

    assert (resolved.state, resolved.result, resolved.owner) == ("done", {"id": 7}, "worker-a")
    with store.effect("publish", lease=lease) as effect:
        assert (effect.fresh, effect.result) == (False, {"id": 7})
    (event,) = store.events(kind="effect.resolved")
    assert event.detail == {"key": "publish", "decision": "done", "by": "ada"}
    assert (event.scope, event.owner, event.token) == ("release", "worker-a", 1)


def test_a_person_who_found_that_it_did_not_happen_lets_the_next_one_do_it(store: StateStore, lease: Lease) -> None:
    assert store.resolve_effect("publish", retry=True).state == "failed"

    with store.effect("publish", lease=lease) as effect:
        assert effect.fresh
        effect.done(8)
    found = store.get_effect("publish")
    assert found is not None
    assert (found.result, found.token) == (8, 2)


def test_nobody_decides_about_what_may_be_under_way(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    with store.effect("publish", lease=lease) as effect:
        with pytest.raises(EffectRunningError) as running:
            store.resolve_effect("publish", retry=True)
        assert running.value.exit_status == 75
        effect.leave("the line went dead")
    with pytest.raises(EffectRunningError):
        store.resolve_effect("publish", done=7)  # whoever left it may be at it still, as long as the lease is live

    store.release(*lease.fence)
    assert store.resolve_effect("publish", done=7).state == "done"


@pytest.mark.parametrize("decision", [{"retry": True}, {"done": 7}], ids=["retry", "done"])
@pytest.mark.parametrize("word", ["done", "failed"])
def test_what_was_decided_is_not_changed_by_a_late_word(
    store: StateStore, lost: Acting, decision: dict[str, Any], word: str
) -> None:
    before = store.resolve_effect("publish", **decision)

    with pytest.raises(StaleLeaseError) as stale:
        getattr(lost, word)()
    assert stale.value.reason == "superseded"
    assert store.get_effect("publish") == before
    (refused,) = store.events(kind="write.refused")
    assert refused.detail["action"] == f"effect.{word}"


def test_a_late_word_of_an_earlier_try_says_nothing_of_a_later_one(
    store: StateStore, lost: Acting, lease: Lease
) -> None:
    store.resolve_effect("publish", retry=True)
    with store.effect("publish", lease=lease) as effect:
        with pytest.raises(StaleLeaseError):
            lost.failed()
        lost.__exit__(TimeoutError, TimeoutError(), None)
        assert state_of(store) == "begun"
        effect.done(8)


def test_what_is_known_cannot_be_resolved(store: StateStore, lost: Acting) -> None:
    lost.done(7)

    for decision in ({"retry": True}, {"done": 8}):
        with pytest.raises(InvalidInputError, match="nothing to resolve"):
            store.resolve_effect("publish", **decision)
    with pytest.raises(NotFoundError):
        store.resolve_effect("nothing", retry=True)


def test_what_was_seen_says_nothing_of_a_later_try(
    store: StateStore, lost: Acting, lease: Lease, clock: FakeClock
) -> None:
    seen = store.get_effect("publish")
    assert seen is not None
    store.resolve_effect("publish", retry=True, by="bob", begun_at=seen.begun_at)
    clock.advance(1)
    for again in range(2):  # another one's try, and once more under the same lease
        with store.effect("publish", lease=lease) as effect:
            if again == 0:
                effect.failed()
            else:
                effect.leave("the line went dead")
        clock.advance(1)
    latest = store.get_effect("publish")
    assert latest is not None
    store.release(*lease.fence)

    with pytest.raises(InvalidInputError, match="latest try") as refused:
        store.resolve_effect("publish", done=7, by="ada", begun_at=seen.begun_at)
    assert (refused.value.found, refused.value.facts["found"]) == (latest.begun_at, rfc3339(latest.begun_at))  # type: ignore[attr-defined]
    assert state_of(store) == "unknown"
    with pytest.raises(InvalidInputError, match="time zone"):
        store.resolve_effect("publish", done=7, begun_at=latest.begun_at.replace(tzinfo=None))
    assert store.resolve_effect("publish", done=7, begun_at=latest.begun_at).state == "done"


def test_an_error_carries_what_resolve_takes(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    with pytest.raises(EffectUnknownError) as left, store.effect("publish", lease=lease):
        pass
    with pytest.raises(EffectRunningError) as running:
        store.resolve_effect("publish", retry=True)
    store.release(*lease.fence)
    with pytest.raises(EffectUnknownError) as unknown, store.effect("publish", lease=store.acquire("next", "worker-b")):
        pass

    for error in (left.value, running.value, unknown.value):
        assert error.facts["begun_at"] == rfc3339(error.begun_at)
    assert left.value.begun_at == running.value.begun_at == unknown.value.begun_at
    assert rfc3339(unknown.value.begun_at) in unknown.value.message
    assert store.resolve_effect(left.value.key, retry=True, begun_at=left.value.begun_at).state == "failed"


def test_a_decision_is_one_of_two(store: StateStore, lost: Acting) -> None:
    wrong: list[dict[str, Any]] = [{}, {"done": 1, "retry": True}, {"retry": 1}, {"done": object()}, {"retry": False}]
    for decision in wrong:
        with pytest.raises(InvalidInputError):
            store.resolve_effect("publish", **decision)
    assert state_of(store) == "unknown"


def test_none_is_a_result(store: StateStore, lost: Acting) -> None:
    assert store.resolve_effect("publish", done=None).state == "done"


def test_a_function_that_asks_the_target_system_decides(store: StateStore, lease: Lease) -> None:
    seen: list[Effect] = []

    def resolve(effect: Effect) -> Resolution:
        seen.append(effect)
        return HAPPENED

    with store.effect("publish", lease=lease, resolve=resolve) as effect:
        assert (effect.fresh, effect.result) == (False, "it is there")
    with store.effect("publish", lease=lease, resolve=resolve):
        pass  # known now: nobody is asked
    assert [(each.state, each.token, each.idempotency_key) for each in seen] == [("unknown", 1, effect.idempotency_key)]
    (event,) = store.events(kind="effect.resolved")
    assert event.detail == {"key": "publish", "decision": "done", "by": "worker-b"}


def test_a_function_that_finds_that_it_did_not_happen_lets_its_caller_act(store: StateStore, lease: Lease) -> None:
    with store.effect("publish", lease=lease, resolve=lambda _: DID_NOT) as effect:
        assert effect.fresh
        effect.done(8)
    assert state_of(store) == "done"


def test_a_function_that_cannot_tell_leaves_it_to_a_person(store: StateStore, lease: Lease) -> None:
    with pytest.raises(EffectUnknownError):
        store.effect("publish", lease=lease, resolve=lambda _: None).__enter__()
    assert state_of(store) == "unknown"


def fail(effect: Effect) -> Resolution:
    raise ConnectionError(effect.key)


def answered(answer: Any, _: Effect) -> Any:
    return answer


def test_a_function_that_fails_decides_nothing(store: StateStore, lease: Lease) -> None:
    with pytest.raises(ConnectionError):
        store.effect("publish", lease=lease, resolve=fail).__enter__()
    wrong: list[Any] = [
        *(True, (True, None), "done"),
        *(Resolution("no"), Resolution(False, 7), Resolution(True, object())),  # type: ignore[arg-type]
    ]
    for answer in wrong:
        with pytest.raises(InvalidInputError):
            store.effect("publish", lease=lease, resolve=partial(answered, answer)).__enter__()
    assert state_of(store) == "unknown"
    assert store.events(kind="effect.resolved") == []


def test_a_function_is_not_asked_about_what_may_be_under_way(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    with store.effect("publish", lease=lease) as effect:
        with pytest.raises(EffectRunningError):
            store.effect("publish", lease=lease, resolve=fail).__enter__()
        effect.done()


def test_a_function_may_use_the_store_and_decide_by_it(store: StateStore, lease: Lease) -> None:
    def resolve(effect: Effect) -> Resolution:
        store.resolve_effect(effect.key, done="by the function", by="the function")
        return DID_NOT

    with store.effect("publish", lease=lease, resolve=resolve) as effect:
        assert (effect.fresh, effect.result) == (False, "by the function")


def test_the_first_of_two_that_look_at_once_decides(store: StateStore, lease: Lease) -> None:
    other = store.acquire("another", "worker-c", 30)

    def slow(_: Effect) -> Resolution:
        with store.effect("publish", lease=other, resolve=lambda _: HAPPENED) as faster:
            assert not faster.fresh
        return DID_NOT

    with store.effect("publish", lease=lease, resolve=slow) as effect:
        assert (effect.fresh, effect.result) == (False, "it is there")


def test_who_looked_before_another_acted_decides_nothing_about_that(store: StateStore, clock: FakeClock) -> None:
    store.effect("publish", lease=store.acquire("release", "worker-a", 30)).__enter__()
    clock.advance(30)
    brief, lease = store.acquire("release", "worker-b", 30), store.acquire("another", "worker-c", 600)

    def slow(_: Effect) -> Resolution:
        """It had not happened; then another found the same, did it, and died before it could tell."""
        assert store.effect("publish", lease=brief, resolve=lambda _: DID_NOT).__enter__().fresh
        clock.advance(30)
        return DID_NOT

    with pytest.raises(EffectRunningError):
        store.effect("publish", lease=lease, resolve=slow).__enter__()
    found = store.get_effect("publish")
    assert found is not None
    assert (found.state, found.token, found.owner) == ("unknown", 2, "worker-b")


def test_who_loses_the_lease_while_looking_does_not_act(store: StateStore, lease: Lease, clock: FakeClock) -> None:
    def slow(_: Effect) -> Resolution:
        clock.advance(30)
        return DID_NOT

    with pytest.raises(StaleLeaseError):
        store.effect("publish", lease=lease, resolve=slow).__enter__()
    assert state_of(store) == "failed"
