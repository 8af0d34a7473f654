"""Effects: begin before the action, tell after it, decide where nobody can tell."""

from __future__ import annotations

from agent_checkpoint import checkpoints, names, payload
from agent_checkpoint.change import record_refusal
from agent_checkpoint.errors import NotFoundError, StaleLeaseError
from agent_checkpoint.ledger import effects as rows
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Checkpoint, Effect, EffectRow, Fence, Happened, Write
from agent_checkpoint.rules import effect as rule
from agent_checkpoint.rules import expiry
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules.decision import Refused
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.checkpoints import Save
    from agent_checkpoint.database import Database, Reader
    from agent_checkpoint.records import EffectState

# Most effects in one list.
MAX_LISTED = 100_000


class Told(Record):
    """What became of telling: whether it was late, the checkpoint, and why that was refused (``refused``)."""

    late: bool
    checkpoint: Checkpoint | None
    refused: Exception | None


def digest_of(request: object) -> str | None:
    """The hash of a request: of its JSON with sorted keys. None for None.

    Raises:
        InvalidInputError: it is no JSON value.
    """
    if request is None:
        return None
    import json
    from hashlib import sha256

    payload.encode("request", request)
    return sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def idempotency_key(key: str) -> str:
    """The same for every try of a key, in every copy of the store: 32 hexadecimal digits."""
    from hashlib import blake2b

    return blake2b(key.encode(), digest_size=16, person=b"agent-checkpoint").hexdigest()


def begin(changes: Changes, key: str, fence: Fence, digest: str | None) -> tuple[EffectRow, bool]:
    """Begin an effect under a live lease, or find that it is done: the row, and whether it was begun now.

    Raises:
        StaleLeaseError: the fence matches no live lease.
        EffectRunningError, EffectUnknownError, EffectMismatchError: it may not be begun.
    """
    write = Write("core", "effect.begin", *fence, None, None, {"key": key})
    process = changes.database.identify()

    def decide(change: Change) -> tuple[EffectRow, bool] | Refused:
        transaction = change.transaction
        live = fencing.live(lease_rows.of_scope(transaction, fence.scope, fence.token), fence, transaction.moment)
        if isinstance(live, StaleLeaseError):
            return Refused(live, write)
        known = rows.find(transaction, key)
        running = known is not None and known.state == "begun" and _is_running(changes.database, transaction, known)
        row = rule.begin(known, key, digest, fence, running, transaction.moment, process)
        if not isinstance(row, EffectRow):
            return Refused(row)
        if row is known:
            return row, False
        rows.save(transaction, row)
        change.happened.append(Happened("effect.begun", *fence, None, None, {"key": key, "request_digest": row.digest}))
        return row, True

    return changes.run((f"effect:{key}", f"scope:{fence.scope}"), decide, write)  # type: ignore[no-any-return]


def tell(
    changes: Changes, begun: EffectRow, state: EffectState, result: str | None, save: Save | None, data: Any
) -> Told:
    """Tell what became of a try, with a checkpoint in the same transaction.

    What happened outside is recorded however late; the checkpoint is not.

    Raises:
        StaleLeaseError: somebody else has decided about it.
    """
    key, fence = begun.key, fence_of(begun)
    write = Write("core", f"effect.{state}", *fence, None, None, {"key": key})
    saving = None if save is None else checkpoints.write_of(save)
    veto = None if saving is None else changes.veto(saving)
    locks = {f"effect:{key}", f"scope:{fence.scope}"}
    if save is not None:
        locks.add(f"workflow:{save.workflow}")

    def decide(change: Change) -> Told | Refused:
        transaction = change.transaction
        live = fencing.live(lease_rows.of_scope(transaction, fence.scope, fence.token), fence, transaction.moment)
        late = isinstance(live, StaleLeaseError)
        row = rule.end(rows.find(transaction, key), begun, state, result, late, transaction.moment)
        if not isinstance(row, EffectRow):
            return Refused(row, write)
        rows.save(transaction, row)
        detail = {"key": key, "late": True} if late else {"key": key}
        change.happened.append(Happened(f"effect.{state}", *fence, None, None, detail))
        if save is None or saving is None:
            return Told(late, None, None)
        put = checkpoints.put_in(change, data, save, saving) if veto is None else Refused(veto, saving)
        if isinstance(put, Checkpoint):
            return Told(late, put, None)
        record_refusal(change, put)
        return Told(late, None, put.error)

    return changes.run(tuple(sorted(locks)), decide)  # type: ignore[no-any-return]


def leave(changes: Changes, begun: EffectRow, why: str) -> None:
    """Note that whoever began a try went away without a word of what became of it."""

    def decide(change: Change) -> None:
        row = rows.find(change.transaction, begun.key)
        if row is not None and row.state == "begun" and rule.same_try(row, begun):
            rows.save(change.transaction, row._replace(state="unknown"))
            detail = {"key": begun.key, "why": why}
            change.happened.append(Happened("effect.unknown", *fence_of(begun), None, None, detail))

    changes.run((f"effect:{begun.key}",), decide)


def resolve(changes: Changes, looked_at: EffectRow, state: EffectState, result: str | None, by: str) -> Effect:
    """Record what somebody found who looked outside after that try; ``by`` says who.

    Raises:
        EffectRunningError: the lease that began it is live, or it was begun anew meanwhile.
        InvalidInputError: it is known already what became of it.
    """
    key = looked_at.key

    def decide(change: Change) -> Effect | Refused:
        transaction = change.transaction
        known = rows.find(transaction, key)
        assert known is not None  # rows stay
        live = _is_leased(changes.database, transaction, known)
        row = rule.resolve(known, looked_at, live, state, result, transaction.moment)
        if not isinstance(row, EffectRow):
            return Refused(row)
        rows.save(transaction, row)
        detail = {"key": key, "decision": "done" if state == "done" else "retry", "by": by}
        change.happened.append(Happened("effect.resolved", known.scope, known.owner, known.token, detail=detail))
        return present(row)

    # With the lease's own lock: its heartbeat may be on the way.
    return changes.run((f"effect:{key}", f"scope:{looked_at.scope}"), decide)  # type: ignore[no-any-return]


def find(database: Database, key: str) -> Effect | None:
    """An effect as it stands; None when it was never begun."""
    found = look(database, key)
    return None if found is None else found[1]


def look(database: Database, key: str) -> tuple[EffectRow, Effect] | None:
    """An effect as it is stored, and as it stands; None when it was never begun."""
    names.name("key", key)
    with database.read() as reader:
        row = rows.find(reader, key)
        return None if row is None else (row, _standing(database, reader, row))


def latest(database: Database, limit: int) -> list[Effect]:
    """The effects that were begun last, without their results."""
    names.integer("limit", limit, 1, MAX_LISTED)
    with database.read() as reader:
        return [_standing(database, reader, row) for row in rows.latest(reader, limit)]


def present(row: EffectRow) -> Effect:
    """An effect as callers see it."""
    return Effect(
        row.key,
        row.state,
        row.scope,
        row.owner,
        row.token,
        row.digest,
        None if row.result is None else payload.decode(row.result),
        utc(row.begun_at),
        None if row.ended_at is None else utc(row.ended_at),
        bool(row.late),
        idempotency_key(row.key),
    )


def _standing(database: Database, reader: Reader, row: EffectRow) -> Effect:
    effect = present(row)
    lost = row.state == "begun" and not _is_running(database, reader, row)
    return effect._replace(state="unknown") if lost else effect


def _is_leased(database: Database, reader: Reader, row: EffectRow) -> bool:
    """Whether the lease that the effect was begun under is live. Once it is not, it never is again."""
    lease = fencing.live(lease_rows.of_scope(reader, row.scope, row.token), fence_of(row), reader.moment)
    if isinstance(lease, StaleLeaseError):
        return False
    return expiry.left(lease, reader.moment, database.who_lives([lease.process])).ns > 0


def _is_running(database: Database, reader: Reader, row: EffectRow) -> bool:
    """Whether whoever began it may be at it: its lease is live, and its process is not provably dead."""
    return _is_leased(database, reader, row) and not (row.process and database.alive(row.process) is False)


def fence_of(row: EffectRow) -> Fence:
    """What a try was begun under."""
    return Fence(row.scope, row.owner, row.token)


def missing(key: str) -> NotFoundError:
    """There is no such effect."""
    return NotFoundError(f"there is no effect {key!r}", hint="see 'agent-checkpoint effect list'", key=key)
