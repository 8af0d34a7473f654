"""What ``doctor`` reports of a PostgreSQL store, and of the server that it is in."""

from __future__ import annotations

import time
from time import monotonic
from typing import TYPE_CHECKING

import psycopg
from psycopg.sql import Literal

from agent_checkpoint.errors import AgentCheckpointError
from agent_checkpoint.records import Check
from agent_checkpoint_postgres import statements
from agent_checkpoint_postgres.event_ids import settled
from agent_checkpoint_postgres.translate import translate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from agent_checkpoint_postgres.database import PostgresDatabase
    from agent_checkpoint_postgres.links import Link

# Seconds from which on an open transaction is worth a word, and from which on two clocks differ.
LONG_SECONDS = 10
APART_SECONDS = 1
# The share of the server's connections from which on there are few left.
NEARLY_ALL = 0.9

SERVER = "SELECT current_setting('server_version'), pg_is_in_recovery()"
DURABILITY = "SELECT current_setting('fsync'), current_setting('full_page_writes')"
STANDBYS = """SELECT COALESCE(string_agg(application_name, ', ' ORDER BY application_name), '')
FROM pg_stat_replication WHERE sync_state = 'async' AND state = 'streaming'"""
CONNECTIONS = """SELECT (SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
current_setting('max_connections')::int"""
SIZE = """SELECT COALESCE(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relnamespace = to_regnamespace(quote_ident({schema})) AND relkind = 'r'"""
WAITING = """SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

# Whoever has the oldest transaction number, in whatever database of the server:
# pg_locks shows it to every role. One that was prepared has no process any more.
HORIZON = statements.OLDEST + ", (SELECT MAX(id) FROM events)"  # noqa: S608 -- of our own constants
HOLDER = """SELECT l.pid, a.datname, a.usename, a.application_name, a.state,
extract(epoch FROM clock_timestamp() - a.xact_start)::float8, p.gid, p.database
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL AND p.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
AND l.transactionid::text::bigint = {number} & 4294967295 AND l.pid IS DISTINCT FROM pg_backend_pid()"""


def checks(database: PostgresDatabase) -> Iterator[Check]:
    """One check at a time; a server that cannot be reached is one broken check."""
    try:
        link = database.borrow(monotonic() + database.busy_seconds)
    except AgentCheckpointError as error:
        yield Check("server", "broken", None, str(error))
        return
    try:
        for check in (_server, _durability, _standbys, _horizon, _connections, _clock, _size, _waiting):
            try:
                yield check(link, database)
            except psycopg.Error as error:
                yield Check(check.__name__.lstrip("_"), "broken", None, str(translate(error, database.name)))
    finally:
        database.links.give_back(link)


def _ask(link: Link, sql: str, **values: Any) -> tuple[Any, ...]:
    """The first row, in the store's schema."""
    written = {name: Literal(value).as_string(link) for name, value in values.items()}
    return link.ask(sql.format(**written).encode())


def _server(link: Link, database: PostgresDatabase) -> Check:
    version, standby = _ask(link, SERVER)
    if standby:
        return Check("server", "warning", version, "this is a standby: it can be read, and takes no write")
    return Check("server", "ok", version, "PostgreSQL, a primary")


def _durability(link: Link, database: PostgresDatabase) -> Check:
    fsync, full_pages = _ask(link, DURABILITY)
    value = {"fsync": fsync, "full_page_writes": full_pages, "synchronous": database.synchronous}
    if "off" in (fsync, full_pages):
        return Check("durability", "warning", value, "a crash of the server can take commits back, tokens included")
    if database.synchronous != "full":
        message = "a crash of the server may take back the last commits, tokens and cursors included"
        return Check("durability", "warning", value, message)
    return Check("durability", "ok", value, "what is answered survives a crash; every write asks for it itself")


def _standbys(link: Link, database: PostgresDatabase) -> Check:
    (names,) = _ask(link, STANDBYS)
    if names:
        message = "asynchronous: promoted, it may have forgotten the last grants; set synchronous_standby_names"
        return Check("standbys", "warning", names, message)
    return Check("standbys", "ok", None, "none that could be promoted without the last commits, as far as is shown")


def _horizon(link: Link, database: PostgresDatabase) -> Check:
    """Whether a transaction that is open holds back events: readers stop below the oldest one."""
    look = f"BEGIN READ ONLY; SET LOCAL search_path TO {statements.quoted(database.schema)}; "
    (oldest, last) = link.ask(f"{look}SELECT {HORIZON}".encode())
    link.own.execute(b"COMMIT")
    tables = link.tables(HOLDER.format(number=int(oldest)).encode())[-1]
    if not tables:
        return Check("event_horizon", "ok", None, "no open transaction holds back events")
    pid, name, user, program, state, seconds, prepared, prepared_in = tables[0]
    value = {
        "pid": pid,
        "database": name or prepared_in,
        "user": user,
        "application": program,
        "state": state or "prepared",
        "seconds": seconds and round(seconds, 1),
        "prepared": prepared,
    }
    hides = last is not None and last >= settled(oldest, link.ahead)
    if not hides and (seconds or 0) < LONG_SECONDS and prepared is None:
        return Check("event_horizon", "ok", value, "the oldest open transaction holds back no event")
    who = f"prepared transaction {prepared!r}" if prepared is not None else f"process {pid}"
    message = f"{who} in database {value['database']!r} is open: events after its begin are shown when it ends"
    return Check("event_horizon", "warning", value, message)


def _connections(link: Link, database: PostgresDatabase) -> Check:
    used, most = _ask(link, CONNECTIONS)
    value = {"used": used, "max_connections": most}
    if used > most * NEARLY_ALL:
        return Check("connections", "warning", value, "nearly all are in use; a pooling proxy would share them")
    return Check("connections", "ok", value, "")


def _clock(link: Link, database: PostgresDatabase) -> Check:
    before = time.time()
    (wall,) = _ask(link, f"SELECT {statements.WALL}")
    apart = round(wall / 1e6 - (before + time.time()) / 2, 3)
    message = "leases are judged by the server's clock, a holder's own deadline by this machine's"
    if abs(apart) > APART_SECONDS:
        return Check("clock", "warning", apart, f"the server's is {apart:+g} s from this machine's; {message}")
    return Check("clock", "ok", apart, message)


def _size(link: Link, database: PostgresDatabase) -> Check:
    (size,) = _ask(link, SIZE, schema=database.schema)
    return Check("size", "ok", {"bytes": size}, "tables and indexes of the store")


def _waiting(link: Link, database: PostgresDatabase) -> Check:
    (waiting,) = _ask(link, WAITING)
    return Check("lock_queue", "ok", waiting, "who waits for an advisory lock in this database right now")
