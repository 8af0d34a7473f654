"""Saving a checkpoint or the writes of a task: what is found out before the lock, and what is done behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from agent_checkpoint import FencedWrite, Part
from agent_checkpoint_langgraph import deltas, mapping, tables
from agent_checkpoint_langgraph.remembered import Known, Stored
from agent_checkpoint_langgraph.removing import remove_unused
from agent_checkpoint_langgraph.serde import encrypts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint_langgraph.mapping import Address, Saving, TaskWrite
    from agent_checkpoint_langgraph.remembered import Remembered
    from agent_checkpoint_langgraph.serde import Typed

    Guarded = Callable[[str, Callable[[Part], Any]], FencedWrite]
    """Makes a protected write of an action and a body."""


class Stock(Protocol):
    """What is in the store already, for a save to build on."""

    serde: SerializerProtocol

    def known(self, where: Address, checkpoint_id: str) -> Known | None:
        """A checkpoint of a namespace."""

    def anchor(self, before: Stored) -> Stored | None:
        """The value on the way from this one to its full copy that is the first to be a multiple of the stride deep."""


class ParentGone(Exception):  # noqa: N818 -- nobody is told: the save is done anew
    """What a save was to build on is not there any more."""


# Below so many bytes a full copy is as good as a difference.
SMALL = 256
# Each so many values, one is the difference to the one so many before it: the way back to the full copy is short.
STRIDE = 32


class Planned:
    """A value to store: whole, or as the difference to one that is stored.

    Whole where the differences on the way back to a full copy would be more
    than three quarters of the value: a growing one gets a full copy each time
    that it has become four times as long.
    """

    __slots__ = ("_base", "_data", "_depth", "_value", "_weight")

    def __init__(self, value: Typed, before: Stored | None, anchor: Callable[[Stored], Stored | None]) -> None:
        self._value = value
        self._base: int | None = None
        self._depth = self._weight = 0
        self._data = value[1]
        if before is None or before.value[0] != value[0] or len(value[1]) < SMALL or encrypts(value[0]):
            return
        depth = before.depth + 1
        base = (anchor(before) if depth % STRIDE == 0 else None) or before
        difference = deltas.difference(base.value[1], value[1])
        if difference is None:
            return
        weight = base.weight + len(difference) + deltas.ROW_COST
        if 4 * weight < 3 * len(value[1]):
            self._base, self._depth, self._weight, self._data = base.number, depth, weight, difference

    def row(self, history: int, channel: str) -> tuple[Any, ...]:
        """Its row, but for the number."""
        return history, channel, self._base, self._depth, self._weight, self._value[0], self._data

    def stored(self, number: int) -> Stored:
        """What it is, once its row has this number."""
        return Stored(number, self._depth, self._weight, self._value)


class CheckpointSave:
    """A checkpoint on its way into the store."""

    def __init__(self, saving: Saving, guarded: Guarded, remembered: Remembered, stock: Stock) -> None:
        self._saving = saving
        self._guarded = guarded
        self._remembered = remembered
        self._stock = stock

    @property
    def config(self) -> RunnableConfig:
        """The config of the checkpoint."""
        return self._saving.address.config(self._saving.checkpoint_id)

    def planned(self) -> FencedWrite:
        """The write, with everything found out that needs no lock: what each value is a difference to."""
        saving = self._saving
        where = saving.address
        parent = self._parent()
        before = parent.state if parent else {}
        kept, changed = _split(saving, parent, self._stock.serde)
        planned = {}
        for channel, value in changed.items():
            old = before.get(channel)
            if old is not None and old.value == value:
                kept[channel] = old
            else:
                planned[channel] = Planned(value, old, self._stock.anchor)

        def store(part: Part) -> Known:
            number, revision, history = _store_checkpoint(part, saving, parent)
            state = {**kept, **_store_values(part, history, planned)}
            for statement in tables.adding(tables.ADD_STATE, [(number, each.number) for each in state.values()]):
                part.run(*statement)
            if revision:
                remove_unused(part, history)
            detail = {"checkpoint_id": saving.checkpoint_id, "checkpoint_ns": where.namespace}
            part.event(
                "langgraph.checkpoint-saved", {**detail, "source": saving.source, "step": saving.step}, sequence=number
            )
            return Known(number, revision, saving.checkpoint_id, saving.versions, state)

        return self._guarded("langgraph.save-checkpoint", store)

    def settle(self, known: Known) -> None:
        """It is committed."""
        where = self._saving.address
        self._remembered.note(where.thread_id, where.namespace, known)

    def retries(self) -> None:
        """What it was to build on is gone."""
        self._remembered.forget(self._saving.address.thread_id)

    def _parent(self) -> Known | None:
        where = self._saving.address
        if where.checkpoint_id is None:
            return None
        found = self._remembered.parent_of(where)
        return found or self._stock.known(where, where.checkpoint_id)


class WritesSave:
    """The writes of a task on their way into the store."""

    def __init__(
        self, where: Address, writes: Sequence[TaskWrite], task_id: str, task_path: str, guarded: Guarded
    ) -> None:
        self._where = where
        self._writes = writes
        self._task_id = task_id
        self._task_path = task_path
        self._guarded = guarded

    def planned(self) -> FencedWrite:
        """The write."""
        where = self._where
        regular = [write for write in self._writes if write.idx >= 0]
        special = {write.idx: write for write in self._writes if write.idx < 0}.values()

        def store(part: Part) -> None:
            history = history_of(part, where)
            for sql, writes in ((tables.ADD_WRITES, regular), (tables.REPLACE_WRITES, special)):
                for statement in tables.adding(sql, [self._row(history, write) for write in writes]):
                    part.run(*statement)
            detail = {"checkpoint_id": where.checkpoint_id, "checkpoint_ns": where.namespace}
            part.event("langgraph.writes-saved", {**detail, "task_id": self._task_id, "count": len(self._writes)})

        return self._guarded("langgraph.save-writes", store)

    def _row(self, history: int, write: TaskWrite) -> tuple[Any, ...]:
        place = (history, self._where.checkpoint_id, self._task_id, write.idx, self._task_path)
        return (*place, write.channel, *write.value)

    def settle(self, answer: None) -> None:
        """It is committed."""

    def retries(self) -> None:
        """Never: writes build on nothing."""


def history_of(part: Part, where: Address) -> int:
    """The number of a namespace of a thread, which begins with its first write."""
    key = (where.thread_id, where.namespace)
    number: int | None = part.shared.get(key)
    if number is None:
        found = part.rows(tables.FIND_HISTORY, key) or part.rows(tables.ADD_HISTORY, key)
        number = part.shared[key] = int(found[0][0])
    return number


def _split(
    saving: Saving, parent: Known | None, serde: SerializerProtocol
) -> tuple[dict[str, Stored], dict[str, Typed]]:
    """What stays as the parent has it, and what has to be stored.

    A channel of the same version as in the parent has the same value, or none.
    Where the parent is unknown, or has another version, the value that came with
    the checkpoint is stored, though it was not announced as new.
    """
    kept: dict[str, Stored] = {}
    changed = dict(saving.changed)
    for channel, version in saving.versions.items():
        if channel in changed or channel in saving.dropped:
            continue
        if parent is not None and parent.versions.get(channel) == version:
            if channel in parent.state:
                kept[channel] = parent.state[channel]
        elif channel in saving.spare:
            changed[channel] = saving.spare[channel]
        elif channel in saving.values:
            changed[channel] = mapping.serialized(serde, channel, saving.values[channel])
    return kept, changed


def _store_checkpoint(part: Part, saving: Saving, parent: Known | None) -> tuple[int, int, int]:
    """Add its row, in the history of its parent; number, revision, history."""
    where = saving.address
    facts = (where.checkpoint_id, saving.format, saving.source, saving.step, saving.run_id)
    row = (saving.checkpoint_id, *facts, *saving.metadata, *saving.body)
    if parent is None:
        found = part.rows(tables.SAVE_CHECKPOINT, (history_of(part, where), *row))
    else:
        # What is remembered of the parent must still hold.
        identity = (parent.number, parent.revision, parent.checkpoint_id, where.thread_id, where.namespace)
        found = part.rows(tables.SAVE_CHILD, (*row, *identity))
    if not found:
        raise ParentGone
    ((number, revision, history),) = found
    if revision:
        part.run(tables.REMOVE_STATE, (number,))
    return number, revision, history


def _store_values(part: Part, history: int, planned: Mapping[str, Planned]) -> dict[str, Stored]:
    rows = [each.row(history, channel) for channel, each in planned.items()]
    return {
        channel: planned[channel].stored(number)
        for statement in tables.adding(tables.ADD_VALUES, rows)
        for channel, number in part.rows(*statement)
    }
