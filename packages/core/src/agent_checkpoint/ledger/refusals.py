"""The counters of refused writes: the first of its kind is an event, the later ones are counted here."""

from __future__ import annotations

from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.records import Refusals
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_checkpoint.database import Reader, Row, Transaction

REFUSAL = Summed("the count of what was refused to token {1} in scope {0}", "tittiii")

REFUSED = """
SELECT scope, token, action, reason, times, first_at, last_at, sum FROM refusals
WHERE scope = ? AND token = ? AND action = ? AND reason = ?
"""

COUNT_REFUSAL = """
INSERT INTO refusals (scope, token, action, reason, times, first_at, last_at, sum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (scope, token, action, reason) DO UPDATE SET
times = excluded.times, last_at = excluded.last_at, sum = excluded.sum
"""

REFUSALS = """
SELECT scope, token, action, reason, times, first_at, last_at, sum FROM refusals
ORDER BY last_at DESC, scope, token, action, reason
LIMIT ?
"""

QUIET = """
SELECT scope, token, action, reason, times, first_at, last_at, sum FROM refusals
WHERE last_at < ?
ORDER BY scope, token, action, reason
"""

# Not one that has counted since it was read.
FORGET = """
DELETE FROM refusals
WHERE scope = ? AND token = ? AND action = ? AND reason = ? AND times = ?
"""


def count(transaction: Transaction, scope: str, token: int | None, action: str, reason: str) -> int:
    """Count a refused write; 1 for the first of its kind."""
    key, at = (scope, token or 0, action, reason), transaction.moment.wall_ns
    found = transaction.rows(REFUSED, key)
    times, first_at = REFUSAL.checked(found[0])[4:6] if found else (0, at)
    row = (*key, times + 1, first_at, at)
    transaction.run(COUNT_REFUSAL, (*row, sums.of(row)))
    return int(times) + 1


def latest(reader: Reader, most: int) -> list[Refusals]:
    """The counters of refused writes, latest first."""
    return [_refusals(row) for row in reader.rows(REFUSALS, (most,))]


def quiet(reader: Reader, since_ns: int) -> list[Refusals]:
    """The counters that have counted nothing since a time."""
    return [_refusals(row) for row in reader.rows(QUIET, (since_ns,))]


def forget(transaction: Transaction, counters: Sequence[Refusals]) -> None:
    """Remove counters that are archived, unless they have counted since."""
    transaction.executemany(FORGET, [_key(counter) for counter in counters])


def _refusals(row: Row) -> Refusals:
    scope, token, action, reason, times, first_at, last_at = REFUSAL.checked(row)
    return Refusals(scope, token or None, action, reason, times, utc(first_at), utc(last_at))


def _key(counter: Refusals) -> Row:
    return counter.scope, counter.token or 0, counter.action, counter.reason, counter.times
