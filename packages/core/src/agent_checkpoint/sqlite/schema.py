"""Creating the file of a store: empty, ours, in WAL mode. Its tables come by migrations."""

from __future__ import annotations

import os
import sqlite3
from _thread import allocate_lock
from contextlib import suppress

from agent_checkpoint import forks
from agent_checkpoint.errors import NotAStoreError, StorageError, StorageUnreachableError
from agent_checkpoint.sqlite.opening import APPLICATION_ID, Connection, patiently
from agent_checkpoint.sqlite.translate import FAILURES, is_busy, translate, translate_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_making = allocate_lock()

# Bytes of the smallest SQLite database; what is shorter, SQLite would take for empty.
SMALLEST = 512

COMPONENTS = """
CREATE TABLE IF NOT EXISTS components (
    component  TEXT    PRIMARY KEY,
    version    INTEGER NOT NULL,
    package    TEXT    NOT NULL, -- the version of agent-checkpoint-core that brought it there
    changed_at INTEGER NOT NULL
) WITHOUT ROWID
"""


def create(path: str, busy_seconds: float) -> None:
    """Make the file of a store if there is none; safe with many at once.

    Each step is refused when somebody is in the way, and harmless when it is
    done already: so the whole is tried again until the time is over.
    """
    folder = os.path.dirname(path)
    _make_folders(folder)
    try:
        if os.path.basename(folder) == ".agent-checkpoint":
            _ignore_in_git(folder)
        patiently(busy_seconds, lambda: _create(path))
    except FAILURES as error:
        raise translate(error, path) from error
    except OSError as error:
        raise translate_os(error, path) from error


def _create(path: str) -> None:
    fresh = _make_file(path)
    if not fresh and 0 < os.stat(path).st_size < SMALLEST:
        raise NotAStoreError(f"{path} is not a database", database=path)
    orphaned = fresh and os.path.exists(path + "-wal")
    connection = Connection(path)
    try:
        if _is_ours(connection, path) and connection.run("PRAGMA journal_mode").fetchone()[0] == "wal":
            return
        # Ignored once WAL is on, so before it; no harm on a store that is there.
        connection.run("PRAGMA auto_vacuum=INCREMENTAL")
        mode = connection.run("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StorageError(f"{path}: SQLite cannot use a write-ahead log here, the journal mode stays {mode!r}")
        _stamp(connection)
    except sqlite3.OperationalError as error:
        if orphaned and not is_busy(error):
            raise StorageUnreachableError(
                f"{path}: the write-ahead log of a deleted store is beside it, and some process may still use it",
                hint="end the processes that used it, remove the files PATH-wal and PATH-shm, then try again",
                database=path,
            ) from error
        raise
    finally:
        connection.close()


def _make_file(path: str) -> bool:
    """Make the empty file, for its owner only from its first moment on; False when there is one.

    The one place where a database file is opened and closed beside SQLite: what
    is made here nobody can have had open, and no other thread gets at it before
    it is closed.
    """
    with _making:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True


def _stamp(connection: Connection) -> None:
    connection.run("BEGIN IMMEDIATE")
    try:
        connection.run(COMPONENTS)
        connection.run(f"PRAGMA application_id={APPLICATION_ID}")
        connection.run("COMMIT")
    except BaseException:
        if connection.raw.in_transaction:
            connection.run("ROLLBACK")
        raise


def _is_ours(connection: Connection, path: str) -> bool:
    """True for a store, False for an empty file; somebody else's database stays as it is."""
    if _mark(connection) == APPLICATION_ID:
        return True
    tables = connection.run("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    version = connection.run("PRAGMA user_version").fetchone()[0]
    # Asked again: another process may have made the store between the questions.
    mark = _mark(connection)
    if mark == APPLICATION_ID or not (tables or version or mark):
        return False
    raise NotAStoreError(f"{path} is an SQLite database of another program", database=path)


def _mark(connection: Connection) -> int:
    return int(connection.run("PRAGMA application_id").fetchone()[0])


def _make_folders(folder: str) -> None:
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
            _sync_folder(os.path.dirname(each) or os.curdir)
        except FileExistsError:
            continue
        except OSError as error:
            raise translate_os(error, each) from error


def _ignore_in_git(folder: str) -> None:
    with suppress(FileExistsError), open(os.path.join(folder, ".gitignore"), "x", encoding="utf-8") as file:
        file.write("# State, not source.\n*\n")


def _sync_folder(folder: str) -> None:
    """A new folder's name survives a power cut like what is written in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def statements(script: str) -> Iterator[str]:
    """The statements of a script, one by one: ``executescript`` would commit first."""
    pending = ""
    *parts, rest = script.split(";")
    for part in parts:
        pending += part + ";"
        # A semicolon within a string, a comment or a trigger ends nothing.
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if (pending + rest).strip():
        yield pending + rest


def _forget_makers() -> None:
    global _making
    _making = allocate_lock()


forks.at_fork(in_child=_forget_makers)
