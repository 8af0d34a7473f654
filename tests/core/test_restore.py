"""What a restore brings back, and what not: leases, tokens, sequences, and the effects that were done since."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint import (
    EffectUnknownError,
    InvalidInputError,
    Lease,
    LeaseHeldError,
    SequenceConflictError,
    StaleLeaseError,
    StateStore,
    StoreMovedError,
)
from agent_checkpoint.restoring import AHEAD
from agent_checkpoint.testing import FakeClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "copies" / "backup.db"


@pytest.fixture
def backed_up(store: StateStore, file: Path) -> StateStore:
    """A store, and its backup from when worker-a held token 1 and had saved one checkpoint."""
    file.parent.mkdir()
    lease = store.acquire("release", "worker-a")
    store.put_checkpoint("deploy", {"stage": "built"}, lease=lease)
    store.backup(file)
    store.release(*lease.fence)
    return store


@pytest.fixture
def fresh(tmp_path: Path, clock: FakeClock) -> Iterator[StateStore]:
    """A place where no store is, in a folder that is not there."""
    with StateStore(tmp_path / "elsewhere" / "agents.db", clock=clock) as store:
        yield store


def grant(store: StateStore, scope: str, times: int) -> int:
    """The last of so many tokens, each released."""
    for _ in range(times):
        lease = store.acquire(scope, "worker-b")
        store.release(*lease.fence)
    return lease.token


def act(store: StateStore, key: str, lease: Lease, result: str) -> None:
    with store.effect(key, lease=lease) as effect:
        assert effect.fresh
        effect.done(result)


def fail(store: StateStore, key: str, lease: Lease) -> None:
    with store.effect(key, lease=lease) as effect:
        effect.failed()


def vanish(store: StateStore, key: str, lease: Lease) -> None:
    """Begin an effect, and let nobody know what became of it."""
    with pytest.raises(LookupError), store.effect(key, lease=lease):
        raise LookupError


# What comes back, and what does not


def test_what_was_saved_since_is_gone_and_what_was_there_is_back(backed_up: StateStore, file: Path) -> None:
    backed_up.put_checkpoint("later", 1)
    backed_up.restore(file)
    found = backed_up.get_checkpoint("deploy")
    assert found is not None
    assert (found.sequence, found.data) == (1, {"stage": "built"})
    assert backed_up.get_checkpoint("later") is None


def test_a_lease_of_the_copy_ends_and_its_fence_does_not_revive(backed_up: StateStore, file: Path) -> None:
    done = backed_up.restore(file)
    assert done.leases_expired == 1
    assert backed_up.list_leases() == []
    with pytest.raises(StaleLeaseError):
        backed_up.heartbeat("release", "worker-a", 1)
    with pytest.raises(StaleLeaseError):
        backed_up.put_checkpoint("deploy", {"stage": "late"}, lease_scope="release", owner="worker-a", token=1)
    (expired,) = backed_up.events(kind="lease.expired")
    assert (expired.scope, expired.token, expired.detail["reason"]) == ("release", 1, "restored")


def test_a_live_lease_is_told_as_where_its_scope_is_asked_for(backed_up: StateStore, file: Path) -> None:
    lease = backed_up.acquire("release", "worker-b", 30)
    with pytest.raises(LeaseHeldError, match="nothing was changed") as refused:
        backed_up.restore(file)

    error = refused.value
    assert (error.owner, error.expires_at, error.retry_after, error.position) == ("worker-b", lease.expires_at, 30.0, 1)
    assert backed_up.check_lease(*lease.fence).token == lease.token


@pytest.mark.parametrize("high", [3 * AHEAD, 2**61])
def test_tokens_go_on_behind_all_that_were_handed_out(
    backed_up: StateStore, file: Path, clock: FakeClock, high: int
) -> None:
    clock.step_wall(-clock.wall_ns() / 1e9)  # 1970, so that no token is high by its time alone
    with closing(sqlite3.connect(backed_up.database)) as raw, raw:
        raw.execute("UPDATE leases SET token = ?, sum = NULL", (high,))
    only = grant(backed_up, "only-here", 4)
    backed_up.restore(file)
    assert backed_up.acquire("release", "worker-c").token > high
    assert backed_up.acquire("only-here", "worker-c").token > only


def test_tokens_start_behind_the_milliseconds_since_1970(backed_up: StateStore, file: Path, clock: FakeClock) -> None:
    backed_up.restore(file)
    assert backed_up.acquire("release", "worker-c").token > clock.wall_ns() // 1_000_000


def test_sequences_go_on_behind_all_that_were_handed_out(backed_up: StateStore, file: Path) -> None:
    lease = backed_up.acquire("release", "worker-b")
    for stage in ("tested", "shipped"):
        backed_up.put_checkpoint("deploy", {"stage": stage}, lease=lease)
    backed_up.put_checkpoint("only-here", 1)
    backed_up.release(*lease.fence)
    assert backed_up.restore(file).workflows == 2

    lease = backed_up.acquire("release", "worker-c")
    with pytest.raises(SequenceConflictError):
        backed_up.put_checkpoint("deploy", {}, lease=lease, expected_sequence=3)
    assert backed_up.put_checkpoint("deploy", {}, lease=lease, expected_sequence=1).sequence == 4
    assert backed_up.put_checkpoint("only-here", 2, expected_sequence=0).sequence == 2


def test_sequences_of_an_earlier_replaced_store_are_not_forgotten(backed_up: StateStore, file: Path) -> None:
    for number in range(5):
        backed_up.put_checkpoint("only-here", number)
    backed_up.restore(file)
    backed_up.restore(file)
    assert backed_up.put_checkpoint("only-here", 6).sequence == 6


def test_an_effect_that_was_done_since_is_not_done_again(backed_up: StateStore, file: Path) -> None:
    lease = backed_up.acquire("release", "worker-b")
    act(backed_up, "publish", lease, "v2 is out")
    vanish(backed_up, "announce", lease)
    backed_up.release(*lease.fence)
    assert backed_up.restore(file).effects == 2

    lease = backed_up.acquire("release", "worker-c")
    with backed_up.effect("publish", lease=lease) as effect:
        assert (effect.fresh, effect.result) == (False, "v2 is out")
    with pytest.raises(EffectUnknownError), backed_up.effect("announce", lease=lease):
        pass


def test_an_effect_that_the_copy_knows_as_done_stays_done(backed_up: StateStore, file: Path, fresh: StateStore) -> None:
    lease = backed_up.acquire("release", "worker-b")
    act(backed_up, "publish", lease, "v2 is out")
    backed_up.backup(file.with_name("second.db"))
    fresh.initialize()
    other = fresh.acquire("release", "worker-x")
    fail(fresh, "publish", other)
    fresh.release(*other.fence)

    fresh.restore(file.with_name("second.db"))
    with fresh.effect("publish", lease=fresh.acquire("release", "worker-c")) as again:
        assert (again.fresh, again.result) == (False, "v2 is out")


def test_slots_of_a_scope_end_each_and_its_limit_stays(store: StateStore, tmp_path: Path) -> None:
    held = [store.acquire("pool", f"worker-{number}", limit=3) for number in range(3)]
    store.backup(tmp_path / "backup.db")
    for lease in held:
        store.release(*lease.fence)
    tokens = [store.acquire("other", f"worker-{number}", limit=2) for number in range(2)]
    for lease in tokens:
        store.release(*lease.fence)

    assert store.restore(tmp_path / "backup.db").leases_expired == 3
    again = [store.acquire("pool", f"worker-{number}", limit=3) for number in range(3)]
    assert [lease.slot for lease in again] == [0, 1, 2]
    assert len({lease.token for lease in again}) == 3
    assert min(lease.token for lease in again) > max(lease.token for lease in held)
    assert [store.acquire("other", "worker-a", limit=2).slot for _ in range(2)] == [0, 1]


def test_a_reader_goes_on_from_its_cursor_and_is_told(backed_up: StateStore, file: Path) -> None:
    grant(backed_up, "release", 3)
    cursor = backed_up.events()[-1].cursor
    backed_up.restore(file)
    backed_up.put_checkpoint("news", 1)
    told = [event.kind for event in backed_up.events(after=cursor)]
    assert told == ["store.restored", "lease.expired", "checkpoint.saved"]


def test_who_waited_when_the_copy_was_made_is_not_waited_for(backed_up: StateStore, file: Path) -> None:
    with closing(sqlite3.connect(file)) as raw, raw:
        raw.execute("INSERT INTO tickets VALUES (9, 'release', 'worker-z', 10, 0, ?, '', 0, 0, '', '', NULL)", (2**62,))
    backed_up.restore(file)
    with backed_up.read() as reader:
        assert reader.rows("SELECT COUNT(*) FROM tickets") == [(0,)]
    assert backed_up.acquire("release", "worker-c").state == "live"


def test_the_numbers_that_adapters_rows_had_are_not_given_again(store: StateStore, tmp_path: Path) -> None:
    script = tmp_path / "0001_notes.sql"
    script.write_text("CREATE TABLE notes (number INTEGER PRIMARY KEY AUTOINCREMENT, text TEXT NOT NULL);")
    store.migrate("notes", {"sqlite": [script]})

    def note(text: str) -> int:
        with store.transaction(component="notes", action="note.write") as part:
            return int(part.rows("INSERT INTO notes (text) VALUES (?) RETURNING number", (text,))[0][0])

    first = note("before")
    store.backup(tmp_path / "backup.db")
    second = note("after")
    store.restore(tmp_path / "backup.db")
    assert (first, second) == (1, 2)
    assert note("later") == 3
    store.mark_restored()
    assert note("far ahead") == 4 + AHEAD


def test_what_keeps_the_log_and_the_tokens_is_there_again(backed_up: StateStore, file: Path) -> None:
    def made() -> set[tuple[str, str, str]]:
        with closing(sqlite3.connect(backed_up.database)) as raw:
            return set(raw.execute("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))

    before = made()
    backed_up.restore(file)
    assert made() == before
    assert {check.check: check.verdict for check in backed_up.doctor()}["integrity"] == "ok"


def test_the_retention_policy_is_that_of_the_copy(store: StateStore, tmp_path: Path) -> None:
    store.set_retention("checkpoints.keep_last", 3)
    store.backup(tmp_path / "backup.db")
    store.set_retention("checkpoints.keep_last", 9)
    store.restore(tmp_path / "backup.db")
    assert store.retention()["checkpoints.keep_last"] == 3


# Where it is restored to


def test_a_live_lease_refuses_and_nothing_changes(backed_up: StateStore, file: Path) -> None:
    lease = backed_up.acquire("release", "worker-b", 30)
    before = [event.id for event in backed_up.events()]
    with pytest.raises(LeaseHeldError) as refused:
        backed_up.restore(file)
    assert refused.value.retry_after == 30
    assert refused.value.facts["token"] == lease.token
    assert [event.id for event in backed_up.events()] == before
    assert backed_up.heartbeat(*lease.fence).state == "live"


def test_a_lease_that_ran_out_refuses_nobody(backed_up: StateStore, file: Path, clock: FakeClock) -> None:
    backed_up.acquire("other", "worker-b", 30)
    clock.advance(30)
    assert backed_up.restore(file).leases_expired == 2


def test_a_missing_store_is_made_and_everything_goes_far_ahead(
    backed_up: StateStore, file: Path, fresh: StateStore, clock: FakeClock
) -> None:
    clock.step_wall(-clock.wall_ns() / 1e9)  # 1970, so that no token is high by its time alone
    last = backed_up.events()[-1].id
    done = fresh.restore(file)
    assert (done.database, done.workflows) == (fresh.database, 1)
    lease = fresh.acquire("release", "worker-c")
    assert lease.token > 1 + AHEAD
    assert fresh.put_checkpoint("deploy", {}, lease=lease).sequence == 2 + AHEAD
    assert fresh.events(kind="store.restored")[0].id >= AHEAD > last


@pytest.mark.usefixtures("backed_up")
def test_a_copy_that_was_put_there_by_hand_is_marked(file: Path, tmp_path: Path, clock: FakeClock) -> None:
    with StateStore(tmp_path / "by-hand.db", clock=clock) as copy:
        Path(copy.database).write_bytes(file.read_bytes())
        assert copy.mark_restored().leases_expired == 1
        with pytest.raises(StaleLeaseError):
            copy.heartbeat("release", "worker-a", 1)
        lease = copy.acquire("release", "worker-c")
        assert lease.token > 1 + AHEAD
        assert copy.put_checkpoint("deploy", {}, lease=lease).sequence == 2 + AHEAD


def test_a_store_that_was_moved_away_is_not_brought_back(
    backed_up: StateStore, file: Path, fresh: StateStore, tmp_path: Path
) -> None:
    backed_up.move_to(fresh)
    with pytest.raises(StoreMovedError):
        backed_up.restore(file)
    backed_up.backup(tmp_path / "moved.db")
    with pytest.raises(StoreMovedError):
        fresh.restore(tmp_path / "moved.db")
    assert fresh.acquire("release", "worker-c").token == 2


def test_a_store_is_not_restored_from_itself(store: StateStore, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(store.database)
    for name in (store.database, tmp_path / "link.db"):
        with pytest.raises(InvalidInputError, match="is the store itself"):
            store.restore(name)


def test_a_store_in_use_is_as_good_as_a_backup(store: StateStore, fresh: StateStore) -> None:
    store.acquire("release", "worker-a")
    assert fresh.restore(store.database).leases_expired == 1
    assert store.heartbeat("release", "worker-a", 1).state == "live"
