"""Values as they are read: each put together from the differences that lead back to a full copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent_checkpoint_langgraph import deltas
from agent_checkpoint_langgraph.remembered import Stored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.database import Row
    from agent_checkpoint_langgraph.serde import Typed


class ValueRow(NamedTuple):
    """A value as it is stored: whole, or what differs from its base."""

    number: int
    channel: str
    base: int | None
    depth: int
    weight: int
    kind: str
    data: bytes


class Values:
    """Some values, with all that they are differences to. ``asked``: which of them will be asked for."""

    def __init__(self, rows: Iterable[Row], asked: Iterable[int] = ()) -> None:
        self._rows = {row[0]: ValueRow._make(row) for row in rows}
        self._asked = frozenset(asked)
        self._whole: dict[int, Typed] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def channel(self, number: int) -> str:
        """The channel that has the value."""
        return self._rows[number].channel

    def whole(self, number: int) -> Typed:
        """The value."""
        found = self._whole.get(number)
        if found is None:
            # The older ones first: each is then one step from the one before it.
            for row in reversed(self.line(number)):
                if row.number in self._asked or row.number == number:
                    found = self._whole[row.number] = (row.kind, self._restored(row))
        assert found is not None
        return found

    def _restored(self, row: ValueRow) -> bytes:
        differences = []
        while row.base is not None:
            differences.append(row.data)
            if row.base in self._whole:
                return deltas.restored(self._whole[row.base][1], differences)
            row = self._rows[row.base]
        return deltas.restored(row.data, differences)

    def line(self, number: int) -> list[ValueRow]:
        """The value, what it is a difference to, and so on to the full copy."""
        row = self._rows[number]
        line = [row]
        while row.base is not None:
            row = self._rows[row.base]
            line.append(row)
        return line

    def stored(self, number: int) -> Stored:
        """The value, for what is saved next to be a difference to."""
        row = self._rows[number]
        return Stored(number, row.depth, row.weight, self.whole(number))
