"""What a checkpoint promises, on every database."""

from __future__ import annotations

from typing import Any

import pytest

from agent_checkpoint import (
    Fence,
    InvalidInputError,
    SequenceConflictError,
    StaleLeaseError,
    StateStore,
)
from agent_checkpoint.testing import FakeClock


def test_checkpoints_of_a_workflow_are_numbered_from_1(store: StateStore) -> None:
    for number in (1, 2, 3):
        assert store.put_checkpoint("deploy", {"step": number}).sequence == number
    assert store.put_checkpoint("other", {}).sequence == 1

    latest = store.get_checkpoint("deploy")
    assert latest is not None
    assert (latest.sequence, latest.data, latest.scope, latest.token) == (3, {"step": 3}, None, None)
    second = store.get_checkpoint("deploy", sequence=2)
    assert second is not None
    assert second.data == {"step": 2}
    assert store.get_checkpoint("deploy", sequence=4) is None
    assert store.get_checkpoint("nothing") is None


def test_a_superseded_owner_cannot_save(store: StateStore, clock: FakeClock) -> None:
    late = store.acquire("release", "worker-a", ttl_seconds=30)
    store.put_checkpoint("deploy", {"stage": "built"}, lease=late)
    clock.advance(30)
    current = store.acquire("release", "worker-b", ttl_seconds=30)
    store.put_checkpoint("deploy", {"stage": "published"}, lease=current)

    with pytest.raises(StaleLeaseError) as stale:
        store.put_checkpoint("deploy", {"stage": "late"}, lease=late)

    assert (stale.value.reason, stale.value.recorded) == ("superseded", True)
    latest = store.get_checkpoint("deploy")
    assert latest is not None
    assert (latest.sequence, latest.data["stage"], latest.token) == (2, "published", 2)
    (refused,) = store.events(kind="write.refused")
    assert (refused.owner, refused.token, refused.workflow) == ("worker-a", 1, "deploy")


def test_an_expired_owner_cannot_save_even_when_nobody_took_over(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(30)
    with pytest.raises(StaleLeaseError) as stale:
        store.put_checkpoint("deploy", {}, lease=lease)
    assert stale.value.reason == "expired"
    assert store.get_checkpoint("deploy") is None


def test_a_fence_can_be_given_whole_or_in_parts(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    for fence in (
        {"lease": lease},
        {"lease": lease.fence},
        {"lease_scope": "release", "owner": "worker-a", "token": 1},
    ):
        saved = store.put_checkpoint("deploy", {}, **fence)  # type: ignore[arg-type]
        assert (saved.scope, saved.owner, saved.token) == ("release", "worker-a", 1)


@pytest.mark.parametrize(
    ("fence", "field"),
    [
        ({"owner": "a"}, "lease_scope"),
        ({"token": 1}, "lease_scope"),
        ({"lease_scope": "s"}, "owner"),
        ({"lease_scope": "s", "owner": "a"}, "token"),
        ({"lease_scope": "s", "token": 1}, "owner"),
        ({"lease_scope": "", "owner": "a", "token": 1}, "scope"),
        ({"lease": Fence("s", "a", 1), "token": 1}, "lease"),
        ({"lease": ("s", "a", 1)}, "lease"),
    ],
)
def test_a_part_of_a_fence_is_invalid_never_an_unprotected_write(
    store: StateStore, fence: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.put_checkpoint("deploy", {}, **fence)
    assert refused.value.field == field
    assert store.get_checkpoint("deploy") is None


def test_a_protected_workflow_takes_no_unprotected_write(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    store.put_checkpoint("deploy", {"n": 1}, lease=lease)
    store.release(*lease.fence)

    with pytest.raises(StaleLeaseError) as stale:
        store.put_checkpoint("deploy", {"n": 2})
    assert stale.value.reason == "protected"
    (refused,) = store.events(kind="write.refused")
    assert (refused.scope, refused.owner, refused.token) == ("release", None, None)
    assert [each.token for each in store.status().refusals] == [None]


def test_a_protected_workflow_takes_no_write_under_another_scope(store: StateStore) -> None:
    store.put_checkpoint("deploy", {"n": 1}, lease=store.acquire("release", "worker-a", 30))
    other = store.acquire("other", "worker-a", 30)

    with pytest.raises(StaleLeaseError) as stale:
        store.put_checkpoint("deploy", {"n": 2}, lease=other)
    assert stale.value.reason == "scope-mismatch"


def test_rebind_moves_a_workflow_and_is_on_record(store: StateStore) -> None:
    store.put_checkpoint("deploy", {"n": 1}, lease=store.acquire("release", "worker-a", 30))
    other = store.acquire("other", "worker-b", 30)
    store.put_checkpoint("deploy", {"n": 2}, lease=other, rebind=True)
    store.put_checkpoint("deploy", {"n": 3}, lease=other)
    store.put_checkpoint("deploy", {"n": 4}, rebind=True)
    store.put_checkpoint("deploy", {"n": 5})

    moves = store.events(kind="checkpoint.rebound")
    assert [(event.sequence, event.detail) for event in moves] == [
        (2, {"from_scope": "release", "to_scope": "other"}),
        (4, {"from_scope": "other", "to_scope": None}),
    ]
    assert len(store.events(kind="checkpoint.saved")) == 5


def test_rebind_does_not_excuse_a_stale_fence(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    store.release(*lease.fence)
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", {}, lease=lease, rebind=True)


def test_a_workflow_becomes_protected_by_its_first_protected_write(store: StateStore) -> None:
    store.put_checkpoint("deploy", {"n": 1})
    store.put_checkpoint("deploy", {"n": 2}, lease=store.acquire("release", "worker-a", 30))
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", {"n": 3})
    assert store.events(kind="checkpoint.rebound") == []


def test_an_expected_sequence_refuses_a_lost_update(store: StateStore) -> None:
    store.put_checkpoint("deploy", {"n": 1}, expected_sequence=0)
    with pytest.raises(SequenceConflictError) as conflict:
        store.put_checkpoint("deploy", {"n": 1}, expected_sequence=0)
    assert (conflict.value.expected, conflict.value.found) == (0, 1)
    assert store.put_checkpoint("deploy", {"n": 2}, expected_sequence=1).sequence == 2
    with pytest.raises(SequenceConflictError):
        store.put_checkpoint("deploy", {"n": 3}, expected_sequence=7)
    assert store.events(kind="write.refused") == []


@pytest.mark.parametrize("sequence", [-1, 1.0, True, "1"])
def test_an_expected_sequence_is_a_count(store: StateStore, sequence: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.put_checkpoint("deploy", {}, expected_sequence=sequence)  # type: ignore[arg-type]
    assert refused.value.field == "expected_sequence"


def test_lists_show_sizes_instead_of_data_newest_first(store: StateStore) -> None:
    store.put_checkpoint("a", {"text": "é"})
    store.put_checkpoint("b", [])
    store.put_checkpoint("a", None)

    assert [(info.workflow, info.sequence, info.size_bytes) for info in store.list_checkpoints()] == [
        ("a", 2, 4),
        ("b", 1, 2),
    ]
    assert [(info.sequence, info.size_bytes) for info in store.checkpoint_history("a")] == [(2, 4), (1, 17)]
    assert store.checkpoint_history("nothing") == []


def test_prune_keeps_the_last_ones_and_their_numbers(store: StateStore) -> None:
    for number in range(1, 11):
        store.put_checkpoint("deploy", {"n": number})
    store.put_checkpoint("small", {})

    planned = store.prune_checkpoints(3, dry_run=True)
    assert [tuple(each) for each in planned] == [("deploy", 7, 1, 7)]
    assert len(store.checkpoint_history("deploy")) == 10
    assert store.prune_checkpoints(3) == planned
    assert [info.sequence for info in store.checkpoint_history("deploy")] == [10, 9, 8]
    assert store.prune_checkpoints(3) == []
    assert store.put_checkpoint("deploy", {}).sequence == 11
    (event,) = store.events(kind="checkpoint.pruned")
    assert (event.workflow, event.detail) == ("deploy", {"count": 7, "from_sequence": 1, "to_sequence": 7})


def test_prune_of_many_goes_in_batches_that_add_up(store: StateStore) -> None:
    for number in range(450):
        store.put_checkpoint("deploy", number)
    (pruned,) = store.prune_checkpoints(1, "deploy")

    assert (pruned.removed, pruned.from_sequence, pruned.to_sequence) == (449, 1, 449)
    spans = [event.detail for event in store.events(kind="checkpoint.pruned")]
    assert sum(span["count"] for span in spans) == 449
    assert len(spans) == 3
    latest = store.get_checkpoint("deploy")
    assert latest is not None
    assert latest.data == 449


def test_pruning_never_unprotects_a_workflow(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    for number in range(3):
        store.put_checkpoint("deploy", number, lease=lease)
    store.prune_checkpoints(1)
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", "unprotected")


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_prune_keeps_at_least_one(store: StateStore, keep: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.prune_checkpoints(keep)  # type: ignore[arg-type]
    assert refused.value.field == "keep_last"
