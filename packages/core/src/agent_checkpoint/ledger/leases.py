"""The lease rows, one for each slot of a scope and never deleted, and the limits of scopes."""

from __future__ import annotations

from agent_checkpoint.errors import StorageCorruptError
from agent_checkpoint.records import Beat, LeaseRow, LimitRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Database, Reader, Transaction
    from agent_checkpoint.records import Fence, Moment

OF_SCOPE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process
FROM leases
WHERE scope = ?
ORDER BY slot
"""

# As little as a holder needs who knows its own deadline: the cheapest look there is.
BEAT = """
SELECT ttl_ns, expires_at, domain, beat_ticks FROM leases
WHERE scope = ? AND token = ? AND owner = ? AND state = 'live'
"""

# In one statement what a grant has to know: a statement costs more than its parts.
STANDING = """
SELECT
leases.scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, leases.domain, beat_ticks,
metadata, process,
limits.slots, limits.domain, limits.since_ticks,
EXISTS (SELECT 1 FROM tickets WHERE tickets.scope = leases.scope)
FROM leases LEFT JOIN limits ON limits.scope = leases.scope
WHERE leases.scope = ?
ORDER BY slot
"""

LIMIT = """
SELECT slots, domain, since_ticks FROM limits
WHERE scope = ?
"""

SET_LIMIT = """
INSERT INTO limits (scope, slots, domain, since_ticks)
VALUES (?, ?, ?, ?)
ON CONFLICT (scope) DO UPDATE SET
slots = excluded.slots, domain = excluded.domain, since_ticks = excluded.since_ticks
"""

ALL = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process
FROM leases
ORDER BY acquired_at DESC, scope, slot
"""

LIVE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process
FROM leases
WHERE state = 'live'
ORDER BY scope, slot
"""

# The last condition can only fail by a bug: the token of a slot never falls.
SAVE = """
INSERT INTO leases (
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope, slot) DO UPDATE SET
owner = excluded.owner, token = excluded.token, state = excluded.state, ttl_ns = excluded.ttl_ns,
acquired_at = excluded.acquired_at, heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at,
domain = excluded.domain, beat_ticks = excluded.beat_ticks, metadata = excluded.metadata, process = excluded.process
WHERE leases.token <= excluded.token
"""


def of_scope(reader: Reader, scope: str) -> list[LeaseRow]:
    """The current or last lease of every slot of a scope, by slot."""
    return [LeaseRow._make(row) for row in reader.rows(OF_SCOPE, (scope,))]


def beat(database: Database, fence: Fence) -> tuple[Beat | None, Moment]:
    """The lease that the fence matches, if its state is live, and the time after it was read."""
    found, moment = database.glance(BEAT, (fence.scope, fence.token, fence.owner))
    return Beat._make(found[0]) if found else None, moment


def glance(database: Database, scope: str) -> tuple[list[LeaseRow], Moment]:
    """The same without a transaction around it, and the time after it was read."""
    found, moment = database.glance(OF_SCOPE, (scope,))
    return [LeaseRow._make(row) for row in found], moment


def standing(reader: Reader, scope: str) -> tuple[list[LeaseRow], LimitRow | None, bool]:
    """The same, the limit that was set (None: none was), and whether somebody may wait."""
    found = reader.rows(STANDING, (scope,))
    if not found:
        return [], limit(reader, scope), True
    *_, slots, domain, since_ticks, queued = found[0]
    set_limit = None if slots is None else LimitRow(slots, domain, since_ticks)
    return [LeaseRow._make(row[:13]) for row in found], set_limit, bool(queued)


def limit(reader: Reader, scope: str) -> LimitRow | None:
    """The limit that was set for a scope."""
    found = reader.rows(LIMIT, (scope,))
    return LimitRow._make(found[0]) if found else None


def set_limit(transaction: Transaction, scope: str, slots: int) -> None:
    """Note how many leases a scope may have from now on."""
    moment = transaction.moment
    transaction.run(SET_LIMIT, (scope, slots, moment.domain, moment.ticks_ns))


def everyone(reader: Reader) -> list[LeaseRow]:
    """The current or last lease of every slot of every scope, latest grant first."""
    return [LeaseRow._make(row) for row in reader.rows(ALL)]


def live(reader: Reader) -> list[LeaseRow]:
    """Every lease that has not ended on record; its time may be over."""
    return [LeaseRow._make(row) for row in reader.rows(LIVE)]


def save(transaction: Transaction, row: LeaseRow) -> None:
    """Write the lease in place of the one before."""
    if transaction.run(SAVE, row) != 1:
        raise StorageCorruptError(f"scope {row.scope!r}: token {row.token} is lower than the stored one")
