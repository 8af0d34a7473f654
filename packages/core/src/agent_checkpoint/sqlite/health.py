"""What ``doctor`` reports of an SQLite store."""

from __future__ import annotations

import os
import sqlite3
import stat

from agent_checkpoint.errors import StorageError
from agent_checkpoint.records import Check
from agent_checkpoint.sqlite import filesystem
from agent_checkpoint.sqlite.blockers import blocker
from agent_checkpoint.sqlite.translate import FAILURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from agent_checkpoint.sqlite.database import SqliteDatabase
    from agent_checkpoint.sqlite.opening import Connection

# A write-ahead log of this size says that no checkpoint gets through: a reader never ends.
LARGE_WAL = 256 * 1024 * 1024


def checks(database: SqliteDatabase) -> Iterator[Check]:
    """One check at a time; a database that cannot be read at all is one broken check."""
    yield _sqlite_version(sqlite3.sqlite_version_info)
    yield _filesystem(database.name)
    yield _modes(database.name)
    yield _sizes(database.name)
    yield _write_lock(database.name)
    yield _clock(database.clock.domain)
    try:
        connection = database.borrow()
    except StorageError as error:
        yield Check("open", "broken", None, str(error))
        return
    try:
        for check in (_integrity, _journal_mode, _synchronous):
            yield _asked(check, connection)
    finally:
        database.connections.give_back(connection)


def has_wal_reset_bug(version: tuple[int, int, int]) -> bool:
    """Whether this SQLite may lose a commit when a write-ahead log is reset under two connections.

    Source: SQLite's release notes; fixed in 3.52 and, on their branches, in
    3.51.3, 3.50.7 and 3.44.6.
    """
    fixed = {(3, 51): 3, (3, 50): 7, (3, 44): 6}
    return version < (3, 52, 0) and version[2] < fixed.get(version[:2], 1_000)


def _asked(check: Callable[[Connection], Check], connection: Connection) -> Check:
    try:
        return check(connection)
    except FAILURES as error:
        return Check(check.__name__.lstrip("_"), "broken", None, str(error))


def _integrity(connection: Connection) -> Check:
    found = [row[0] for row in connection.run("PRAGMA integrity_check(20)")]
    if found == ["ok"]:
        return Check("integrity", "ok", "ok", "every page, index and constraint is sound")
    return Check("integrity", "broken", found, "the file is damaged: keep it and its -wal, restore from a backup")


def _journal_mode(connection: Connection) -> Check:
    mode = connection.run("PRAGMA journal_mode").fetchone()[0]
    if mode == "wal":
        return Check("journal_mode", "ok", mode, "readers and the writer do not wait for each other")
    return Check("journal_mode", "warning", mode, "somebody switched the write-ahead log off; 'init' turns it on again")


def _synchronous(connection: Connection) -> Check:
    level = connection.run("PRAGMA synchronous").fetchone()[0]
    if level >= 2:
        message = "what this connection is answered survives a power cut; programs may have opened theirs with less"
        return Check("synchronous", "ok", "full", message)
    message = "a power cut may take back the last commits, tokens and cursors included"
    return Check("synchronous", "warning", "normal", message)


def _sqlite_version(version: tuple[int, int, int]) -> Check:
    shown = ".".join(map(str, version))
    if has_wal_reset_bug(version):
        message = (
            "has the WAL-reset bug, which in rare races corrupts a database; fixed in 3.44.6, 3.50.7, 3.51.3, 3.52"
        )
        return Check("sqlite_version", "warning", shown, message)
    return Check("sqlite_version", "ok", shown, "no known bug that concerns a store")


def _filesystem(path: str) -> Check:
    try:
        kind = filesystem.check(path)
    except StorageError as error:
        return Check("filesystem", "broken", getattr(error, "filesystem", None), str(error))
    if not kind:
        return Check("filesystem", "warning", None, "unknown: make sure that it is a local disk")
    if filesystem.is_one_kernel(kind):
        return Check("filesystem", "ok", kind, "local: after a reboot old leases end at once")
    return Check("filesystem", "ok", kind, "after a reboot old leases end by their ttl")


def _modes(path: str) -> Check:
    modes: dict[str, Any] = {}
    for suffix in ("", "-wal", "-shm", "-gate"):
        try:
            found = os.stat(path + suffix)
        except OSError:
            continue
        modes[os.path.basename(path) + suffix] = f"{stat.S_IMODE(found.st_mode):04o}"
    owner = os.stat(path).st_uid if os.path.exists(path) else os.geteuid()
    if owner != os.geteuid():
        return Check("modes", "warning", modes, f"the database belongs to user {owner}, not to you ({os.geteuid()})")
    if any(int(mode, 8) & 0o077 for mode in modes.values()):
        return Check("modes", "warning", modes, "other users can read or write the store; chmod 600 unless you mean it")
    return Check("modes", "ok", modes, "only its owner can read and write the store")


def _sizes(path: str) -> Check:
    sizes = {}
    for name, suffix in (("database", ""), ("wal", "-wal")):
        try:
            sizes[f"{name}_bytes"] = os.stat(path + suffix).st_size
        except OSError:
            sizes[f"{name}_bytes"] = 0
    if sizes["wal_bytes"] > LARGE_WAL:
        return Check("sizes", "warning", sizes, "the write-ahead log does not shrink: some reader never ends")
    return Check("sizes", "ok", sizes, "")


def _clock(domain: str) -> Check:
    if domain:
        return Check("clock_domain", "ok", domain, "leases are judged by this boot's monotonic clock")
    message = (
        "this boot cannot be told from others here (container, time namespace or no /proc): the wall clock decides"
    )
    return Check("clock_domain", "warning", None, message)


def _write_lock(path: str) -> Check:
    holder = blocker(path)
    if holder is None:
        return Check("write_lock", "ok", None, "nobody sits on it, as far as the kernel tells")
    who = f"process {holder['pid']} ({holder['command']})"
    if holder["stopped"]:
        return Check("write_lock", "warning", holder, f"{who} is stopped while it holds the {holder['lock']} lock")
    return Check("write_lock", "ok", holder, f"{who} is writing right now")
