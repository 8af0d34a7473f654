"""How long a lease still lives, and by which clock.

Three cases, in this order:

1. Same clock domain: live until ``beat_ticks + ttl`` of the monotonic clock. A
   beat more than a second in the future was made under another boot.
2. Another known boot, and only one kernel at a time can have the store open:
   the owner's kernel is gone, expired at once.
3. Otherwise the wall clock decides, and never grants more than one ttl from
   now, so that a clock which stepped back cannot block a scope for ever.

The ttl is always the lease's own, never the contender's. A lease that is bound
to a process ends with it at once, when the kernel proves that it is dead.
"""

from __future__ import annotations

from agent_checkpoint.names import NS
from agent_checkpoint.record import Record
from agent_checkpoint.records import LeaseRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent_checkpoint.records import Beat, LeaseState, Moment, Ticket

    Alive = Mapping[str, bool | None]
    """What the kernel says of processes, by the text that identifies them; None: it cannot tell."""

# A later beat than this in one domain is no scheduling noise but another boot.
FUTURE_NS = NS


class Remaining(Record):
    """Nanoseconds a lease still lives (0: expired), and why it would have ended.

    ``clamp``: the wall clock promised more than one ttl; a writer stores less.
    """

    ns: int
    reason: str
    clamp: bool = False


def remaining(row: LeaseRow | Ticket | Beat, moment: Moment) -> Remaining:
    """What is left of a ticket, or of a lease whose state is live, if nobody died."""
    if row.domain and moment.domain:
        lived = moment.ticks_ns - row.beat_ticks
        if row.domain == moment.domain and lived >= -FUTURE_NS:
            ttl_ns = row.ttl_ns
            return Remaining._make((0 if lived >= ttl_ns else ttl_ns - lived if lived > 0 else ttl_ns, "ttl", False))
        if moment.one_kernel:
            return Remaining(0, "reboot")
    left = row.expires_at - moment.wall_ns
    return Remaining(max(0, min(left, row.ttl_ns)), "ttl", left > row.ttl_ns)


def lies_ahead(row: LeaseRow | Ticket, moment: Moment) -> bool:
    """Whether it was renewed in what is the future by the wall clock that decides: by more than noise."""
    return remaining(row, moment).clamp and row.expires_at - row.ttl_ns > moment.wall_ns + FUTURE_NS


def left(row: LeaseRow | Ticket, moment: Moment, alive: Alive) -> Remaining:
    """The same, when it is known who died."""
    found = remaining(row, moment)
    if found.ns and row.process and alive.get(row.process) is False:
        return Remaining(0, "owner-dead")
    return found


def is_live(row: LeaseRow, moment: Moment) -> bool:
    """Whether the lease still protects its scope."""
    return row.state == "live" and remaining(row, moment).ns > 0


def ended(row: LeaseRow, state: LeaseState, moment: Moment) -> LeaseRow:
    """The lease after its end; when that was tells how long its slot has been free."""
    scope, slot, owner, token, _, ttl_ns, acquired_at, heartbeat_at, expires_at, _, _, metadata, process = row
    domain, ticks = moment.domain, moment.ticks_ns
    return LeaseRow._make(
        (
            scope,
            slot,
            owner,
            token,
            state,
            ttl_ns,
            acquired_at,
            heartbeat_at,
            expires_at,
            domain,
            ticks,
            metadata,
            process,
        )
    )


def ago_ns(domain: str, ticks: int, moment: Moment) -> int:
    """How long ago that was, by the monotonic clock; 0 where it cannot be told."""
    return max(0, moment.ticks_ns - ticks) if domain and domain == moment.domain else 0


def clamped(row: LeaseRow, moment: Moment) -> LeaseRow:
    """The lease with no more than one ttl to live, counted from now by the wall clock."""
    return row._replace(expires_at=moment.wall_ns + row.ttl_ns)
