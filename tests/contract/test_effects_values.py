"""Keys, requests and results of effects: what may be one, and what is kept of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agent_checkpoint import EffectMismatchError, InvalidInputError, Lease, StateStore
from agent_checkpoint.testing import FakeClock


@pytest.fixture
def lease(store: StateStore) -> Lease:
    return store.acquire("release", "worker-a", ttl_seconds=30)


def state_of(store: StateStore, key: str) -> str:
    found = store.get_effect(key)
    assert found is not None
    return found.state


def test_the_same_key_with_another_request_is_refused_naming_both(store: StateStore, lease: Lease) -> None:
    order = {"amount": 10, "to": "Ada"}
    with store.effect("refund", lease=lease, request=order) as effect:
        effect.done("paid")

    with store.effect("refund", lease=lease, request={"to": "Ada", "amount": 10}) as again:
        assert again.result == "paid"
    with store.effect("refund", lease=lease) as unasked:
        assert unasked.result == "paid"
    with pytest.raises(EffectMismatchError) as mismatch:
        store.effect("refund", lease=lease, request={**order, "amount": 11}).__enter__()
    found = store.get_effect("refund")
    assert found is not None
    assert mismatch.value.recorded_digest == found.request_digest
    assert mismatch.value.request_digest != mismatch.value.recorded_digest
    assert (mismatch.value.exit_status, mismatch.value.retryable) == (76, False)


def test_a_request_stays_with_its_key_over_a_try_that_named_none(store: StateStore, lease: Lease) -> None:
    for request in ({"amount": 10}, None):
        with store.effect("refund", lease=lease, request=request) as effect:
            effect.failed()
    with pytest.raises(EffectMismatchError):
        store.effect("refund", lease=lease, request={"amount": 11}).__enter__()


def test_a_request_of_any_shape_can_be_told_from_others(store: StateStore, lease: Lease) -> None:
    for request in (0, False, "", [], {}, 1.0, [[1]], {"ä": "\u2028"}, 10**3999):
        key = f"refund-{request!r:.20}"
        with store.effect(key, lease=lease, request=request) as effect:
            effect.done()
        with store.effect(key, lease=lease, request=request) as effect:
            assert not effect.fresh
        with pytest.raises(EffectMismatchError):
            store.effect(key, lease=lease, request=["another"]).__enter__()


def test_a_request_that_is_no_json_is_refused_before_anything_is_begun(store: StateStore, lease: Lease) -> None:
    for request in ({1: 2}, {"a": float("nan")}, object(), b"bytes", {"a", "b"}):
        with pytest.raises(InvalidInputError, match=r"^request"):
            store.effect("refund", lease=lease, request=request)
    assert store.list_effects() == []


def test_a_key_is_any_name(store: StateStore, lease: Lease) -> None:
    for key in ("a b'\"$(rm)", "ключ", "-x", "--", "k" * 512, "%s?", "a/../b"):
        with store.effect(key, lease=lease) as effect:
            effect.done(key)
        found = store.get_effect(key)
        assert found is not None
        assert (found.key, found.result) == (key, key)


def test_a_key_that_is_no_name_is_refused(store: StateStore, lease: Lease) -> None:
    keys: list[Any] = ["", "a\nb", "\0", "k" * 513, "\ud800", 7, None, b"key"]
    for key in keys:
        for use in (partial(store.effect, lease=lease), store.get_effect, partial(store.resolve_effect, retry=True)):
            with pytest.raises(InvalidInputError, match=r"^key"):
                use(key)


def test_a_result_that_cannot_be_kept_is_refused_and_can_be_told_in_other_words(
    store: StateStore, lease: Lease
) -> None:
    results: list[Any] = [{"a": float("inf")}, object(), "x" * (16 << 20)]
    with store.effect("publish", lease=lease) as effect:
        for result in results:
            with pytest.raises(InvalidInputError, match=r"^result"):
                effect.done(result)
        assert state_of(store, "publish") == "begun"
        effect.done("too large")
    with pytest.raises(InvalidInputError), store.effect("announce", lease=lease) as effect:
        effect.done(results[0])
    assert state_of(store, "announce") == "unknown"


def test_a_checkpoint_needs_its_workflow_and_its_data(store: StateStore, lease: Lease) -> None:
    with store.effect("publish", lease=lease) as effect:
        for half in ({"workflow": "deploy"}, {"data": None}):
            with pytest.raises(InvalidInputError):
                effect.done(7, **half)
        effect.done(7, workflow="deploy", data=None)
    assert len(store.checkpoint_history("deploy")) == 1


def test_the_idempotency_key_is_the_same_for_every_try_and_another_for_every_key(
    store: StateStore, lease: Lease
) -> None:
    keys = {store.effect("refund-42", lease=lease, request=request).idempotency_key for request in (None, 1)}
    assert keys == {"5e0887fc733c3c477f96b66cb1f15dba"}
    assert store.effect("refund-43", lease=lease).idempotency_key not in keys


def test_effects_are_listed_latest_first_and_without_their_results(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", 60)
    for key in ("one", "two", "three"):
        with store.effect(key, lease=lease) as effect:
            effect.done(key)
        clock.advance(1)

    assert [(effect.key, effect.result) for effect in store.list_effects(2)] == [("three", None), ("two", None)]
    for limit in (0, -1, True, "2"):
        with pytest.raises(InvalidInputError):
            store.list_effects(limit)  # type: ignore[arg-type]
