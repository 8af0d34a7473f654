"""What is kept, and for how long: the rules that were set."""

from __future__ import annotations

from agent_checkpoint import payload
from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agent_checkpoint.database import Reader, Transaction

RULE = Summed("the retention rule {}", "tj")

RULES = """
SELECT rule, value, sum FROM retention
ORDER BY rule
"""

SET = """
INSERT INTO retention (rule, value, sum) VALUES (?, ?, ?)
ON CONFLICT (rule) DO UPDATE SET value = excluded.value, sum = excluded.sum
"""

UNSET = """
DELETE FROM retention
WHERE rule = ?
"""

EVENTS_SINCE = """
SELECT COUNT(*) FROM events
WHERE at >= ?
"""

EVENTS_UP_TO = """
SELECT COUNT(*) FROM events
WHERE id <= ?
"""

CHECKPOINTS_SINCE = """
SELECT COUNT(*) FROM checkpoints
WHERE saved_at >= ?
"""


def rules(reader: Reader) -> dict[str, Any]:
    """Every rule that is set."""
    return {rule: payload.decode(value) for rule, value in map(RULE.checked, reader.rows(RULES))}


def set_rule(transaction: Transaction, rule: str, value: str) -> None:
    """Set a rule."""
    transaction.run(SET, (rule, value, sums.of((rule, value))))


def unset(transaction: Transaction, rule: str) -> bool:
    """Forget a rule; whether it was set."""
    return transaction.run(UNSET, (rule,)) > 0


def grown(reader: Reader, since_ns: int) -> tuple[int, int]:
    """How many events and checkpoints there are since a time."""
    return reader.rows(EVENTS_SINCE, (since_ns,))[0][0], reader.rows(CHECKPOINTS_SINCE, (since_ns,))[0][0]


def events_up_to(reader: Reader, last: int) -> int:
    """How many events there are up to an id."""
    return int(reader.rows(EVENTS_UP_TO, (last,))[0][0])
