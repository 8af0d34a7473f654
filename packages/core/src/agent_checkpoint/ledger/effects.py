"""The rows of effects: one for each key, for ever."""

from __future__ import annotations

from agent_checkpoint.records import EffectRow

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Reader, Transaction

FIND = """
SELECT key, scope, owner, token, state, digest, result, begun_at, ended_at, late, process FROM effects
WHERE key = ?
"""

SAVE = """
INSERT INTO effects (key, scope, owner, token, state, digest, result, begun_at, ended_at, late, process)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
scope = excluded.scope, owner = excluded.owner, token = excluded.token, state = excluded.state,
digest = excluded.digest, result = excluded.result, begun_at = excluded.begun_at, ended_at = excluded.ended_at,
late = excluded.late, process = excluded.process
"""

EVERYONE = """
SELECT key, scope, owner, token, state, digest, result, begun_at, ended_at, late, process FROM effects
ORDER BY key
"""

LATEST = """
SELECT key, scope, owner, token, state, digest, NULL, begun_at, ended_at, late, process FROM effects
ORDER BY begun_at DESC, key
LIMIT ?
"""


def find(reader: Reader, key: str) -> EffectRow | None:
    """The effect with a key."""
    found = reader.rows(FIND, (key,))
    return EffectRow._make(found[0]) if found else None


def save(transaction: Transaction, row: EffectRow) -> None:
    """Write the effect in place of what was known of it."""
    transaction.run(SAVE, row)


def everyone(reader: Reader) -> list[EffectRow]:
    """Every effect, with its result."""
    return [EffectRow._make(row) for row in reader.rows(EVERYONE)]


def latest(reader: Reader, most: int) -> list[EffectRow]:
    """The effects that were begun last, without their results."""
    return [EffectRow._make(row) for row in reader.rows(LATEST, (most,))]
