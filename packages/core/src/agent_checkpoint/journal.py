"""The audit log and the overview, as people read them."""

from __future__ import annotations

from agent_checkpoint import names
from agent_checkpoint.ledger import checkpoints as checkpoint_rows
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.ledger import refusals, tickets
from agent_checkpoint.records import Status
from agent_checkpoint.rules import present
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Database
    from agent_checkpoint.records import Event

# Most events in one answer: with a cursor, the next call goes on.
MAX_EVENTS = 1_000_000
REFUSALS_SHOWN = 100


def events(
    database: Database, limit: int, after: str | None, scope: str | None, workflow: str | None, kind: str | None
) -> list[Event]:
    """Oldest first: the last ``limit`` events, or with ``after`` the next ones behind that cursor."""
    names.integer("limit", limit, 1, MAX_EVENTS)
    filters = {"scope": scope, "workflow": workflow, "kind": kind}
    for field, value in filters.items():
        if value is not None:
            names.name(field, value)
    if after is not None and not isinstance(after, str):
        names.invalid("after", f"must be a cursor, not {type(after).__name__}")
    with database.read() as reader:
        return event_log.read(reader, limit, after, filters)


def status(database: Database) -> Status:
    """Everything that answers the four questions, from one state of the store."""
    with database.read() as reader:
        rows = lease_rows.everyone(reader)
        waiters = tickets.everyone(reader)
        latest = checkpoint_rows.latest_of_each(reader)
        refused = refusals.latest(reader, REFUSALS_SHOWN)
    bound = [*(row.process for row in rows if row.state == "live"), *(ticket.process for ticket in waiters)]
    alive = database.who_lives(bound)
    shown = [present.lease(row, reader.moment, alive) for row in rows]
    queues = present.queues(waiters, reader.moment, alive)
    return Status(database.name, utc(reader.moment.wall_ns), shown, queues, latest, refused)
