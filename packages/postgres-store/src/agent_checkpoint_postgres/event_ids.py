"""The ids of events where many write at once.

A sequence would number events in the order in which they were written, but
transactions become visible in the order in which they commit: a reader that has
seen number 8 would never see 7, whose transaction was slower. So an id begins
with the number of its transaction, and readers stop below the oldest one that
is open. What is below that can never appear later.

A dump that is restored into a younger cluster meets smaller transaction numbers
than its own events have. ``ahead``, stored beside the events, is added to every
number, and grows once when that is found: events keep their ids and their
order, and what comes after is behind them.
"""

from __future__ import annotations

from agent_checkpoint.errors import StorageError

# Bits of an id that number the events of one transaction.
BITS = 16
MOST = 2**BITS - 1
FIRST = -1

# What is to be known: how far the numbers are ahead, the last transaction with an event, the next one of the cluster.
LOOK = """SELECT
(SELECT ahead FROM event_ids), (SELECT MAX(id) >> 16 FROM events),
pg_snapshot_xmax(pg_current_snapshot())::text::bigint"""
GO_AHEAD = """UPDATE event_ids
SET ahead = (SELECT MAX(id) >> 16 FROM events) + 1 - pg_snapshot_xmin(pg_current_snapshot())::text::bigint
RETURNING ahead"""


def next_id(transaction: int, ahead: int, number: int) -> int:
    """The id of the event with this number (from 0) in a transaction.

    Raises:
        StorageError: a transaction cannot have that many.
    """
    if number > MOST:
        raise StorageError(f"one transaction cannot record more than {MOST + 1} events; nothing of it was written")
    return ((transaction + ahead) << BITS) + number


def settled(oldest: int, ahead: int) -> int:
    """The first id that may still appear, when this is the oldest transaction that is open."""
    return (oldest + ahead) << BITS


def is_behind(ahead: int, last: int | None, following: int) -> bool:
    """Whether the cluster gives out numbers that events have already."""
    return last is not None and following + ahead <= last
