"""From stored rows to the leases that callers see."""

from __future__ import annotations

import json

from agent_checkpoint.names import NS
from agent_checkpoint.records import Lease, Waiting
from agent_checkpoint.rules import expiry
from agent_checkpoint.rules.expiry import remaining
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.records import LeaseRow, Moment, Ticket
    from agent_checkpoint.rules.expiry import Alive


def lease(row: LeaseRow, moment: Moment, alive: Alive) -> Lease:
    """The lease as it is at ``moment``: an overdue one is expired, recorded or not.

    One whose process is dead is live still, and says that its owner is not: it
    ends when the next one asks for the scope, or the sweep finds it.

    ``expires_at`` is as it was stored, unless the wall clock has stepped since
    then and would tell another end than the clock that decides.
    """
    if row.state != "live":
        return Lease(row, row.state, 0, row.expires_at)
    left = remaining(row, moment).ns
    if left == 0:
        return Lease(row, "expired", 0, row.expires_at)
    return Lease(row, "live", left, ends_ns(row, left, moment), alive.get(row.process) if row.process else None)


def ends_ns(row: LeaseRow, left_ns: int, moment: Moment) -> int:
    """The wall time at which a live lease ends: as stored, unless the wall clock has stepped since."""
    expires_at = moment.wall_ns + left_ns
    return row.expires_at if abs(expires_at - row.expires_at) <= NS else expires_at


def settled(row: LeaseRow) -> Lease:
    """The lease that was written just now."""
    live = row.state == "live"
    return Lease._make(
        (row, row.state, row.ttl_ns if live else 0, row.expires_at, True if live and row.process else None)
    )


def queues(tickets: Iterable[Ticket], moment: Moment, alive: Alive) -> list[Waiting]:
    """Who waits for what, by scope and place; those who are gone are left out."""
    found: list[Waiting] = []
    for ticket in tickets:
        if expiry.left(ticket, moment, alive).ns:
            before = found[-1].position if found and found[-1].scope == ticket.scope else 0
            process = json.loads(ticket.process) if ticket.process else None
            lives = alive.get(ticket.process)
            found.append(Waiting(ticket.scope, before + 1, ticket.owner, utc(ticket.asked_at), process, lives))
    return found
