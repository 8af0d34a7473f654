"""Leases: acquire, heartbeat, release, check, force-release, look."""

from __future__ import annotations

from agent_checkpoint import names, payload
from agent_checkpoint.errors import StaleLeaseError
from agent_checkpoint.ledger import leases as rows
from agent_checkpoint.records import Fence, LeaseRow, Write
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules import grant, present
from agent_checkpoint.rules.decision import Granted, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database
    from agent_checkpoint.records import Lease, Moment

    Decision = Granted | Refused
    Rule = Callable[[LeaseRow, Moment], Granted]


# Seconds a heartbeat queues in front of the write lock before it goes around. A
# frozen process at the head of the queue must not outlast a short lease, whose
# length is known only behind the lock.
HEARTBEAT_PATIENCE = 0.1


def acquire(changes: Changes, scope: str, owner: str, ttl_seconds: float, metadata: object, reclaim: bool) -> Lease:
    """Grant the scope to the owner, or raise ``LeaseHeldError``."""
    ask = grant.Ask(
        names.name("scope", scope),
        names.name("owner", owner),
        names.ttl_ns(ttl_seconds),
        payload.encode_object("metadata", metadata, payload.MAX_METADATA_BYTES),
        names.flag("reclaim", reclaim),
    )

    def decide(change: Change) -> Lease | Refused:
        transaction = change.transaction
        return _settle(change, grant.acquire(rows.of_scope(transaction, scope), ask, transaction.moment))

    return changes.run((f"scope:{scope}",), decide)  # type: ignore[no-any-return]


def heartbeat(changes: Changes, fence: Fence, ttl_seconds: float | None) -> Lease:
    """Extend a live lease, or raise ``StaleLeaseError``."""
    ttl_ns = None if ttl_seconds is None else names.ttl_ns(ttl_seconds)
    return _by_owner(
        changes, fence, "lease.heartbeat", lambda row, moment: grant.heartbeat(row, ttl_ns, moment), HEARTBEAT_PATIENCE
    )


def release(changes: Changes, fence: Fence) -> Lease:
    """End a live lease, or raise ``StaleLeaseError``."""
    return _by_owner(changes, fence, "lease.release", lambda row, _: grant.release(row))


def _by_owner(changes: Changes, fence: Fence, action: str, rule: Rule, patience: float | None = None) -> Lease:
    """What only the holder of a live lease may do to it."""

    def decide(change: Change) -> Lease | Refused:
        moment = change.transaction.moment
        row = fencing.live(rows.of_scope(change.transaction, fence.scope), fence, moment)
        if isinstance(row, StaleLeaseError):
            return Refused(row, Write("core", action, *fence, None, None, {}))
        return _settle(change, rule(row, moment))

    return changes.run((f"scope:{fence.scope}",), decide, patience=patience)  # type: ignore[no-any-return]


def force_release(changes: Changes, scope: str, reason: str, token: int | None) -> Lease:
    """End a live lease against its owner's will, or raise ``NotFoundError``."""
    names.name("scope", scope)
    names.text("reason", reason)
    if token is not None:
        names.integer("token", token, 1)

    def decide(change: Change) -> Lease | Refused:
        row = rows.of_scope(change.transaction, scope)
        if token is not None:
            fence = Fence(scope, row.owner if row else "", token)
            live = fencing.live(row, fence, change.transaction.moment)
            if isinstance(live, StaleLeaseError):
                return Refused(live)
        return _settle(change, grant.force_release(row, scope, reason, change.transaction.moment))

    return changes.run((f"scope:{scope}",), decide)  # type: ignore[no-any-return]


def check(database: Database, fence: Fence) -> Lease:
    """The live lease that the fence matches, or raise ``StaleLeaseError``; writes nothing."""
    with database.read() as reader:
        row = fencing.live(rows.of_scope(reader, fence.scope), fence, reader.moment)
    if isinstance(row, StaleLeaseError):
        raise row
    return present.lease(row, reader.moment)


def find(database: Database, scope: str, include_expired: bool) -> Lease | None:
    """The live lease of a scope, with ``include_expired`` the last one."""
    names.name("scope", scope)
    with database.read() as reader:
        row = rows.of_scope(reader, scope)
    lease = None if row is None else present.lease(row, reader.moment)
    return lease if lease is not None and (include_expired or lease.state == "live") else None


def everyone(database: Database, include_expired: bool) -> list[Lease]:
    """The live lease of every scope, with ``include_expired`` the last one of each."""
    with database.read() as reader:
        found = rows.everyone(reader)
    leases = [present.lease(row, reader.moment) for row in found]
    return [lease for lease in leases if include_expired or lease.state == "live"]


def _settle(change: Change, decision: Decision) -> Lease | Refused:
    if isinstance(decision, Refused):
        return decision
    rows.save(change.transaction, decision.row)
    change.happened.extend(decision.events)
    return present.settled(decision.row)
