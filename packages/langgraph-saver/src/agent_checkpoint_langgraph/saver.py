"""``AgentCheckpointSaver``: LangGraph's checkpoint saver on the store. It delegates."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from langgraph.checkpoint.base import BaseCheckpointSaver

from agent_checkpoint import InvalidInputError, StateStore
from agent_checkpoint_langgraph import ancestry, mapping, reading, removing
from agent_checkpoint_langgraph.core import Core
from agent_checkpoint_langgraph.mapping import storable
from agent_checkpoint_langgraph.ownership import LeaseBlock, ThreadLease, thread_of
from agent_checkpoint_langgraph.saving import CheckpointSave, WritesSave
from agent_checkpoint_langgraph.serde import checked
from agent_checkpoint_langgraph.supersteps import Supersteps, next_version, note_read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
    from os import PathLike
    from types import TracebackType

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        ChannelVersions,
        Checkpoint,
        CheckpointMetadata,
        CheckpointTuple,
        DeltaChannelHistory,
    )
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint_langgraph.core import Fencing
    from agent_checkpoint_langgraph.importer import ImportReport
    from agent_checkpoint_langgraph.mapping import Address
    from agent_checkpoint_langgraph.pages import Header, Page
    from agent_checkpoint_langgraph.reading import ThreadInfo

    Deny = Callable[[str], bool] | Iterable[str]

# LangGraph saves for a task that was cancelled in a callback, which comes so many turns of the loop later at most.
TURNS = 5

Self = TypeVar("Self", bound="AgentCheckpointSaver")


class AgentCheckpointSaver(BaseCheckpointSaver[str]):
    """Keeps the checkpoints of LangGraph threads in a store, and refuses the writes of superseded workers.

    One class for sync and async code, from any thread and any event loop. The
    store and its tables are made on first use.

    Args:
        store: where; the same one may serve leases and checkpoints of other kinds.
        serde: another serializer than the strict msgpack one.
        fencing: ``"optional"``: a thread needs a lease from its first one on;
            ``"required"``: always; ``"off"``: never.
        metadata_deny: which keys of config and metadata are not stored: a
            function of the key, or names. Without it those that look like
            credentials (``openai_api_key``, ``auth_token``, …).

    Every method may raise a ``StorageError``; those that write raise
    ``StaleLeaseError`` where the writer's lease is not live, or is missing, and
    ``FenceRefusedError`` where a plugin vetoes. ``a…`` methods are the same, awaited.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        serde: SerializerProtocol | None = None,
        fencing: Fencing = "optional",
        metadata_deny: Deny = mapping.looks_secret,
    ) -> None:
        super().__init__(serde=checked(serde))
        self._core = Core(store, fencing, metadata_deny)
        self._owns_store = False

    @classmethod
    def from_conn_string(
        cls: type[Self],
        conn_string: str | PathLike[str],
        *,
        serde: SerializerProtocol | None = None,
        fencing: Fencing = "optional",
        metadata_deny: Deny = mapping.looks_secret,
        **store_options: Any,
    ) -> Self:
        """A saver on a store of its own at a path or URL, for ``with`` or ``async with``, which close it.

        ``store_options`` are those of ``StateStore``.
        """
        store = StateStore(conn_string, **store_options)
        saver = cls(store, serde=serde, fencing=fencing, metadata_deny=metadata_deny)
        saver._owns_store = True
        return saver

    @property
    def store(self) -> StateStore:
        """The store that it keeps everything in."""
        return self._core.store

    def setup(self) -> None:
        """Create the store and the tables; idempotent, and done by itself on first use."""
        self._core.prepare()

    async def asetup(self) -> None:
        """See ``setup``."""
        await self._core.run(self.setup)

    # Ownership

    def lease(
        self,
        thread_id: Any,
        *,
        owner: str | None = None,
        ttl_seconds: float = 30,
        wait_seconds: float = 0,
        multitask_strategy: str = "reject",
        in_context: bool = True,
        **options: Any,
    ) -> LeaseBlock:
        """A ``with`` or ``async with`` block that holds the lease of a thread and gives a ``ThreadLease``.

        It is renewed in the background. Pass ``lease.config(config)`` to the
        graph: then a run that loses it stops before its next node. Code in the
        block's context writes under it anyway, unless ``in_context`` is False.
        ``multitask_strategy``: see ``leased``. The rest is as for ``StateStore.hold``.

        Raises:
            LeaseHeldError: at the start: another one holds it.
            StaleLeaseError: at the end, when it was lost and the block raised nothing.
            InvalidInputError: a value breaks its rule.
        """
        core = self._core
        return LeaseBlock(
            core.store,
            core.awaited,
            core.prepare,
            thread_id,
            owner=owner,
            wait_seconds=wait_seconds,
            multitask_strategy=multitask_strategy,
            in_context=in_context,
            options={"ttl_seconds": ttl_seconds, **options},
        )

    def bind(self, lease: Any, thread_id: Any = None) -> ThreadLease:
        """Let every write to a thread through this saver present a lease that was taken elsewhere.

        As in a worker that was started by ``agent-checkpoint run langgraph/<thread_id>``:
        ``saver.bind(Lease.from_env())``. It is checked before each superstep
        and each write; for a check before each node pass ``lease.config(config)`` as well.

        Raises:
            InvalidInputError: its scope is not that of the thread.
        """
        name = thread_of(lease.fence.scope) if thread_id is None else mapping.thread_name(thread_id)
        if mapping.scope_of(name) != lease.fence.scope:
            raise InvalidInputError(f"lease: is of scope {lease.fence.scope!r}, not of thread {name!r}", field="lease")
        bound = (
            lease if isinstance(lease, ThreadLease) else ThreadLease(self._core.store, name, lease, self._core.awaited)
        )
        if bound.key[0] != self._core.store.database:
            raise InvalidInputError(f"lease: is of the store {bound.key[0]}", field="lease")
        self._core.bound[name] = bound
        return bound

    def unbind(self, thread_id: Any) -> None:
        """Undo ``bind``; idempotent."""
        self._core.bound.pop(mapping.thread_name(thread_id), None)

    def find_lease(self, config: RunnableConfig | None, thread_id: Any) -> ThreadLease | None:
        """The lease that a write to the thread would present: from the config, the context, or what was bound."""
        return self._core.find_lease(config, mapping.thread_name(thread_id))

    @property
    def get_next_version(self) -> Supersteps:
        """Counts the versions of channels for one run, and checks its lease before each superstep."""
        return Supersteps(self._core)

    # Reading

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that the config names, or the latest of its thread and namespace; None if there is none."""
        return self._get_tuple(self._noted(config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See ``get_tuple``."""
        where = self._noted(config)
        return await self._core.run(self._get_tuple, where)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """The checkpoints of a thread (of one namespace, where the config names it; of all threads without a config).

        Newest first. ``filter`` compares metadata, ``before`` leaves out the
        checkpoint that it names and all that were saved after it, ``limit``
        counts what passed both. Nothing is locked while the caller goes through them.
        """
        self._core.prepare()
        for page, headers in self._pages(config, filter, before, limit):
            for header in headers:
                yield page.tuple(header, self.serde, next_version)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """See ``list``."""
        await self.asetup()
        pages = self._pages(config, filter, before, limit)

        def next_page() -> Sequence[CheckpointTuple] | None:
            page, headers = next(pages, (None, ()))
            return None if page is None else [page.tuple(each, self.serde, next_version) for each in headers]

        while (found := await self._core.run(next_page)) is not None:
            for each in found:
                yield each

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """For each channel the writes on the way to a checkpoint since its value was stored, and that value."""
        self._core.prepare()
        return ancestry.histories(self._core.store, self.serde, mapping.address(config), channels)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """See ``get_delta_channel_history``."""
        return await self._core.run(self.get_delta_channel_history, config=config, channels=channels)

    def list_threads(self) -> Sequence[ThreadInfo]:
        """Every thread, the one that was written last first."""
        self._core.prepare()
        return reading.threads(self._core.store)

    async def alist_threads(self) -> Sequence[ThreadInfo]:
        """See ``list_threads``."""
        return await self._core.run(self.list_threads)

    # Writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Save a checkpoint whose parent the config names; the config of the checkpoint.

        Raises:
            InvalidInputError: a value cannot be serialised; it names the channel.
        """
        job = self._checkpoint_save(config, checkpoint, metadata, new_versions)
        self._core.writer.save(job)
        return job.config

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See ``put``. Saves that come at once share a commit; one that is cancelled before its turn is not made."""
        job = self._checkpoint_save(config, checkpoint, metadata, new_versions)
        await self._core.writer.submit(job)
        return job.config

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote on top of a checkpoint, which may be saved later. See ``put``.

        A regular write stays as it was first saved; an error, interrupt,
        resume or schedule is replaced.
        """
        self._core.writer.save(self._writes_save(config, writes, task_id, task_path))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See ``put_writes`` and ``aput``."""
        job = self._writes_save(config, writes, task_id, task_path)
        await self._core.writer.submit(job)

    async def _settled(self) -> None:
        """Until what this event loop is about to save, as for a task that was cancelled, is saved."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await self._core.writer.settled()

    # Removing and copying: without a lease, a thread that ever had one is taken for the one transaction

    def delete_thread(self, thread_id: Any) -> None:
        """Remove a thread. Whoever ran it is refused from then on, where it was ever leased.

        Raises:
            LeaseHeldError: another one holds its lease.
        """
        name = mapping.thread_name(thread_id)
        self._core.change(name, "langgraph.delete-thread", lambda part: removing.delete_thread(part, name))

    async def adelete_thread(self, thread_id: Any) -> None:
        """See ``delete_thread``."""
        await self._core.run(self.delete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove what these runs saved, in every thread; each thread as by ``delete_thread``.

        What the checkpoints of other runs are computed from stays, as in ``prune``.
        """
        for run_id in [storable("run_id", str(run_id)) for run_id in run_ids]:
            for name in self._core.threads_of_run(run_id):
                delete = partial(removing.delete_run, thread_id=name, run_id=run_id, serde=self.serde)
                self._core.change(name, "langgraph.delete-run", delete)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See ``delete_for_runs``."""
        await self._core.run(self.delete_for_runs, run_ids)

    def copy_thread(self, source_thread_id: Any, target_thread_id: Any) -> None:
        """Copy a thread's checkpoints and writes into another one, where those of the same id are replaced.

        Raises:
            LeaseHeldError: another one holds the target's lease.
        """
        source, target = mapping.thread_name(source_thread_id), mapping.thread_name(target_thread_id)
        if source == target:
            raise InvalidInputError("target_thread_id: is the source", field="target_thread_id")
        copy = partial(removing.copy_thread, source=source, target=target)
        self._core.change(target, "langgraph.copy-thread", copy, reads=source)

    async def acopy_thread(self, source_thread_id: Any, target_thread_id: Any) -> None:
        """See ``copy_thread``."""
        await self._core.run(self.copy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[Any], *, strategy: str = "keep_latest", keep_last: int | None = None) -> None:
        """Remove the older checkpoints of threads, of each namespace all but the latest (or the ``keep_last`` latest).

        ``strategy="delete"`` removes the threads. What a checkpoint that stays
        is computed from stays too: the ancestors of a channel that is saved as
        its changes (``DeltaChannel``), back to its last snapshot.

        Raises:
            LeaseHeldError: another one holds the lease of a thread; those before it are done.
            InvalidInputError: another strategy, or ``keep_last`` is less than 1.
        """
        keep = removing.checked_keep(strategy, keep_last)
        for name in map(mapping.thread_name, thread_ids):
            if keep is None:
                self.delete_thread(name)
            else:
                self._core.prune(name, keep, self.serde)

    async def aprune(
        self, thread_ids: Sequence[Any], *, strategy: str = "keep_latest", keep_last: int | None = None
    ) -> None:
        """See ``prune``."""
        await self._core.run(self.prune, thread_ids, strategy=strategy, keep_last=keep_last)

    # The rest

    def import_threads(
        self, path: str | PathLike[str], *, on_progress: Callable[[int, int], object] | None = None
    ) -> ImportReport:
        """Save all that a file of LangGraph's ``SqliteSaver`` has. See ``importer.import_threads``."""
        from agent_checkpoint_langgraph.importer import import_threads

        return import_threads(self, path, on_progress=on_progress)

    async def aimport_threads(
        self, path: str | PathLike[str], *, on_progress: Callable[[int, int], object] | None = None
    ) -> ImportReport:
        """See ``import_threads``; ``on_progress`` is called in another thread."""
        return await self._core.run(self.import_threads, path, on_progress=on_progress)

    def close(self) -> None:
        """End the threads for asyncio, and close the store of ``from_conn_string``; idempotent."""
        self._core.close(store=self._owns_store)

    async def aclose(self) -> None:
        """See ``close``."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AgentCheckpointSaver({self.store.database!r}, fencing={self._core.fencing!r})"

    def _noted(self, config: RunnableConfig) -> Address:
        """Where a config points; a run that begins there is checked from now on."""
        where = mapping.address(config)
        note_read(self._core, where.thread_id, self._core.find_lease(config, where.thread_id))
        return where

    def _get_tuple(self, where: Address) -> CheckpointTuple | None:
        self._core.prepare()
        found = reading.find(self._core.store, where, self._core.remembered)
        if found is None:
            return None
        header, page = found
        if where.checkpoint_id is None:  # a run that goes on from here saves what differs from it
            self._core.remembered.note(where.thread_id, where.namespace, page.known(header, self.serde))
        return page.tuple(header, self.serde, next_version)

    def _pages(
        self,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Iterator[tuple[Page, Sequence[Header]]]:
        search = reading.search_for(self._core.store, config, filter, before)
        return reading.pages(self._core.store, self.serde, search, limit)

    def _checkpoint_save(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> CheckpointSave:
        core = self._core
        parent = core.remembered.parent_of(mapping.address(config))
        known_versions = parent.versions if parent else {}
        saving = mapping.saving(self.serde, core.is_secret, config, checkpoint, metadata, new_versions, known_versions)
        stock = reading.Stock(core.store, self.serde)
        return CheckpointSave(saving, core.guarded(config, saving.address.thread_id), core.remembered, stock)

    def _writes_save(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> WritesSave:
        where = mapping.address(config)
        if where.checkpoint_id is None:
            raise InvalidInputError("checkpoint_id: writes belong to a checkpoint", field="checkpoint_id")
        guarded = self._core.guarded(config, where.thread_id)
        task_id, task_path = storable("task_id", str(task_id)), storable("task_path", str(task_path))
        return WritesSave(where, mapping.task_writes(self.serde, writes), task_id, task_path, guarded)
