"""The rows of effects: one for each key, for ever."""

from __future__ import annotations

from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.records import EffectRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Reader, Row, Transaction

# Without its result, in whose place its sum stands.
EFFECT = Summed("the effect {}", "tttitTIiIip")

FIND = """
SELECT key, scope, owner, token, state, digest, result_sum, begun_at, ended_at, late, process, sum, result FROM effects
WHERE key = ?
"""

# Whoever finds none.
HIDDEN = """
SELECT COUNT(*) FROM effects
WHERE key || '' = ?
"""

HOW_MANY = """
SELECT COUNT(*) FROM effects
WHERE key || '' > ''
"""

HOW_MANY_IN_ORDER = """
SELECT COUNT(*) FROM effects
WHERE begun_at >= -9223372036854775807
"""

SAVE = """
INSERT INTO effects (
key, scope, owner, token, state, digest, result_sum, begun_at, ended_at, late, process, sum, result)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
scope = excluded.scope, owner = excluded.owner, token = excluded.token, state = excluded.state,
digest = excluded.digest, result = excluded.result, begun_at = excluded.begun_at, ended_at = excluded.ended_at,
late = excluded.late, process = excluded.process, result_sum = excluded.result_sum, sum = excluded.sum
"""

EVERYONE = """
SELECT key, scope, owner, token, state, digest, result_sum, begun_at, ended_at, late, process, sum, result FROM effects
ORDER BY key
"""

LATEST = """
SELECT key, scope, owner, token, state, digest, result_sum, begun_at, ended_at, late, process, sum FROM effects
ORDER BY begun_at DESC, key
LIMIT ?
"""


def find(reader: Reader, key: str) -> EffectRow | None:
    """The effect with a key."""
    found = reader.rows(FIND, (key,))
    if not found and reader.rows(HIDDEN, (key,))[0][0]:
        raise sums.gone(f"the effect {key!r}")
    return effect(found[0]) if found else None


def save(transaction: Transaction, row: EffectRow) -> None:
    """Write the effect in place of what was known of it."""
    result_sum = None if row.result is None else sums.of_text(row.result)
    values = (*row[:6], result_sum, *row[7:])
    transaction.run(SAVE, (*values, sums.of(values), row.result))


def everyone(reader: Reader) -> list[EffectRow]:
    """Every effect, with its result."""
    found = [effect(row) for row in reader.rows(EVERYONE)]
    if reader.rows(HOW_MANY)[0][0] != len(found):
        raise sums.gone("an effect")
    return found


def latest(reader: Reader, most: int) -> list[EffectRow]:
    """The effects that were begun last, without their results."""
    found = [EFFECT.checked(row) for row in reader.rows(LATEST, (most,))]
    if reader.rows(HOW_MANY) != reader.rows(HOW_MANY_IN_ORDER):
        raise sums.gone("an effect")
    return [EffectRow._make((*values[:6], None, *values[7:])) for values in found]


def effect(row: Row) -> EffectRow:
    """An effect from the columns of ``FIND``."""
    values, result = EFFECT.checked(row[:12]), row[12]
    if result is not None or values[6] is not None:
        EFFECT.check_text(values, result, values[6])
    return EffectRow._make((*values[:6], result, *values[7:]))
