"""Saving a checkpoint or the writes of a task: what is found out before the lock, and what is done behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_checkpoint import FencedWrite, Part
from agent_checkpoint_langgraph import deltas, mapping, tables
from agent_checkpoint_langgraph.remembered import Known, Stored
from agent_checkpoint_langgraph.serde import encrypts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint_langgraph.mapping import Address, Saving, TaskWrite
    from agent_checkpoint_langgraph.remembered import Remembered
    from agent_checkpoint_langgraph.serde import Typed

    Guarded = Callable[[str, Callable[[Part], Any]], FencedWrite]
    """Makes a protected write of an action and a body."""


class ParentGone(Exception):  # noqa: N818 -- nobody is told: the save is done anew
    """What a save was to build on is not there any more."""


class Planned:
    """A value to store: whole, or as the difference to one that is stored."""

    __slots__ = ("base", "data", "value", "weight")

    def __init__(self, value: Typed, before: Stored | None) -> None:
        kind, data = value
        self.value = value
        self.base: int | None = None
        self.weight = 0
        self.data = data
        if before is not None and before.value[0] == kind and not encrypts(kind):
            difference = deltas.difference(before.value[1], data)
            weight = before.weight + len(difference or b"") + deltas.ROW_COST
            if difference is not None and weight < len(data):
                self.base, self.weight, self.data = before.number, weight, difference

    def store(self, part: Part, history: int, channel: str | None) -> Stored:
        """Add its row."""
        row = (history, channel, self.base, self.weight, self.value[0], self.data)
        ((number,),) = part.rows(tables.ADD_VALUE, row)
        return Stored(number, self.weight, self.value)


class CheckpointSave:
    """A checkpoint on its way into the store."""

    def __init__(
        self,
        saving: Saving,
        guarded: Guarded,
        remembered: Remembered,
        find: Callable[[Address, str], Known | None],
        serde: SerializerProtocol,
    ) -> None:
        self._saving = saving
        self._guarded = guarded
        self._remembered = remembered
        self._find = find
        self._serde = serde

    @property
    def config(self) -> RunnableConfig:
        """The config of the checkpoint."""
        return self._saving.address.config(self._saving.checkpoint_id)

    def planned(self) -> FencedWrite:
        """The write, with everything found out that needs no lock: what each value is a difference to."""
        saving = self._saving
        where = saving.address
        parent = self._parent()
        kept, changed = _split(saving, parent, self._serde)
        before = parent.state if parent else {}
        values = {channel: Planned(value, before.get(channel)) for channel, value in changed.items()}
        same = {
            channel: before[channel]
            for channel, value in changed.items()
            if channel in before and before[channel].value == value
        }
        for channel in same:
            del values[channel]
        body = Planned(saving.body, parent.body if parent else None)

        def store(part: Part) -> Known:
            if parent is not None and not part.rows(tables.IS_SAVED, (parent.number, parent.body.number)):
                raise ParentGone
            history = history_of(part, where)
            stored_body = body.store(part, history, None)
            state = {**kept, **same}
            state.update((channel, each.store(part, history, channel)) for channel, each in values.items())
            number = _store_checkpoint(part, history, saving, stored_body.number)
            part.executemany(tables.ADD_STATE, [(number, each.number) for each in state.values()])
            detail = {"checkpoint_id": saving.checkpoint_id, "checkpoint_ns": where.namespace}
            part.event(
                "langgraph.checkpoint-saved", {**detail, "source": saving.source, "step": saving.step}, sequence=number
            )
            return Known(number, saving.checkpoint_id, stored_body, saving.versions, state)

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
        found = self._remembered.find(where.thread_id, where.namespace, where.checkpoint_id)
        return found or self._find(where, where.checkpoint_id)


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

        def store(part: Part) -> None:
            history = history_of(part, where)
            for write in self._writes:
                row = (self._task_id, write.index, self._task_path, write.channel, *write.value)
                part.run(
                    tables.ADD_WRITE if write.index >= 0 else tables.REPLACE_WRITE,
                    (history, where.checkpoint_id, *row),
                )
            detail = {"checkpoint_id": where.checkpoint_id, "checkpoint_ns": where.namespace}
            part.event("langgraph.writes-saved", {**detail, "task_id": self._task_id, "count": len(self._writes)})

        return self._guarded("langgraph.save-writes", store)

    def settle(self, answer: None) -> None:
        """It is committed."""

    def retries(self) -> None:
        """Never: writes build on nothing."""


def history_of(part: Part, where: Address) -> int:
    """The number of a namespace of a thread, which begins with its first write."""
    key = (where.thread_id, where.namespace)
    found = part.rows(tables.FIND_HISTORY, key) or part.rows(tables.ADD_HISTORY, key)
    number: int = found[0][0]
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
        elif channel in saving.values:
            changed[channel] = mapping.serialized(serde, channel, saving.values[channel])
    return kept, changed


def _store_checkpoint(part: Part, history: int, saving: Saving, body: int) -> int:
    row = (saving.address.checkpoint_id, saving.format, saving.source, saving.step, saving.run_id, *saving.metadata)
    found = part.rows(tables.FIND_CHECKPOINT, (history, saving.checkpoint_id))
    if found:
        number: int = found[0][0]
        part.run(tables.REPLACE_CHECKPOINT, (*row, body, number))
        part.run(tables.REMOVE_STATE, (number,))
    else:
        ((number,),) = part.rows(tables.ADD_CHECKPOINT, (history, saving.checkpoint_id, *row, body))
    return number
