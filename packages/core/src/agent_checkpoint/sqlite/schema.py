"""Creating the file of a store: empty, ours, in WAL mode. Its tables come by migrations."""

from __future__ import annotations

import os
import sqlite3
import time

from agent_checkpoint.errors import NotAStoreError, StorageError, StorageUnreachableError
from agent_checkpoint.sqlite.connections import APPLICATION_ID, Connection, connect
from agent_checkpoint.sqlite.translate import is_busy, translate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

COMPONENTS = """
CREATE TABLE IF NOT EXISTS components (
    component  TEXT    PRIMARY KEY,
    version    INTEGER NOT NULL,
    package    TEXT    NOT NULL, -- the version of agent-checkpoint-core that brought it there
    changed_at INTEGER NOT NULL
) WITHOUT ROWID
"""


def create(path: str, busy_seconds: float) -> None:
    """Make the file of a store if there is none; safe with many at once."""
    folder = os.path.dirname(path)
    _make_folders(folder)
    fresh = not os.path.exists(path)
    connection = None
    try:
        connection = connect(path, busy_seconds, "FULL", create=True)
        if fresh:
            # Before WAL: -wal and -shm get the modes of the database. By name, never
            # through a descriptor.
            os.chmod(path, 0o600)
        if _is_ours(connection, path) and connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
            return
        # Ignored once WAL is on, so before it; no harm on a store that is there.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        _switch_to_wal(connection, busy_seconds)
        _stamp(connection)
    except sqlite3.Error as error:
        raise translate(error, path) from error
    except OSError as error:
        raise StorageUnreachableError(f"{path}: {error}", database=path) from error
    finally:
        if connection is not None:
            connection.close()


def _stamp(connection: Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute(COMPONENTS)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_ours(connection: Connection, path: str) -> bool:
    """True for a store, False for an empty file; somebody else's database stays as it is."""
    if connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
        return True
    foreign = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    # Asked again: another process may have made the store between the two questions.
    if foreign is None or connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
        return False
    raise NotAStoreError(f"{path} is an SQLite database of another program", database=path)


def _switch_to_wal(connection: Connection, busy_seconds: float) -> None:
    """``journal_mode=WAL`` does not wait for locks by itself."""
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        else:
            if mode == "wal":
                return
            if time.monotonic() > deadline:
                raise StorageError(f"SQLite cannot use a write-ahead log here, the journal mode stays {mode!r}")
        time.sleep(0.005)


def _make_folders(folder: str) -> None:
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageUnreachableError(
                f"the folder {each} cannot be made: {error.strerror}", hint="name another path with --db", database=each
            ) from error
        if os.path.basename(each) == ".agent-checkpoint":
            _ignore_in_git(each)
        _sync_folder(os.path.dirname(each) or os.curdir)


def _ignore_in_git(folder: str) -> None:
    with open(os.path.join(folder, ".gitignore"), "w", encoding="ascii") as file:
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
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if pending.strip():
        yield pending
