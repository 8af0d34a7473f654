"""The audit log, append-only.

Order is by id, never by time: where many can write at once, the id begins with
the number of the transaction, and readers stop below the first that is open. A
cursor is opaque to readers; it names the event's id.
"""

from __future__ import annotations

from agent_checkpoint import payload
from agent_checkpoint.ledger import sums
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.names import invalid
from agent_checkpoint.records import Event
from agent_checkpoint.times import utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from agent_checkpoint.database import Reader, Row, Transaction
    from agent_checkpoint.records import Happened

# Its sum is without its id.
EVENT = Summed("event {}", "iitTTITIj")

RECORD = """
INSERT INTO events (id, at, kind, scope, owner, token, workflow, sequence, detail, sum)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

RECORD_TELLING = RECORD + "RETURNING id\n"

COLUMNS = "SELECT id, at, kind, scope, owner, token, workflow, sequence, detail, sum FROM events WHERE "
NEXT = "id > ? AND id < ?{filters} ORDER BY id LIMIT ?"
LAST = "id > ? AND id < ?{filters} ORDER BY id DESC LIMIT ?"
FILTERS = {"scope": " AND scope = ?", "workflow": " AND workflow = ?", "kind": " AND kind = ?"}
# Where they are in a row.
PLACES = {"kind": 2, "scope": 3, "workflow": 6}

LATEST = """
SELECT id, at, kind, scope, owner, token, workflow, sequence, detail, sum FROM events
WHERE kind = ?
ORDER BY id DESC
LIMIT 1
"""

# In a part of the log of so many events it is looked whether one is hidden: a millisecond or two of work.
FEW = 500
# Of so many ids one transaction of a database with many writers takes the first ones.
A_TRANSACTION = 2**16
RESTORED = "store.restored"
MAX_ID = "SELECT MAX(id) FROM events"
MIN_ID = "SELECT MIN(id) FROM events"
COUNT_BEHIND = "SELECT COUNT(*) FROM events WHERE id > ? AND kind = ?"

# What every cursor begins with; then the event's id.
CURSOR = "0-0-"
START = "start"
MAX_DIGITS = 19
# No event has a higher id.
ALL = 2**63 - 1

# The first event that is not older than that; everything before it in the order of the log is.
FIRST_SINCE = """
SELECT MIN(id) FROM events
WHERE at >= ?
"""

SLICE_END = """
SELECT MAX(id) FROM (SELECT id FROM events WHERE id <= ? ORDER BY id LIMIT ?) AS slice
"""

OPEN_DOOR = "INSERT INTO archive_door (up_to) VALUES (?)"
REMOVE = "DELETE FROM events WHERE id <= ?"
CLOSE_DOOR = "DELETE FROM archive_door"


def record(transaction: Transaction, events: Sequence[Happened], telling: bool) -> list[Event]:
    """Append events; with ``telling`` they come back as they will be read."""
    at = transaction.moment.wall_ns
    number = transaction.event_id
    rows = []
    for *parts, detail in events:
        values = (at, *parts, _text(detail) if detail else "{}")
        rows.append((number(), *values, sums.of(values)))
    if telling:
        return [_event((transaction.rows(RECORD_TELLING, row)[0][0], *row[1:-1])) for row in rows]
    if len(rows) == 1:  # nearly always
        transaction.run(RECORD, rows[0])
    elif rows:
        transaction.executemany(RECORD, rows)
    return []


def _text(detail: dict[str, Any]) -> str:
    return detail.text if isinstance(detail, payload.Encoded) else payload.dump(detail)


def read(reader: Reader, limit: int, after: str | None, filters: dict[str, str | None]) -> list[Event]:
    """Oldest first: the last ``limit`` events, or with ``after`` the next ones behind that cursor."""
    chosen = {name: value for name, value in filters.items() if value is not None}
    order = (LAST if after is None else NEXT).format(filters="".join(FILTERS[name] for name in chosen))
    start = 0 if after is None else _place(after)
    rows = reader.rows(COLUMNS + order, (start, reader.horizon, *chosen.values(), limit))
    if not rows:
        _refuse_silence(reader, start, bool(chosen))
    found = [EVENT.numbered(row) for row in (rows if after is not None else reversed(rows))]
    if reader.horizon == ALL:  # one writes at a time: ids are without gaps
        if not chosen:
            _refuse_gaps(reader, found, start)
        else:
            is_full = len(found) == limit
            behind = found[0][0] - 1 if after is None and is_full else start
            up_to = found[-1][0] if after is not None and is_full else last_id(reader)
            _refuse_hidden(reader, chosen, behind, up_to, len(found))
    return [_event(values) for values in found]


def _refuse_silence(reader: Reader, start: int, chosen: bool) -> None:
    """Refuse to say that there is nothing behind a place where that cannot be."""
    last = last_id(reader)
    if start > last > 0:
        # Else a reader of a store that was replaced would wait in silence for what it missed.
        invalid("after", "is behind the last event: it is a cursor of another store")
    if not last:
        raise sums.gone("the audit log")  # its last line is never removed
    if start < last and not chosen and reader.horizon == ALL:
        raise sums.gone(f"event {start + 1}")


def _refuse_gaps(reader: Reader, found: Sequence[Row], start: int) -> None:
    """Refuse a part of the log that lacks an event, as far as its neighbours tell."""
    last = start
    for number, _, kind, *_ in found:
        # A restore goes ahead, and so did the transactions of a database that the log was moved from.
        begins_anew = kind == RESTORED or number % A_TRANSACTION == 0
        if last and number != last + 1 and not begins_anew and number != reader.rows(MIN_ID)[0][0]:
            raise sums.gone(f"event {last + 1}")
        last = number


def _refuse_hidden(reader: Reader, chosen: dict[str, str], behind: int, up_to: int, known: int) -> None:
    """Refuse what was chosen from a part of the log that is not long, if damage hides one of them."""
    if up_to - behind > FEW:
        return
    whole = [EVENT.numbered(row) for row in reader.rows(COLUMNS + NEXT.format(filters=""), (behind, up_to + 1, FEW))]
    _refuse_gaps(reader, whole, behind)
    if sum(all(row[PLACES[name]] == value for name, value in chosen.items()) for row in whole) != known:
        raise sums.gone("an event")


def last_id(reader: Reader) -> int:
    """The id of the log's last event; 0 for none."""
    return int(reader.rows(MAX_ID)[0][0] or 0)


def skip_to(transaction: Transaction, number: int, happened: Happened) -> None:
    """Append an event with this id, where the table counts by itself: the next ones are behind it."""
    kind, scope, owner, token, workflow, sequence, detail = happened
    numbered = transaction.event_id() or number
    at = transaction.moment.wall_ns
    values = (at, kind, scope, owner, token, workflow, sequence, _text(detail) if detail else "{}")
    transaction.run(RECORD, (numbered, *values, sums.of(values)))


def up_to(reader: Reader, before_ns: int) -> int:
    """The id of the last event of the log's older part: all up to it are from before; 0 for none.

    The log's last event is never among them: it may be a reader's place.
    """
    ((since,),) = reader.rows(FIRST_SINCE, (before_ns,))
    ((last,),) = reader.rows(MAX_ID)
    return min(since or ALL, last or 0, reader.horizon) - 1


def first_cursor(reader: Reader) -> str:
    """The cursor of the oldest event that is in the log."""
    return f"{CURSOR}{reader.rows(MIN_ID)[0][0]}"


def settled(reader: Reader) -> int:
    """An id that no event which is still to come is below."""
    return min(last_id(reader), reader.horizon - 1)


def count_behind(reader: Reader, after: int, kind: str) -> int:
    """How many events of a kind there are behind an id, settled or not."""
    return int(reader.rows(COUNT_BEHIND, (after, kind))[0][0])


def remove(transaction: Transaction, last: int, most: int) -> tuple[int, int]:
    """Remove the oldest ``most`` events up to ``last``, which are archived: how many, and the last of them."""
    ((end,),) = transaction.rows(SLICE_END, (last, most))
    if end is None:
        return 0, last
    transaction.run(OPEN_DOOR, (end,))
    removed = transaction.run(REMOVE, (end,))
    transaction.run(CLOSE_DOOR)
    return removed, end


def page(reader: Reader, after: int, last: int, most: int) -> list[Event]:
    """The next events behind an id, up to another one."""
    rows = reader.rows(COLUMNS + NEXT.format(filters=""), (after, last + 1, most))
    found = [EVENT.numbered(row) for row in rows]
    if reader.horizon == ALL:
        _refuse_gaps(reader, found, after)
    return [_event(values) for values in found]


def latest(reader: Reader, kind: str) -> dict[str, Any] | None:
    """The detail of the last event of a kind; None when there is none."""
    found = reader.rows(LATEST, (kind,))
    return None if not found else dict(payload.decode(EVENT.numbered(found[0])[8]))


def _event(row: Row) -> Event:
    number, at, kind, scope, owner, token, workflow, sequence, detail = row
    cursor = f"{CURSOR}{number}"
    return Event(cursor, number, utc(at), kind, scope, owner, token, workflow, sequence, payload.decode(detail))


def _place(cursor: str) -> int:
    if cursor == START:
        return 0
    digits = cursor.removeprefix(CURSOR)
    if not (cursor.startswith(CURSOR) and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        invalid("after", "must be a cursor that an event of this store carries, or 'start'")
    return min(int(digits), ALL)
