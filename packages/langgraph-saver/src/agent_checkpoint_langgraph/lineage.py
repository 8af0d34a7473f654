"""In which order the checkpoints of a file are saved, and what those that come later build on."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from agent_checkpoint_langgraph.reading import Stock
from agent_checkpoint_langgraph.remembered import Remembered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import Part, StateStore
    from agent_checkpoint_langgraph.pieces import Cutter
    from agent_checkpoint_langgraph.remembered import Known
    from agent_checkpoint_langgraph.serde import Typed
    from agent_checkpoint_langgraph.sqlitefile import Place


def in_order(places: Sequence[Place]) -> list[Place]:
    """Each after its parent, else by their ids: those of two machines do not always sort as they were saved."""
    by_id = {(place.namespace, place.checkpoint_id): place for place in places}
    ordered: dict[tuple[str, str], Place] = {}
    for place in places:
        line: dict[tuple[str, str], Place] = {}
        each: Place | None = place
        while each is not None and (key := each[:2]) not in ordered and key not in line:
            line[key] = each
            each = by_id.get((each.namespace, each.parent_id or ""))
        ordered.update(reversed(line.items()))
    return list(ordered.values())


class Lineage(Remembered):
    """The checkpoints of one thread that others still to come build on."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self._children = Counter((place.namespace, place.parent_id) for place in places)
        self._parents: dict[tuple[str, str], Known] = {}
        self._trial: dict[tuple[str, str], Known] = {}

    def find(self, thread_id: str, namespace: str, checkpoint_id: str) -> Known | None:
        """One that was saved."""
        key = (namespace, checkpoint_id)
        return self._trial.get(key) or self._parents.get(key)

    def begin(self) -> None:
        """Forget what was not committed."""
        self._trial = {}

    def saved(self, namespace: str, known: Known) -> None:
        """One is saved, but not yet committed."""
        self._trial[(namespace, known.checkpoint_id)] = known

    def commit(self, places: Iterable[Place]) -> None:
        """These are committed: keep what has children still to come."""
        self._children.subtract((place.namespace, place.parent_id) for place in places)
        together = {**self._parents, **self._trial}
        self._parents = {key: known for key, known in together.items() if self._children[key] > 0}
        self._trial = {}

    def forget_all(self) -> None:
        """Somebody removed what is remembered."""
        self._parents, self._trial = {}, {}


def stock_inside(part: Part, cutter: Cutter) -> Stock:
    """What is in the store, seen from inside a transaction; no object is made of it."""
    return Stock(cast("StateStore", Inside(part)), cast("SerializerProtocol", Versions(cutter)))


class Inside:
    """The transaction in the place of the store."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def read(self) -> AbstractContextManager[Part]:
        """The transaction itself."""
        return nullcontext(self._part)


class Versions:
    """Loads of a checkpoint only the versions of its channels, and makes no objects."""

    def __init__(self, cutter: Cutter) -> None:
        self._cutter = cutter

    def loads_typed(self, data: Typed) -> dict[str, Any]:
        """The versions, where a checkpoint has them."""
        return {"channel_versions": self._cutter.pieces(*data).versions}
