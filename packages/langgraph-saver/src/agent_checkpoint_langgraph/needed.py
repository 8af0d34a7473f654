"""Which ancestors a checkpoint cannot do without: where a channel is saved as its changes.

LangGraph's ``DeltaChannel`` has a stored value now and then, and is put together
from the writes since; the metadata of a checkpoint names the channels that are
not stored in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_checkpoint_langgraph import mapping, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint.database import Row


def needed(
    ask: Callable[..., list[Row]], history: int, rows: Sequence[Row], kept: Iterable[Row], serde: SerializerProtocol
) -> set[int]:
    """The checkpoints that are kept, and those that their state is put together from.

    ``rows`` are those of the whole namespace, as ``tables.OF_HISTORY`` gives them.
    """
    found: set[int] = set()
    changing = []
    for row in kept:
        found.add(row[0])
        counters = mapping.metadata_value(serde, row[4], row[5]).get("counters_since_delta_snapshot")
        if counters:
            changing.append((row, frozenset(counters)))
    if changing:
        _walk(rows, changing, _stored(ask, history), found)
    return found


def _stored(ask: Callable[..., list[Row]], history: int) -> dict[int, set[str]]:
    stored: dict[int, set[str]] = {}
    for checkpoint, channel in ask(tables.CHANNELS_OF_HISTORY, (history,)):
        stored.setdefault(checkpoint, set()).add(channel)
    return stored


def _walk(
    rows: Sequence[Row], changing: Iterable[tuple[Row, frozenset[str]]], stored: dict[int, set[str]], found: set[int]
) -> None:
    """From each of these towards the root, until every channel was met with its value, or somebody walked there."""
    by_id = {row[1]: row for row in rows}
    walked: set[tuple[int, frozenset[str]]] = set()
    for row, channels in changing:
        ancestor = by_id.get(row[2])
        while channels and ancestor is not None and (ancestor[0], channels) not in walked:
            walked.add((ancestor[0], channels))
            found.add(ancestor[0])
            channels -= stored.get(ancestor[0], set())
            ancestor = by_id.get(ancestor[2])
