"""The tables of a store as they stand, and the seal on those that were moved away."""

from __future__ import annotations

from agent_checkpoint.database import MOVED, Table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from agent_checkpoint.database import Row

TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite~_%' ESCAPE '~' ORDER BY name"
COLUMNS = "SELECT name, pk FROM pragma_table_info('{table}') ORDER BY cid"
UNIQUE = "SELECT name FROM pragma_index_list('{table}') WHERE \"unique\" = 1 AND partial = 0 ORDER BY name LIMIT 1"
INDEXED = "SELECT name FROM pragma_index_info('{index}') ORDER BY seqno"
# Letters of a text: that stored here is ASCII, but for names.
SIZE = 'COALESCE(LENGTH("{column}"), 0)'

SEAL = """CREATE TRIGGER sealed_{table}_{change} BEFORE {change} ON {table}
BEGIN
    SELECT RAISE(ABORT, '{message}');
END"""
UNSEAL = "DROP TRIGGER IF EXISTS sealed_{table}_{change}"
CHANGES = ("INSERT", "UPDATE", "DELETE")


def tables(rows: Callable[[str], list[Row]]) -> Iterator[Table]:
    """Every table, with the columns of its primary key or of a unique index."""
    for (name,) in rows(TABLES):
        columns = rows(COLUMNS.format(table=name))
        key = [column for column, place in sorted(columns, key=lambda row: row[1]) if place]
        for (index,) in () if key else rows(UNIQUE.format(table=name)):
            key = [column for (column,) in rows(INDEXED.format(index=index))]
        names = tuple(column for column, _ in columns)
        yield Table(name, names, tuple(key) or names, " + ".join(SIZE.format(column=column) for column in names))


def sealing(names: Iterable[str], moved_to: str) -> Iterator[str]:
    """The statements that refuse every change of these tables."""
    message = (MOVED + moved_to).replace("'", "''")
    for table in names:
        for change in CHANGES:
            yield SEAL.format(table=table, change=change, message=message)


def unsealing(names: Iterable[str]) -> Iterator[str]:
    """The statements that take that back."""
    for table in names:
        for change in CHANGES:
            yield UNSEAL.format(table=table, change=change)
