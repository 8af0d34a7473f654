"""Checkpoints as they are read, a page at a time: all that is stored of them in one look."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph.checkpoint.base import CheckpointTuple, writes_sort_key

from agent_checkpoint_langgraph import mapping, tables
from agent_checkpoint_langgraph.mapping import Address
from agent_checkpoint_langgraph.remembered import Known
from agent_checkpoint_langgraph.values import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint.database import Reader
    from agent_checkpoint_langgraph.serde import Typed

TASKS = "__pregel_tasks"


class Header(NamedTuple):
    """A checkpoint without its state."""

    number: int
    revision: int
    history: int
    thread_id: str
    namespace: str
    checkpoint_id: str
    parent_id: str | None
    format: int
    metadata_kind: str
    metadata: bytes

    @property
    def address(self) -> Address:
        """Where it is."""
        return Address(self.thread_id, self.namespace, self.checkpoint_id)


class State:
    """The values of some checkpoints; each is put together when it is asked for."""

    def __init__(self, reader: Reader, numbers: Sequence[int]) -> None:
        self._of: dict[int, list[int]] = {number: [] for number in numbers}
        for checkpoint, value in reader.rows(*tables.among(tables.STATE, numbers)):
            self._of[checkpoint].append(value)
        asked = {value for values in self._of.values() for value in values}
        self._values = Values(reader.rows(*tables.among(tables.VALUES, numbers)), asked)

    def values(self, checkpoint: int) -> dict[str, Typed]:
        """What the channels of a checkpoint have."""
        return {self._values.channel(value): self._values.whole(value) for value in self._of[checkpoint]}

    def known(self, header: Header, versions: Mapping[str, Any]) -> Known:
        """What a save that builds on a checkpoint has to know."""
        state = {self._values.channel(value): self._values.stored(value) for value in self._of[header.number]}
        return Known(header.number, header.revision, header.checkpoint_id, versions, state)


class KnownState:
    """The same for a checkpoint that this process remembers."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def values(self, checkpoint: int) -> dict[str, Typed]:
        """What its channels have."""
        return {channel: stored.value for channel, stored in self._known.state.items()}

    def known(self, header: Header, versions: Mapping[str, Any]) -> Known:
        """What is remembered."""
        return self._known


class Page:
    """Some checkpoints with all that is stored of them, but the state where that is ``remembered``."""

    def __init__(self, reader: Reader, headers: Sequence[Header], remembered: Known | None = None) -> None:
        numbers = [header.number for header in headers]
        rows = reader.rows(*tables.among(tables.BODIES, numbers))
        self._bodies: dict[int, Typed] = {number: (kind, data) for number, kind, data in rows}
        self._state = KnownState(remembered) if remembered else State(reader, numbers)
        self._writes = by_checkpoint(reader.rows(*tables.among(tables.WRITES, numbers)))
        old = any(header.format < mapping.PENDING_SENDS_FORMAT and header.parent_id for header in headers)
        self._sends = by_checkpoint(reader.rows(*tables.among(tables.SENDS, numbers))) if old else {}

    def __contains__(self, header: Header) -> bool:
        """Whether it was there still when the page was read."""
        return header.number in self._bodies

    def known(self, header: Header, serde: SerializerProtocol) -> Known:
        """What a save that builds on it has to know."""
        return self._state.known(header, self._body(header, serde).get("channel_versions") or {})

    def tuple(self, header: Header, serde: SerializerProtocol, next_version: Callable[[Any], Any]) -> CheckpointTuple:
        """The checkpoint as LangGraph wants it."""
        checkpoint = self._body(header, serde)
        values = {channel: serde.loads_typed(value) for channel, value in self._state.values(header.number).items()}
        sends = self._sends.get(header.number)
        if sends and header.format < mapping.PENDING_SENDS_FORMAT:
            values[TASKS] = [serde.loads_typed(value) for _, _, value in sends]
            versions = checkpoint["channel_versions"]
            versions[TASKS] = max(versions.values()) if versions else next_version(None)
        checkpoint["channel_values"] = values
        address = header.address
        return CheckpointTuple(
            address.config(),
            checkpoint,
            mapping.metadata_value(serde, header.metadata_kind, header.metadata),  # type: ignore[arg-type]
            address.config(header.parent_id) if header.parent_id else None,
            [(task, channel, serde.loads_typed(value)) for task, channel, value in self._writes.get(header.number, ())],
        )

    def _body(self, header: Header, serde: SerializerProtocol) -> Any:
        return serde.loads_typed(self._bodies[header.number])


def by_checkpoint(rows: Sequence[Sequence[Any]]) -> dict[int, list[tuple[str, str, Typed]]]:
    """Writes by the checkpoint that they belong to, in the order in which a run applies them."""
    if not rows:
        return {}
    ordered = sorted(rows, key=lambda row: (row[0], *writes_sort_key(row[1], row[2], row[3])))
    return {
        number: [(task_id, channel, (kind, data)) for _, _, task_id, _, channel, kind, data in group]
        for number, group in groupby(ordered, key=lambda row: row[0])
    }
