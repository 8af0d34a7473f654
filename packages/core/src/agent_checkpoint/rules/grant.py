"""Who is granted a scope, and how a lease ends by will.

The token of a grant is the scope's last token plus one. The last token lives
in the lease row, which is why that row is never deleted.
"""

from __future__ import annotations

from agent_checkpoint.errors import LeaseHeldError, NotFoundError
from agent_checkpoint.names import MAX_TOKEN, NS, invalid
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened, LeaseRow
from agent_checkpoint.rules import present
from agent_checkpoint.rules.decision import Granted, Refused
from agent_checkpoint.rules.expiry import clamped, is_live, remaining
from agent_checkpoint.times import rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.records import Moment
    from agent_checkpoint.rules.expiry import Remaining


class Ask(Record):
    """What ``acquire`` was asked for; ``metadata`` is stored text."""

    scope: str
    owner: str
    ttl_ns: int
    metadata: str
    reclaim: bool


def acquire(current: LeaseRow | None, ask: Ask, moment: Moment) -> Granted | Refused:
    """Grant the scope unless a lease is live in it.

    A live lease refuses everybody, its own owner's name included: an owner is a
    label, two processes may share it. ``reclaim`` takes one's own lease back
    with a new token, which fences the earlier self.
    """
    kind = "lease.acquired"
    ended: tuple[Happened, ...] = ()
    if current is not None and current.state == "live":
        left = remaining(current, moment)
        if left.ns == 0:
            ended = (_happened("lease.expired", current, {"reason": left.reason}),)
        elif ask.reclaim and current.owner == ask.owner:
            kind = "lease.reclaimed"
        else:
            return _held(current, left, moment)
    row = _grant(current, ask, moment)
    return Granted(row, (*ended, _happened(kind, row, {"ttl_seconds": row.ttl_ns / NS, "slot": row.slot})))


def force_release(current: LeaseRow | None, scope: str, reason: str, moment: Moment) -> Granted | Refused:
    """End the live lease of a scope against its owner's will."""
    if current is None or not is_live(current, moment):
        return Refused(NotFoundError(f"no live lease on scope {scope!r}: nothing to release", scope=scope))
    row = current._replace(state="force-released")
    return Granted(row, (_happened("lease.force-released", row, {"reason": reason}),))


def _grant(current: LeaseRow | None, ask: Ask, moment: Moment) -> LeaseRow:
    token = 1 if current is None else current.token + 1
    if token > MAX_TOKEN:
        invalid("scope", f"has used up its tokens (the last one is {MAX_TOKEN}); use another scope")
    scope, owner, ttl_ns, metadata, _ = ask
    wall, ticks, domain, _ = moment
    return LeaseRow._make((scope, 0, owner, token, "live", ttl_ns, wall, wall, wall + ttl_ns, domain, ticks, metadata))


def _held(current: LeaseRow, left: Remaining, moment: Moment) -> Refused:
    expires_at = rfc3339(present.ends_ns(current, left.ns, moment))
    error = LeaseHeldError(
        f"scope {current.scope!r} is held by {current.owner!r} (token {current.token}) until {expires_at}",
        hint="try again after retry_after seconds; the holder may release it earlier",
        scope=current.scope,
        owner=current.owner,
        token=current.token,
        expires_at=expires_at,
        retry_after=left.ns / NS,
    )
    if not left.clamp:
        return Refused(error)
    row = clamped(current, moment)
    return Refused(error, row=row, events=(_happened("lease.clamped", row, {"ttl_seconds": row.ttl_ns / NS}),))


def heartbeat(row: LeaseRow, ttl_ns: int | None, moment: Moment) -> Granted:
    """Extend a live lease; without ``ttl_ns`` by the length it has."""
    scope, slot, owner, token, state, had_ns, acquired_at, _, _, _, _, metadata = row
    ttl_ns = ttl_ns or had_ns
    wall, ticks, domain, _ = moment
    row = LeaseRow._make(
        (scope, slot, owner, token, state, ttl_ns, acquired_at, wall, wall + ttl_ns, domain, ticks, metadata)
    )
    detail: dict[str, object] = {} if ttl_ns == had_ns else {"ttl_seconds": ttl_ns / NS}
    return Granted._make((row, (_happened("lease.heartbeat", row, detail),)))


def release(row: LeaseRow) -> Granted:
    """End a live lease by its owner's will; the row stays, for the token."""
    row = row._replace(state="released")
    return Granted._make((row, (_happened("lease.released", row, {}),)))


def _happened(kind: str, row: LeaseRow, detail: dict[str, object]) -> Happened:
    return Happened._make((kind, row.scope, row.owner, row.token, None, None, detail))
