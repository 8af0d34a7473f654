"""From stored rows to the leases that callers see."""

from __future__ import annotations

from agent_checkpoint.names import NS
from agent_checkpoint.records import Lease
from agent_checkpoint.rules.expiry import remaining

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.records import LeaseRow, Moment


def lease(row: LeaseRow, moment: Moment) -> Lease:
    """The lease as it is at ``moment``: an overdue one is expired, recorded or not.

    ``expires_at`` is as it was stored, unless the wall clock has stepped since
    then and would tell another end than the clock that decides.
    """
    if row.state != "live":
        return Lease(row, row.state, 0, row.expires_at)
    left = remaining(row, moment).ns
    if left == 0:
        return Lease(row, "expired", 0, row.expires_at)
    return Lease(row, "live", left, ends_ns(row, left, moment))


def ends_ns(row: LeaseRow, left_ns: int, moment: Moment) -> int:
    """The wall time at which a live lease ends: as stored, unless the wall clock has stepped since."""
    expires_at = moment.wall_ns + left_ns
    return row.expires_at if abs(expires_at - row.expires_at) <= NS else expires_at


def settled(row: LeaseRow) -> Lease:
    """The lease that was written just now."""
    return Lease._make((row, row.state, row.ttl_ns if row.state == "live" else 0, row.expires_at))
