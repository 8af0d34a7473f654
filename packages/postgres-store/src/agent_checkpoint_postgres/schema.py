"""An empty store on a server, and what must hold of a server before it is used."""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg.sql import Literal

from agent_checkpoint.errors import StorageError
from agent_checkpoint_postgres import event_ids, statements
from agent_checkpoint_postgres.translate import foreign, missing, translate

if TYPE_CHECKING:
    from agent_checkpoint_postgres.database import PostgresDatabase
    from agent_checkpoint_postgres.links import Link

# The oldest PostgreSQL: its SQL is what the statements are tested with.
OLDEST_SERVER = 140_000
PAUSE_SECONDS = 0.05
# How a schema is known for ours: pg_dump keeps it.
MARK = "agent-checkpoint store"

FACTS = """SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),
to_regclass(format('%I.%I', {schema}, 'components')) IS NOT NULL,
obj_description(to_regclass(format('%I.%I', {schema}, 'components')), 'pg_class')"""
STRANGERS = """SELECT COUNT(*) FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident({schema}))
AND relname IN ('leases', 'events', 'checkpoints', 'tickets', 'limits', 'refusals')"""
COMPONENTS = f"""
CREATE TABLE components (
    component  TEXT   COLLATE "C" PRIMARY KEY,
    version    BIGINT NOT NULL,
    package    TEXT   NOT NULL, -- the version of agent-checkpoint-core that brought it there
    changed_at BIGINT NOT NULL
);
COMMENT ON TABLE components IS '{MARK}'
"""
SCHEMA = "SELECT to_regnamespace(quote_ident({schema})) IS NOT NULL"
VERSION = "SELECT COALESCE((SELECT version FROM components WHERE component = 'core'), 0)"
# The cluster, and the line of its history: a promoted standby begins another one.
TIMELINE = """SELECT system_identifier || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
FROM pg_control_system() WHERE NOT pg_is_in_recovery()"""
# A crash that the postmaster survives begins the counters of the background writer anew.
LIFE = "SELECT concat(pg_postmaster_start_time(), '/', (SELECT stats_reset FROM pg_stat_bgwriter))"


class Facts(NamedTuple):
    """What a server says of itself, and of the schema."""

    server_version: int
    encoding: str
    has_components: bool
    mark: str | None


def create(database: PostgresDatabase) -> None:
    """Make the schema and an empty store in it; safe with many at once.

    Raises:
        NotAStoreError: the schema has tables of another program.
        StorageError: the server does not serve, or does not let us.
    """
    deadline = monotonic() + database.busy_seconds
    while True:
        link = None
        try:
            link = database.links.borrow(deadline)
            if not _facts(link, database).has_components:
                _create(link, database, deadline)
            return
        except (psycopg.Error, StorageError) as error:
            failed = error if isinstance(error, StorageError) else translate(error, database.name)
            if not (isinstance(failed, StorageError) and failed.undone and monotonic() < deadline):
                raise failed from error
        finally:
            if link is not None:
                database.links.give_back(link)
        sleep(PAUSE_SECONDS)


def _create(link: Link, database: PostgresDatabase, deadline: float) -> None:
    schema, patience = database.schema, max(1, int((deadline - monotonic()) * 1000))
    link.ask(statements.begin_write(schema, ("create",), durable=True, patience_ms=patience))
    if _facts(link, database).has_components:
        link.own.execute(b"COMMIT")  # another starter was first
        return
    literal = Literal(schema).as_string(link)
    if link.ask(STRANGERS.format(schema=literal).encode())[0]:
        raise foreign(database.name)
    if not link.ask(SCHEMA.format(schema=literal).encode())[0]:
        # Only where it is missing: a role that may not create schemas can be given one.
        link.own.execute(f"CREATE SCHEMA {statements.identifier(schema)}".encode())
    link.own.execute(COMPONENTS.encode())
    link.own.execute(b"COMMIT")


def look_at(link: Link, database: PostgresDatabase) -> int:
    """Note what a transaction on this connection needs to know; the version of core's tables.

    Raises:
        NotFoundError: there is no store in the schema.
        StorageError: the server is too old, or not in UTF-8.
    """
    if not _facts(link, database).has_components:
        raise missing(database.name)
    look = f"BEGIN READ ONLY; SET LOCAL search_path TO {statements.quoted(database.schema)}; "
    (version,) = link.ask(f"{look}{VERSION}".encode())
    if version:
        ahead, last, following = link.ask(event_ids.LOOK.encode())
    link.own.execute(b"COMMIT")
    if version:
        if event_ids.is_behind(ahead, last, following):
            ahead = _go_ahead(link, database)
        link.ahead, link.timeline = ahead, _timeline(link)
        (link.life,) = link.ask(LIFE.encode())
    return int(version)


def _go_ahead(link: Link, database: PostgresDatabase) -> int:
    """The cluster is younger than the events: number the next ones behind them. Many at once do it once."""
    patience = max(1, int(database.busy_seconds * 1000))
    link.ask(statements.begin_write(database.schema, ("event-ids",), durable=True, patience_ms=patience))
    ahead, last, following = link.ask(event_ids.LOOK.encode())
    if event_ids.is_behind(ahead, last, following):
        (ahead,) = link.ask(event_ids.GO_AHEAD.encode())
    link.own.execute(b"COMMIT")
    return int(ahead)


def _timeline(link: Link) -> str:
    """Which history this server writes; "" where it does not tell."""
    try:
        row = link.own.execute(TIMELINE.encode()).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return ""
    return str(row[0]) if row else ""


def _facts(link: Link, database: PostgresDatabase) -> Facts:
    facts = Facts(*link.ask(FACTS.format(schema=Literal(database.schema).as_string(link)).encode()))
    if facts.server_version < OLDEST_SERVER:
        version = f"{facts.server_version // 10_000}.{facts.server_version % 10_000}"
        raise StorageError(f"{database.name}: the server is PostgreSQL {version}", hint="use PostgreSQL 14 or later")
    if facts.encoding != "UTF8":
        raise StorageError(
            f"{database.name}: the database's encoding is {facts.encoding}, which cannot store every name",
            hint="create the database with ENCODING 'UTF8'",
        )
    if facts.has_components and facts.mark != MARK:
        raise foreign(database.name)
    return facts
