"""What the audit log promises, on every database."""

from __future__ import annotations

import pytest

from agent_checkpoint import InvalidInputError, StateStore
from agent_checkpoint.testing import FakeClock


def test_each_state_change_has_exactly_one_event_in_order(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", 30)
    store.put_checkpoint("deploy", {"a": 1}, lease=lease)
    store.heartbeat(*lease.fence)
    store.release(*lease.fence)

    events = store.events()
    assert [event.kind for event in events] == [
        "store.initialized",
        "lease.acquired",
        "checkpoint.saved",
        "lease.heartbeat",
        "lease.released",
    ]
    assert [event.id for event in events] == sorted({event.id for event in events})
    saved = events[2]
    assert (saved.scope, saved.owner, saved.token, saved.workflow, saved.sequence) == (
        *("release", "worker-a", 1),
        *("deploy", 1),
    )
    assert saved.at.timestamp() * 1e9 == clock.wall_ns()


def test_without_a_cursor_the_last_ones_come_oldest_first(store: StateStore) -> None:
    for number in range(10):
        store.put_checkpoint("deploy", number)
    assert [event.sequence for event in store.events(limit=3)] == [8, 9, 10]


def test_a_cursor_reads_on_from_its_event_and_misses_none(store: StateStore) -> None:
    for number in range(10):
        store.put_checkpoint("deploy", number)
    whole = store.events()
    read = store.events(limit=3, after="start")
    while batch := store.events(limit=3, after=read[-1].cursor):
        read += batch
    assert read == whole


def test_filters_combine(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a", 30)
    store.acquire("other", "worker-a", 30)
    store.put_checkpoint("deploy", 1, lease=lease)
    store.put_checkpoint("plain", 1)

    assert [event.kind for event in store.events(scope="release")] == ["lease.acquired", "checkpoint.saved"]
    assert [event.workflow for event in store.events(kind="checkpoint.saved")] == ["deploy", "plain"]
    assert len(store.events(workflow="deploy", scope="release", kind="checkpoint.saved")) == 1
    assert store.events(workflow="plain", scope="release") == []


@pytest.mark.parametrize("after", ["", "x", "0-0-", "0-0-1x", "1-0-1", "0-0-99999999999999999999", 7, "0-0-１"])
def test_what_is_no_cursor_of_this_store_is_refused(store: StateStore, after: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.events(after=after)  # type: ignore[arg-type]
    assert refused.value.field == "after"


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "10", None])
def test_a_limit_is_a_count(store: StateStore, limit: object) -> None:
    with pytest.raises(InvalidInputError) as refused:
        store.events(limit)  # type: ignore[arg-type]
    assert refused.value.field == "limit"


def test_time_may_step_back_order_does_not(store: StateStore, clock: FakeClock) -> None:
    store.put_checkpoint("deploy", 1)
    clock.step_wall(-3600)
    store.put_checkpoint("deploy", 2)
    assert [event.sequence for event in store.events(workflow="deploy")] == [1, 2]
    latest = store.get_checkpoint("deploy")
    assert latest is not None
    assert latest.sequence == 2


def test_status_is_one_look_at_everything(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", 30)
    store.put_checkpoint("deploy", {"a": 1}, lease=lease)
    status = store.status()

    assert status.leases == [lease]
    assert [(info.workflow, info.sequence, info.scope) for info in status.checkpoints] == [("deploy", 1, "release")]
    assert status.refusals == []
    assert status.database == store.database
