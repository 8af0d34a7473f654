"""What the tests of moving a store share: one with something in every table, and all that is in one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StaleLeaseError, StateStore
from agent_checkpoint.errors import EffectUnknownError
from agent_checkpoint.transfer import LEFT_BEHIND

# Near the end of what a token may be: no double has it.
LARGE_TOKEN = 2**62 + 1
# More than are copied at once.
MANY = 230
ODD = "Ünï ☃ \U0001f600 \\ ' \" %s ?"
DATA = {"text": ODD, "whole": 10**300, "real": 0.1, "deep": [[{}], None, True]}


def fill(store: StateStore) -> None:
    """Something in every table of core, and no live lease at the end."""
    with store.hold(ODD, "worker-ä", ttl_seconds=60) as lease:
        store.put_checkpoint(ODD, DATA, lease=lease)
        with store.effect("refund", lease=lease, request={"amount": 5}) as effect:
            effect.done({"id": ODD})
        with pytest.raises(EffectUnknownError), store.effect("mail", lease=lease):
            pass
        late = lease.fence
    with suppress(StaleLeaseError):
        store.put_checkpoint(ODD, "late", lease_scope=late.scope, owner=late.owner, token=late.token)
    for number in range(MANY):
        store.put_checkpoint("many", number)
    store.prune_checkpoints(MANY - 5, "many")
    store.set_limit("pool", 3)
    store.set_retention("checkpoints.keep_last", 1_000)
    store.release(*store.acquire("old", "worker-a").fence)
    with store.transaction(component="test", action="test.age") as part:
        part.run("UPDATE leases SET token = ?, sum = NULL WHERE scope = 'old'", (LARGE_TOKEN,))


def everything(store: StateStore) -> dict[str, list[Any]]:
    """Every row of every table that moves; of events all but the word that they were moved."""
    with store.read() as reader:
        found = {
            table.name: sorted(
                map(tuple, reader.rows(f'SELECT {", ".join(sorted(table.columns))} FROM "{table.name}"')), key=repr
            )
            for table in reader.tables()
            if table.name not in LEFT_BEHIND
        }
    return {**found, "events": [row for row in found["events"] if "store.moved" not in row]}


def goes_on(store: StateStore, cursor: str) -> None:
    """Tokens, sequences, numbers, events and effects go on where they were."""
    assert store.acquire("old", "worker-b").token == LARGE_TOKEN + 1
    assert store.put_checkpoint("many", "more").sequence == MANY + 1
    latest = store.get_checkpoint(ODD)
    assert latest is not None
    assert latest.data == DATA
    with store.hold(ODD, "worker-ö", ttl_seconds=60) as lease:
        assert lease.token == 2
        assert store.put_checkpoint(ODD, "more", lease=lease).sequence == 2
        with store.effect("refund", lease=lease, request={"amount": 5}) as effect:
            assert (effect.fresh, effect.result) == (False, {"id": ODD})
        with pytest.raises(EffectUnknownError), store.effect("mail", lease=lease):
            pass
    assert [lease.slot for lease in (store.acquire("pool", "worker-c", limit=3) for _ in range(3))] == [0, 1, 2]
    kinds = [event.kind for event in store.events(1_000, after=cursor)]
    assert kinds[:4] == ["store.sealed", "store.moved", "lease.acquired", "checkpoint.saved"]
    whole = [event.id for event in store.events(10_000, after="start")]
    assert whole == sorted(set(whole))


def last_cursor(store: StateStore) -> str:
    return store.events(1)[-1].cursor


def is_empty(place: Path) -> bool:
    """Whether there is no store, or one that has no tables of core yet."""
    import sqlite3
    from contextlib import closing

    if not place.exists():
        return True
    with closing(sqlite3.connect(place)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return names in ([], ["components"])
