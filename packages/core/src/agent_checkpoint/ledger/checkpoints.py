"""The checkpoint rows. A workflow's latest one is never removed: its sequence counts on from it."""

from __future__ import annotations

from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.records import Checkpoint, CheckpointInfo
from agent_checkpoint.rules.fence import Workflow
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.database import Reader, Row, Transaction

# Without its data, for which its sum stands.
CHECKPOINT = Summed("checkpoint {1} of workflow {0}", "tiiiTTII")
FLOOR_OF = Summed("the floor of workflow {}", "ti")
# No sequence is higher.
LAST = 2**63 - 1

# With the latest sequence by the other index: a workflow that seems to be
# further back would give out a sequence again.
STANDING = """
SELECT
checkpoints.workflow, checkpoints.sequence, size_bytes, saved_at, scope, owner, token, data_sum, checkpoints.sum,
(SELECT MAX(again.sequence) FROM checkpoints AS again WHERE again.workflow || '' = checkpoints.workflow || ''),
EXISTS (SELECT 1 FROM floors AS again WHERE again.workflow || '' = checkpoints.workflow || ''),
floors.workflow
FROM checkpoints LEFT JOIN floors ON floors.workflow = checkpoints.workflow
WHERE checkpoints.workflow = ?
ORDER BY checkpoints.sequence DESC
LIMIT 1
"""

# Whoever finds none, or has reason to count them.
HIDDEN = """
SELECT COUNT(*) FROM checkpoints
WHERE workflow || '' = ? AND sequence > ? AND sequence <= ?
"""

FLOOR = """
SELECT workflow, sequence, sum FROM floors
WHERE workflow = ?
"""

HIDDEN_FLOOR = """
SELECT COUNT(*) FROM floors
WHERE workflow || '' = ?
"""

SET_FLOOR = """
INSERT INTO floors (workflow, sequence, sum) VALUES (?, ?, ?)
ON CONFLICT (workflow) DO UPDATE SET sequence = excluded.sequence, sum = excluded.sum
"""

SAVE = """
INSERT INTO checkpoints (workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum, data)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

LATEST = """
SELECT
workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum, data,
(SELECT MAX(again.sequence) FROM checkpoints AS again WHERE again.workflow || '' = checkpoints.workflow || '')
FROM checkpoints
WHERE workflow = ?
ORDER BY sequence DESC
LIMIT 1
"""

AT = """
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum, data, sequence FROM checkpoints
WHERE workflow = ? AND sequence = ?
"""

HISTORY = """
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum FROM checkpoints
WHERE workflow = ?
ORDER BY sequence DESC
"""

LATEST_OF_EACH = """
SELECT
workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum,
(SELECT MAX(again.sequence) FROM checkpoints AS again WHERE again.workflow || '' = checkpoints.workflow || '')
FROM checkpoints
WHERE id IN (SELECT MAX(id) FROM checkpoints GROUP BY workflow)
ORDER BY id DESC
"""

# From each to the next: not by counting the checkpoints.
HOW_MANY_WORKFLOWS = """
WITH RECURSIVE known (name) AS (
    SELECT MIN(workflow || '') FROM checkpoints
    UNION ALL
    SELECT (SELECT MIN(again.workflow || '') FROM checkpoints AS again WHERE again.workflow || '' > known.name)
    FROM known WHERE known.name > ''
)
SELECT COUNT(name) FROM known
"""

# The last sequence of each workflow that was ever handed out.
HANDED_OUT = """
SELECT workflow, MAX(sequence)
FROM (SELECT workflow, sequence FROM checkpoints UNION ALL SELECT workflow, sequence FROM floors) AS known
GROUP BY workflow
"""

WHOLE = """
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum, data FROM checkpoints
WHERE workflow = ? AND sequence > ?
ORDER BY sequence
LIMIT ?
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
SELECT workflow, sequence, size_bytes, saved_at, scope, owner, token, data_sum, sum FROM checkpoints
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
    if not found:
        _refuse_hidden(reader, workflow)
        return Workflow(0, None, _floor(reader, workflow))
    _, sequence, _, _, scope, _, _, _ = CHECKPOINT.checked(found[0][:9])
    latest, floors = found[0][9:11]
    if latest != sequence:
        raise sums.gone(f"the latest checkpoint of workflow {workflow!r}")
    return Workflow._make((sequence, scope, _floor(reader, workflow) if floors or found[0][11] is not None else 0))


def _floor(reader: Reader, workflow: str) -> int:
    """The sequence to go on behind; 0 for none."""
    found = reader.rows(FLOOR, (workflow,))
    if not found and reader.rows(HIDDEN_FLOOR, (workflow,))[0][0]:
        raise sums.gone(f"the floor of workflow {workflow!r}")
    return int(FLOOR_OF.checked(found[0])[1]) if found else 0


def _refuse_hidden(reader: Reader, workflow: str, after: int = 0, last: int = LAST, known: int = 0) -> None:
    """Refuse to go on where the other index has another number of checkpoints in that range."""
    if reader.rows(HIDDEN, (workflow, after, last))[0][0] != known:
        raise sums.gone(f"a checkpoint of workflow {workflow!r}")


def set_floor(transaction: Transaction, workflow: str, floor: int) -> bool:
    """Let a workflow go on behind a sequence; whether it would have come to that one again."""
    found = standing(transaction, workflow)
    if max(found.sequence, found.floor) >= floor:
        return False
    transaction.run(SET_FLOOR, (workflow, floor, sums.of((workflow, floor))))
    return True


def save(transaction: Transaction, checkpoint: Checkpoint, stored: str) -> None:
    """Write the next checkpoint; ``stored`` is its data as text."""
    workflow, sequence, _, _, scope, owner, token = checkpoint
    saved_at = transaction.moment.wall_ns
    transaction.run(SAVE, _stored((workflow, sequence, len(stored), saved_at, scope, owner, token), stored))


def find(reader: Reader, workflow: str, sequence: int | None) -> tuple[Checkpoint, str] | None:
    """A checkpoint without its data, and the data as stored; the latest without ``sequence``."""
    found = reader.rows(LATEST, (workflow,)) if sequence is None else reader.rows(AT, (workflow, sequence))
    if not found:
        _refuse_hidden(reader, workflow, *((0, LAST) if sequence is None else (sequence - 1, sequence)))
        return None
    _, sequence, _, saved_at, scope, owner, token, stored = _whole(found[0])
    if found[0][10] != sequence:
        raise sums.gone(f"the latest checkpoint of workflow {workflow!r}")
    return Checkpoint(workflow, sequence, None, utc(saved_at), scope, owner, token), stored


def history(reader: Reader, workflow: str) -> list[CheckpointInfo]:
    """Every checkpoint of a workflow, newest first."""
    found = [_info(row) for row in reader.rows(HISTORY, (workflow,))]
    _refuse_hidden(reader, workflow, known=len(found))
    return found


def latest_of_each(reader: Reader) -> list[CheckpointInfo]:
    """The latest checkpoint of every workflow, last saved first."""
    rows = reader.rows(LATEST_OF_EACH)
    found = [_info(row[:9]) for row in rows]
    if any(row[9] != row[1] for row in rows) or reader.rows(HOW_MANY_WORKFLOWS)[0][0] != len(rows):
        raise sums.gone("the latest checkpoint of a workflow")
    return found


def handed_out(reader: Reader) -> dict[str, int]:
    """The last sequence of each workflow, of those in a store that a backup replaced too."""
    return dict(reader.rows(HANDED_OUT))


def page(reader: Reader, workflow: str, after: int, most: int) -> list[Row]:
    """The next checkpoints behind a sequence, whole, as they are stored; ``saved_at`` in nanoseconds."""
    found = [_whole(row) for row in reader.rows(WHOLE, (workflow, after, most))]
    last = found[-1][1] if len(found) == most else LAST
    _refuse_hidden(reader, workflow, after, last, len(found))
    return [(*row[:2], *row[3:]) for row in found]


def take_over(transaction: Transaction, rows: Iterable[Row]) -> None:
    """Write checkpoints of another store, in the order of ``page``."""
    transaction.executemany(SAVE, [_stored((*row[:2], len(row[6]), *row[2:6]), row[6]) for row in rows])


def workflows(reader: Reader) -> list[str]:
    """Every workflow that has a checkpoint."""
    found = [name for (name,) in reader.rows(WORKFLOWS)]
    if reader.rows(HOW_MANY_WORKFLOWS)[0][0] != len(found):
        raise sums.gone("a workflow")
    return found


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
    for _, sequence, size_bytes, *_ in map(CHECKPOINT.checked, oldest):
        size += size_bytes
        if last and size > most_bytes:
            break
        last = sequence
    if not last:
        return (0, 0, 0)
    return (transaction.run(REMOVE, (workflow, last + 1)), oldest[0][1], last)


def _info(row: Row) -> CheckpointInfo:
    workflow, sequence, size_bytes, saved_at, scope, owner, token, _ = CHECKPOINT.checked(row)
    return CheckpointInfo(workflow, sequence, size_bytes, utc(saved_at), scope, owner, token)


def _stored(facts: Row, data: str) -> Row:
    """A row as it is written: the facts, the sums, the data."""
    facts = (*facts, sums.of_text(data))
    return (*facts, sums.of(facts), data)


def _whole(row: Row) -> Row:
    """The facts of a row without the sums, and its data."""
    facts = CHECKPOINT.checked(row[:9])
    CHECKPOINT.check_text(facts, row[9], facts[7])
    return (*facts[:7], row[9])
