"""Every row of core's tables checked by its sum, a page at a time; for ``doctor``."""

from __future__ import annotations

from agent_checkpoint.errors import StorageCorruptError, StorageError
from agent_checkpoint.ledger import checkpoints, effects, events, leases, refusals, retention
from agent_checkpoint.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_checkpoint.database import Database, Row

# Rows that are read at once, and those of them that may be large.
PAGE, FEW = 500, 10


class Rows(Record):
    """How to read a table in the order of its key, the sum and then a large text last, and how to check a row."""

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    check: Callable[[Row], object]
    page: int = PAGE


class Looked(Record):
    """What was found: how many rows, how many without a sum, and which are damaged."""

    rows: int
    without: int
    damaged: list[str]


def _columns(statement: str) -> tuple[str, ...]:
    """What a statement selects, by name."""
    return tuple(name.strip() for name in statement.partition("FROM")[0].replace("SELECT", "").split(","))


def _checkpoint(row: Row) -> None:
    facts = checkpoints.CHECKPOINT.checked(row[:9])
    checkpoints.CHECKPOINT.check_text(facts, row[9], facts[7])


TABLES = (
    Rows("leases", ("scope", "slot"), _columns(leases.ALL), leases.LEASE.checked),
    Rows("limits", ("scope",), _columns(leases.LIMIT), leases.LIMIT_OF.checked),
    Rows("checkpoints", ("workflow", "sequence"), _columns(checkpoints.WHOLE), _checkpoint, FEW),
    Rows("floors", ("workflow",), _columns(checkpoints.FLOOR), checkpoints.FLOOR_OF.checked),
    Rows("effects", ("key",), _columns(effects.FIND), effects.effect, FEW),
    Rows("events", ("id",), _columns(events.LATEST), events.EVENT.numbered),
    Rows("refusals", ("scope", "token", "action", "reason"), _columns(refusals.REFUSALS), refusals.REFUSAL.checked),
    Rows("retention", ("rule",), _columns(retention.RULES), retention.RULE.checked),
)


def examine(database: Database) -> Looked:
    """Check every row; what cannot be read at all is damaged too."""
    count, without = 0, 0
    damaged: list[str] = []
    for rows in TABLES:
        place = rows.columns.index("sum")
        try:
            for page in _pages(database, rows):
                count += len(page)
                without += sum(row[place] is None for row in page)
                damaged += _damaged(rows, page)
        except StorageError as error:
            damaged.append(f"table {rows.table}: {error}")
    return Looked(count, without, damaged)


def _damaged(rows: Rows, page: list[Row]) -> Iterator[str]:
    for row in page:
        try:
            rows.check(row)
        except StorageCorruptError as error:
            yield str(error)


def _pages(database: Database, rows: Rows) -> Iterator[list[Row]]:
    """The rows, each page by a read of its own."""
    key, places = ", ".join(rows.key), [rows.columns.index(name) for name in rows.key]
    source = f"SELECT {', '.join(rows.columns)} FROM {rows.table}"  # noqa: S608 -- our own names
    order = f" ORDER BY {key} LIMIT ?"
    behind = ""
    last: Row = ()
    while True:
        with database.read() as reader:
            page = reader.rows(source + behind + order, (*last, rows.page))
        if not page:
            return
        yield page
        before, last = last, tuple(page[-1][at] for at in places)
        if not _is_behind(last, before):  # or it would go round for ever
            raise StorageCorruptError("its rows are not in their order: the file is damaged")
        behind = f" WHERE ({key}) > ({', '.join('?' * len(places))})"


def _is_behind(last: Row, before: Row) -> bool:
    try:
        return last > before
    except TypeError:
        return False  # a text where a number was
