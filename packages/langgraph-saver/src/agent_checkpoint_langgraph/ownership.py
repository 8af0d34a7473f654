"""Who owns a thread: the lease that a run writes under, how it gets there, and where it is looked at.

A run carries its lease in its config, in the context, or bound to the saver,
and is looked up in that order. It is checked against the store where the run
can still be stopped: before each superstep (``get_next_version``) and at the
start of the run and of each node or task (the callback handler).
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config

from agent_checkpoint import FencedWrite, InvalidInputError, LeaseHeldError, NotFoundError, StaleLeaseError
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint_langgraph import mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType
    from uuid import UUID

    from langchain_core.runnables import RunnableConfig

    from agent_checkpoint import Effect, Fence, Resolution, StateStore
    from agent_checkpoint.aacting import AsyncActing
    from agent_checkpoint.acting import Acting

# A key that starts with two underscores is not copied into a checkpoint's metadata.
CONFIG_KEY = "__agent_checkpoint_lease"
# LangGraph tags what runs as a node of a graph with it; the chains inside of one have other tags.
STEP_TAG = "graph:step:"
STRATEGIES = ("reject", "enqueue", "interrupt")
# What an interrupted run is told.
INTERRUPTED = "interrupted by a new run of the thread"

# By the store and the thread.
_leases: ContextVar[Mapping[tuple[str, str], ThreadLease]] = ContextVar("agent_checkpoint_langgraph_leases")


class ThreadLease:
    """The right to run a thread, in its holder's hands.

    ``thread_id``, ``scope``, ``owner`` and ``token`` say what it is; ``token``
    is what to pass to a system that refuses lower ones.
    """

    def __init__(self, store: StateStore, thread_id: str, held: Any, awaited: AsyncStateStore | None = None) -> None:
        self.thread_id = thread_id
        self.held: Any = held
        """The lease of the store: what ``store.hold`` gave, or a fence that came from elsewhere."""
        self.fence: Fence = held.fence
        self._store = store
        self._awaited = awaited or AsyncStateStore.of(store)

    @property
    def key(self) -> tuple[str, str]:
        """The store and the thread."""
        return self._store.database, self.thread_id

    @property
    def scope(self) -> str:
        """The scope of the thread."""
        return self.fence.scope

    @property
    def owner(self) -> str:
        """The label of who holds it."""
        return self.fence.owner

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.fence.token

    @property
    def lost(self) -> bool:
        """Whether it is known to be lost; asks nobody."""
        lost = getattr(self.held, "lost", None)
        return lost is not None and lost.is_set()

    def check(self) -> None:
        """Make sure that it is held, before what cannot be undone; the refusal goes on record.

        It reads one row of the store in the calling thread: some microseconds
        on SQLite, a round trip on a server (``await acheck()`` in asyncio).

        Raises:
            StaleLeaseError: it is lost, for good; stop.
            StorageError: the store cannot be asked.
        """
        try:
            confirm = getattr(self.held, "confirm", None)
            if confirm is not None:
                confirm()
            else:
                self._store.check_scope(self.scope, self)
        except StaleLeaseError:
            put_on_record(self._store, self.scope, self)
            raise

    async def acheck(self) -> None:
        """``check`` in a thread, for where the event loop must not wait."""
        await asyncio.get_running_loop().run_in_executor(None, self.check)

    def effect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> Acting:
        """A ``with`` block around an action outside that must not happen twice; see ``StateStore.effect``.

        The key names the action in the whole store, not in the thread alone.
        """
        return self._store.effect(key, lease=self, request=request, resolve=resolve)

    def aeffect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> AsyncActing:
        """``effect`` for ``async with``; ``resolve`` runs in a thread."""
        return self._awaited.effect(key, lease=self, request=request, resolve=resolve)

    def config(self, config: RunnableConfig | None = None) -> RunnableConfig:
        """The config that makes a run write under this lease, and stop when it is lost.

        Raises:
            InvalidInputError: the config is for another thread.
        """
        merged: dict[str, Any] = {**(config or {})}
        configurable = dict(merged.get("configurable") or {})
        thread_id = configurable.setdefault("thread_id", self.thread_id)
        if mapping.thread_name(thread_id) != self.thread_id:
            raise InvalidInputError(
                f"config: is for thread {str(thread_id)!r}, the lease for {self.thread_id!r}", field="config"
            )
        configurable[CONFIG_KEY] = self
        merged["configurable"] = configurable
        merged["callbacks"] = _with_guard(merged.get("callbacks"), LeaseGuard(self))
        return merged  # type: ignore[return-value]

    def __deepcopy__(self, memo: object) -> ThreadLease:
        return self  # a copied config is the same run

    def __reduce__(self) -> Any:
        raise TypeError("a held lease cannot be sent to another process; its fence can: lease.fence")

    def __repr__(self) -> str:
        return f"ThreadLease(thread {self.thread_id!r}, {self.owner!r}, token {self.token})"


class LeaseGuard(BaseCallbackHandler):
    """Stops a run that lost its lease: at its start, and before each of its nodes and tasks."""

    raise_error = True
    run_inline = True

    def __init__(self, lease: ThreadLease) -> None:
        self.lease = lease

    def on_chain_start(
        self,
        serialized: dict[str, Any],
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Check the lease where a run, a node or a task begins.

        The chains inside of one have its metadata too, but not its name.
        """
        is_node = any(tag.startswith(STEP_TAG) for tag in tags or ())
        is_task = more.get("name") is not None and more["name"] == (metadata or {}).get("langgraph_node")
        if parent_run_id is None or is_node or is_task:
            self.lease.check()


class LeaseBlock:
    """A ``with`` or ``async with`` block that holds the lease of a thread."""

    def __init__(
        self,
        store: StateStore,
        awaited: AsyncStateStore,
        prepare: Callable[[], None],
        thread_id: Any,
        *,
        owner: str | None,
        wait_seconds: float,
        multitask_strategy: str,
        in_context: bool,
        options: Mapping[str, Any],
    ) -> None:
        if multitask_strategy not in STRATEGIES:
            raise InvalidInputError(
                f"multitask_strategy: must be one of {', '.join(STRATEGIES)}", field="multitask_strategy"
            )
        if multitask_strategy == "enqueue" and wait_seconds == 0:
            wait_seconds = float("inf")
        self._store = store
        self._awaited = awaited
        self._prepare = prepare
        self._thread_id = mapping.thread_name(thread_id)
        self._scope = mapping.scope_of(thread_id)
        self._ask = {"owner": owner or default_owner(), "wait_seconds": wait_seconds, **options}
        self._interrupts = multitask_strategy == "interrupt"
        self._in_context = in_context
        self._hold: Any = None

    def __enter__(self) -> ThreadLease:
        self._prepare()
        while True:
            hold = self._store.hold(self._scope, **self._ask)
            hold.thread_bound = False  # a generator may be gone through by one thread after another
            try:
                return self._entered(hold, hold.__enter__())
            except LeaseHeldError as held:
                if not self._interrupts or held.token is None:
                    raise
                interrupt(self._store, held)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left().__exit__(kind, error, trace)

    async def __aenter__(self) -> ThreadLease:
        await asyncio.get_running_loop().run_in_executor(None, self._prepare)
        while True:
            hold = self._awaited.hold(self._scope, **self._ask)
            try:
                return self._entered(hold, await hold.__aenter__())
            except LeaseHeldError as held:
                if not self._interrupts or held.token is None:
                    raise
                await ainterrupt(self._awaited, held)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._left().__aexit__(kind, error, trace)

    def _entered(self, hold: Any, held: Any) -> ThreadLease:
        self._hold = hold
        lease = ThreadLease(self._store, self._thread_id, held, self._awaited)
        if self._in_context:
            _leases.set({**_leases.get({}), lease.key: lease})
        return lease

    def _left(self) -> Any:
        if self._in_context:
            # Not by a reset: a block may be left in another context than it was entered in.
            held = dict(_leases.get({}))
            held.pop((self._store.database, self._thread_id), None)
            _leases.set(held)
        hold, self._hold = self._hold, None
        return hold


@contextmanager
def presenting(lease: ThreadLease) -> Iterator[None]:
    """Let what the calling code writes to the thread present the lease, also where no config carries it."""
    before = _leases.set({**_leases.get({}), lease.key: lease})
    try:
        yield
    finally:
        with suppress(ValueError):  # thrown away, it ends in another context, which knows nothing of it
            _leases.reset(before)


def interrupt(store: StateStore, held: LeaseHeldError) -> None:
    """Fence the run that holds a thread; not its successor, should there be one by now."""
    with suppress(NotFoundError, StaleLeaseError):
        store.force_release(held.scope, reason=INTERRUPTED, token=held.token)


async def ainterrupt(store: AsyncStateStore, held: LeaseHeldError) -> None:
    """``interrupt``, awaited."""
    with suppress(NotFoundError, StaleLeaseError):
        await store.force_release(held.scope, reason=INTERRUPTED, token=held.token)


def put_on_record(store: StateStore, scope: str, lease: ThreadLease | None) -> None:
    """Have the store refuse an empty write, so that the audit log shows who was stopped.

    On an event loop it is done in a thread, for which nobody waits: somebody
    may hold the write lock.
    """
    write = FencedWrite(
        mapping.COMPONENT, "langgraph.check", None, lease, workflow=scope, scope=scope, required=lease is None
    )
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        store.write_all([write])
    else:
        loop.run_in_executor(None, store.write_all, [write])


def current_lease(config: RunnableConfig | None = None) -> ThreadLease | None:
    """The lease that the calling code runs under, as in a node or task; None where there is none.

    In an async node before Python 3.11, where LangGraph cannot hand on its
    context, pass the node's ``config``.
    """
    carried = _carried(config) or _carried(var_child_runnable_config.get())
    if carried is not None:
        return carried
    held = _leases.get({})
    return next(reversed([*held.values()]), None) if held else None


def default_owner() -> str:
    """Who asks, where nobody said: the host and the process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def find(config: RunnableConfig | None, key: tuple[str, str]) -> ThreadLease | None:
    """The lease of a thread of a store: carried by a config, by that of the node that calls, or by the context."""
    for carried in (_carried(config), _carried(var_child_runnable_config.get())):
        if carried is not None and carried.key == key:
            return carried
    return _leases.get({}).get(key)


def _carried(config: RunnableConfig | None) -> ThreadLease | None:
    carried = ((config or {}).get("configurable") or {}).get(CONFIG_KEY)
    return carried if isinstance(carried, ThreadLease) else None


def thread_of(scope: str) -> str:
    """The thread that a scope guards.

    Raises:
        InvalidInputError: it guards none, or its name does not tell which.
    """
    prefix, _, thread_id = scope.partition("/")
    if prefix != "langgraph" or thread_id.startswith("sha256:"):
        raise InvalidInputError(
            f"lease: scope {scope!r} is not that of a thread",
            hint="take the lease of langgraph/<thread_id>, or name the thread: bind(lease, thread_id)",
            field="lease",
        )
    return thread_id


def _with_guard(callbacks: Any, guard: LeaseGuard) -> Any:
    if callbacks is None:
        return [guard]
    if isinstance(callbacks, BaseCallbackManager):
        manager = callbacks.copy()
        manager.add_handler(guard, inherit=True)
        return manager
    return [*callbacks, guard]
