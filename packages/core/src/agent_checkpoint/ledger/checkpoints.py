"""The checkpoint rows. A workflow's latest one is never removed: its sequence counts on from it."""

from __future__ import annotations

from agent_checkpoint.records import Checkpoint, CheckpointInfo
from agent_checkpoint.rules.fence import Workflow
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.database import Reader, Row, Transaction

STANDING = """
SELECT checkpoints.sequence, scope, floors.sequence
FROM checkpoints LEFT JOIN floors ON floors.workflow = checkpoints.workflow
WHERE checkpoints.workflow = ?
ORDER BY checkpoints.sequence DESC
LIMIT 1
"""

FLOOR = """
SELECT sequence FROM floors
WHERE workflow = ?
"""

SET_FLOOR = """
INSERT INTO floors (workflow, sequence) VALUES (?, ?)
ON CONFLICT (workflow) DO UPDATE SET sequence = excluded.sequence
"""

SAVE = """
INSERT INTO checkpoints (workflow, sequence, size_bytes, saved_at, scope, owner, token, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""

LATEST = """
SELECT workflow, sequence, saved_at, scope, owner, token, data FROM checkpoints
WHERE workflow = ?
ORDER BY sequence DESC
LIMIT 1
"""

AT = """
SELECT workflow, sequence, saved_at, scope, owner, token, data FROM checkpoints
WHERE workflow = ? AND sequence = ?
"""

HISTORY = """
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token FROM checkpoints
WHERE workflow = ?
ORDER BY sequence DESC
"""

LATEST_OF_EACH = """
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token FROM checkpoints
WHERE id IN (SELECT MAX(id) FROM checkpoints GROUP BY workflow)
ORDER BY id DESC
"""

# The last sequence of each workflow that was ever handed out.
HANDED_OUT = """
SELECT workflow, MAX(sequence)
FROM (SELECT workflow, sequence FROM checkpoints UNION ALL SELECT workflow, sequence FROM floors) AS known
GROUP BY workflow
"""

WHOLE = """
SELECT workflow, sequence, saved_at, scope, owner, token, data FROM checkpoints
WHERE workflow = ? AND sequence > ?
ORDER BY sequence
LIMIT ?
"""

IMPORT = """
INSERT INTO checkpoints (workflow, sequence, size_bytes, saved_at, scope, owner, token, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""

WORKFLOWS = """
SELECT DISTINCT workflow FROM checkpoints
ORDER BY workflow
"""

# The oldest sequence that stays when a workflow keeps so many.
OLDEST_KEPT = """
SELECT sequence FROM checkpoints
WHERE workflow = ?
ORDER BY sequence DESC
LIMIT 1 OFFSET ?
"""

SPAN_BELOW = """
SELECT COUNT(*), MIN(sequence), MAX(sequence) FROM checkpoints
WHERE workflow = ? AND sequence < ?
"""

OLDEST = """
SELECT sequence, size_bytes FROM checkpoints
WHERE workflow = ? AND sequence < ?
ORDER BY sequence
LIMIT ?
"""

REMOVE = """
DELETE FROM checkpoints
WHERE workflow = ? AND sequence < ?
"""


def standing(reader: Reader, workflow: str) -> Workflow:
    """The latest sequence of a workflow (0: none), the scope it was written under, the sequence to go on behind."""
    found = reader.rows(STANDING, (workflow,))
    if found:
        sequence, scope, floor = found[0]
        return Workflow._make((sequence, scope, floor or 0))
    floors = reader.rows(FLOOR, (workflow,))
    return Workflow(0, None, floors[0][0] if floors else 0)


def set_floor(transaction: Transaction, workflow: str, floor: int) -> bool:
    """Let a workflow go on behind a sequence; whether it would have come to that one again."""
    found = standing(transaction, workflow)
    if max(found.sequence, found.floor) >= floor:
        return False
    transaction.run(SET_FLOOR, (workflow, floor))
    return True


def save(transaction: Transaction, checkpoint: Checkpoint, stored: str) -> None:
    """Write the next checkpoint; ``stored`` is its data as text."""
    workflow, sequence, _, _, scope, owner, token = checkpoint
    saved_at = transaction.moment.wall_ns
    transaction.run(SAVE, (workflow, sequence, len(stored), saved_at, scope, owner, token, stored))


def find(reader: Reader, workflow: str, sequence: int | None) -> tuple[Checkpoint, str] | None:
    """A checkpoint without its data, and the data as stored; the latest without ``sequence``."""
    found = reader.rows(LATEST, (workflow,)) if sequence is None else reader.rows(AT, (workflow, sequence))
    if not found:
        return None
    _, sequence, saved_at, scope, owner, token, stored = found[0]
    return Checkpoint(workflow, sequence, None, utc(saved_at), scope, owner, token), stored


def history(reader: Reader, workflow: str) -> list[CheckpointInfo]:
    """Every checkpoint of a workflow, newest first."""
    return [_info(row) for row in reader.rows(HISTORY, (workflow,))]


def latest_of_each(reader: Reader) -> list[CheckpointInfo]:
    """The latest checkpoint of every workflow, last saved first."""
    return [_info(row) for row in reader.rows(LATEST_OF_EACH)]


def handed_out(reader: Reader) -> dict[str, int]:
    """The last sequence of each workflow, of those in a store that a backup replaced too."""
    return dict(reader.rows(HANDED_OUT))


def page(reader: Reader, workflow: str, after: int, most: int) -> list[Row]:
    """The next checkpoints behind a sequence, whole, as they are stored; ``saved_at`` in nanoseconds."""
    return reader.rows(WHOLE, (workflow, after, most))


def take_over(transaction: Transaction, rows: Iterable[Row]) -> None:
    """Write checkpoints of another store, in the order of ``page``."""
    transaction.executemany(IMPORT, [(*row[:2], len(row[6]), *row[2:]) for row in rows])


def workflows(reader: Reader) -> list[str]:
    """Every workflow that has a checkpoint."""
    return [name for (name,) in reader.rows(WORKFLOWS)]


def span_to_prune(reader: Reader, workflow: str, keep_last: int) -> tuple[int, int, int]:
    """How many checkpoints are older than the last ``keep_last``, the first and the last of them."""
    kept = reader.rows(OLDEST_KEPT, (workflow, keep_last - 1))
    if not kept:
        return (0, 0, 0)
    count, first, last = reader.rows(SPAN_BELOW, (workflow, kept[0][0]))[0]
    return (count, first or 0, last or 0)


def remove_batch(
    transaction: Transaction, workflow: str, below: int, most: int, most_bytes: int
) -> tuple[int, int, int]:
    """Remove the oldest checkpoints below a sequence: how many, the first and the last of them.

    At most ``most`` of them, and no more than ``most_bytes`` where that is more than one.
    """
    oldest = transaction.rows(OLDEST, (workflow, below, most))
    size, last = 0, 0
    for sequence, size_bytes in oldest:
        size += size_bytes
        if last and size > most_bytes:
            break
        last = sequence
    if not last:
        return (0, 0, 0)
    return (transaction.run(REMOVE, (workflow, last + 1)), oldest[0][0], last)


def _info(row: Row) -> CheckpointInfo:
    workflow, sequence, size_bytes, saved_at, scope, owner, token = row
    return CheckpointInfo(workflow, sequence, size_bytes, utc(saved_at), scope, owner, token)
