"""The lease rows, one for each slot of a scope and never deleted, and the limits of scopes."""

from __future__ import annotations

from agent_checkpoint.errors import StorageCorruptError
from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.records import Beat, LeaseRow, LimitRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Database, Reader, Row, Transaction
    from agent_checkpoint.records import Fence, Moment


LEASE = Summed("the lease of scope {}, slot {},", "tititiiiitijp")
LIMIT_OF = Summed("the limit of scope {}", "titi")
# No lease has it.
NO_TOKEN = 0

OF_SCOPE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum
FROM leases
WHERE scope = ?
ORDER BY slot
"""

# With whether somebody may wait for what is given back.
WITH_QUEUE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum, EXISTS (SELECT 1 FROM tickets WHERE tickets.scope = leases.scope)
FROM leases
WHERE scope = ?
ORDER BY slot
"""

# How many there are by the other index: a scope that seems to have fewer would be
# granted an old token.
HIDDEN = """
SELECT COUNT(*) FROM leases
WHERE scope || '' = ?
"""

# Both at once: two statements without a transaction around them see two states. One row at least.
OF_SCOPE_SURELY = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum, hidden.many
FROM (SELECT COUNT(*) AS many FROM leases AS again WHERE again.scope || '' = ?) AS hidden
LEFT JOIN leases ON leases.scope = ?
ORDER BY slot
"""

HOW_MANY = """
SELECT COUNT(*) FROM leases
WHERE scope || '' > ''
"""

# As little as a holder needs who knows its own deadline: the cheapest look there is.
BEAT = """
SELECT ttl_ns, expires_at, domain, beat_ticks, sum FROM leases
WHERE scope = ? AND token = ? AND owner = ? AND state = 'live'
"""

# In one statement what a grant has to know: a statement costs more than its parts.
STANDING = """
SELECT
leases.scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, leases.domain, beat_ticks,
metadata, process, leases.sum,
EXISTS (SELECT 1 FROM limits AS again WHERE again.scope || '' = leases.scope || ''),
limits.scope, EXISTS (SELECT 1 FROM tickets WHERE tickets.scope = leases.scope)
FROM leases LEFT JOIN limits ON limits.scope = leases.scope
WHERE leases.scope = ?
ORDER BY slot
"""

LIMIT = """
SELECT scope, slots, domain, since_ticks, sum FROM limits
WHERE scope = ?
"""

HIDDEN_LIMIT = """
SELECT COUNT(*) FROM limits
WHERE scope || '' = ?
"""

SET_LIMIT = """
INSERT INTO limits (scope, slots, domain, since_ticks, sum)
VALUES (?, ?, ?, ?, ?)
ON CONFLICT (scope) DO UPDATE SET
slots = excluded.slots, domain = excluded.domain, since_ticks = excluded.since_ticks, sum = excluded.sum
"""

ALL = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum
FROM leases
ORDER BY acquired_at DESC, scope, slot
"""

LIVE = """
SELECT
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum
FROM leases
WHERE state = 'live'
ORDER BY scope, slot
"""

# The last condition can only fail by a bug: the token of a slot never falls.
SAVE = """
INSERT INTO leases (
scope, slot, owner, token, state, ttl_ns, acquired_at, heartbeat_at, expires_at, domain, beat_ticks, metadata, process,
sum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope, slot) DO UPDATE SET
owner = excluded.owner, token = excluded.token, state = excluded.state, ttl_ns = excluded.ttl_ns,
acquired_at = excluded.acquired_at, heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at,
domain = excluded.domain, beat_ticks = excluded.beat_ticks, metadata = excluded.metadata, process = excluded.process,
sum = excluded.sum
WHERE leases.token <= excluded.token
"""


def of_scope(reader: Reader, scope: str, token: int = NO_TOKEN) -> list[LeaseRow]:
    """The current or last lease of every slot of a scope, by slot; to be sure of the one with a token, if it is there.

    Without a token, and where none has it, all are there that must be.
    """
    return _whole(reader.rows(OF_SCOPE, (scope,)), scope, token, reader)


def with_queue(reader: Reader, scope: str, token: int) -> tuple[list[LeaseRow], bool]:
    """The same, and whether somebody may wait."""
    found = reader.rows(WITH_QUEUE, (scope,))
    return _whole([row[:14] for row in found], scope, token, reader), not found or bool(found[0][14])


def beat(database: Database, fence: Fence) -> tuple[Beat | None, Moment]:
    """The lease that the fence matches, if its state is live, and the time after it was read."""
    scope, owner, token = fence
    found, moment = database.glance(BEAT, (scope, token, owner))
    if not found:
        glance(database, scope, token)  # or it is there, and damaged
        return None, moment
    *beat, found_sum = found[0]
    known = LEASE.known.get(found_sum)
    if known is not None and [*known[2:4], known[0], known[5], *known[8:11]] == [owner, token, scope, *beat]:
        return Beat._make(beat), moment
    rows, moment = glance(database, scope, token)
    row = next((row for row in rows if row.token == token and row.owner == owner and row.state == "live"), None)
    return row and Beat(row.ttl_ns, row.expires_at, row.domain, row.beat_ticks), moment


def glance(database: Database, scope: str, token: int = NO_TOKEN) -> tuple[list[LeaseRow], Moment]:
    """As ``of_scope``, without a transaction around it, and the time after it was read."""
    if token != NO_TOKEN:
        found, moment = database.glance(OF_SCOPE, (scope,))
        rows = [LeaseRow._make(LEASE.checked(row)) for row in found]
        if any(row.token == token for row in rows):
            return rows, moment
    found, moment = database.glance(OF_SCOPE_SURELY, (scope, scope))
    rows = [LeaseRow._make(LEASE.checked(row[:14])) for row in found if row[0] is not None]
    if found[0][14] != len(rows):
        raise sums.gone(f"a lease of scope {scope!r}")
    return rows, moment


def standing(reader: Reader, scope: str) -> tuple[list[LeaseRow], LimitRow | None, bool]:
    """The leases of a scope, the limit that was set (None: none was), and whether somebody may wait."""
    found = reader.rows(STANDING, (scope,))
    if not found:
        return _whole([], scope, NO_TOKEN, reader), limit(reader, scope), True
    is_limited, limited, *_, queued = found[0][14:]
    if limited is None and not is_limited and len(found) == 1:
        # Without a limit there is one slot.
        return [LeaseRow._make(LEASE.checked(found[0][:14]))], None, bool(queued)
    return _whole([row[:14] for row in found], scope, NO_TOKEN, reader), limit(reader, scope), bool(queued)


def limit(reader: Reader, scope: str) -> LimitRow | None:
    """The limit that was set for a scope."""
    found = reader.rows(LIMIT, (scope,))
    if not found and reader.rows(HIDDEN_LIMIT, (scope,))[0][0]:
        raise sums.gone(f"the limit of scope {scope!r}")
    return _limit(found[0]) if found else None


def set_limit(transaction: Transaction, scope: str, slots: int) -> None:
    """Note how many leases a scope may have from now on."""
    moment = transaction.moment
    row = (scope, slots, moment.domain, moment.ticks_ns)
    transaction.run(SET_LIMIT, (*row, sums.of(row)))


def everyone(reader: Reader) -> list[LeaseRow]:
    """The current or last lease of every slot of every scope, latest grant first."""
    found = [LeaseRow._make(LEASE.checked(row)) for row in reader.rows(ALL)]
    if reader.rows(HOW_MANY)[0][0] != len(found):
        raise sums.gone("a lease")
    return found


def live(reader: Reader) -> list[LeaseRow]:
    """Every lease that has not ended on record; its time may be over."""
    return [LeaseRow._make(LEASE.checked(row)) for row in reader.rows(LIVE)]


def save(transaction: Transaction, row: LeaseRow) -> None:
    """Write the lease in place of the one before."""
    if transaction.run(SAVE, LEASE.given(row)) != 1:
        raise StorageCorruptError(f"scope {row.scope!r}: token {row.token} is lower than the stored one")


def _whole(found: list[Row], scope: str, token: int, reader: Reader) -> list[LeaseRow]:
    """The rows of a scope, checked; unless that with the token is there, that all are there too."""
    if len(found) == 1:  # nearly always
        row = LeaseRow._make(LEASE.checked(found[0]))
        if row.token == token:
            return [row]
    rows = [LeaseRow._make(LEASE.checked(row)) for row in found]
    for row in rows:
        if row.token == token:
            return rows
    if reader.rows(HIDDEN, (scope,))[0][0] != len(rows):
        raise sums.gone(f"a lease of scope {scope!r}")
    return rows


def _limit(row: Row) -> LimitRow:
    return LimitRow._make(LIMIT_OF.checked(row)[1:])
