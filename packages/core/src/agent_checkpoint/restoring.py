"""Backups, and how an old state comes back without giving anything out twice.

A copy is of the past: its leases have ended, its counters are behind what was
handed out since. So every lease in it ends (reason ``restored``), and tokens,
sequences and event ids go on behind those of the store that is replaced; where
that one is not at hand, far ahead. What the replaced store knows of effects is
kept: what was done since is not done again.
"""

from __future__ import annotations

import os

from agent_checkpoint import migrations, transfer
from agent_checkpoint.database import Terms
from agent_checkpoint.errors import StoreMovedError
from agent_checkpoint.ledger import checkpoints as checkpoint_rows
from agent_checkpoint.ledger import components
from agent_checkpoint.ledger import effects as effect_rows
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened
from agent_checkpoint.rules import expiry, grant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.records import EffectRow, LeaseRow, Moment

# How far tokens, event ids and sequences go ahead where it is not known what was handed out.
AHEAD = 1_000_000
# What a store is sealed with while its content is replaced.
RESTORING = "a backup that is being restored over it"


class Backup(Record):
    """A copy of a store in a file."""

    file: str
    bytes: int


class Restored(Record):
    """What a restore did: leases that were ended, scopes and workflows whose counters were set, effects kept."""

    database: str
    file: str | None
    leases_expired: int
    scopes: int
    workflows: int
    effects: int


class Replaced(Record):
    """What must not be forgotten of a store that is replaced."""

    leases: list[LeaseRow] = []  # noqa: RUF012 -- a named tuple's default, never mutated
    sequences: dict[str, int] = {}  # noqa: RUF012
    effects: list[EffectRow] = []  # noqa: RUF012
    last_event: int = 0


def backup(changes: Changes, path: str) -> Backup:
    """Copy the store into a new file while others use it."""
    return Backup(path, changes.database.copy_to(path))


def restore(target: Changes, open_store: Callable[[str], Changes], path: str) -> Restored:
    """Put a backup in place of what is in the target.

    Raises:
        LeaseHeldError: a lease is live in the target; nothing was changed.
        StoreMovedError: the target was moved away.
    """
    prepared = f"{target.database.name}.restoring-{os.getpid()}"
    copy = open_store(path)
    copy.database.copy_to(prepared)
    copy.database.close()
    work = open_store(prepared)
    try:
        migrations.migrate(work, work.database.dialect, migrations.CORE, work.database.core_migrations)
        replaced = _seal(target)
        try:
            restored = mark(work, replaced, path)
            work.database.close()
            target.database.overwrite(prepared)
        except BaseException:
            if replaced is not None:
                transfer.unseal(target)
            raise
        return restored._replace(database=target.database.name)
    finally:
        work.database.close()
        for suffix in ("", "-wal", "-shm", "-gate"):
            if os.path.exists(prepared + suffix):
                os.unlink(prepared + suffix)


def _seal(target: Changes) -> Replaced | None:
    """Let nobody write to the target any more, and note what must not be forgotten of it; None: it is empty."""
    target.database.create()
    with target.database.transaction((), Terms(migrating=True)) as transaction:
        if not components.version(transaction, migrations.CORE):
            return None
    with target.database.read() as reader:
        moved_to = components.moved_to(reader)
    if moved_to is None:
        transfer.seal(target, RESTORING)
    elif moved_to != RESTORING:  # else whoever restored it before was killed
        place = target.database.name
        raise StoreMovedError(f"{place}: this store was moved to {moved_to}", database=place, moved_to=moved_to)
    with target.database.read() as reader:
        return Replaced(
            lease_rows.everyone(reader),
            checkpoint_rows.handed_out(reader),
            effect_rows.everyone(reader),
            event_log.last_id(reader),
        )


def mark(changes: Changes, replaced: Replaced | None, path: str | None) -> Restored:
    """End what was live in a copy, and let its counters go on behind what was handed out; in one transaction."""
    known = replaced or Replaced()

    def decide(change: Change) -> Restored:
        transaction = change.transaction
        expired, scopes = _leases(change, known.leases)
        floors = _sequences(change, known.sequences, replaced is None)
        kept = _effects(change, known.effects)
        detail = {"from": path and os.path.basename(path), "leases_expired": expired, "effects": kept}
        last = max(known.last_event, event_log.last_id(transaction))
        event_log.skip_to(
            transaction, last + (AHEAD if replaced is None else 1), Happened("store.restored", detail=detail)
        )
        return Restored(changes.database.name, path, expired, scopes, floors, kept)

    return changes.run(("restore",), decide)  # type: ignore[no-any-return]


def _leases(change: Change, replaced: Iterable[LeaseRow]) -> tuple[int, int]:
    """End every lease, and let the tokens of every scope go on behind all that were handed out."""
    transaction, moment = change.transaction, change.transaction.moment
    expired = 0
    rows = {(row.scope, row.slot): row for row in lease_rows.everyone(transaction)}
    for key, row in rows.items():
        if row.state == "live":
            decision = grant.expire(row, "restored", moment)
            change.happened.extend(decision.events)
            rows[key] = decision.row
            expired += 1
    handed_out: dict[str, int] = {}
    for row in replaced:
        handed_out[row.scope] = max(handed_out.get(row.scope, 0), row.token)
        rows.setdefault((row.scope, row.slot), _over(row, moment))
    latest: dict[str, LeaseRow] = {}
    for row in rows.values():
        if row.scope not in latest or row.token > latest[row.scope].token:
            latest[row.scope] = row
    for scope, row in latest.items():
        token = max(row.token + AHEAD, handed_out.get(scope, 0), moment.wall_ns // 1_000_000)
        rows[(scope, row.slot)] = row._replace(token=token)
    for row in rows.values():
        lease_rows.save(transaction, row)
    return expired, len(latest)


def _over(row: LeaseRow, moment: Moment) -> LeaseRow:
    return expiry.ended(row, "expired", moment) if row.state == "live" else row


def _sequences(change: Change, replaced: dict[str, int], unknown: bool) -> int:
    """Let the sequences of every workflow go on behind all that were handed out; how many had to be set."""
    transaction = change.transaction
    floors = dict(replaced)
    if unknown:
        floors = {workflow: last + AHEAD for workflow, last in checkpoint_rows.handed_out(transaction).items()}
    return sum(checkpoint_rows.set_floor(transaction, workflow, floor) for workflow, floor in sorted(floors.items()))


def _effects(change: Change, replaced: Iterable[EffectRow]) -> int:
    """Keep what the replaced store knows of effects: what was done since must not be done again."""
    kept = 0
    for row in replaced:
        if effect_rows.find(change.transaction, row.key) != row:
            effect_rows.save(change.transaction, row)
            kept += 1
    return kept
