"""The file of LangGraph's own SQLite saver, as it is read: in one state, and never changed."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from agent_checkpoint import (
    InvalidInputError,
    NotFoundError,
    StorageBusyError,
    StorageCorruptError,
    StorageUnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

CHECKPOINT_COLUMNS = frozenset(
    ("thread_id", "checkpoint_ns", "checkpoint_id", "parent_checkpoint_id", "type", "checkpoint", "metadata")
)
WRITE_COLUMNS = frozenset(("thread_id", "checkpoint_ns", "checkpoint_id", "task_id", "idx", "channel", "type", "value"))
NO_WRITES = """
(SELECT '' AS thread_id, '' AS checkpoint_ns, '' AS checkpoint_id, '' AS task_id, '' AS task_path,
0 AS idx, '' AS channel, '' AS type, '' AS value WHERE 0)
"""

COLUMNS = "SELECT name FROM pragma_table_info(?)"
COUNT = "SELECT COUNT(*) FROM checkpoints"
# The thread that was saved to last comes last.
THREADS = """
SELECT thread_id, MAX(checkpoint_id) AS latest FROM (
    SELECT thread_id, checkpoint_id FROM checkpoints UNION ALL SELECT thread_id, checkpoint_id FROM {writes})
GROUP BY thread_id
ORDER BY latest, thread_id
"""
PLACES = """
SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id FROM checkpoints
WHERE thread_id = ?
ORDER BY checkpoint_id, checkpoint_ns
"""
PLACES_OF_WRITES_ALONE = """
SELECT DISTINCT w.checkpoint_ns, w.checkpoint_id, NULL FROM {writes} w
WHERE w.thread_id = ? AND NOT EXISTS (
    SELECT 1 FROM checkpoints c
    WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id)
ORDER BY w.checkpoint_id, w.checkpoint_ns
"""
# The kinds of values, and then one of each: to group the values themselves would sort all of them.
KINDS = """
SELECT type, MIN(checkpoint_id) FROM checkpoints
WHERE thread_id = ?
GROUP BY type
"""
KINDS_OF_WRITES = """
SELECT type, MIN(checkpoint_id) FROM {writes}
WHERE thread_id = ?
GROUP BY type
"""
EXAMPLE = """
SELECT checkpoint FROM checkpoints
WHERE thread_id = ? AND checkpoint_id = ? AND type IS ?
LIMIT 1
"""
EXAMPLE_OF_WRITES = """
SELECT value FROM {writes}
WHERE thread_id = ? AND checkpoint_id = ? AND type IS ?
LIMIT 1
"""
CHECKPOINT = """
SELECT type, checkpoint, metadata FROM checkpoints
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
"""
WRITES = """
SELECT task_id, {task_path}, idx, channel, type, value FROM {writes}
WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?
ORDER BY 1, 2, 3
"""


class Place(NamedTuple):
    """Where a checkpoint stands in its thread."""

    namespace: str
    checkpoint_id: str
    parent_id: str | None


class StoredCheckpoint(NamedTuple):
    """A checkpoint in one piece, and its metadata as JSON."""

    kind: str
    data: bytes
    metadata: bytes


class StoredWrite(NamedTuple):
    """What a task wrote to a channel."""

    task_id: str
    task_path: str
    idx: int
    channel: str
    kind: str
    data: bytes


class SqliteFile:
    """A file of ``SqliteSaver`` or ``AsyncSqliteSaver``, opened for reading; a writer goes on meanwhile.

    Raises:
        NotFoundError: there is none.
        InvalidInputError: it is something else.
        StorageError: it cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        if not self._path.exists():
            raise NotFoundError(f"there is no file {str(path)!r}", hint="name the file that SqliteSaver wrote")
        if not self._path.is_file():
            raise InvalidInputError(f"path: {str(path)!r} is no file", field="path")
        with self._told():
            self._connection = self._open()
        try:
            self._writes, self._task_path = self._tables()
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Close it; idempotent."""
        self._connection.close()

    def count(self) -> int:
        """How many checkpoints it has."""
        ((count,),) = self._rows(COUNT)
        return int(count)

    def threads(self) -> list[str]:
        """Its threads, the one that was saved to last as the last one."""
        return [row[0] for row in self._rows(THREADS)]

    def places(self, thread_id: str) -> list[Place]:
        """The checkpoints of a thread, by their ids."""
        return [Place(*row) for row in self._rows(PLACES, thread_id)]

    def places_of_writes_alone(self, thread_id: str) -> list[Place]:
        """The checkpoints of a thread that are not there, but writes on top of them are."""
        return [Place(*row) for row in self._rows(PLACES_OF_WRITES_ALONE, thread_id)]

    def examples(self, thread_id: str) -> list[tuple[str, bytes, str]]:
        """A value of each kind in a thread, as (kind, bytes, checkpoint id)."""
        found = []
        for kinds, example in ((KINDS, EXAMPLE), (KINDS_OF_WRITES, EXAMPLE_OF_WRITES)):
            for kind, checkpoint_id in self._rows(kinds, thread_id):
                ((data,),) = self._rows(example, thread_id, checkpoint_id, kind)
                found.append((kind or "", _bytes(data), checkpoint_id))
        return found

    def checkpoint(self, thread_id: str, place: Place) -> StoredCheckpoint:
        """A checkpoint of a thread."""
        ((kind, data, metadata),) = self._rows(CHECKPOINT, thread_id, place.namespace, place.checkpoint_id)
        return StoredCheckpoint(kind or "", _bytes(data), _bytes(metadata) or b"{}")

    def writes(self, thread_id: str, place: Place) -> list[StoredWrite]:
        """The writes on top of a checkpoint, those of a task together."""
        return [
            StoredWrite(task_id, task_path, index, channel, kind or "", _bytes(value))
            for task_id, task_path, index, channel, kind, value in self._rows(
                WRITES, thread_id, place.namespace, place.checkpoint_id
            )
        ]

    def _open(self) -> sqlite3.Connection:
        """In one state, that of now; what others write from now on is not seen."""
        try:
            return self._begun("mode=ro")
        except sqlite3.OperationalError as error:
            # In a folder where SQLite cannot make its own files, and has none, nobody is writing.
            refused = "unable to open" in str(error) or "readonly" in str(error)
            if not refused or any(Path(f"{self._path}-{side}").exists() for side in ("wal", "journal")):
                raise
            with suppress(sqlite3.OperationalError):
                return self._begun("mode=ro&immutable=1")
            raise

    def _begun(self, options: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(self._path.absolute()))}?{options}"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("BEGIN")
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    def _tables(self) -> tuple[str, str]:
        """What stands for the table of writes, and for its path of a task: older files lack it."""
        checkpoints = {name for (name,) in self._rows(COLUMNS, "checkpoints")}
        writes = {name for (name,) in self._rows(COLUMNS, "writes")}
        if not checkpoints >= CHECKPOINT_COLUMNS or (writes and not writes >= WRITE_COLUMNS):
            hint = "name the file that SqliteSaver or AsyncSqliteSaver of langgraph-checkpoint-sqlite 2 or later wrote"
            if "workflow" in checkpoints:
                hint = f"it is a store of Agent Checkpoint already: open it as one. Else {hint}"
            raise InvalidInputError(
                f"path: {str(self._path)!r} was not written by LangGraph's SqliteSaver", hint=hint, field="path"
            )
        return "writes" if writes else NO_WRITES, "task_path" if "task_path" in writes or not writes else "''"

    def _rows(self, sql: str, *bound: Any) -> Sequence[Any]:
        if "{" in sql:
            sql = sql.format(writes=self._writes, task_path=self._task_path)
        with self._told():
            return self._connection.execute(sql, bound).fetchall()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What SQLite says, in our words."""
        path = str(self._path)
        try:
            yield
        except sqlite3.Error as error:
            name = getattr(error, "sqlite_errorname", "")
            if name == "SQLITE_NOTADB" or "file is not a database" in str(error):
                raise InvalidInputError(
                    f"path: {path!r} is no SQLite database", hint="name the file that SqliteSaver wrote", field="path"
                ) from error
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise StorageBusyError(f"{path} is locked: {error}", blocker=None) from error
            if "malformed" in str(error) or name.startswith("SQLITE_CORRUPT"):
                raise StorageCorruptError(f"{path} is damaged: {error}", hint="import a backup of it") from error
            raise StorageUnreachableError(f"{path} cannot be read: {error}") from error


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else bytes(value)
