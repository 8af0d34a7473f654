"""The rule ``langgraph.thread_days`` of a store's retention policy: threads that nobody went on with go, each whole."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING

from agent_checkpoint import LeaseHeldError
from agent_checkpoint_langgraph import mapping, removing
from agent_checkpoint_langgraph.saver import AgentCheckpointSaver

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import Part, StateStore

    Rows = Callable[..., list[Any]]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
HISTORIES = "langgraph_histories"
# What was saved last in a thread, in whichever namespace.
LATEST = """
SELECT c.kind, c.data FROM langgraph_checkpoints c JOIN langgraph_histories h ON h.number = c.history
WHERE h.thread_id = ?
ORDER BY c.number DESC
LIMIT 1
"""


def apply(store: StateStore, days: float, dry_run: bool) -> int:
    """Remove each thread whose latest checkpoint is older than so many days; how many, or with ``dry_run`` would be.

    A thread's age is its checkpoint's own ``ts``, by the store's clock. What is
    leased stays, and so does a thread whose checkpoint cannot be read here.
    """
    with store.read() as reader:
        if all(table.name != HISTORIES for table in reader.tables()):
            return 0
        now = EPOCH + timedelta(microseconds=reader.moment.wall_ns // 1000)
    saver = AgentCheckpointSaver(store)
    try:
        is_old = partial(_is_old, serde=saver.serde, before=now - timedelta(days=days))
        return sum(_remove(saver, info.thread_id, is_old, dry_run) for info in saver.list_threads())
    finally:
        saver.close()


def _remove(saver: AgentCheckpointSaver, thread_id: str, is_old: Callable[[Rows, str], bool], dry_run: bool) -> bool:
    """Remove one thread, if it is old, and nobody has it; whether it was, or would be."""
    with saver.store.read() as reader:
        if not is_old(reader.rows, thread_id):
            return False
    if saver.store.get_lease(mapping.scope_of(thread_id)) is not None:
        return False
    if dry_run:
        return True

    def delete(part: Part) -> int:
        # Once more, behind the lock: somebody may have gone on with it.
        return removing.delete_thread(part, thread_id) if is_old(part.rows, thread_id) else 0

    try:
        return saver._core.change(thread_id, "langgraph.delete-thread", delete) > 0
    except LeaseHeldError:  # since a moment ago
        return False


def _is_old(rows: Rows, thread_id: str, serde: SerializerProtocol, before: datetime) -> bool:
    for kind, data in rows(LATEST, (thread_id,)):
        try:
            saved = datetime.fromisoformat(serde.loads_typed((kind, data))["ts"].replace("Z", "+00:00"))
        except Exception:
            logging.getLogger(__name__).warning("thread %r stays: its age cannot be read", thread_id, exc_info=True)
            return False
        return (saved if saved.tzinfo else saved.replace(tzinfo=timezone.utc)) < before
    return False
