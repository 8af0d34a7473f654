"""From SQLite's and the system's errors to ours, by what the caller can do about them."""

from __future__ import annotations

import errno
import os
import sqlite3

from agent_checkpoint.database import MOVED
from agent_checkpoint.errors import (
    NotAStoreError,
    OutcomeUnknownError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    StorageUnreachableError,
    StoreMovedError,
)
from agent_checkpoint.sqlite.blockers import blocker

TYPE_CHECKING = False
if TYPE_CHECKING:
    Failure = sqlite3.Error | OverflowError | UnicodeDecodeError

# What Python's sqlite3 raises where SQLite fails: the last one where SQLite's own message quotes damage.
FAILURES = (sqlite3.Error, OverflowError, UnicodeDecodeError)
# SQLite's own result texts (sqlite3_errstr). Codes are in Python only from 3.11 on.
_KINDS: tuple[tuple[str, type[StorageError]], ...] = (
    ("database or disk is full", StorageFullError),
    ("readonly database", StorageReadOnlyError),
    ("file is not a database", NotAStoreError),
    ("malformed", StorageCorruptError),
    ("Could not decode to UTF-8", StorageCorruptError),
    ("unable to open database file", StorageUnreachableError),
    ("disk I/O error", StorageUnreachableError),
)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def translate(error: Failure, path: str, waited_seconds: float | None = None) -> StorageError:
    """The error to raise instead; its cause is the original."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return StorageCorruptError(f"{path}: the file is damaged: {text}", database=path)
    if is_busy(error):
        return _busy(path, waited_seconds)
    if text.startswith(MOVED):
        return StoreMovedError(f"{path}: {text}", database=path, moved_to=text.removeprefix(MOVED))
    for phrase, kind in _KINDS:
        if phrase in text:
            if kind is StorageUnreachableError:
                kind = _closer_look(path)
            return kind(f"{path}: {text}", database=path)
    return StorageError(f"{path}: {text}", database=path)


def translate_commit(error: Failure, path: str) -> StorageError:
    """The same for a failed COMMIT, whose frames may have reached the disk all the same."""
    if "disk I/O error" in str(error):
        return OutcomeUnknownError(f"{path}: {error} while committing; it may have happened", database=path)
    return translate(error, path)


def translate_os(error: OSError, path: str) -> StorageError:
    """The same for the system's own errors."""
    kind: type[StorageError] = StorageUnreachableError
    if error.errno in _READ_ONLY:
        kind = StorageReadOnlyError
    elif error.errno in _FULL:
        kind = StorageFullError
    return kind(f"{path}: {error.strerror}", database=path)


def is_busy(error: Failure) -> bool:
    """Whether another connection is in the way.

    SQLite speaks of its locking protocol (SQLITE_PROTOCOL) when it has looked
    in vain, a hundred times, for a moment in which nobody was opening the log:
    a process that was frozen just then leaves none.
    """
    text = str(error)
    return "is locked" in text or "locking protocol" in text


def _busy(path: str, waited_seconds: float | None) -> StorageBusyError:
    held_by = blocker(path)
    who = "another connection"
    if held_by is not None:
        frozen = ", which is stopped (SIGCONT lets it go on)" if held_by["stopped"] else ""
        who = f"process {held_by['pid']} ({held_by['command']}){frozen}"
    time = "the busy timeout" if waited_seconds is None else f"{waited_seconds:g} s"
    message = f"{path}: no lock within {time}, held by {who}"
    return StorageBusyError(message, database=path, blocker=held_by)


def _closer_look(path: str) -> type[StorageError]:
    """SQLite says the same of a full disk and a read-only folder when it cannot make its sidecars."""
    folder = os.path.dirname(path)
    try:
        filesystem = os.statvfs(folder)
    except OSError:
        return StorageUnreachableError
    if filesystem.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        return StorageReadOnlyError
    # The shared memory beside the database takes 32 KiB.
    if filesystem.f_bavail * filesystem.f_frsize < 64 * 1024:
        return StorageFullError
    return StorageUnreachableError
