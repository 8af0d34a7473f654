"""From PostgreSQL's errors to ours, by what the caller can do about them.

Nothing of a connection string is ever in a message: what the server says has
none, and what libpq says of a string it cannot parse is not repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from agent_checkpoint.database import MOVED
from agent_checkpoint.errors import (
    InvalidInputError,
    NotAStoreError,
    NotFoundError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    StorageUnreachableError,
    StoreMovedError,
)

if TYPE_CHECKING:
    from agent_checkpoint.errors import AgentCheckpointError

# SQLSTATEs (appendix A of PostgreSQL's manual), by what they mean to a caller.
BUSY = {
    "55P03": "no lock within the busy timeout",
    "57014": "the server's statement_timeout ended the call",
    "53300": "the server has no connection left",
}
# The transaction is gone, and the same call may well succeed.
UNDONE = ("40001", "40P01", "25P03", "25P04", "57P01", "57P02", "57P03", "57P05")
FULL = ("53100", "53200")
# A value is larger than an index takes.
TOO_LARGE = "54000"
READ_ONLY = ("25006", "42501")
CORRUPT = ("XX001", "XX002")
# A table of core is gone, and with it the store.
MISSING = "42P01"
CORE = tuple(
    f'"{table}"' for table in ("components", "leases", "limits", "tickets", "checkpoints", "events", "refusals")
)
# Class 08: the connection.
CONNECTION = "08"

HINTS = {
    "42501": "grant the role what docs/postgres.md lists under 'Roles and grants'",
    "25006": "name the primary: this server is a standby, or set to read only",
}
REACH = "check that the server runs and takes connections from here, and the URL"


def translate(error: psycopg.Error, place: str) -> AgentCheckpointError:
    """The error to raise instead; its cause is the original."""
    state = error.sqlstate or ""
    text = _sentence(error)
    if state == "0A000" and "during recovery" in text:
        state = "25006"  # what a standby says to BEGIN READ WRITE
    if text.startswith(MOVED):
        return StoreMovedError(f"{place}: {text}", database=place, moved_to=text.removeprefix(MOVED))
    if state in BUSY:
        return StorageBusyError(f"{place}: {BUSY[state]}", database=place, blocker=None)
    if state == MISSING and any(table in text for table in CORE):
        return missing(place)
    if state in UNDONE or state.startswith(CONNECTION) or (not state and isinstance(error, psycopg.OperationalError)):
        return _undone(StorageUnreachableError(f"{place}: {text}", hint=REACH, database=place))
    if state == TOO_LARGE or (not state and isinstance(error, psycopg.DataError)):
        return InvalidInputError(f"value: PostgreSQL cannot store it: {text}", field="value")
    kind: type[StorageError] = StorageError
    if state.startswith(FULL):
        kind = StorageFullError
    elif state in READ_ONLY:
        kind = StorageReadOnlyError
    elif state in CORRUPT:
        kind = StorageCorruptError
    return kind(f"{place}: {text}", hint=HINTS.get(state, ""), database=place)


def translate_connect(error: psycopg.Error, place: str) -> StorageError:
    """The same for a connection that could not be made; libpq gives it no SQLSTATE."""
    text = _sentence(error)
    if any(phrase in text for phrase in ("too many", "connection slots")):
        return _undone(StorageBusyError(f"{place}: {BUSY['53300']}", database=place, blocker=None))
    unreachable = StorageUnreachableError(f"{place}: {text}", hint=REACH, database=place)
    # What the server refuses for good is not tried again: a role, a password, a database that is not there.
    for_good = any(
        phrase in text
        for phrase in ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")
    )
    return unreachable if for_good else _undone(unreachable)


def missing(place: str) -> NotFoundError:
    """There is no store in the schema."""
    return NotFoundError(
        f"there is no store at {place}",
        hint="create it with 'agent-checkpoint init' (store.initialize()), or name another with --db",
        database=place,
    )


def foreign(place: str) -> NotAStoreError:
    """The schema has tables of somebody else."""
    return NotAStoreError(f"{place}: the schema has tables of another program", database=place)


def ended(place: str) -> StorageError:
    """The transaction is over: a statement after its end would be committed alone."""
    return StorageError(f"{place}: the transaction has ended, nothing of it was written", database=place)


def _undone(error: StorageError) -> StorageError:
    error.undone = True
    error.retryable = True
    return error


def _sentence(error: psycopg.Error) -> str:
    """What the server says, without the statement and its place in our code."""
    said = error.diag.message_primary or str(error)
    return " ".join(line.strip() for line in said.strip().splitlines()[:3])
