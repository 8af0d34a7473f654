"""Every SQL statement on the saver's tables: one text for every database."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

FIND_HISTORY = """
SELECT number FROM langgraph_histories
WHERE thread_id = ? AND checkpoint_ns = ?
"""

ADD_HISTORY = """
INSERT INTO langgraph_histories (thread_id, checkpoint_ns) VALUES (?, ?)
RETURNING number
"""

HISTORIES = """
SELECT number, checkpoint_ns FROM langgraph_histories
WHERE thread_id = ?
ORDER BY number
"""

# Saving a checkpoint

ADD_VALUES = """
INSERT INTO langgraph_values (history, channel, base, depth, weight, kind, data) VALUES {rows}
RETURNING channel, number
"""

FIND_CHECKPOINT = """
SELECT number FROM langgraph_checkpoints
WHERE history = ? AND checkpoint_id = ?
"""

ADD_CHECKPOINT = """
INSERT INTO langgraph_checkpoints (
history, checkpoint_id, revision, parent_id, format, source, step, run_id, metadata_kind, metadata, kind, data)
"""
# Saved again, a checkpoint keeps its place.
AGAIN = """
ON CONFLICT (history, checkpoint_id) DO UPDATE SET
revision = langgraph_checkpoints.revision + 1, parent_id = excluded.parent_id, format = excluded.format,
source = excluded.source, step = excluded.step, run_id = excluded.run_id,
metadata_kind = excluded.metadata_kind, metadata = excluded.metadata, kind = excluded.kind, data = excluded.data
RETURNING number, revision, history
"""
SAVE_CHECKPOINT = f"{ADD_CHECKPOINT}VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?){AGAIN}"
# The parent by all that it is known by: the database may be another one than yesterday's.
SAVE_CHILD = f"""{ADD_CHECKPOINT}
SELECT c.history, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?
FROM langgraph_checkpoints c JOIN langgraph_histories h ON h.number = c.history
WHERE c.number = ? AND c.revision = ? AND c.checkpoint_id = ? AND h.thread_id = ? AND h.checkpoint_ns = ?{AGAIN}"""  # noqa: S608 -- constants

ADD_STATE = """
INSERT INTO langgraph_state (checkpoint, value) VALUES {rows}
"""

REMOVE_STATE = """
DELETE FROM langgraph_state
WHERE checkpoint = ?
"""

# Saving writes: of the regular ones the first counts, of the special ones the last.

ADD_WRITES = """
INSERT INTO langgraph_writes (history, checkpoint_id, task_id, idx, task_path, channel, kind, data)
VALUES {rows}
ON CONFLICT (history, checkpoint_id, task_id, idx) DO NOTHING
"""

REPLACE_WRITES = """
INSERT INTO langgraph_writes (history, checkpoint_id, task_id, idx, task_path, channel, kind, data)
VALUES {rows}
ON CONFLICT (history, checkpoint_id, task_id, idx) DO UPDATE SET
task_path = excluded.task_path, channel = excluded.channel, kind = excluded.kind, data = excluded.data
"""

# Reading

HEADERS = """
SELECT
c.number, c.revision, c.history, h.thread_id, h.checkpoint_ns, c.checkpoint_id, c.parent_id, c.format,
c.metadata_kind, c.metadata
FROM langgraph_checkpoints c JOIN langgraph_histories h ON h.number = c.history
"""
HEADERS_END = """
ORDER BY c.number DESC
LIMIT ?
"""
# Its number first: then its checkpoints are found in their order by an index, and not sorted.
BY_HISTORY = "c.history = (SELECT number FROM langgraph_histories WHERE thread_id = ? AND checkpoint_ns = ?)"
BY_THREAD = "h.thread_id = ?"
BY_NAMESPACE = "h.checkpoint_ns = ?"
BY_ID = "c.checkpoint_id = ?"
BY_SOURCE = "c.source = ?"
BY_STEP = "c.step = ?"
BY_RUN = "c.run_id = ?"
BEFORE = "c.number < ?"
BEFORE_ID = "c.checkpoint_id < ?"

PLACE = """
SELECT MAX(c.number) FROM langgraph_checkpoints c JOIN langgraph_histories h ON h.number = c.history
WHERE c.checkpoint_id = ?
"""
IN_THREAD = "AND h.thread_id = ?"

BODIES = """
SELECT number, kind, data FROM langgraph_checkpoints
WHERE number IN ({places})
"""

# The values of these checkpoints, and those that they are differences to.
VALUES = """
WITH RECURSIVE wanted (number, base) AS (
    SELECT number, base FROM langgraph_values
    WHERE number IN (SELECT value FROM langgraph_state WHERE checkpoint IN ({places}))
    UNION
    SELECT v.number, v.base FROM wanted w JOIN langgraph_values v ON v.number = w.base
)
SELECT v.number, v.channel, v.base, v.depth, v.weight, v.kind, v.data
FROM wanted w JOIN langgraph_values v ON v.number = w.number
"""

# A value, and those that it is a difference to.
LINE_OF_VALUE = """
WITH RECURSIVE wanted (number, base) AS (
    SELECT number, base FROM langgraph_values
    WHERE number = ?
    UNION
    SELECT v.number, v.base FROM wanted w JOIN langgraph_values v ON v.number = w.base
)
SELECT v.number, v.channel, v.base, v.depth, v.weight, v.kind, v.data
FROM wanted w JOIN langgraph_values v ON v.number = w.number
"""

STATE = """
SELECT checkpoint, value FROM langgraph_state
WHERE checkpoint IN ({places})
"""

WRITES = """
SELECT c.number, w.task_path, w.task_id, w.idx, w.channel, w.kind, w.data
FROM langgraph_checkpoints c
JOIN langgraph_writes w ON w.history = c.history AND w.checkpoint_id = c.checkpoint_id
WHERE c.number IN ({places})
"""

# What was sent on top of the parents of these.
SENDS = """
SELECT c.number, w.task_path, w.task_id, w.idx, w.channel, w.kind, w.data
FROM langgraph_checkpoints c
JOIN langgraph_writes w ON w.history = c.history AND w.checkpoint_id = c.parent_id
WHERE c.number IN ({places}) AND w.channel = '__pregel_tasks'
"""

# A checkpoint and its ancestors, the nearest first.
ANCESTORS = """
WITH RECURSIVE line (number, parent_id, depth) AS (
    SELECT number, parent_id, 0 FROM langgraph_checkpoints
    WHERE history = ? AND checkpoint_id = ?
    UNION ALL
    SELECT c.number, c.parent_id, l.depth + 1
    FROM line l JOIN langgraph_checkpoints c ON c.history = ? AND c.checkpoint_id = l.parent_id
    WHERE l.depth < ?
)
SELECT number, parent_id FROM line
ORDER BY depth
"""

CHANNELS_OF = """
SELECT s.checkpoint, v.channel
FROM langgraph_state s JOIN langgraph_values v ON v.number = s.value
WHERE s.checkpoint IN ({places})
"""

CHANNELS_OF_HISTORY = """
SELECT s.checkpoint, v.channel
FROM langgraph_checkpoints c
JOIN langgraph_state s ON s.checkpoint = c.number
JOIN langgraph_values v ON v.number = s.value
WHERE c.history = ?
"""

THREADS = """
SELECT t.thread_id, t.checkpoints, h.checkpoint_ns, c.checkpoint_id
FROM (
    SELECT h.thread_id AS thread_id, COUNT(c.number) AS checkpoints, MAX(c.number) AS latest
    FROM langgraph_histories h LEFT JOIN langgraph_checkpoints c ON c.history = h.number
    GROUP BY h.thread_id) t
LEFT JOIN langgraph_checkpoints c ON c.number = t.latest
LEFT JOIN langgraph_histories h ON h.number = c.history
ORDER BY COALESCE(c.number, 0) DESC, t.thread_id
"""

# Removing

REMOVE_WRITES = "DELETE FROM langgraph_writes WHERE history = ?"
REMOVE_ALL_STATE = """
DELETE FROM langgraph_state
WHERE checkpoint IN (SELECT number FROM langgraph_checkpoints WHERE history = ?)
"""
REMOVE_VALUES = "DELETE FROM langgraph_values WHERE history = ?"
REMOVE_CHECKPOINTS = "DELETE FROM langgraph_checkpoints WHERE history = ?"
REMOVE_HISTORY = "DELETE FROM langgraph_histories WHERE number = ?"

REMOVE_CHECKPOINT = "DELETE FROM langgraph_checkpoints WHERE number = ?"
REMOVE_VALUE = "DELETE FROM langgraph_values WHERE number = ?"
REMOVE_WRITES_OF = """
DELETE FROM langgraph_writes
WHERE history = ? AND checkpoint_id = ?
"""

OF_HISTORY = """
SELECT number, checkpoint_id, parent_id, run_id, metadata_kind, metadata FROM langgraph_checkpoints
WHERE history = ?
ORDER BY number DESC
"""

OF_RUN = """
SELECT h.thread_id, c.history, c.number, c.checkpoint_id
FROM langgraph_checkpoints c JOIN langgraph_histories h ON h.number = c.history
WHERE c.run_id = ?
ORDER BY c.number
"""

# Copying

COPY_VALUE = """
INSERT INTO langgraph_values (history, channel, base, depth, weight, kind, data)
SELECT ?, channel, ?, depth, weight, kind, data FROM langgraph_values
WHERE number = ?
RETURNING number
"""

BASES = """
SELECT number, base FROM langgraph_values
WHERE history = ?
ORDER BY number
"""

COPY_CHECKPOINT = f"""{ADD_CHECKPOINT}
SELECT ?, checkpoint_id, 0, parent_id, format, source, step, run_id, metadata_kind, metadata, kind, data
FROM langgraph_checkpoints
WHERE number = ?
RETURNING number
"""  # noqa: S608 -- a constant

IDS = """
SELECT number, checkpoint_id FROM langgraph_checkpoints
WHERE history = ?
ORDER BY number
"""

STATE_OF_HISTORY = """
SELECT s.checkpoint, s.value
FROM langgraph_state s JOIN langgraph_checkpoints c ON c.number = s.checkpoint
WHERE c.history = ?
"""

COPY_WRITES = """
INSERT INTO langgraph_writes (history, checkpoint_id, task_id, idx, task_path, channel, kind, data)
SELECT ?, checkpoint_id, task_id, idx, task_path, channel, kind, data FROM langgraph_writes
WHERE history = ?
ON CONFLICT (history, checkpoint_id, task_id, idx) DO UPDATE SET
task_path = excluded.task_path, channel = excluded.channel, kind = excluded.kind, data = excluded.data
"""

# How many checkpoints a statement names at once: a few widths, so that each is prepared once.
WIDTHS = (1, 4, 16, 64)


def among(sql: str, numbers: Sequence[int]) -> tuple[str, list[int]]:
    """The statement for so many checkpoints, and the numbers to bind: the last one fills up the places."""
    if not numbers:
        numbers = [0]  # no row has it
    width = next(width for width in WIDTHS if width >= len(numbers))
    padded = [*numbers, *[numbers[-1]] * (width - len(numbers))]
    text, times = _among(sql, width)
    return text, padded * times


@cache
def _among(sql: str, width: int) -> tuple[str, int]:
    return sql.replace("{places}", ", ".join("?" * width)), sql.count("{places}")


# Rows that a statement adds at once: far fewer than the parameters that any database takes.
MOST_ROWS = 64


def adding(sql: str, rows: Sequence[Sequence[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The statements that add these rows, and what to bind: one for all of them, if they are not very many."""
    for start in range(0, len(rows), MOST_ROWS):
        some = rows[start : start + MOST_ROWS]
        yield _adding(sql, len(some), len(some[0])), [value for row in some for value in row]


@cache
def _adding(sql: str, rows: int, width: int) -> str:
    places = f"({', '.join('?' * width)})"
    return sql.replace("{rows}", ", ".join([places] * rows))
