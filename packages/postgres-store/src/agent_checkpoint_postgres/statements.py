"""Core's SQL as PostgreSQL takes it, and what opens a transaction in one message.

A message of several statements goes through PostgreSQL's simple protocol, which
runs them one after the other, each with a snapshot of its own: what comes after
the locks sees what was committed while we waited for them.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from psycopg.sql import Identifier, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent_checkpoint_postgres.links import Link

# How long a transaction may idle, in milliseconds: the server ends one whose
# client is frozen or cut off, and with it its locks.
IDLE_MS = 5_000
# That of one in whose midst another store is waited for.
MIGRATING_IDLE_MS = 600_000

# Microseconds since 1970 by the server's clock, which is read now and not at the transaction's begin.
WALL = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
# The oldest transaction that is open still: what is older is visible to this look, or never will be.
OLDEST = "pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
OWN = "pg_current_xact_id()::text::bigint"

READ = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL search_path TO {schema}; "
    f"SET LOCAL idle_in_transaction_session_timeout TO {IDLE_MS}; SELECT {WALL}, {OLDEST}"
)
WRITE = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL search_path TO {schema}; "
    "SET LOCAL idle_in_transaction_session_timeout TO {idle}; "
    "SET LOCAL synchronous_commit TO {level}; SET LOCAL lock_timeout TO {patience}; {locks}"
    f"SELECT {WALL}, {OLDEST}, {OWN}"
)
LOCKS = "SELECT pg_advisory_xact_lock(key) FROM unnest(ARRAY[{keys}]::bigint[]) AS key; "


@lru_cache(maxsize=1024)
def numbered(sql: str) -> bytes:
    """The statement with ``$1``, ``$2``, … in place of each ``?``, which stands for a parameter and nothing else."""
    first, *rest = sql.split("?")
    return "".join([first, *(f"${number}{part}" for number, part in enumerate(rest, start=1))]).encode()


@lru_cache(maxsize=4096)
def key(schema: str, name: str) -> int:
    """The number of an advisory lock: 64 bits of a hash, since that is what PostgreSQL locks.

    Two names with one number only wait for each other without need.
    """
    digest = blake2b(f"agent-checkpoint\0{schema}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def identifier(name: str) -> str:
    """A name as SQL takes it."""
    return Identifier(name).as_string(None)


def quoted(schema: str) -> str:
    """What to look for tables in: the schema, and nothing before it."""
    return f"{identifier(schema)}, pg_temp"


def glance(schema: str, sql: str, parameters: Sequence[object], link: Link) -> bytes:
    """One query with its parameters written out, and the time after it, as one message."""
    first, *rest = sql.split("?")
    written = [Literal(value).as_string(link) for value in parameters]
    query = "".join([first, *(value + part for value, part in zip(written, rest))])  # noqa: B905 -- Python 3.10's
    return f"BEGIN READ ONLY; SET LOCAL search_path TO {quoted(schema)}; {query}; SELECT {WALL}; COMMIT".encode()


def begin_read(schema: str) -> bytes:
    """Open a transaction that reads one state."""
    return READ.format(schema=quoted(schema)).encode()


def begin_write(schema: str, locks: Sequence[str], *, durable: bool, patience_ms: int, idle_ms: int = IDLE_MS) -> bytes:
    """Open a transaction that holds these locks.

    They are taken in the order of their numbers, so that no two transactions
    wait for each other. The level of isolation and of durability is ours,
    whatever the server's default is: under REPEATABLE READ a stale write lands.
    """
    return WRITE.format(
        schema=quoted(schema),
        level="on" if durable else "off",
        patience=patience_ms,
        idle=idle_ms,
        locks=take(schema, locks),
    ).encode()


def take(schema: str, locks: Iterable[str]) -> str:
    """The statement that takes these locks; none for none."""
    keys = sorted({key(schema, name) for name in locks})
    return LOCKS.format(keys=", ".join(map(str, keys))) if keys else ""
