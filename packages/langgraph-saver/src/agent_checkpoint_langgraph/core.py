"""What a saver and its clones share: the store, its tables, who writes under which lease, the threads for asyncio."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakSet

from agent_checkpoint import FencedWrite, InvalidInputError, Part, StateStore
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint_langgraph import mapping, ownership, removing, tables
from agent_checkpoint_langgraph.migrations import migrations
from agent_checkpoint_langgraph.remembered import Remembered
from agent_checkpoint_langgraph.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import Part
    from agent_checkpoint_langgraph.ownership import ThreadLease
    from agent_checkpoint_langgraph.saving import Guarded

T = TypeVar("T")
Fencing = Literal["optional", "required", "off"]

# Reads go on beside the one writer.
READERS = 4


# Rows that are removed in one transaction: little enough that no heartbeat waits long.
BATCH = 200

_cores: WeakSet[Core] = WeakSet()


class Core:
    """See the module."""

    def __init__(self, store: StateStore, fencing: str, metadata_deny: Callable[[str], bool] | Iterable[str]) -> None:
        if not isinstance(store, StateStore):
            raise InvalidInputError(
                f"store: must be a StateStore, not {type(store).__name__}",
                hint="AgentCheckpointSaver.from_conn_string(path) opens one",
                field="store",
            )
        if fencing not in ("optional", "required", "off"):
            raise InvalidInputError("fencing: must be optional, required or off", field="fencing")
        self.store = store
        self.awaited = AsyncStateStore.of(store)
        self.fencing = fencing
        self.is_secret = metadata_deny if callable(metadata_deny) else frozenset(metadata_deny).__contains__
        self.bound: dict[str, ThreadLease] = {}
        self._is_prepared = False
        self.begin()
        _cores.add(self)

    def begin(self) -> None:
        """What a forked child needs anew: it has none of its parent's threads, and perhaps their locks."""
        self.remembered = Remembered()
        self.writer = Writer(self.store, self.prepare)
        self._preparing = Lock()
        self._readers: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        """Create the store and the tables, the first time."""
        if self._is_prepared:
            return
        with self._preparing:
            self.store.initialize()
            self.store.migrate(mapping.COMPONENT, migrations())
            self._is_prepared = True

    def find_lease(self, config: RunnableConfig | None, thread_id: str) -> ThreadLease | None:
        """The lease of a thread: from the config, the context, or what was bound."""
        return ownership.find(config, (self.store.database, thread_id)) or self.bound.get(thread_id)

    def guarded(
        self, config: RunnableConfig | None, thread_id: str, *, takes: bool = False, reads: str | None = None
    ) -> Guarded:
        """How to write to a thread in this context, one at a time.

        ``takes``: without a lease, under one for this write alone. ``reads``:
        another thread, which nobody writes to meanwhile.
        """
        scope = mapping.scope_of(thread_id)
        locks = () if reads is None else (f"workflow:{mapping.scope_of(reads)}",)
        if self.fencing == "off":
            return lambda action, body: FencedWrite(mapping.COMPONENT, action, body, workflow=scope, locks=locks)
        lease = self.find_lease(config, thread_id)
        taker = ownership.default_owner() if takes else None

        def write(action: str, body: Callable[[Part], Any]) -> FencedWrite:
            return FencedWrite(
                mapping.COMPONENT,
                action,
                body,
                lease,
                workflow=scope,
                locks=locks,
                scope=scope,
                required=self.fencing == "required",
                takes=taker,
            )

        return write

    def change(self, thread_id: str, action: str, body: Callable[[Part], T], *, reads: str | None = None) -> T:
        """Remove something of a thread, or copy another one into it, and give the space back."""
        answer = self._change(thread_id, action, body, reads)
        self.store.shrink()
        return answer

    def prune(self, thread_id: str, keep_last: int, serde: SerializerProtocol) -> None:
        """Remove the older checkpoints of a thread, in short transactions."""
        self.prepare()
        with self.store.read() as reader:
            found = removing.prunable(reader, thread_id, keep_last, serde)
        for history, doomed in found:
            for some in _batches(doomed):
                act = partial(removing.prune, history=history, doomed=some, keep_last=keep_last)
                self._change(thread_id, "langgraph.prune-thread", act)
            # Also where nothing is to be removed: an earlier call may have been interrupted.
            self._remove_unused(thread_id, history)
        self.store.shrink()

    def _remove_unused(self, thread_id: str, history: int) -> None:
        with self.store.read() as reader:
            unused = removing.unused(reader.rows, history)
        for some in _batches(unused):
            remove = partial(Part.executemany, sql=tables.REMOVE_VALUE, parameters=some)
            self._change(thread_id, "langgraph.prune-thread", remove)

    def _change(self, thread_id: str, action: str, body: Callable[[Part], T], reads: str | None = None) -> T:
        self.prepare()
        (outcome,) = self.store.write_all([self.guarded(None, thread_id, takes=True, reads=reads)(action, body)])
        self.remembered.forget(thread_id)
        if outcome.error is not None:
            raise outcome.error
        answer: T = outcome.answer
        return answer

    def threads_of_run(self, run_id: str) -> list[str]:
        """The threads that a run saved something in."""
        self.prepare()
        with self.store.read() as reader:
            return list(dict.fromkeys(row[0] for row in reader.rows(tables.OF_RUN, (run_id,))))

    async def run(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a method in one of the reading threads."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="agent-checkpoint-langgraph-read")
        call = partial(copy_context().run, method, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    def close(self, *, store: bool) -> None:
        """End the threads once they are done, and close the store if that is asked."""
        self.writer.close()
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.shutdown()
        if store:
            self.store.close()


def _batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    return (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))


def _begin_in_child() -> None:
    for core in _cores:
        core.begin()


os.register_at_fork(after_in_child=_begin_in_child)
