"""From SQLite's errors to ours, by what the caller can do about them."""

from __future__ import annotations

import sqlite3

from agent_checkpoint.errors import (
    NotAStoreError,
    OutcomeUnknownError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    StorageUnreachableError,
)

# SQLite's own result texts (sqlite3_errstr). Codes are in Python only from 3.11 on.
_KINDS: tuple[tuple[str, type[StorageError]], ...] = (
    ("is locked", StorageBusyError),
    ("database or disk is full", StorageFullError),
    ("readonly database", StorageReadOnlyError),
    ("file is not a database", NotAStoreError),
    ("malformed", StorageCorruptError),
    ("unable to open database file", StorageUnreachableError),
    ("disk I/O error", StorageUnreachableError),
)


def translate(error: sqlite3.Error | OverflowError, path: str) -> StorageError:
    """The error to raise instead; its cause is the original."""
    text = str(error)
    for phrase, kind in _KINDS:
        if phrase in text:
            return kind(f"{path}: {text}", database=path)
    return StorageError(f"{path}: {text}", database=path)


def translate_commit(error: sqlite3.Error, path: str) -> StorageError:
    """The same for a failed COMMIT, whose frames may have reached the disk all the same."""
    found = translate(error, path)
    if isinstance(found, StorageUnreachableError):
        return OutcomeUnknownError(f"{path}: {error} while committing; it may have happened", database=path)
    return found


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection is in the way."""
    return "is locked" in str(error)
