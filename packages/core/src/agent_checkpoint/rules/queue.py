"""Who is next: first come, first served, and nobody idles a scope.

Each ticket has a life that its waiter renews, and ends with its process. A
waiter that is frozen is passed over: once a slot has been free for 50 ms for
each ticket in front, the next may take it, and those in front count no more
until they are awake.
"""

from __future__ import annotations

from agent_checkpoint.record import Record
from agent_checkpoint.rules.expiry import left, lies_ahead, remaining

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_checkpoint.records import Moment, Ticket
    from agent_checkpoint.rules.expiry import Alive

# How long a slot stays free for each ticket whose turn it is.
TURN_NS = 50_000_000
# A ticket's life: after that long without a word from it its waiter is gone.
LIFE_NS = 10_000_000_000


class Queue(Record):
    """The tickets in front of somebody, and those whose waiters are gone, by number."""

    ahead: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


NOBODY = Queue()


def look(tickets: Sequence[Ticket], mine: int, moment: Moment, alive: Alive) -> Queue:
    """The queue as the holder of ticket ``mine`` sees it; 0 stands behind everybody."""
    # Whoever slept through the life of its ticket has lost its place.
    kept = any(ticket.number == mine and remaining(ticket, moment).ns for ticket in tickets)
    ahead, gone = [], []
    for ticket in tickets:
        if ticket.number == mine:
            continue
        if _is_gone(ticket, moment, alive):
            gone.append(ticket.number)
        elif not ticket.passed and (ticket.number < mine or not kept):
            ahead.append(ticket.number)
    return Queue(tuple(ahead), tuple(gone))


def _is_gone(ticket: Ticket, moment: Moment, alive: Alive) -> bool:
    """Whether nobody waits with this ticket any more, as far as can be told.

    One that the wall clock promises more than a life was renewed before the
    clock was set back. Nobody knows how long ago; its waiter, if there is one,
    queues up anew, else all behind it would wait until the clock has caught up.
    """
    return left(ticket, moment, alive).ns == 0 or lies_ahead(ticket, moment)


def may_pass(ahead: int, free_ns: int) -> bool:
    """Whether somebody behind ``ahead`` others may take a slot that has been free for so long."""
    return free_ns >= TURN_NS * ahead
