"""A row that is not what was written is never taken for it: 74, naming the row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StaleLeaseError, StateStore, StorageCorruptError
from agent_checkpoint.testing import FakeClock

Call = Callable[[StateStore], Any]


def damage(store: StateStore, *statements: str) -> None:
    """Change the tables as a disk might."""
    with store.transaction(component="tests", action="tests.damage") as part:
        for statement in statements:
            part.run(statement)


def sums_of(store: StateStore, table: str) -> list[Any]:
    with store.read() as reader:
        return [found for (found,) in reader.rows(f"SELECT sum FROM {table}")]


def verdict(store: StateStore) -> str:
    (check,) = [check for check in store.doctor() if check.check == "sums"]
    return check.verdict


@pytest.fixture
def full(store: StateStore) -> StateStore:
    """A store with a row in every table that has sums."""
    lease = store.acquire("release", "worker-a", 600, metadata={"run": 1})
    store.put_checkpoint("deploy", {"stage": "build"}, lease=lease)
    store.put_checkpoint("deploy", {"stage": "test"}, lease=lease)
    with store.effect("refund-42", lease=lease) as effect:
        effect.done({"receipt": 7})
    for _ in range(2):
        with pytest.raises(RuntimeError):
            store.put_checkpoint("deploy", 1)
    store.set_limit("pool", 2)
    store.acquire("pool", "builder", 600)
    store.set_retention("checkpoints.keep_last", 3)
    return store


ASK: dict[str, tuple[str, str, list[Call]]] = {
    "lease, owner": (
        "UPDATE leases SET owner = 'worker-b' WHERE scope = 'release'",
        "'release', slot 0",
        [
            lambda store: store.get_lease("release"),
            lambda store: store.check_lease("release", "worker-b", 1),
            lambda store: store.acquire("release", "worker-c"),
            lambda store: store.heartbeat("release", "worker-b", 1),
            lambda store: store.put_checkpoint("deploy", 1, lease_scope="release", owner="worker-b", token=1),
            lambda store: store.list_leases(),
            lambda store: store.status(),
        ],
    ),
    "lease, token": (
        "UPDATE leases SET token = 9 WHERE scope = 'release'",
        "'release'",
        [lambda store: store.acquire("release", "worker-c"), lambda store: store.check_scope("release")],
    ),
    "lease, JSON": ("UPDATE leases SET metadata = '{' WHERE scope = 'release'", "'release'", [StateStore.list_leases]),
    "limit": ("UPDATE limits SET slots = 3", "'pool'", [lambda store: store.acquire("pool", "builder")]),
    "checkpoint, data": (
        'UPDATE checkpoints SET data = \'{"stage":"tent"}\' WHERE sequence = 2',
        "checkpoint 2 of workflow 'deploy'",
        [lambda store: store.get_checkpoint("deploy"), lambda store: list(store.export_checkpoints())],
    ),
    "checkpoint, scope": (
        "UPDATE checkpoints SET scope = 'else' WHERE sequence = 2",
        "checkpoint 2 of workflow 'deploy'",
        [
            lambda store: store.checkpoint_history("deploy"),
            lambda store: store.list_checkpoints(),
            lambda store: store.put_checkpoint("deploy", 1, rebind=True),
        ],
    ),
    "checkpoint, sequence": (
        "UPDATE checkpoints SET sequence = 5 WHERE sequence = 2",
        "checkpoint 5 of workflow 'deploy'",
        [lambda store: store.get_checkpoint("deploy"), lambda store: store.put_checkpoint("deploy", 1, rebind=True)],
    ),
    "effect, result": (
        "UPDATE effects SET result = '{\"receipt\":8}'",
        "'refund-42'",
        [lambda store: store.get_effect("refund-42")],
    ),
    "effect, state": (
        "UPDATE effects SET state = 'failed'",
        "'refund-42'",
        [lambda store: store.get_effect("refund-42"), lambda store: store.list_effects()],
    ),
    "refusal": ("UPDATE refusals SET times = 7", "scope 'release'", [StateStore.status]),
    "retention": ("UPDATE retention SET value = '30'", "'checkpoints.keep_last'", [StateStore.retention]),
}


@pytest.mark.parametrize(("statement", "name", "calls"), ASK.values(), ids=ASK)
def test_a_damaged_row_is_refused_by_name(full: StateStore, statement: str, name: str, calls: list[Call]) -> None:
    assert verdict(full) == "ok"
    damage(full, statement)
    for call in calls:
        with pytest.raises(StorageCorruptError, match="damaged") as corrupt:
            call(full)
        assert name in str(corrupt.value)
        assert (corrupt.value.exit_status, "doctor" in corrupt.value.hint) == (74, True)
    assert verdict(full) == "broken"


def test_what_is_not_damaged_is_answered_all_the_same(full: StateStore) -> None:
    damage(full, "UPDATE leases SET owner = 'x' WHERE scope = 'release'")
    assert full.get_lease("pool").owner == "builder"  # type: ignore[union-attr]
    assert full.get_checkpoint("deploy").data == {"stage": "test"}  # type: ignore[union-attr]


def test_every_write_of_a_row_gives_it_its_sum(full: StateStore, clock: FakeClock) -> None:
    lease = full.get_lease("release")
    assert lease is not None
    for change in (
        lambda: full.heartbeat(*lease.fence, ttl_seconds=900),
        lambda: clock.advance(5),
        lambda: full.release(*lease.fence),
        lambda: full.set_limit("pool", 5),
        lambda: full.prune_checkpoints(1),
        lambda: full.acquire("release", "worker-b", 60),
        lambda: full.force_release("release", reason="test"),
        lambda: clock.advance(900),
        lambda: full.sweep(),
    ):
        change()
        assert verdict(full) == "ok"
    for table in ("leases", "limits", "checkpoints", "effects", "events", "refusals", "retention"):
        assert None not in sums_of(full, table)


def test_rows_without_sums_are_taken_as_they_are_and_get_one_when_they_are_written(full: StateStore) -> None:
    damage(full, "UPDATE leases SET sum = NULL", "UPDATE checkpoints SET sum = NULL, data_sum = NULL")
    lease = full.get_lease("release")
    assert lease is not None
    assert full.get_checkpoint("deploy").data == {"stage": "test"}  # type: ignore[union-attr]
    (check,) = [check for check in full.doctor() if check.check == "sums"]
    assert (check.verdict, check.value["without"]) == ("ok", 4)

    full.heartbeat(*lease.fence)
    full.put_checkpoint("deploy", 3, lease=lease)

    assert [found is None for found in sums_of(full, "leases WHERE scope = 'release'")] == [False]
    assert sorted(found is None for found in sums_of(full, "checkpoints")) == [False, True, True]


def test_a_row_without_a_sum_that_makes_no_sense_is_refused_too(full: StateStore) -> None:
    damage(full, "UPDATE leases SET sum = NULL, metadata = '{' WHERE scope = 'release'")
    with pytest.raises(StorageCorruptError):
        full.get_lease("release")
    damage(full, "UPDATE checkpoints SET sum = NULL, data_sum = NULL, data = 'tru'")
    with pytest.raises(StorageCorruptError):
        full.get_checkpoint("deploy")


def test_what_was_imported_has_sums(full: StateStore) -> None:
    lines = list(full.export_checkpoints())
    renamed = full.put_checkpoint("other", 1)
    assert renamed.sequence == 1
    assert [each.checkpoints for each in full.import_checkpoints(lines)] == [
        2,
    ][:1]
    assert verdict(full) == "ok"


def test_who_looks_while_a_scope_is_granted_first_is_told_of_no_damage(path: Path | str) -> None:
    with StateStore(path) as store:
        store.initialize()
        over = threading.Event()

        def grant() -> None:
            for number in range(400):
                store.acquire(f"scope-{number}", "worker-a")
            over.set()

        granting = threading.Thread(target=grant)
        granting.start()
        number = 0
        while not over.is_set():
            try:
                store.check_scope(f"scope-{number}")
            except StaleLeaseError:
                number += 1  # granted by now, so that it wants a lease
        granting.join()
        assert number > 0
