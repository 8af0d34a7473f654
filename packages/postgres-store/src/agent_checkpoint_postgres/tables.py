"""The tables of a store as they stand, and the seal on those that were moved away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg.sql import Literal

from agent_checkpoint.database import MOVED, Table
from agent_checkpoint_postgres.statements import identifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from agent_checkpoint.database import Row

COLUMNS = """SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY c.relname, a.attnum"""
# The columns of each table's unique indexes, the primary key's first.
KEYS = """SELECT c.relname, x.indexrelid::bigint, a.attname
FROM pg_class c JOIN pg_index x ON x.indrelid = c.oid AND x.indisunique AND x.indpred IS NULL AND x.indexprs IS NULL
CROSS JOIN unnest(x.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
AND c.relkind = 'r'
ORDER BY c.relname, x.indisprimary DESC, x.indexrelid, k.place"""
# The columns that count by themselves.
COUNTERS = """SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
AND c.relkind = 'r' AND a.attidentity <> ''"""
COUNT_ON = """SELECT setval(pg_get_serial_sequence({table}, {column}), (SELECT MAX({name}) FROM {place}))
WHERE EXISTS (SELECT 1 FROM {place})"""

SKIP = """SELECT setval(counter, nextval(counter) + {ahead})
FROM (SELECT pg_get_serial_sequence({table}, {column})::regclass AS counter) AS one"""

SEAL = """CREATE TRIGGER sealed BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {table}
EXECUTE FUNCTION refuse_change({message})"""
UNSEAL = "DROP TRIGGER IF EXISTS sealed ON {table}"


def tables(rows: Callable[[str], list[Row]]) -> list[Table]:
    """Every table of the schema."""
    columns: dict[str, list[str]] = {}
    for table, column in rows(COLUMNS):
        columns.setdefault(table, []).append(column)
    keys: dict[str, dict[int, list[str]]] = {}
    for table, index, column in rows(KEYS):
        keys.setdefault(table, {}).setdefault(index, []).append(column)
    return [
        Table(table, tuple(names), tuple(next(iter(keys.get(table, {}).values()), names)), _size(table))
        for table, names in columns.items()
    ]


def _size(table: str) -> str:
    # Of the whole row as text: what is stored may be compressed.
    return f"OCTET_LENGTH({identifier(table)}::text)"


def sealing(names: Iterable[str], moved_to: str) -> Iterator[str]:
    """The statements that refuse every change of these tables; each waits for who is changing it."""
    message = (MOVED + moved_to).replace("\\", "\\\\").replace("'", "''").replace("?", "\\x3f")  # no parameter's place
    for table in names:
        yield SEAL.format(table=identifier(table), message=f"E'{message}'")


def unsealing(names: Iterable[str]) -> Iterator[str]:
    """The statements that take that back."""
    for table in names:
        yield UNSEAL.format(table=identifier(table))


def counting_on(counters: Iterable[Any]) -> Iterator[str]:
    """The statements that let identities go on behind the rows that are there."""
    for table, column in counters:
        yield COUNT_ON.format(
            table=Literal(identifier(table)).as_string(None),
            column=Literal(column).as_string(None),
            name=identifier(column),
            place=identifier(table),
        )


def skipping(counters: Iterable[Any], ahead: int) -> Iterator[str]:
    """The statements that let identities go on so much further."""
    for table, column in counters:
        place = Literal(identifier(table)).as_string(None), Literal(column).as_string(None)
        yield SKIP.format(table=place[0], column=place[1], ahead=ahead)
