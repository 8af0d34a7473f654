"""Copies of a store: SQLite's online backup, out of the file and back into it.

Only SQLite touches the database that is in use. What is written over it comes
as one transaction: others see the old content or the new one.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

from agent_checkpoint.errors import InvalidInputError, StorageCorruptError
from agent_checkpoint.sqlite.connections import connect, refuse_foreign
from agent_checkpoint.sqlite.translate import translate, translate_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.sqlite.connections import Connection


def copy(source: str, target: str, busy_seconds: float) -> int:
    """Write a consistent copy into a new file, for its owner only, synced and checked; its bytes.

    Writers go on meanwhile.

    Raises:
        InvalidInputError: the target is there already.
        StorageError: the source cannot be read, or the target not be written, or the copy is damaged.
    """
    try:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        message = f"file: {target} is there already: a copy is a file of its own"
        raise InvalidInputError(message, field="file") from None
    except OSError as error:
        raise translate_os(error, target) from error
    try:
        with closing(connect(source, "FULL")) as from_, closing(connect(target, "FULL")) as to:
            refuse_foreign(from_, source, busy_seconds)
            from_.backup(to)
            to.execute("PRAGMA journal_mode=DELETE").fetchone()  # one file, until somebody uses it
            _check(to, target)
        return _sync(target)
    except sqlite3.Error as error:
        os.unlink(target)
        raise translate(error, target) from error
    except BaseException:
        os.unlink(target)
        raise


def overwrite(target: str, source: str) -> None:
    """Put the content of a copy in place of what is in a store, in one transaction."""
    try:
        with closing(connect(source, "FULL")) as from_, closing(connect(target, "FULL")) as to:
            from_.backup(to)
    except sqlite3.Error as error:
        raise translate(error, target) from error


def _check(connection: Connection, path: str) -> None:
    found = [row[0] for row in connection.execute("PRAGMA integrity_check(5)")]
    if found != ["ok"]:
        raise StorageCorruptError(f"{path}: the copy is damaged: {'; '.join(map(str, found))}", database=path)


def _sync(path: str) -> int:
    """The copy and its name survive a power cut. No connection to it is open any more."""
    for each in (path, os.path.dirname(os.path.abspath(path))):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return os.stat(path).st_size
