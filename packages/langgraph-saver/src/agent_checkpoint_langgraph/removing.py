"""Deleting, pruning and copying threads: what is done behind the lock.

A value that nothing names any more stays while another one is the difference to
it; it goes with the last of those. Nothing is rewritten for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph import mapping, tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import Part

# Checkpoints that are removed in one transaction: little enough that no heartbeat waits long.
BATCH = 200


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


def delete_run(part: Part, thread_id: str, run_id: str) -> int:
    """Remove what a run saved in a thread; how many checkpoints that were."""
    rows = [row for row in part.rows(tables.OF_RUN, (run_id,)) if row[0] == thread_id]
    for history in {history for _, history, _, _ in rows}:
        _remove(part, history, [(number, checkpoint_id) for _, of, number, checkpoint_id in rows if of == history])
    if rows:
        part.event("langgraph.run-deleted", {"run_id": run_id, "checkpoints": len(rows)})
    return len(rows)


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


def prune_thread(part: Part, thread_id: str, keep_last: int, serde: SerializerProtocol) -> int:
    """Remove the oldest checkpoints of a thread but the last ones of each namespace, a batch; how many those were.

    What those that stay are computed from, stays as well: the ancestors since
    the last stored value of each channel that is saved as its changes.
    """
    removed = 0
    for history, _ in part.rows(tables.HISTORIES, (thread_id,)):
        rows = part.rows(tables.OF_HISTORY, (history,))
        needed = _needed(part, rows, keep_last, serde)
        doomed = [(number, checkpoint_id) for number, checkpoint_id, *_ in reversed(rows) if number not in needed]
        doomed = doomed[: BATCH - removed]
        _remove(part, history, doomed)
        removed += len(doomed)
    if removed:
        part.event("langgraph.thread-pruned", {"checkpoints": removed, "keep_last": keep_last})
    return removed


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
    _remove(part, new_history, replaced)  # first: what is copied has no checkpoint yet that needs it
    values: dict[int | None, int | None] = {None: None}
    for number, base in part.rows(tables.BASES, (history,)):
        ((values[number],),) = part.rows(tables.COPY_VALUE, (new_history, values[base], number))
    state: dict[int, list[int]] = {}
    for checkpoint, value in part.rows(tables.STATE_OF_HISTORY, (history,)):
        state.setdefault(checkpoint, []).append(value)
    for number, _ in ids:
        ((new,),) = part.rows(tables.COPY_CHECKPOINT, (new_history, number))
        part.executemany(tables.ADD_STATE, [(new, values[value]) for value in state.get(number, ())])
    part.run(tables.COPY_WRITES, (new_history, history))
    return len(ids)


def _needed(part: Part, rows: Sequence[Sequence[Any]], keep_last: int, serde: SerializerProtocol) -> set[int]:
    """The last checkpoints of a namespace, and the ancestors without which their state cannot be put together."""
    by_id = {row[1]: row for row in rows}
    needed = {row[0] for row in rows[:keep_last]}
    for row in rows[:keep_last]:
        metadata = mapping.metadata_value(serde, row[4], row[5])
        channels = set(metadata.get("counters_since_delta_snapshot") or ())
        walked, ancestor = {row[0]}, by_id.get(row[2])
        while channels and ancestor is not None and ancestor[0] not in walked:
            walked.add(ancestor[0])
            channels -= {channel for _, channel in part.rows(*tables.among(tables.CHANNELS_OF, [ancestor[0]]))}
            ancestor = by_id.get(ancestor[2])
        needed |= walked
    return needed


def _remove(part: Part, history: int, checkpoints: Iterable[tuple[int, str]]) -> None:
    """Remove some checkpoints of a namespace with their writes, and the values that nobody needs any more."""
    gone = list(checkpoints)
    if not gone:
        return
    part.executemany(tables.REMOVE_STATE, [(number,) for number, _ in gone])
    part.executemany(tables.REMOVE_CHECKPOINT, [(number,) for number, _ in gone])
    part.executemany(tables.REMOVE_WRITES_OF, [(history, checkpoint_id) for _, checkpoint_id in gone])
    remove_unused(part, history)


def remove_unused(part: Part, history: int) -> None:
    """Remove the values of a namespace that no checkpoint has, and nothing is a difference to."""
    needed: set[int | None] = {value for _, value in part.rows(tables.STATE_OF_HISTORY, (history,))}
    unused = []
    # From the newest on: a value comes before what it is a difference to.
    for number, base in reversed(part.rows(tables.BASES, (history,))):
        if number in needed:
            needed.add(base)
        else:
            unused.append((number,))
    part.executemany(tables.REMOVE_VALUE, unused)
