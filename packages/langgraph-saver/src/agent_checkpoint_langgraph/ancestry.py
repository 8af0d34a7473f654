"""What a channel went through on the way to a checkpoint: the writes since its value was last stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_checkpoint_langgraph import tables
from agent_checkpoint_langgraph.pages import State, by_checkpoint
from agent_checkpoint_langgraph.reading import latest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langgraph.checkpoint.base import DeltaChannelHistory
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import StateStore
    from agent_checkpoint.database import Reader
    from agent_checkpoint_langgraph.mapping import Address
    from agent_checkpoint_langgraph.serde import Typed

# Ancestors that are looked at at once: as many as a statement names.
LINE = 64


class Trail:
    """One channel's writes, newest first, and the ancestor that has its value."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, str, Typed]] = []
        self.seed: Typed | None = None


def histories(
    store: StateStore, serde: SerializerProtocol, where: Address, channels: Sequence[str]
) -> Mapping[str, DeltaChannelHistory]:
    """For each channel the writes of the ancestors since its value was stored, oldest first, and that value.

    The writes on top of the checkpoint itself are its future. Those of the
    ancestor that has the value came after it, and count.
    """
    trails = {channel: Trail() for channel in channels}
    with store.read() as reader:
        target = latest(reader, where)
        if target is not None and target.parent_id is not None:
            _follow(reader, target.history, target.parent_id, trails)
    found: dict[str, DeltaChannelHistory] = {}
    for channel, trail in trails.items():
        writes = [(task, name, serde.loads_typed(value)) for task, name, value in reversed(trail.writes)]
        found[channel] = {"writes": writes}
        if trail.seed is not None:
            found[channel]["seed"] = serde.loads_typed(trail.seed)
    return found


def line(reader: Reader, history: int, checkpoint_id: str) -> list[tuple[int, str | None]]:
    """A checkpoint and its ancestors, the nearest first, as (number, parent id): so many as are looked at at once."""
    return [
        (number, parent_id)
        for number, parent_id in reader.rows(tables.ANCESTORS, (history, checkpoint_id, history, LINE - 1))
    ]


def _follow(reader: Reader, history: int, checkpoint_id: str, trails: dict[str, Trail]) -> None:
    open_trails = dict(trails)
    cursor: str | None = checkpoint_id
    seen: set[int] = set()
    while cursor is not None and open_trails:
        ancestors = line(reader, history, cursor)
        if not ancestors or ancestors[0][0] in seen:  # a parent that is its own descendant
            return
        numbers = [number for number, _ in ancestors]
        stored = set(reader.rows(*tables.among(tables.CHANNELS_OF, numbers)))
        writes = by_checkpoint(reader.rows(*tables.among(tables.WRITES, numbers)))
        for number, parent_id in ancestors:
            seen.add(number)
            for channel, trail in list(open_trails.items()):
                trail.writes += [write for write in reversed(writes.get(number, ())) if write[1] == channel]
                if (number, channel) in stored:
                    trail.seed = State(reader, [number]).values(number)[channel]
                    del open_trails[channel]
            cursor = parent_id
