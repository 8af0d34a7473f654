"""Who is granted a scope, and how a lease ends by will.

The token of a grant is the scope's last token plus one. The last token lives
in the lease rows, which is why they are never deleted.
"""

from __future__ import annotations

from agent_checkpoint.errors import LeaseHeldError, NotFoundError
from agent_checkpoint.names import MAX_TOKEN, NS, invalid
from agent_checkpoint.payload import Encoded
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened, LeaseRow
from agent_checkpoint.rules import present, queue
from agent_checkpoint.rules.decision import Granted, Refused
from agent_checkpoint.rules.expiry import ago_ns, clamped, ended, left
from agent_checkpoint.times import rfc3339, utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from agent_checkpoint.records import LimitRow, Moment, Ticket
    from agent_checkpoint.rules.expiry import Alive, Remaining

    Live = list[tuple[LeaseRow, Remaining]]

# A slot that was never granted has been free for ever.
FOR_EVER = 2**63 - 1


class Ask(Record):
    """What ``acquire`` was asked for; ``metadata`` and ``process`` are stored text.

    ``ticket`` is the asker's place in the queue, 0 for none.
    """

    scope: str
    owner: str
    ttl_ns: int
    metadata: str
    reclaim: bool
    limit: int | None = None
    process: str = ""
    ticket: int = 0


class Standing(Record):
    """How a scope stands: a lease for each slot, the limit that was set, who queues, who lives."""

    rows: Sequence[LeaseRow]
    limit: LimitRow | None = None
    tickets: Sequence[Ticket] = ()
    alive: Alive = {}  # noqa: RUF012 -- a named tuple's default, never mutated


def acquire(standing: Standing, ask: Ask, moment: Moment) -> Granted | Refused:
    """Grant the lowest free slot of the scope, unless somebody is ahead in the queue.

    A live lease refuses everybody, its own owner's name included: an owner is a
    label, two processes may share it. ``reclaim`` takes one's own lease back
    with a new token, which fences the earlier self.
    """
    limit, changed = _limit(standing, ask)
    live: Live = []
    over: Live = []
    for row in standing.rows:
        if row.state == "live":
            remaining = left(row, moment, standing.alive)
            (live if remaining.ns else over).append((row, remaining))
    line = queue.look(standing.tickets, ask.ticket, moment, standing.alive) if standing.tickets else queue.NOBODY
    if len(live) >= limit:
        mine = next((row for row, _ in live if row.owner == ask.owner), None) if ask.reclaim else None
        return _held(ask.scope, live, line, moment) if mine is None else _reclaim(standing, ask, mine, line, moment)
    slot = _lowest_free([row.slot for row, _ in live]) if live else 0
    free = limit - len(live)
    passed = line.ahead if len(line.ahead) >= free else ()
    if passed:
        free_ns = _free_for(standing, over, free, moment)
        if not queue.may_pass(len(passed), free_ns):
            return _behind(ask.scope, over, line, free_ns, moment)
    row = _grant(standing.rows, slot, ask, moment)
    events = [_expired(each, remaining) for each, remaining in over if each.slot == slot] if over else []
    if changed:
        events.append(Happened("lease.limit-set", ask.scope, detail={"limit": limit}))
    events.append(_happened("lease.acquired", row, _length(row)))
    gone = (*line.gone, ask.ticket) if ask.ticket else line.gone
    return Granted._make((row, tuple(events), limit if changed else None, passed, gone))


def fullness(standing: Standing, scope: str, moment: Moment) -> LeaseHeldError | None:
    """The error that says why a scope has no free slot; None when it has one."""
    live: Live = []
    for row in standing.rows:
        if row.state == "live" and (remaining := left(row, moment, standing.alive)).ns:
            live.append((row, remaining))
    if len(live) < (1 if standing.limit is None else standing.limit.slots):
        return None
    error = _held(scope, live, queue.NOBODY, moment).error
    assert isinstance(error, LeaseHeldError)
    return error


def _limit(standing: Standing, ask: Ask) -> tuple[int, bool]:
    """The scope's limit, and whether this grant fixes it at another one than 1."""
    if standing.limit is None and not standing.rows:
        limit, changed = ask.limit or 1, ask.limit is not None and ask.limit > 1
    else:
        limit, changed = 1 if standing.limit is None else standing.limit.slots, False
        if ask.limit is not None and ask.limit != limit:
            invalid(
                "limit",
                f"is {limit} in scope {ask.scope!r}, not {ask.limit}: it was fixed by the first grant, or set since",
                hint="leave it out, or change it for everybody with 'lease set-limit' (set_limit)",
                limit=limit,
                asked=ask.limit,
            )
    if ask.reclaim and limit > 1:
        invalid("reclaim", f"is for scopes with one lease at a time; {ask.scope!r} has a limit of {limit}")
    return limit, changed


def _lowest_free(taken: Sequence[int]) -> int:
    slot = 0
    while slot in taken:
        slot += 1
    return slot


def _free_for(standing: Standing, over: Live, free: int, moment: Moment) -> int:
    """How long the scope has had a free slot: since the last lease ended that used to fill it, or its limit was raised.

    An end that is not on record yet has only just been noticed.
    """
    ends = [0] * len(over)
    ends += [ago_ns(row.domain, row.beat_ticks, moment) for row in standing.rows if row.state != "live"]
    free_ns = sorted(ends)[free - 1] if free <= len(ends) else FOR_EVER
    limit = standing.limit
    return free_ns if limit is None else min(free_ns, ago_ns(limit.domain, limit.since_ticks, moment))


def _reclaim(standing: Standing, ask: Ask, current: LeaseRow, line: queue.Queue, moment: Moment) -> Refused | Granted:
    """Take one's own live lease back, unless its process is there to be asked."""
    if current.process and current.process != ask.process and standing.alive.get(current.process):
        return Refused(
            LeaseHeldError(
                f"the process of {current.owner!r}, which holds scope {current.scope!r}, is alive: not reclaimed",
                hint="end that process first, or end its lease on record with 'lease force-release' (force_release)",
                **_facts(current, left(current, moment, standing.alive), moment),
                position=len(line.ahead) + 1,
            )
        )
    row = _grant(standing.rows, current.slot, ask, moment)
    happened = _happened("lease.reclaimed", row, _length(row))
    return Granted(row, (happened,), gone=(ask.ticket,) if ask.ticket else ())


def _grant(rows: Sequence[LeaseRow], slot: int, ask: Ask, moment: Moment) -> LeaseRow:
    token = 1
    for row in rows:
        if row.token >= token:
            token = row.token + 1
    if token > MAX_TOKEN:
        invalid("scope", f"has used up its tokens (the last one is {MAX_TOKEN}); use another scope")
    scope, owner, ttl_ns, metadata, _, _, process, _ = ask
    wall, ticks, domain, _ = moment
    return LeaseRow._make(
        (scope, slot, owner, token, "live", ttl_ns, wall, wall, wall + ttl_ns, domain, ticks, metadata, process)
    )


def _held(scope: str, live: Live, line: queue.Queue, moment: Moment) -> Refused:
    current, remaining = min(live, key=lambda each: each[1].ns)
    facts = _facts(current, remaining, moment)
    until = rfc3339(facts["expires_at"])
    others = f" and {len(live) - 1} more," if len(live) > 1 else ""
    waiting = f"; {len(line.ahead)} are waiting for it" if line.ahead else ""
    error = LeaseHeldError(
        f"scope {scope!r} is held by {current.owner!r} (token {current.token}){others} until {until}{waiting}",
        hint="try again after retry_after seconds, or wait in the queue (--wait); the holder may release it earlier",
        **facts,
        position=len(line.ahead) + 1,
    )
    rows = tuple(clamped(row, moment) for row, remaining in live if remaining.clamp)
    events = tuple(_happened("lease.clamped", row, {"ttl_seconds": row.ttl_ns / NS}) for row in rows)
    return Refused(error, rows=rows, events=events)


def in_the_way(row: LeaseRow, remaining: Remaining, moment: Moment, hint: str) -> LeaseHeldError:
    """The error for what is done to a whole store, where no lease may be live."""
    return LeaseHeldError(
        f"scope {row.scope!r} is held by {row.owner!r} (token {row.token}); nothing was changed",
        hint=hint,
        **_facts(row, remaining, moment),
        position=1,
    )


def _facts(current: LeaseRow, remaining: Remaining, moment: Moment) -> dict[str, Any]:
    return {
        "scope": current.scope,
        "owner": current.owner,
        "token": current.token,
        "expires_at": utc(present.ends_ns(current, remaining.ns, moment)),
        "retry_after": remaining.ns / NS,
    }


def _behind(scope: str, over: Live, line: queue.Queue, free_ns: int, moment: Moment) -> Refused:
    """Free, but others are ahead. What ended without a word goes on record: their time counts from here."""
    ahead = len(line.ahead)
    error = LeaseHeldError(
        f"scope {scope!r} is free, but {ahead} {'waiter is' if ahead == 1 else 'waiters are'} ahead in its queue",
        hint="wait in the queue (--wait), or try again after retry_after seconds",
        scope=scope,
        owner=None,
        token=None,
        expires_at=None,
        retry_after=(queue.TURN_NS * ahead - free_ns) / NS,
        position=ahead + 1,
    )
    rows = tuple(ended(row, "expired", moment) for row, _ in over)
    return Refused(error, rows=rows, events=tuple(_expired(row, remaining) for row, remaining in over))


def heartbeat(row: LeaseRow, ttl_ns: int | None, moment: Moment) -> Granted:
    """Extend a live lease; without ``ttl_ns`` by the length it has."""
    extended = renewed(row, ttl_ns or row.ttl_ns, moment)
    detail: dict[str, object] = {} if extended.ttl_ns == row.ttl_ns else {"ttl_seconds": extended.ttl_ns / NS}
    return Granted._make((extended, (_happened("lease.heartbeat", extended, detail),), None, (), ()))


def renewed(row: LeaseRow, ttl_ns: int, moment: Moment) -> LeaseRow:
    """A live lease with a whole ttl to live from now."""
    scope, slot, owner, token, state, _, acquired_at, _, _, _, _, metadata, process = row
    wall, ticks, domain, _ = moment
    return LeaseRow._make(
        (scope, slot, owner, token, state, ttl_ns, acquired_at, wall, wall + ttl_ns, domain, ticks, metadata, process)
    )


def release(row: LeaseRow, moment: Moment) -> Granted:
    """End a live lease by its owner's will; the row stays, for the token."""
    row = ended(row, "released", moment)
    return Granted._make((row, (_happened("lease.released", row, {}),), None, (), ()))


def force_release(rows: Sequence[LeaseRow], scope: str, reason: str, moment: Moment) -> Granted | Refused:
    """End the live lease of a scope against its owner's will."""
    if not rows:
        return Refused(NotFoundError(f"no live lease on scope {scope!r}: nothing to release", scope=scope))
    if len(rows) > 1:
        invalid(
            "token",
            f"is needed: scope {scope!r} has {len(rows)} live leases",
            hint="'lease list' shows their tokens",
            tokens=[row.token for row in rows],
        )
    row = ended(rows[0], "force-released", moment)
    return Granted(row, (_happened("lease.force-released", row, {"reason": reason}),))


def expire(row: LeaseRow, reason: str, moment: Moment) -> Granted:
    """Put the end of a lease on record that is over: by its time, or since its owner is dead."""
    happened = _happened("lease.expired", row, {"reason": reason})
    return Granted(ended(row, "expired", moment), (happened,))


def _length(row: LeaseRow) -> Encoded:
    """The detail of every grant, encoded here: a JSON encoder would take ten times as long for two numbers."""
    ttl_seconds = row.ttl_ns / NS
    detail = Encoded(ttl_seconds=ttl_seconds, slot=row.slot)
    detail.text = f'{{"ttl_seconds":{ttl_seconds!r},"slot":{row.slot}}}'
    return detail


def _expired(row: LeaseRow, remaining: Remaining) -> Happened:
    return _happened("lease.expired", row, {"reason": remaining.reason})


def _happened(kind: str, row: LeaseRow, detail: dict[str, object]) -> Happened:
    return Happened._make((kind, row.scope, row.owner, row.token, None, None, detail))
