"""What goes into a sum, and rows that an SQLite file has lost or hides."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import NotFoundError, StateStore, StorageCorruptError
from agent_checkpoint.ledger import sums
from agent_checkpoint.testing import FakeClock

Call = Callable[[StateStore], Any]


@pytest.fixture
def store(path: Path, clock: FakeClock) -> Iterator[StateStore]:
    with StateStore(path, clock=clock) as opened:
        opened.initialize()
        lease = opened.acquire("release", "worker-a", 600)
        opened.set_limit("pool", 3)
        for _ in range(3):
            opened.acquire("pool", "builder", 600)
        for number in range(4):
            opened.put_checkpoint("deploy", number, lease=lease)
        with opened.effect("refund", lease=lease) as effect:
            effect.done(1)
        yield opened


def rewrite(path: Path, *statements: str) -> None:
    """Change the file past its triggers."""
    with closing(sqlite3.connect(path)) as raw, raw:
        for (name,) in raw.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            raw.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            raw.execute(statement)


def hide(path: Path, index: str, where: str) -> None:
    """Take rows out of one index alone, as damage to it does: the others still have them."""
    with closing(sqlite3.connect(path)) as raw, raw:
        (sql,) = raw.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (index,)).fetchone()
        raw.execute(f"DROP INDEX {index}")
        raw.execute(f"{sql} {'AND' if ' WHERE ' in sql else 'WHERE'} {where}")
        raw.execute("PRAGMA writable_schema = ON")
        raw.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, index))


def test_a_sum_is_the_same_on_every_python() -> None:
    row = ("scope é\u20ac\U0001f600", 0, None, 2**63 - 1, -1, 2**31, 1.5, b"x", "")
    assert sums.of(row) == 699070374
    assert sums.of_text('{"a":"\\u00e9"}') == 2933495253
    assert sums.of(("1",)) != sums.of((1,)) != sums.of((1.0,))
    assert sums.of(("a", "b")) != sums.of(("ab", ""))


HIDDEN: dict[str, tuple[str, str, list[Call]]] = {
    "the latest checkpoint": (
        "checkpoints_of_workflow",
        "sequence < 4",
        [
            lambda store: store.get_checkpoint("deploy"),
            lambda store: store.get_checkpoint("deploy", sequence=4),
            lambda store: store.put_checkpoint("deploy", 1, rebind=True),
            lambda store: store.checkpoint_history("deploy"),
            lambda store: store.list_checkpoints(),
            lambda store: list(store.export_checkpoints("deploy")),
        ],
    ),
    "one in the middle": (
        "checkpoints_of_workflow",
        "sequence <> 2",
        [
            lambda store: store.get_checkpoint("deploy", sequence=2),
            lambda store: store.checkpoint_history("deploy"),
            lambda store: list(store.export_checkpoints("deploy")),
        ],
    ),
    "a whole workflow": (
        "checkpoints_of_workflow",
        "sequence > 9",
        [
            lambda store: store.get_checkpoint("deploy"),
            lambda store: store.put_checkpoint("deploy", 1),
            lambda store: store.list_checkpoints(),
            lambda store: list(store.export_checkpoints()),
        ],
    ),
    "events of a scope": ("events_of_scope", "id > 4", [lambda store: store.events(50, scope="release")]),
    "events of a workflow": ("events_of_workflow", "id < 9", [lambda store: store.events(50, workflow="deploy")]),
    "an effect in order": ("effects_in_order", "begun_at < 0", [StateStore.list_effects]),
}


@pytest.mark.parametrize(("index", "where", "calls"), HIDDEN.values(), ids=HIDDEN)
def test_what_an_index_hides_is_missed(
    store: StateStore, path: Path, index: str, where: str, calls: list[Call]
) -> None:
    hide(path, index, where)
    for call in calls:
        with pytest.raises(StorageCorruptError, match="cannot be found any more"), StateStore(path) as opened:
            call(opened)


def test_what_was_never_there_is_not_missed(store: StateStore) -> None:
    assert store.get_lease("never") is None
    assert store.get_checkpoint("never") is None
    assert store.get_checkpoint("deploy", sequence=9) is None
    assert store.get_effect("never") is None
    assert store.acquire("never", "w").token == 1
    with pytest.raises(NotFoundError):
        store.force_release("never/2", reason="x")


def test_a_gap_in_the_log_is_missed(store: StateStore, path: Path) -> None:
    cursors = [event.cursor for event in store.events()]
    rewrite(path, "DELETE FROM events WHERE id = 5")
    for call in (store.events, lambda: store.events(after=cursors[3]), lambda: store.events(after="start")):
        with pytest.raises(StorageCorruptError, match="event 5 cannot be found"):
            call()
    assert store.events(3)[-1].cursor == cursors[-1]


def test_a_damaged_event_is_refused(store: StateStore, path: Path) -> None:
    rewrite(path, "UPDATE events SET owner = 'worker-b' WHERE id = 3")
    for call in (store.events, lambda: store.events(after="start"), lambda: store.events(kind="lease.limit-set")):
        with pytest.raises(StorageCorruptError, match="event 3 is damaged"):
            call()


def test_text_that_is_none_is_damage(store: StateStore, path: Path) -> None:
    rewrite(path, "UPDATE leases SET owner = CAST(x'ff41' AS TEXT)")
    with pytest.raises(StorageCorruptError):
        store.get_lease("release")
