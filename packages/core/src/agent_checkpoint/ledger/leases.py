"""The lease rows, one for each slot of a scope and never deleted, and the limits of scopes."""

from __future__ import annotations

from agent_checkpoint.errors import StorageCorruptError
from agent_checkpoint.records import LeaseRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Reader, Transaction

OF_SCOPE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process
FROM leases
WHERE scope = ?
ORDER BY slot
"""

# In one statement what a grant has to know: a statement costs more than its parts.
STANDING = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
(SELECT slots FROM limits WHERE limits.scope = leases.scope),
EXISTS (SELECT 1 FROM tickets WHERE tickets.scope = leases.scope)
FROM leases
WHERE scope = ?
ORDER BY slot
"""

LIMIT = """
SELECT slots FROM limits
WHERE scope = ?
"""

SET_LIMIT = """
INSERT INTO limits (scope, slots)
VALUES (?, ?)
ON CONFLICT (scope) DO UPDATE SET slots = excluded.slots
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


def standing(reader: Reader, scope: str) -> tuple[list[LeaseRow], int | None, bool]:
    """The same, the limit that was set (None: none was), and whether somebody may wait."""
    found = reader.rows(STANDING, (scope,))
    if found:
        return [LeaseRow._make(row[:-2]) for row in found], found[0][-2], bool(found[0][-1])
    return [], limit(reader, scope), True


def limit(reader: Reader, scope: str) -> int | None:
    """The limit that was set for a scope."""
    found = reader.rows(LIMIT, (scope,))
    return int(found[0][0]) if found else None


def set_limit(transaction: Transaction, scope: str, slots: int) -> None:
    """Note how many leases a scope may have."""
    transaction.run(SET_LIMIT, (scope, slots))


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
