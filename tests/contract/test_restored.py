"""A store that was copied by hand, or loaded from a dump: nothing is given out twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_checkpoint import EffectUnknownError, StaleLeaseError, StateStore
from agent_checkpoint.restoring import AHEAD
from agent_checkpoint.testing import FakeClock


def test_leases_end_and_counters_go_ahead(store: StateStore, clock: FakeClock) -> None:
    clock.step_wall(-clock.wall_ns() / 1e9)  # 1970, so that no token is high by its time alone
    lease = store.acquire("release", "worker-a")
    store.put_checkpoint("deploy", 1, lease=lease)
    done = store.mark_restored()
    assert (done.leases_expired, done.scopes, done.workflows, done.file) == (1, 1, 1, None)

    with pytest.raises(StaleLeaseError):
        store.heartbeat(*lease.fence)
    later = store.acquire("release", "worker-b")
    assert later.token == 2 + AHEAD
    assert store.put_checkpoint("deploy", 2, lease=later).sequence == 2 + AHEAD


def test_readers_go_on_behind_the_mark(store: StateStore) -> None:
    store.acquire("release", "worker-a")
    cursor = store.events()[-1].cursor
    store.mark_restored()
    (restored, expired) = store.events(after=cursor)
    assert (restored.kind, expired.kind, expired.detail["reason"]) == ("store.restored", "lease.expired", "restored")


def test_an_effect_that_was_under_way_is_unknown(store: StateStore) -> None:
    with pytest.raises(LookupError), store.effect("publish", lease=store.acquire("release", "worker-a")):
        raise LookupError
    store.mark_restored()
    with pytest.raises(EffectUnknownError), store.effect("publish", lease=store.acquire("release", "worker-b")):
        pass


def test_what_is_numbered_goes_ahead(store: StateStore, tmp_path: Path) -> None:
    scripts = {
        "sqlite": "CREATE TABLE notes (number INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT);",
        "postgresql": "CREATE TABLE notes (number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, text TEXT);",
    }
    files = {}
    for dialect, script in scripts.items():
        (tmp_path / dialect).mkdir()
        files[dialect] = [tmp_path / dialect / "0001_notes.sql"]
        files[dialect][0].write_text(script)
    store.migrate("notes", files)

    def note() -> int:
        with store.transaction(component="notes", action="note.write") as part:
            return int(part.rows("INSERT INTO notes (text) VALUES ('x') RETURNING number")[0][0])

    first = note()
    store.mark_restored()
    assert note() > first + AHEAD


def test_checkpoints_go_out_and_come_back_in(store: StateStore, tmp_path: Path) -> None:
    lease = store.acquire("release", "worker-a")
    store.put_checkpoint("deploy", {"b": 1, "a": 2}, lease=lease)
    exported = list(store.export_checkpoints())
    assert [each.workflow for each in store.import_checkpoints(exported)] == ["deploy"]
    with StateStore(tmp_path / "other.db") as other:
        other.initialize()
        other.import_checkpoints(exported)
        assert other.get_checkpoint("deploy") == store.get_checkpoint("deploy")
        assert other.checkpoint_history("deploy") == store.checkpoint_history("deploy")
