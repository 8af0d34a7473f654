"""Deleting, pruning and copying threads: what is done behind the lock.

A value that nothing names any more stays while another one is the difference to
it; it goes with the last of those. Nothing is rewritten for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph import tables
from agent_checkpoint_langgraph.needed import needed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import Part
    from agent_checkpoint.database import Reader, Row


def delete_thread(part: Part, thread_id: str) -> int:
    """Remove all of a thread; how many checkpoints it had."""
    histories = part.rows(tables.HISTORIES, (thread_id,))
    removed = 0
    for history, _ in histories:
        for sql in (tables.REMOVE_WRITES, tables.REMOVE_ALL_STATE, tables.REMOVE_VALUES):
            part.run(sql, (history,))
        removed += part.run(tables.REMOVE_CHECKPOINTS, (history,))
        part.run(tables.REMOVE_HISTORY, (history,))
    if histories:
        part.event("langgraph.thread-deleted", {"checkpoints": removed})
    return removed


def delete_run(part: Part, thread_id: str, run_id: str, serde: SerializerProtocol) -> int:
    """Remove what a run saved in a thread, but for what others are computed from; how many checkpoints that were."""
    removed = 0
    for history, _ in part.rows(tables.HISTORIES, (thread_id,)):
        rows = part.rows(tables.OF_HISTORY, (history,))
        stays = needed(part.rows, history, rows, [row for row in rows if row[3] != run_id], serde)
        doomed = [(row[0], row[1]) for row in rows if row[3] == run_id and row[0] not in stays]
        remove(part, history, doomed)
        remove_unused(part, history)
        removed += len(doomed)
    if removed:
        part.event("langgraph.run-deleted", {"run_id": run_id, "checkpoints": removed})
    return removed


def checked_keep(strategy: str, keep_last: int | None) -> int | None:
    """How many checkpoints of each namespace a strategy keeps; None: not even the thread.

    Raises:
        InvalidInputError: there is no such strategy, or it keeps no such number.
    """
    if strategy not in ("keep_latest", "delete"):
        raise InvalidInputError("strategy: must be keep_latest or delete", field="strategy")
    if strategy == "delete" and keep_last is None:
        return None
    keep = 1 if keep_last is None else keep_last
    if strategy == "delete" or type(keep) is not int or keep < 1:
        raise InvalidInputError("keep_last: must be a number from 1 on, with strategy keep_latest", field="keep_last")
    return keep


def prunable(
    reader: Reader, thread_id: str, keep_last: int, serde: SerializerProtocol
) -> list[tuple[int, list[tuple[int, str]]]]:
    """For each namespace the checkpoints to remove, the oldest first: all but the last ones.

    What those that stay are computed from, stays as well. What is saved
    meanwhile needs nothing of what is listed here.
    """
    found = []
    for history, _ in reader.rows(tables.HISTORIES, (thread_id,)):
        rows = reader.rows(tables.OF_HISTORY, (history,))
        stays = needed(reader.rows, history, rows, rows[:keep_last], serde)
        found.append((history, [(row[0], row[1]) for row in reversed(rows) if row[0] not in stays]))
    return found


def prune(part: Part, history: int, doomed: Sequence[tuple[int, str]], keep_last: int) -> None:
    """Remove some checkpoints of a namespace; their values are looked after once all are gone."""
    remove(part, history, doomed)
    part.event("langgraph.thread-pruned", {"checkpoints": len(doomed), "keep_last": keep_last})


def copy_thread(part: Part, source: str, target: str) -> int:
    """Put a copy of each checkpoint of one thread into another one; how many there are."""
    copied = sum(
        _copy_history(part, history, (target, name)) for history, name in part.rows(tables.HISTORIES, (source,))
    )
    if copied:
        part.event("langgraph.thread-copied", {"from_thread": source, "checkpoints": copied})
    return copied


def _copy_history(part: Part, history: int, target: tuple[str, str]) -> int:
    ((new_history,),) = part.rows(tables.FIND_HISTORY, target) or part.rows(tables.ADD_HISTORY, target)
    ids = part.rows(tables.IDS, (history,))
    replaced = [
        (number, checkpoint_id)
        for _, checkpoint_id in ids
        for (number,) in part.rows(tables.FIND_CHECKPOINT, (new_history, checkpoint_id))
    ]
    remove(part, new_history, replaced)
    remove_unused(part, new_history)  # first: what is copied has no checkpoint yet that needs it
    values: dict[int | None, int | None] = {None: None}
    for number, base in part.rows(tables.BASES, (history,)):
        ((values[number],),) = part.rows(tables.COPY_VALUE, (new_history, values[base], number))
    state: dict[int, list[int]] = {}
    for checkpoint, value in part.rows(tables.STATE_OF_HISTORY, (history,)):
        state.setdefault(checkpoint, []).append(value)
    for number, _ in ids:
        ((new,),) = part.rows(tables.COPY_CHECKPOINT, (new_history, number))
        for statement in tables.adding(tables.ADD_STATE, [(new, values[value]) for value in state.get(number, ())]):
            part.run(*statement)
    part.run(tables.COPY_WRITES, (new_history, history))
    return len(ids)


def remove(part: Part, history: int, gone: Sequence[tuple[int, str]]) -> None:
    """Remove some checkpoints of a namespace with their writes. Their values stay: see ``remove_unused``."""
    part.executemany(tables.REMOVE_STATE, [(number,) for number, _ in gone])
    part.executemany(tables.REMOVE_CHECKPOINT, [(number,) for number, _ in gone])
    part.executemany(tables.REMOVE_WRITES_OF, [(history, checkpoint_id) for _, checkpoint_id in gone])


def unused(rows: Callable[..., list[Row]], history: int) -> list[tuple[int]]:
    """The values of a namespace that no checkpoint has, and nothing is a difference to.

    They can never be used again: a checkpoint gets new values, and those of its parent.
    """
    needed: set[int | None] = {value for _, value in rows(tables.STATE_OF_HISTORY, (history,))}
    found = []
    # From the newest on: a value comes before what it is a difference to.
    for number, base in reversed(rows(tables.BASES, (history,))):
        if number in needed:
            needed.add(base)
        else:
            found.append((number,))
    return found


def remove_unused(part: Part, history: int) -> None:
    """Remove the values that nobody needs any more."""
    part.executemany(tables.REMOVE_VALUE, unused(part.rows, history))
