"""The lease rows: one for each slot of a scope, never deleted."""

from __future__ import annotations

from agent_checkpoint.errors import StorageCorruptError
from agent_checkpoint.records import LeaseRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Reader, Transaction

# A scope has one slot, 0.
OF_SCOPE = """
SELECT scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata
FROM leases
WHERE scope = ? AND slot = 0
"""

ALL = """
SELECT scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata
FROM leases
ORDER BY acquired_at DESC, scope, slot
"""

# The last condition can only fail by a bug: the token of a scope never falls.
SAVE = """
INSERT INTO leases
(scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope, slot) DO UPDATE SET
owner = excluded.owner, token = excluded.token, state = excluded.state, ttl_ns = excluded.ttl_ns,
acquired_at = excluded.acquired_at, heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at,
domain = excluded.domain, beat_ticks = excluded.beat_ticks, metadata = excluded.metadata
WHERE leases.token <= excluded.token
"""


def of_scope(reader: Reader, scope: str) -> LeaseRow | None:
    """The scope's current or last lease."""
    found = reader.rows(OF_SCOPE, (scope,))
    return LeaseRow._make(found[0]) if found else None


def everyone(reader: Reader) -> list[LeaseRow]:
    """The current or last lease of every scope, latest grant first."""
    return [LeaseRow._make(row) for row in reader.rows(ALL)]


def save(transaction: Transaction, row: LeaseRow) -> None:
    """Write the lease in place of the one before."""
    if transaction.run(SAVE, row) != 1:
        raise StorageCorruptError(f"scope {row.scope!r}: token {row.token} is lower than the stored one")
