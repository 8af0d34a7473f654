"""Checkpoints: put under a fence, get, list, prune."""

from __future__ import annotations

from agent_checkpoint import names, payload
from agent_checkpoint.errors import StaleLeaseError
from agent_checkpoint.ledger import checkpoints as rows
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Checkpoint, Happened, Pruned, Write
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules.decision import Refused
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database
    from agent_checkpoint.records import CheckpointInfo, Fence, Fenced

ACTION = "checkpoint.put"
# What a prune removes in one transaction: little enough that no heartbeat waits long.
BATCH = 200
BATCH_BYTES = 2 * 1024 * 1024


class Save(Record):
    """What ``put_checkpoint`` was asked for; ``stored`` is the data as text."""

    workflow: str
    stored: str
    fence: Fence | None
    expected_sequence: int | None
    rebind: bool


def fence_of(lease: Fenced | None, scope: object, owner: object, token: object) -> Fence | None:
    """The fence that a write presents, or None when it presents none at all.

    Raises:
        InvalidInputError: some but not all of its parts, or a lease and parts.
    """
    parts = {"lease_scope": scope, "owner": owner, "token": token}
    missing = [field for field, value in parts.items() if value is None]
    if lease is not None:
        if len(missing) < len(parts):
            names.invalid("lease", "give either a lease or lease_scope, owner and token, not both")
        return fencing.presented_by(lease)
    if len(missing) == len(parts):
        return None
    if missing:
        names.invalid(missing[0], "is missing: a protected write needs lease_scope, owner and token, all three")
    return fencing.presented(scope, owner, token)


def put(changes: Changes, data: object, save: Save) -> Checkpoint:
    """Save the next checkpoint of a workflow, fenced by the lease that it presents."""
    fence, workflow, write = save.fence, save.workflow, write_of(save)
    locks = (f"workflow:{workflow}",) if fence is None else (f"scope:{fence.scope}", f"workflow:{workflow}")

    def decide(change: Change) -> Checkpoint | Refused:
        return put_in(change, data, save, write)

    return changes.run(locks, decide, write if fence or save.rebind else None)  # type: ignore[no-any-return]


def put_in(change: Change, data: object, save: Save, write: Write) -> Checkpoint | Refused:
    """The next checkpoint, or why there is none, as a part of a change that holds the workflow's lock."""
    transaction, fence, workflow = change.transaction, save.fence, save.workflow
    if fence is not None:
        live = fencing.live(lease_rows.of_scope(transaction, fence.scope, fence.token), fence, transaction.moment)
        if isinstance(live, StaleLeaseError):
            return Refused(live, write)
    found = rows.standing(transaction, workflow)
    error = fencing.binding(workflow, found, fence, save.expected_sequence, save.rebind)
    if error is not None:
        return Refused(error, write if isinstance(error, StaleLeaseError) else None)
    saved_at = utc(transaction.moment.wall_ns)
    checkpoint = Checkpoint(workflow, found.following, data, saved_at, *(fence or (None, None, None)))
    rows.save(transaction, checkpoint, save.stored)
    change.happened.extend(fencing.saved(workflow, found, fence, len(save.stored)))
    return checkpoint


def write_of(save: Save) -> Write:
    """The protected write that it is: what plugins may veto."""
    scope, owner, token = save.fence or (None, None, None)
    detail = {"rebind": save.rebind}
    return Write("core", ACTION, scope, owner, token, save.workflow, save.expected_sequence, detail)


def valid_save(
    workflow: str, data: object, fence: Fence | None, expected_sequence: int | None, rebind: bool, max_bytes: int
) -> Save:
    """The request, its parts checked before any lock is taken."""
    if expected_sequence is not None:
        names.integer("expected_sequence", expected_sequence, 0)
    return Save(
        names.name("workflow", workflow),
        payload.encode("data", data, max_bytes),
        fence,
        expected_sequence,
        names.flag("rebind", rebind),
    )


def find(database: Database, workflow: str, sequence: int | None) -> Checkpoint | None:
    """The latest checkpoint of a workflow or the one with ``sequence``; None when absent."""
    names.name("workflow", workflow)
    if sequence is not None:
        names.integer("sequence", sequence, 1)
    with database.read() as reader:
        found = rows.find(reader, workflow, sequence)
    return found and found[0]._replace(data=payload.decode(found[1]))


def latest_of_each(database: Database) -> list[CheckpointInfo]:
    """The latest checkpoint of every workflow, last saved first."""
    with database.read() as reader:
        return rows.latest_of_each(reader)


def history(database: Database, workflow: str) -> list[CheckpointInfo]:
    """Every checkpoint of a workflow, newest first."""
    names.name("workflow", workflow)
    with database.read() as reader:
        return rows.history(reader, workflow)


def prune(changes: Changes, database: Database, keep_last: int, workflow: str | None, dry_run: bool) -> list[Pruned]:
    """Remove all but the last ``keep_last`` checkpoints, in short transactions."""
    names.integer("keep_last", keep_last, 1)
    names.flag("dry_run", dry_run)
    if workflow is not None:
        names.name("workflow", workflow)
    with database.read() as reader:
        chosen = rows.workflows(reader) if workflow is None else [workflow]
        spans = {name: rows.span_to_prune(reader, name, keep_last) for name in chosen}
    pruned = []
    for name, (count, first, last) in spans.items():
        removed = count if dry_run or not count else _prune_to(changes, name, last)
        if removed:
            pruned.append(Pruned(name, removed, first, last))
    return pruned


def _prune_to(changes: Changes, workflow: str, last: int) -> int:
    """Remove the checkpoints up to sequence ``last``; how many this call removed."""
    removed, reached = 0, 0
    while reached < last:
        batch, reached = _prune_batch(changes, workflow, last)
        removed += batch
    return removed


def _prune_batch(changes: Changes, workflow: str, last: int) -> tuple[int, int]:
    def decide(change: Change) -> tuple[int, int]:
        batch = rows.remove_batch(change.transaction, workflow, last + 1, BATCH, BATCH_BYTES)
        removed, first, reached = batch
        if removed == 0:  # somebody else was faster
            return (0, last)
        detail = {"count": removed, "from_sequence": first, "to_sequence": reached}
        change.happened.append(Happened("checkpoint.pruned", workflow=workflow, detail=detail))
        return (removed, reached)

    return changes.run((f"workflow:{workflow}",), decide)  # type: ignore[no-any-return]
