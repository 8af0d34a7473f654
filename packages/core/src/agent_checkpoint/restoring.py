"""Backups, and how an old state comes back without giving anything out twice.

A copy is of the past: its leases have ended, its counters are behind what was
handed out since. So every lease in it ends (reason ``restored``), and tokens,
sequences and event ids go on behind those of the store that is replaced; where
that one is not at hand, far ahead. What the replaced store knows of effects is
kept: what was done since is not done again.
"""

from __future__ import annotations

import os

from agent_checkpoint import migrations, names
from agent_checkpoint.errors import StoreMovedError, schema_version_error
from agent_checkpoint.ledger import checkpoints as checkpoint_rows
from agent_checkpoint.ledger import components
from agent_checkpoint.ledger import effects as effect_rows
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened
from agent_checkpoint.rules import effect, expiry, grant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Transaction
    from agent_checkpoint.records import EffectRow, LeaseRow

# How far what counts goes ahead where it is not known what was handed out.
AHEAD = 1_000_000


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
    limits: dict[str, int] = {}  # noqa: RUF012
    sequences: dict[str, int] = {}  # noqa: RUF012
    effects: list[EffectRow] = []  # noqa: RUF012
    last_event: int = 0


def backup(changes: Changes, path: str) -> Backup:
    """Copy the store into a new file while others use it."""
    return Backup(path, changes.database.copy_to(names.path("file", path)))


def restore(target: Changes, path: str) -> Restored:
    """Put a backup in place of what is in the target, in one transaction; others wait for it, and go on with it.

    Raises:
        LeaseHeldError: a lease is live in the target; nothing was changed.
        StoreMovedError: the target was moved away, or what the backup is of.
    """
    database = target.database
    with database.opened_copy(names.path("file", path)) as put:
        database.create()

        def decide(change: Change) -> Restored:
            transaction = change.transaction
            replaced = _look(database, transaction)
            adapters = {name for name, *_ in components.everyone(transaction)} - {migrations.CORE}
            put(transaction)
            _refuse_moved(transaction, path)
            migrations.migrate_in(change, database.dialect, migrations.CORE, database.core_migrations)
            for component in sorted(adapters):
                _migrate(change, database.dialect, component)
            return _mark(change, database.name, replaced, path)

        return target.run(("restore",), decide, terms=migrations.MIGRATING)  # type: ignore[no-any-return]


def mark(changes: Changes) -> Restored:
    """The same for a copy that was put here by hand: what the store before it had handed out is not known."""

    def decide(change: Change) -> Restored:
        return _mark(change, changes.database.name, None, None)

    return changes.run(("restore",), decide)  # type: ignore[no-any-return]


def _look(database: Database, transaction: Transaction) -> Replaced | None:
    """What must not be forgotten of the store that is here; None when there is none."""
    version = components.version(transaction, migrations.CORE)
    if not version:
        return None
    known = len(database.core_migrations[database.dialect])
    if version != known:
        raise schema_version_error(migrations.CORE, version, known)
    _refuse_moved(transaction, database.name)
    leases = lease_rows.everyone(transaction)
    _refuse_live(database, transaction, leases)
    limits = {row.scope: lease_rows.limit(transaction, row.scope) for row in leases}
    return Replaced(
        leases,
        {scope: limit.slots for scope, limit in limits.items() if limit is not None},
        checkpoint_rows.handed_out(transaction),
        effect_rows.everyone(transaction),
        event_log.last_id(transaction),
    )


def _refuse_moved(transaction: Transaction, place: str) -> None:
    moved_to = components.moved_to(transaction)
    if moved_to is not None:
        raise StoreMovedError(f"{place}: this store was moved to {moved_to}", database=place, moved_to=moved_to)


def _refuse_live(database: Database, transaction: Transaction, leases: list[LeaseRow]) -> None:
    alive = database.who_lives(row.process for row in leases if row.state == "live")
    for row in leases:
        if row.state == "live" and (left := expiry.left(row, transaction.moment, alive)).ns:
            hint = "let the work end, or force-release the lease; then restore"
            raise grant.in_the_way(row, left, transaction.moment, hint)


def _migrate(change: Change, dialect: str, component: str) -> None:
    """Bring an adapter's tables up to date, for processes that have used them and go on; if its package is here."""
    from importlib.metadata import entry_points

    from agent_checkpoint.transfer import GROUP

    for found in entry_points(group=GROUP, name=component):
        migrations.migrate_in(change, dialect, component, found.load()())


def _mark(change: Change, database: str, replaced: Replaced | None, path: str | None) -> Restored:
    """End what was live in a copy, and let its counters go on behind what was handed out."""
    transaction = change.transaction
    known = replaced or Replaced()
    expired, scopes = _leases(change, known)
    floors = _sequences(transaction, known.sequences, replaced is None)
    kept = _effects(transaction, known.effects)
    last = max(known.last_event, event_log.last_id(transaction))
    if replaced is None:
        transaction.skip(AHEAD)
    detail = {"from": path and os.path.basename(path), "leases_expired": expired, "effects": kept}
    event_log.skip_to(transaction, last + (AHEAD if replaced is None else 1), Happened("store.restored", detail=detail))
    return Restored(database, path, expired, scopes, floors, kept)


def _leases(change: Change, replaced: Replaced) -> tuple[int, int]:
    """End every lease, and let the tokens of every scope go on behind all that were handed out."""
    transaction, moment = change.transaction, change.transaction.moment
    expired = 0
    rows = {(row.scope, row.slot): row for row in lease_rows.everyone(transaction)}
    _keep_limits(transaction, replaced.limits, {row.scope for row in rows.values()})
    handed_out: dict[str, int] = {}
    for row in replaced.leases:
        handed_out[row.scope] = max(handed_out.get(row.scope, 0), row.token)
        rows.setdefault((row.scope, row.slot), row)
    for key, row in rows.items():
        if row.state == "live":
            decision = grant.expire(row, "restored", moment)
            change.happened.extend(decision.events)
            rows[key] = decision.row
            expired += 1
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


def _keep_limits(transaction: Transaction, limits: dict[str, int], known: set[str]) -> None:
    """Of the scopes that only the replaced store knows: their users ask with that limit, and with no other."""
    for scope, slots in limits.items():
        if scope not in known and lease_rows.limit(transaction, scope) is None:
            lease_rows.set_limit(transaction, scope, slots)


def _sequences(transaction: Transaction, replaced: dict[str, int], unknown: bool) -> int:
    """Let the sequences of every workflow go on behind all that were handed out; how many had to be set."""
    floors = replaced
    if unknown:
        floors = {workflow: last + AHEAD for workflow, last in checkpoint_rows.handed_out(transaction).items()}
    return sum(checkpoint_rows.set_floor(transaction, workflow, floor) for workflow, floor in sorted(floors.items()))


def _effects(transaction: Transaction, replaced: Iterable[EffectRow]) -> int:
    """Keep what the replaced store knows of effects: what was done since must not be done again."""
    kept = 0
    for row in replaced:
        copied = effect_rows.find(transaction, row.key)
        if copied is None or (copied != row and effect.knows_more(row, copied)):
            effect_rows.save(transaction, row)
            kept += 1
    return kept
