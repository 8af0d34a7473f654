"""Copies of a store: SQLite's online backup out of the file, and rows back into it.

Only SQLite touches the database that is in use. What comes back is a part of a
transaction like any other: others see the old content or the new one.
"""

from __future__ import annotations

import os
from contextlib import closing, contextmanager, suppress
from time import monotonic, sleep

from agent_checkpoint.errors import InvalidInputError, NotFoundError, StorageCorruptError, schema_version_error
from agent_checkpoint.sqlite import tables
from agent_checkpoint.sqlite.connections import Connections
from agent_checkpoint.sqlite.opening import Connection, refuse_foreign
from agent_checkpoint.sqlite.translate import FAILURES, translate, translate_os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_checkpoint.database import Row, Transaction
    from agent_checkpoint.sqlite.opening import Connection

# What is copied between two syncs: 2 MB.
PAGES_AT_ONCE = 512
# In the order in which it was made.
SCHEMA = """
SELECT type, name, sql FROM sqlite_schema
WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite~_%' ESCAPE '~'
ORDER BY rowid
"""
VERSION = "SELECT COALESCE(MAX(version), 0) FROM components WHERE component = 'core'"
HAS_COUNTERS = "SELECT COUNT(*) FROM sqlite_schema WHERE name = 'sqlite_sequence'"
COUNTERS = "SELECT name, seq FROM sqlite_sequence"
FORGET_COUNTERS = "DELETE FROM sqlite_sequence"
SET_COUNTER = "INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)"
# Who waited when the copy was made is gone; who waits now queues up anew.
QUEUES = ("tickets",)


def copy(source: str, target: str, busy_seconds: float) -> int:
    """Write a consistent copy into a new file, for its owner only, synced and checked; its bytes.

    Writers go on meanwhile. The file has its name once it is whole.

    Raises:
        InvalidInputError: the target is there already.
        StorageError: the source cannot be read, or the target not be written, or the copy is damaged.
    """
    partial = f"{target}.{os.urandom(4).hex()}.partial"
    try:
        if os.path.lexists(target):
            raise FileExistsError
        _make(partial)
    except FileExistsError:
        raise _there_already(target) from None
    except OSError as error:
        raise translate_os(error, target) from error
    try:
        _copy(source, partial, busy_seconds)
        return _name(partial, target)
    except FAILURES as error:
        raise translate(error, target) from error
    except FileExistsError:
        raise _there_already(target) from None
    except OSError as error:
        raise translate_os(error, target) from error
    finally:
        _clear(partial)


@contextmanager
def opened(path: str, busy_seconds: float, version: int) -> Iterator[Callable[[Transaction], None]]:
    """A copy that is sound: what puts its content in place of everything, as a part of a transaction.

    Raises:
        NotFoundError: there is no such file.
        NotAStoreError: it is no copy of a store.
        NewerSchemaError: its tables are of a later version than this one.
        StorageCorruptError: it is damaged.
    """
    if not os.path.lexists(path):
        raise NotFoundError(f"there is no file {path}", hint="name what 'agent-checkpoint backup' wrote")
    copies = Connections(os.path.realpath(path), busy_seconds, "FULL")
    copied, _ = copies.borrow()
    try:
        copied.run("BEGIN")  # one state, should somebody use it
        _check(copied, path)
        ((found,),) = copied.run(VERSION).fetchall()
        if found > version:
            raise schema_version_error("core", found, version)
        yield lambda transaction: _replace(copied, transaction)
    except FAILURES as error:
        raise translate(error, path) from error
    finally:
        copied.close()
        copies.close()


def _copy(source: str, target: str, busy_seconds: float) -> None:
    with (
        _synced(target) as sync,
        closing(Connection(source)) as from_,
        closing(Connection(target)) as to,
    ):
        refuse_foreign(from_, source, busy_seconds)
        from_.run("BEGIN")
        from_.run("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # one state, however many steps it takes
        from_.raw.backup(to.raw, pages=PAGES_AT_ONCE, progress=lambda *_: sync())
        to.run("PRAGMA journal_mode=DELETE").fetchone()  # one file, until somebody uses it
        _check(to, target)


@contextmanager
def _synced(path: str) -> Iterator[Callable[[], None]]:
    """What brings the file to the disk so far, and leaves the disk to the others for as long as that took.

    All of it at once would keep their syncs waiting, one behind the other.
    """
    descriptor = os.open(path, os.O_RDONLY)

    def sync() -> None:
        started = monotonic()
        os.fsync(descriptor)
        sleep(monotonic() - started)

    try:
        yield sync
    finally:
        os.close(descriptor)  # only now, for it drops locks: nobody else has this file open


def _check(connection: Connection, path: str) -> None:
    found = [row[0] for row in connection.run("PRAGMA integrity_check(5)")]
    if found != ["ok"]:
        raise StorageCorruptError(f"{path}: the copy is damaged: {'; '.join(map(str, found))}", database=path)


def _name(partial: str, target: str) -> int:
    """Give a copy its name; copy and name survive a power cut. No connection to it is open any more."""
    _sync(partial)
    size = os.stat(partial).st_size
    # Over a file of our own, and no other. Not by a link: who was killed then would leave a store with two names.
    _make(target)
    try:
        os.replace(partial, target)
    except OSError:
        _clear(target)
        raise
    _sync(os.path.dirname(os.path.abspath(target)))
    return size


def _clear(path: str) -> None:
    """Remove what is ours and no copy; where the disk does not even allow that, the first error is the one to tell."""
    with suppress(OSError):
        os.unlink(path)


def _make(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _there_already(target: str) -> InvalidInputError:
    return InvalidInputError(f"file: {target} is there already: a copy is a file of its own", field="file")


def _replace(copied: Connection, transaction: Transaction) -> None:
    """Put the tables of a copy in place of those that are here.

    Numbers that are here given once, and never again, stay so: processes may
    remember rows by them.
    """

    def rows(sql: str) -> list[Row]:
        return copied.run(sql).fetchall()

    counters = _highest(_counters(transaction.rows), _counters(rows))
    for kind, name, _ in transaction.rows(SCHEMA):
        if kind in ("table", "view"):  # the others go with them
            transaction.run(f'DROP {kind} "{name}"')
    _run(transaction, [sql for kind, _, sql in rows(SCHEMA) if kind == "table"])
    for table in tables.tables(rows):
        if table.name not in QUEUES:
            columns = ", ".join(f'"{column}"' for column in table.columns)
            places = ", ".join("?" * len(table.columns))
            found = copied.raw.execute(f'SELECT {columns} FROM "{table.name}"')  # noqa: S608 -- a schema's own names
            transaction.executemany(f'INSERT INTO "{table.name}" ({columns}) VALUES ({places})', found)  # noqa: S608
    _run(transaction, [sql for kind, _, sql in rows(SCHEMA) if kind != "table"])  # triggers last: they refuse changes
    if counters and transaction.rows(HAS_COUNTERS)[0][0]:
        transaction.run(FORGET_COUNTERS)
        transaction.executemany(SET_COUNTER, counters.items())


def _run(transaction: Transaction, statements: list[str]) -> None:
    for statement in statements:
        transaction.run(statement)


def _counters(rows: Callable[[str], list[Row]]) -> dict[str, int]:
    return dict(rows(COUNTERS)) if rows(HAS_COUNTERS)[0][0] else {}


def _highest(*counters: dict[str, int]) -> dict[str, int]:
    names = {name for each in counters for name in each}
    return {name: max(each.get(name, 0) for each in counters) for name in names}
