"""Leases: acquire, heartbeat, release, check, force-release, limits, the sweep, look."""

from __future__ import annotations

from agent_checkpoint import names, payload
from agent_checkpoint.database import ORDINARY, Terms
from agent_checkpoint.errors import AgentCheckpointError, StaleLeaseError
from agent_checkpoint.ledger import leases as rows
from agent_checkpoint.ledger import tickets
from agent_checkpoint.records import Fence, Happened, LeaseRow, Limit, Write
from agent_checkpoint.rules import expiry, grant, present
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules.decision import Granted, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Reader
    from agent_checkpoint.records import Lease, Moment

    Decision = Granted | Refused
    Rule = Callable[[LeaseRow, Moment], Granted]


# A heartbeat queues for 0.1 s in front of the write lock before it goes around. A
# frozen process at the head of the queue must not outlast a short lease, whose
# length is known only behind the lock.
HEARTBEAT = Terms(patience=0.1)
# The sweep is a courtesy: who looks at the store is not kept waiting for it.
SWEEP = Terms(patience=0.1, within=0.2)
# Leases that the sweep puts on record in one transaction: some 10 ms of work.
SWEPT_AT_ONCE = 100
# More slots than any scope needs; looking for a free one reads them all.
MAX_LIMIT = 10_000


def valid_ask(
    scope: object,
    owner: object,
    ttl_seconds: object,
    metadata: object,
    reclaim: object = False,
    limit: object = None,
    process: str = "",
) -> grant.Ask:
    """What ``acquire`` is asked for, each part checked."""
    return grant.Ask._make(
        (
            names.name("scope", scope),
            names.name("owner", owner),
            names.ttl_ns(ttl_seconds),
            payload.encode_object("metadata", metadata, payload.MAX_METADATA_BYTES),
            names.flag("reclaim", reclaim),
            None if limit is None else names.integer("limit", limit, 1, MAX_LIMIT),
            process,
            0,
        )
    )


def acquire(changes: Changes, ask: grant.Ask, note: Callable[[LeaseRow], object] | None = None) -> Lease:
    """Grant the scope to the owner, or raise ``LeaseHeldError``: one try, no waiting.

    ``note`` hears of the grant before its commit, which an interrupt may keep from the caller.
    """

    return changes.run((f"scope:{ask.scope}",), lambda change: grant_in(change, changes.database, ask, note))  # type: ignore[no-any-return]


def acquire_now(changes: Changes, ask: grant.Ask, note: Callable[[Lease], object]) -> Lease:
    """The same, and ``note`` hears of the lease; interrupted in between, it is given back: nobody would know of it."""
    granted: list[LeaseRow] = []
    try:
        lease = acquire(changes, ask, granted.append)
        note(lease)
    except Exception:
        raise
    except BaseException:
        if granted:
            _take_back_if_possible(changes, granted[-1])
        raise
    return lease


def grant_in(
    change: Change, database: Database, ask: grant.Ask, note: Callable[[LeaseRow], object] | None = None
) -> Lease | Refused:
    """The grant, or why there is none, as a part of a change that holds the scope's lock."""
    transaction = change.transaction
    decision = grant.acquire(standing(database, transaction, ask.scope, ask.ticket), ask, transaction.moment)
    if isinstance(decision, Granted):
        if decision.limit is not None:
            rows.set_limit(transaction, ask.scope, decision.limit)
        if decision.passed:
            tickets.pass_over(transaction, ask.scope, decision.passed)
        if decision.gone:
            tickets.remove(transaction, ask.scope, decision.gone)
        if note is not None:
            note(decision.row)
    return _settle(change, decision)


def release_in(change: Change, granted: LeaseRow) -> None:
    """The end of a lease that the same change granted."""
    _settle(change, grant.release(granted, change.transaction.moment))


def standing(database: Database, reader: Reader, scope: str, ticket: int) -> grant.Standing:
    """How a scope stands, and which of the processes live that the holder of a ticket (0: none) waits for."""
    leases, limit, perhaps_queued = rows.standing(reader, scope)
    line = tickets.of_scope(reader, scope) if perhaps_queued else ()
    bound = [row.process for row in leases if row.state == "live"]
    if line:
        # Whoever slept through the life of its ticket stands behind everybody, as one without a ticket does.
        kept = ticket < 0 or any(other.number == ticket and expiry.remaining(other, reader.moment).ns for other in line)
        bound += [other.process for other in line if not kept or other.number < ticket]
    return grant.Standing._make((leases, limit, line, database.who_lives(bound) if bound else {}))


def heartbeat(changes: Changes, fence: Fence, ttl_seconds: float | None) -> Lease:
    """Extend a live lease, or raise ``StaleLeaseError``."""
    ttl_ns = None if ttl_seconds is None else names.ttl_ns(ttl_seconds)
    return _by_owner(
        changes, fence, "lease.heartbeat", lambda row, moment: grant.heartbeat(row, ttl_ns, moment), HEARTBEAT
    )


def is_held(reader: Reader, scope: str) -> bool:
    """Whether a lease is live in the scope, as far as its time tells."""
    return any(expiry.is_live(row, reader.moment) for row in rows.of_scope(reader, scope))


def wake_next(change: Change, scope: str, freed: int = 1) -> None:
    """Ring the bells of those whose turn it is once this is committed."""
    bells = tickets.next_bells(change.transaction, scope, freed)
    if bells:
        change.transaction.ring(bells)


def release(changes: Changes, fence: Fence, earlier: Sequence[Happened] = (), terms: Terms = ORDINARY) -> Lease:
    """End a live lease, or raise ``StaleLeaseError``; ``earlier`` events go on record before its end."""

    def rule(row: LeaseRow, moment: Moment) -> Granted:
        released = grant.release(row, moment)
        return released._replace(events=(*earlier, *released.events)) if earlier else released

    return _by_owner(changes, fence, "lease.release", rule, terms)


def take_back(changes: Changes, granted: LeaseRow) -> None:
    """Release what was granted, if it ever was and is live still: else another may have its token."""

    def decide(change: Change) -> None:
        for row in rows.of_scope(change.transaction, granted.scope):
            same = (row.token, row.acquired_at, row.process) == (granted.token, granted.acquired_at, granted.process)
            if same and expiry.is_live(row, change.transaction.moment):
                _settle(change, grant.release(row, change.transaction.moment))

    changes.run((f"scope:{granted.scope}",), decide)


def _take_back_if_possible(changes: Changes, granted: LeaseRow) -> None:
    try:
        take_back(changes, granted)
    except AgentCheckpointError:
        return  # it ends by its ttl


def expire(changes: Changes, fence: Fence, reason: str) -> Lease:
    """End a live lease whose owner is known to be dead, or raise ``StaleLeaseError``."""
    return _by_owner(changes, fence, "lease.expire", lambda row, moment: grant.expire(row, reason, moment))


def bind(changes: Changes, fence: Fence, process: str) -> Lease:
    """Bind a live lease to another process, or raise ``StaleLeaseError``. No event: who owns it stays."""
    return _by_owner(changes, fence, "lease.bind", lambda row, _: Granted(row._replace(process=process), ()))


def _by_owner(changes: Changes, fence: Fence, action: str, rule: Rule, terms: Terms = ORDINARY) -> Lease:
    """What only the holder of a live lease may do to it."""

    def decide(change: Change) -> Lease | Refused:
        moment = change.transaction.moment
        if terms is HEARTBEAT:  # which ends nothing, so that nobody is to be woken
            leases, perhaps_queued = rows.of_scope(change.transaction, fence.scope, fence.token), False
        else:
            leases, perhaps_queued = rows.with_queue(change.transaction, fence.scope, fence.token)
        row = fencing.live(leases, fence, moment)
        if isinstance(row, StaleLeaseError):
            return Refused(row, Write("core", action, *fence, None, None, {}))
        return _settle(change, rule(row, moment), perhaps_queued)

    lease: Lease = changes.run((f"scope:{fence.scope}",), decide, terms=terms)
    if lease.state == "live" and lease.row.process:  # whoever extends it need not be the process that it is bound to
        return lease._replace(owner_alive=changes.database.alive(lease.row.process))
    return lease


def force_release(changes: Changes, scope: str, reason: str, token: int | None) -> Lease:
    """End a live lease against its owner's will, or raise ``NotFoundError``."""
    names.name("scope", scope)
    names.text("reason", reason)
    if token is not None:
        names.integer("token", token, 1)

    def decide(change: Change) -> Lease | Refused:
        moment = change.transaction.moment
        found = rows.of_scope(change.transaction, scope)
        if token is not None:
            owner = next((row.owner for row in found if row.token == token), "")
            live = fencing.live(found, Fence(scope, owner, token), moment)
            if isinstance(live, StaleLeaseError):
                return Refused(_not_live(scope, token, owner or None, live.reason))
            found = [live]
        live_ones = [row for row in found if expiry.is_live(row, moment)]
        return _settle(change, grant.force_release(live_ones, scope, reason, moment))

    return changes.run((f"scope:{scope}",), decide)  # type: ignore[no-any-return]


def _not_live(scope: str, token: int, owner: str | None, reason: str) -> StaleLeaseError:
    return StaleLeaseError(
        f"no live lease on scope {scope!r} has token {token}: nothing was ended",
        hint="'lease list' shows the tokens of what is live",
        reason=reason,
        scope=scope,
        owner=owner,
        token=token,
    )


def set_limit(changes: Changes, scope: str, limit: int) -> Limit:
    """How many leases a scope may have from now on; live ones stay, whatever it is."""
    names.name("scope", scope)
    names.integer("limit", limit, 1, MAX_LIMIT)

    def decide(change: Change) -> Limit:
        found = rows.limit(change.transaction, scope)
        previous = 1 if found is None else found.slots
        rows.set_limit(change.transaction, scope, limit)
        wake_next(change, scope, limit)
        if limit != previous:
            change.happened.append(Happened("lease.limit-set", scope, detail={"limit": limit, "previous": previous}))
        return Limit(scope, limit, previous)

    return changes.run((f"scope:{scope}",), decide)  # type: ignore[no-any-return]


def sweep(changes: Changes, terms: Terms = SWEEP) -> list[Lease]:
    """Put on record which leases are over: by their time, or since their process is dead. Reads first."""
    with changes.database.read() as reader:
        live = rows.live(reader)
        alive = changes.database.who_lives(row.process for row in live)
        over = [row for row in live if expiry.left(row, reader.moment, alive).ns == 0]
    swept: list[Lease] = []
    for start in range(0, len(over), SWEPT_AT_ONCE):
        swept += _sweep(changes, [row.scope for row in over[start : start + SWEPT_AT_ONCE]], terms)
    return swept


def _sweep(changes: Changes, scopes: Sequence[str], terms: Terms) -> list[Lease]:
    scopes = sorted(set(scopes))

    def decide(change: Change) -> list[Lease]:
        swept, moment = [], change.transaction.moment
        for scope in scopes:
            found = [row for row in rows.of_scope(change.transaction, scope) if row.state == "live"]
            alive = changes.database.who_lives(row.process for row in found)
            for row in found:
                left = expiry.left(row, moment, alive)
                if left.ns == 0:
                    decision = grant.expire(row, left.reason, moment)
                    rows.save(change.transaction, decision.row)
                    change.happened.extend(decision.events)
                    swept.append(present.settled(decision.row))
            wake_next(change, scope)
        return swept

    return changes.run(tuple(f"scope:{scope}" for scope in scopes), decide, terms=terms)  # type: ignore[no-any-return]


def check(database: Database, fence: Fence) -> Lease:
    """The live lease that the fence matches, or raise ``StaleLeaseError``; writes nothing."""
    row, moment = _look(database, fence)
    return present.lease(row, moment, database.who_lives([row.process]))


def check_own(database: Database, fence: Fence) -> Lease:
    """The same for a lease of this very process, which lives."""
    row, moment = _look(database, fence)
    return present.lease(row, moment, {row.process: True if database.knows_processes else None})


def check_scope(database: Database, scope: str, fence: Fence | None, required: bool) -> None:
    """Raise ``StaleLeaseError`` where the scope would refuse a write under this fence, or under none."""
    token = fence.token if fence is not None and fence.scope == scope else rows.NO_TOKEN
    found, moment = rows.glance(database, scope, token)
    refusal = fencing.guard(bool(found), scope, fence, required)
    if refusal is not None:
        raise refusal
    if fence is not None and isinstance(row := fencing.live(found, fence, moment), StaleLeaseError):
        raise row


def is_live(database: Database, fence: Fence) -> bool:
    """Whether the fence matches a live lease: the cheapest sure look."""
    beat, moment = rows.beat(database, fence)
    return beat is not None and expiry.remaining(beat, moment).ns > 0


def _look(database: Database, fence: Fence) -> tuple[LeaseRow, Moment]:
    found, moment = rows.glance(database, fence.scope, fence.token)
    row = fencing.live(found, fence, moment)
    if isinstance(row, StaleLeaseError):
        raise row
    return row, moment


def find(database: Database, scope: str, include_expired: bool) -> Lease | None:
    """The live lease of a scope that was granted last, with ``include_expired`` the last one, live or not."""
    names.name("scope", scope)
    with database.read() as reader:
        found = rows.of_scope(reader, scope)
    leases = [present.lease(row, reader.moment, database.who_lives([row.process])) for row in found]
    leases = [lease for lease in leases if include_expired or lease.state == "live"]
    return max(leases, key=lambda lease: lease.token, default=None)


def everyone(database: Database, include_expired: bool) -> list[Lease]:
    """The live leases of every scope, with ``include_expired`` the last one of each slot."""
    with database.read() as reader:
        found = rows.everyone(reader)
    alive = database.who_lives(row.process for row in found if row.state == "live")
    leases = [present.lease(row, reader.moment, alive) for row in found]
    return [lease for lease in leases if include_expired or lease.state == "live"]


def _settle(change: Change, decision: Decision, perhaps_queued: bool = True) -> Lease | Refused:
    if isinstance(decision, Refused):
        return decision
    rows.save(change.transaction, decision.row)
    change.happened.extend(decision.events)
    if perhaps_queued and decision.row.state != "live":
        wake_next(change, decision.row.scope)
    return present.settled(decision.row)
