"""The tickets of those who wait. They are not audited, and lost in a power cut without harm.

The sum of a ticket is of what stays of it: when it ends, and whether it was
passed over, changes all the time.
"""

from __future__ import annotations

from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.records import Ticket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.database import Reader, Row, Transaction

TICKET = Summed("a ticket of scope {}", "ttiipt")
MOVING = Summed("a ticket of scope {}", "titiii")

OF_SCOPE = """
SELECT number, scope, owner, ttl_ns, asked_at, expires_at, domain, beat_ticks, passed, process, bell, sum FROM tickets
WHERE scope = ?
ORDER BY number
"""

# Those who sleep through their turn keep their place, but are not waited for.
NEXT_BELLS = """
SELECT bell FROM tickets
WHERE scope = ? AND passed = 0
ORDER BY number
LIMIT ?
"""

ALL = """
SELECT number, scope, owner, ttl_ns, asked_at, expires_at, domain, beat_ticks, passed, process, bell, sum FROM tickets
ORDER BY scope, number
"""

ADD = """
INSERT INTO tickets (scope, owner, ttl_ns, asked_at, expires_at, domain, beat_ticks, passed, process, bell, sum)
VALUES (?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)
RETURNING number
"""

# Whoever renews its ticket is awake, and has its place again.
RENEW = """
UPDATE tickets SET expires_at = ?, domain = ?, beat_ticks = ?, passed = 0
WHERE number = ? AND scope = ?
"""

SKIP = """
UPDATE tickets SET passed = 1
WHERE number = ? AND scope = ?
"""

REMOVE = """
DELETE FROM tickets
WHERE number = ? AND scope = ?
"""


REMOVE_OWN = """
DELETE FROM tickets
WHERE number = ? AND scope = ? AND asked_at = ? AND process = ? AND bell = ?
"""


def of_scope(reader: Reader, scope: str) -> list[Ticket]:
    """The queue of a scope, first come first."""
    return [_ticket(row) for row in reader.rows(OF_SCOPE, (scope,))]


def next_bells(reader: Reader, scope: str, most: int) -> list[str]:
    """The bells of those whose turn it is; some may have none."""
    return [bell for (bell,) in reader.rows(NEXT_BELLS, (scope, most)) if bell]


def everyone(reader: Reader) -> list[Ticket]:
    """Every queue, by scope."""
    return [_ticket(row) for row in reader.rows(ALL)]


def add(transaction: Transaction, scope: str, owner: str, ttl_ns: int, process: str, bell: str) -> Ticket:
    """Queue up."""
    wall, ticks, domain, _ = transaction.moment
    row = (scope, owner, ttl_ns, wall, wall + ttl_ns, domain, ticks)
    (number,) = transaction.rows(ADD, (*row, process, bell, sums.of((scope, owner, ttl_ns, wall, process, bell))))[0]
    return Ticket._make((number, *row, 0, process, bell))


def renew(transaction: Transaction, scope: str, number: int, ttl_ns: int) -> None:
    """Keep a ticket for another life."""
    wall, ticks, domain, _ = transaction.moment
    transaction.run(RENEW, (wall + ttl_ns, domain, ticks, number, scope))


def pass_over(transaction: Transaction, scope: str, numbers: Iterable[int]) -> None:
    """Note that somebody behind these was served."""
    transaction.executemany(SKIP, [(number, scope) for number in numbers])


def remove(transaction: Transaction, scope: str, numbers: Iterable[int]) -> None:
    """Take tickets out of the queue."""
    transaction.executemany(REMOVE, [(number, scope) for number in numbers])


def remove_own(transaction: Transaction, ticket: Ticket) -> None:
    """Take one's own ticket out of the queue, if it ever got into it: else another may have its number."""
    transaction.run(REMOVE_OWN, (ticket.number, ticket.scope, ticket.asked_at, ticket.process, ticket.bell))


def _ticket(row: Row) -> Ticket:
    number, scope, owner, ttl_ns, asked_at, expires_at, domain, beat_ticks, passed, process, bell, found = row
    TICKET.checked((scope, owner, ttl_ns, asked_at, process, bell, found))
    MOVING.checked((scope, number, domain, expires_at, beat_ticks, passed, None))
    return Ticket._make(row[:11])
