"""``AsyncStateStore``: the same door, awaited.

Each call runs on a small pool of threads, never on the event loop, which a
fsync would stall. A call that is cancelled goes on in its thread and may still
take effect. Those that grant a lease or begin an effect (``acquire``, ``hold``,
``effect``) wait for it, at most the busy timeout, and give back what they got.
"""

from __future__ import annotations

import asyncio
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from agent_checkpoint import aholding, leases, names, waiting
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.names import NOTHING
from agent_checkpoint.store import StateStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from types import TracebackType
    from typing import Any, Literal, ParamSpec, TypeVar

    from agent_checkpoint.aacting import AsyncActing
    from agent_checkpoint.acting import Resolution
    from agent_checkpoint.aholding import AsyncHeldLease, AsyncHold
    from agent_checkpoint.archive import Archived
    from agent_checkpoint.change import Outcome
    from agent_checkpoint.clock import Clock
    from agent_checkpoint.exchange import Imported
    from agent_checkpoint.fenced import FencedWrite
    from agent_checkpoint.process import ProcessTable
    from agent_checkpoint.records import (
        Check,
        Checkpoint,
        CheckpointInfo,
        Effect,
        Event,
        Fenced,
        Lease,
        Limit,
        Pruned,
        Status,
    )
    from agent_checkpoint.restoring import Backup, Restored
    from agent_checkpoint.retention import Freed
    from agent_checkpoint.transfer import Moved

    P = ParamSpec("P")
    T = TypeVar("T")

# SQLite has one writer at a time; a few threads let reads go on beside it.
THREADS = 4


class AsyncStateStore:
    """``StateStore`` for asyncio: the same methods and arguments, awaited.

    ``transaction`` and ``read`` are missing on purpose: a block that awaits
    inside would hold the write lock, or an old state, for as long as others please.
    """

    def __init__(
        self,
        database: str | os.PathLike[str],
        *,
        busy_timeout_seconds: float = 10,
        synchronous: Literal["full", "normal"] = "full",
        plugins: Sequence[object] = (),
        max_payload_bytes: int = 16 * 1024 * 1024,
        clock: Clock | None = None,
        processes: ProcessTable | None = None,
    ) -> None:
        self._begin_with(
            StateStore(
                database,
                busy_timeout_seconds=busy_timeout_seconds,
                synchronous=synchronous,
                plugins=plugins,
                max_payload_bytes=max_payload_bytes,
                clock=clock,
                processes=processes,
            ),
            owned=True,
        )

    @classmethod
    def of(cls, store: StateStore) -> AsyncStateStore:
        """The awaited door to a store that is in use already. Closing it leaves the store open."""
        door = cls.__new__(cls)
        door._begin_with(store, owned=False)
        return door

    def _begin_with(self, store: StateStore, *, owned: bool) -> None:
        self._store = store
        self._owned = owned
        self._closed = False
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0

    @property
    def database(self) -> str:
        """See ``StateStore.database``."""
        return self._store.database

    @property
    def address(self) -> str:
        """See ``StateStore.address``."""
        return self._store.address

    async def initialize(self) -> bool:
        """See ``StateStore.initialize``."""
        return await self._run(self._store.initialize)

    async def acquire(
        self,
        scope: str,
        owner: str,
        ttl_seconds: float = 60,
        *,
        wait_seconds: float = 0,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        reclaim: bool = False,
        pid: int | None = None,
    ) -> Lease:
        """See ``StateStore.acquire``. Cancelled, it leaves neither a lease nor a place in the queue behind."""
        process = "" if pid is None else self._store._database.identify(names.integer("pid", pid, 1))
        ask = leases.valid_ask(scope, owner, ttl_seconds, metadata, reclaim, limit, process)
        waiter = self._store._waiter(ask, wait_seconds, asyncio.current_task())
        return await aholding.wait(waiter, self._begin)

    def hold(
        self,
        scope: str,
        owner: str,
        ttl_seconds: float = 30,
        *,
        wait_seconds: float = 0,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost: Callable[[AsyncHeldLease, str], object] | None = None,
        max_lifetime_seconds: float | None = None,
    ) -> AsyncHold:
        """See ``StateStore.hold``: ``async with``, and ``await lease.check()``.

        ``on_lost`` may be a coroutine function: it then runs as a task of the loop.
        """
        hold = self._store.hold(
            scope,
            owner,
            ttl_seconds,
            wait_seconds=wait_seconds,
            limit=limit,
            metadata=metadata,
            on_lost=on_lost,  # type: ignore[arg-type]
            max_lifetime_seconds=max_lifetime_seconds,
        )
        return aholding.AsyncHold(hold, self._begin)

    async def heartbeat(self, scope: str, owner: str, token: int, ttl_seconds: float | None = None) -> Lease:
        """See ``StateStore.heartbeat``."""
        return await self._run(self._store.heartbeat, scope, owner, token, ttl_seconds)

    async def release(self, scope: str, owner: str, token: int) -> Lease:
        """See ``StateStore.release``."""
        return await self._run(self._store.release, scope, owner, token)

    async def expire(self, scope: str, owner: str, token: int, *, reason: str = "owner-dead") -> Lease:
        """See ``StateStore.expire``."""
        return await self._run(self._store.expire, scope, owner, token, reason=reason)

    async def set_limit(self, scope: str, limit: int) -> Limit:
        """See ``StateStore.set_limit``."""
        return await self._run(self._store.set_limit, scope, limit)

    async def sweep(self) -> list[Lease]:
        """See ``StateStore.sweep``."""
        return await self._run(self._store.sweep)

    async def wait_until_free(self, scope: str, wait_seconds: float = math.inf) -> None:
        """See ``StateStore.wait_until_free``."""
        waiter = waiting.FreeWaiter(self._store._database, scope, wait_seconds)
        while (pause := await self._run(waiter.step)) is not None:
            await asyncio.sleep(pause)

    async def check_lease(self, scope: str, owner: str, token: int) -> Lease:
        """See ``StateStore.check_lease``."""
        return await self._run(self._store.check_lease, scope, owner, token)

    async def check_scope(self, scope: str, lease: Fenced | None = None, *, required: bool = False) -> None:
        """See ``StateStore.check_scope``."""
        await self._run(self._store.check_scope, scope, lease, required=required)

    async def get_lease(self, scope: str, include_expired: bool = False) -> Lease | None:
        """See ``StateStore.get_lease``."""
        return await self._run(self._store.get_lease, scope, include_expired)

    async def list_leases(self, include_expired: bool = False) -> list[Lease]:
        """See ``StateStore.list_leases``."""
        return await self._run(self._store.list_leases, include_expired)

    async def force_release(self, scope: str, *, reason: str, token: int | None = None) -> Lease:
        """See ``StateStore.force_release``."""
        return await self._run(self._store.force_release, scope, reason=reason, token=token)

    async def put_checkpoint(
        self,
        workflow: str,
        data: Any,
        *,
        lease_scope: str | None = None,
        owner: str | None = None,
        token: int | None = None,
        lease: Fenced | None = None,
        expected_sequence: int | None = None,
        rebind: bool = False,
    ) -> Checkpoint:
        """See ``StateStore.put_checkpoint``."""
        return await self._run(
            self._store.put_checkpoint,
            workflow,
            data,
            lease_scope=lease_scope,
            owner=owner,
            token=token,
            lease=lease,
            expected_sequence=expected_sequence,
            rebind=rebind,
        )

    async def get_checkpoint(self, workflow: str, *, sequence: int | None = None) -> Checkpoint | None:
        """See ``StateStore.get_checkpoint``."""
        return await self._run(self._store.get_checkpoint, workflow, sequence=sequence)

    async def list_checkpoints(self) -> list[CheckpointInfo]:
        """See ``StateStore.list_checkpoints``."""
        return await self._run(self._store.list_checkpoints)

    async def checkpoint_history(self, workflow: str) -> list[CheckpointInfo]:
        """See ``StateStore.checkpoint_history``."""
        return await self._run(self._store.checkpoint_history, workflow)

    async def prune_checkpoints(
        self, keep_last: int, workflow: str | None = None, dry_run: bool = False
    ) -> list[Pruned]:
        """See ``StateStore.prune_checkpoints``."""
        return await self._run(self._store.prune_checkpoints, keep_last, workflow, dry_run)

    def effect(
        self,
        key: str,
        *,
        lease: Fenced,
        request: Any = None,
        resolve: Callable[[Effect], Resolution | None] | None = None,
    ) -> AsyncActing:
        """See ``StateStore.effect``: ``async with``, and ``await effect.done(result)``.

        ``resolve`` runs in a thread.
        """
        from agent_checkpoint.aacting import AsyncActing

        return AsyncActing(self._store.effect(key, lease=lease, request=request, resolve=resolve), self._begin)

    async def resolve_effect(
        self,
        key: str,
        *,
        done: Any = NOTHING,
        retry: bool = False,
        by: str = "a person",
        begun_at: datetime | None = None,
    ) -> Effect:
        """See ``StateStore.resolve_effect``."""
        return await self._run(self._store.resolve_effect, key, done=done, retry=retry, by=by, begun_at=begun_at)

    async def get_effect(self, key: str) -> Effect | None:
        """See ``StateStore.get_effect``."""
        return await self._run(self._store.get_effect, key)

    async def list_effects(self, limit: int = 100) -> list[Effect]:
        """See ``StateStore.list_effects``."""
        return await self._run(self._store.list_effects, limit)

    async def export_checkpoints(self, workflow: str | None = None) -> Iterator[str]:
        """See ``StateStore.export_checkpoints``: all lines, read in a thread."""
        return iter(await self._run(lambda: list(self._store.export_checkpoints(workflow))))

    async def import_checkpoints(self, lines: Iterable[str]) -> list[Imported]:
        """See ``StateStore.import_checkpoints``."""
        return await self._run(self._store.import_checkpoints, lines)

    async def events(
        self,
        limit: int = 100,
        after: str | None = None,
        scope: str | None = None,
        workflow: str | None = None,
        kind: str | None = None,
    ) -> list[Event]:
        """See ``StateStore.events``."""
        return await self._run(self._store.events, limit, after, scope, workflow, kind)

    async def archive_events(
        self, before: datetime, to: str | os.PathLike[str], progress: Callable[[int], object] | None = None
    ) -> Archived:
        """See ``StateStore.archive_events``; ``progress`` is called in a thread."""
        return await self._run(self._store.archive_events, before, to, progress)

    async def retention(self) -> dict[str, Any]:
        """See ``StateStore.retention``."""
        return await self._run(self._store.retention)

    async def set_retention(self, rule: str, value: Any) -> dict[str, Any]:
        """See ``StateStore.set_retention``."""
        return await self._run(self._store.set_retention, rule, value)

    async def apply_retention(self, dry_run: bool = False) -> list[Freed]:
        """See ``StateStore.apply_retention``."""
        return await self._run(self._store.apply_retention, dry_run)

    async def stamp(self) -> object:
        """See ``StateStore.stamp``."""
        return await self._run(self._store.stamp)

    async def status(self) -> Status:
        """See ``StateStore.status``."""
        return await self._run(self._store.status)

    async def doctor(self) -> list[Check]:
        """See ``StateStore.doctor``."""
        return await self._run(self._store.doctor)

    async def shrink(self) -> int:
        """See ``StateStore.shrink``."""
        return await self._run(self._store.shrink)

    async def migrate(self, component: str, files: Mapping[str, Sequence[str | os.PathLike[str]]]) -> int:
        """See ``StateStore.migrate``."""
        return await self._run(self._store.migrate, component, files)

    async def write_all(self, writes: Iterable[FencedWrite]) -> list[Outcome]:
        """See ``StateStore.write_all``."""
        return await self._run(self._store.write_all, writes)

    async def move_to(self, target: StateStore, progress: Callable[[str, int, int], object] | None = None) -> Moved:
        """See ``StateStore.move_to``; ``progress`` is called in a thread."""
        return await self._run(self._store.move_to, target, progress)

    async def backup(self, path: str | os.PathLike[str]) -> Backup:
        """See ``StateStore.backup``."""
        return await self._run(self._store.backup, path)

    async def restore(self, path: str | os.PathLike[str]) -> Restored:
        """See ``StateStore.restore``."""
        return await self._run(self._store.restore, path)

    async def mark_restored(self) -> Restored:
        """See ``StateStore.mark_restored``."""
        return await self._run(self._store.mark_restored)

    async def close(self) -> None:
        """See ``StateStore.close``; calls that were made before it come to their end."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_pid == os.getpid():
            await asyncio.get_running_loop().run_in_executor(None, pool.shutdown)
        if self._owned:
            self._store.close()

    async def __aenter__(self) -> AsyncStateStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncStateStore({self.database!r})"

    def _threads(self) -> ThreadPoolExecutor:
        """The pool of this process: a forked child has none of its parent's threads."""
        if self._closed:
            raise InvalidInputError("store: is closed", field="store")
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="agent-checkpoint")
            self._pool_pid = os.getpid()
        return self._pool

    def _begin(self, method: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads(), partial(method, *arguments))

    async def _run(self, method: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads(), partial(method, *arguments, **options))
