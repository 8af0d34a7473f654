"""What became of a commit whose answer was lost.

A server that crashed may give the number of a transaction that it has lost to
another one: "committed" means that ours was only where its event is there, or
where the server has not crashed since.
"""

from __future__ import annotations

from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from agent_checkpoint.errors import AgentCheckpointError, OutcomeUnknownError, StorageError
from agent_checkpoint_postgres import statements
from agent_checkpoint_postgres.translate import translate

if TYPE_CHECKING:
    from agent_checkpoint_postgres.database import PostgresDatabase
    from agent_checkpoint_postgres.links import Link

# Between two looks whether it is still under way.
LOOK_SECONDS = 0.05

STATUS = "SELECT pg_xact_status('{number}'::xid8)"
EVENT = "SELECT COUNT(*) FROM events WHERE id = ? AND at = ?"


class Sent(NamedTuple):
    """A commit that was sent: the transaction's number, one of its events and its time, and on which server.

    ``told``: somebody is told of it; what nobody is told of may happen twice.
    """

    number: int
    event: int | None
    at: int
    timeline: str
    life: str
    told: bool


def find_out(database: PostgresDatabase, sent: Sent, error: psycopg.Error) -> None:
    """Return when it was committed.

    Raises:
        StorageUnreachableError: ``undone``: it surely was not, or may happen twice.
        OutcomeUnknownError: nobody can tell.
    """
    until = monotonic() + database.busy_seconds
    while (status := _status(database, sent, until)) == "in progress" and monotonic() < until:
        sleep(LOOK_SECONDS)  # the server is away, or has not yet noticed that we are gone
    if status == "committed":
        return
    if status == "aborted" or not sent.told:
        raise translate(error, database.name) from error
    raise OutcomeUnknownError(
        f"{database.name}: the connection was lost while committing; it may have happened", database=database.name
    ) from error


def _status(database: PostgresDatabase, sent: Sent, until: float) -> str:
    """What can be known now: committed, aborted, in progress, or unknown."""
    try:
        link = database.borrow(until)
    except StorageError:
        return "in progress"
    except AgentCheckpointError:
        return "unknown"
    try:
        return _ask(link, database, sent)
    except psycopg.OperationalError:
        return "in progress"
    except psycopg.Error:
        return "unknown"
    finally:
        database.links.give_back(link)


def _ask(link: Link, database: PostgresDatabase, sent: Sent) -> str:
    status = "unknown"
    if sent.timeline and link.timeline == sent.timeline:  # another one may know nothing of it
        try:
            (status,) = link.ask(STATUS.format(number=sent.number).encode())
        except psycopg.errors.InvalidParameterValue:
            return "aborted"  # the crashed server has forgotten that it ever gave out the number
    if sent.event is None:
        return status if status != "committed" or link.life == sent.life else "unknown"
    # After the status: else it might be committed between the two.
    message = statements.glance(database.schema, EVENT, (sent.event, sent.at), link)
    ((found,),), *_ = link.tables(message)
    if found:
        return "committed"
    # Without its event, what was committed under its number is another transaction.
    return "aborted" if status == "committed" else status or "unknown"
