"""The sum that each row carries: what a disk has changed is never taken for what was written.

Whoever writes a row gives it the sum of its columns as they are stored, their
types included; whoever reads it looks at the sum before anything else. A text
that may be large has a sum of its own, which is one of those columns: a look at
the others need not read it. A row from before there were sums has none (NULL),
is taken as it is if its columns are of the right kinds, and gets one when it is
written the next time.

A sum cannot tell that a row is gone. So where a row that is not found would be
taken for one that never was, its table has a second index with the same keys,
which nobody uses but to ask again (``… || ''``).
"""

from __future__ import annotations

from binascii import crc32
from marshal import dumps

from agent_checkpoint import payload
from agent_checkpoint.errors import StorageCorruptError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agent_checkpoint.database import Row

# Rows of one kind that are remembered: what was checked, or written, a moment ago need not be checked again.
REMEMBERED = 32
# How values become bytes: marshal's format 2 is the same in every Python from 2.5
# on, tells types apart, and takes half the time of a formatted text.
FORMAT = 2


def of(row: Row) -> int:
    """The sum of a row's columns."""
    return crc32(dumps(row if type(row) is tuple else tuple(row), FORMAT))


def of_text(text: str) -> int:
    """The sum of a text that is left out of its row's."""
    return crc32(text.encode())


def gone(thing: str) -> StorageCorruptError:
    """A row is not where it must be, or something else is there."""
    return StorageCorruptError(f"{thing} cannot be found any more: the file is damaged")


class Summed:
    """How the rows of a table are checked.

    ``thing`` names a row by its first columns. ``kinds`` has a letter for each
    column: t text, i integer, j JSON, p a process (JSON or ""), in capitals
    where it may be NULL.
    """

    __slots__ = ("kinds", "known", "thing")

    def __init__(self, thing: str, kinds: str) -> None:
        self.thing = thing
        self.kinds = kinds
        self.known: dict[int, Row] = {}
        """By their sum, the last rows that were checked or given one."""

    def given(self, row: Row) -> Row:
        """A row with its sum behind it, as it is written."""
        values = tuple(row)
        found = crc32(dumps(values, FORMAT))
        if len(self.known) >= REMEMBERED:
            self.known.clear()
        self.known[found] = values
        return (*values, found)

    def checked(self, row: Row) -> Row:
        """A row without its sum, which is the last column.

        Raises:
            StorageCorruptError: it is not what was written.
        """
        values, found = row[:-1], row[-1]
        if self.known.get(found) == values:
            return values
        if found is None:
            self._check_kinds(values)
            return values
        if crc32(dumps(values, FORMAT)) != found:
            raise self.damaged(values)
        if len(self.known) >= REMEMBERED:
            self.known.clear()
        self.known[found] = values
        return values

    def numbered(self, row: Row) -> Row:
        """The same for a row whose first column is given by the database, and no part of the sum."""
        values, found = row[:-1], row[-1]
        if found is None:
            self._check_kinds(values)
        elif crc32(dumps(values[1:], FORMAT)) != found:
            raise self.damaged(values)
        return values

    def check_text(self, values: Row, text: Any, found: Any) -> None:
        """Check the text that is left out of the row's sum.

        Raises:
            StorageCorruptError: it is not what was written.
        """
        whole = type(text) is str and (of_text(text) == found if found is not None else _is(text, "j"))
        if not whole:
            raise self.damaged(values)

    def damaged(self, values: Row) -> StorageCorruptError:
        """The error that names a row."""
        shown = [repr(value)[:100] for value in values]
        return StorageCorruptError(f"{self.thing.format(*shown)} is damaged: it is not what was written")

    def _check_kinds(self, values: Row) -> None:
        if not all(map(_is, values, self.kinds)):
            raise self.damaged(values)


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return kind.isupper()
    return _KINDS[kind.lower()](value)


def _is_json(value: Any) -> bool:
    try:
        payload.decode(value)
    except (ValueError, TypeError):
        return False  # a RecursionError says nothing of the value: the caller is deep inside of others
    return type(value) is str


_KINDS: dict[str, Callable[[Any], bool]] = {
    "t": lambda value: type(value) is str,
    "i": lambda value: type(value) is int,
    "j": _is_json,
    "p": lambda value: value == "" or _is_json(value),
}
