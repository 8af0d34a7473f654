"""The blocks: where the leases live, and the lock itself."""

from __future__ import annotations

import math
import os
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from prefect.blocks.core import Block
from prefect.client.schemas.objects import FlowRun
from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from agent_checkpoint import InvalidInputError, LeaseHeldError, NotFoundError, StaleLeaseError, StateStore
from agent_checkpoint.locate import locate
from agent_checkpoint_prefect import artifacts, decorating, holding, names
from agent_checkpoint_prefect.records import RecordLocks
from agent_checkpoint_prefect.stores import awaited, store_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent_checkpoint import Lease
    from agent_checkpoint_prefect.leases import FencedLease

# Prefect wants addresses, and docs/ is published nowhere yet. Nobody can register this one and be taken for us.
SITE = "https://agent-checkpoint.invalid"
DOCUMENTATION = f"{SITE}/docs/prefect.md"
LOGO = f"{SITE}/docs/logo.png"
# Stands for "the block's own timeout", where None waits for ever. It is itself after a pickle too.
OWN: Any = ...


class _Strict(Block):
    """A block that takes no field but its own; Prefect names the type of a block inside of another one beside them."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_slug(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("block_type_slug") == cls.get_block_type_slug():
            return {key: value for key, value in values.items() if key != "block_type_slug"}
        return values

    def __eq__(self, other: object) -> bool:
        """By value: a block that was saved or loaded is the one that was not."""
        return type(self) is type(other) and self.__dict__ == other.__dict__


class LeaseStore(_Strict):
    """Where leases are kept: an SQLite file for the processes of one machine, or a PostgreSQL database."""

    _block_type_name: ClassVar[str | None] = "Lease Store"
    _block_type_slug: ClassVar[str | None] = "lease-store"
    _logo_url: ClassVar[Any] = LOGO
    _documentation_url: ClassVar[Any] = DOCUMENTATION
    _description: ClassVar[str | None] = (
        "Where fenced locks keep their leases: one SQLite file, or a PostgreSQL database."
    )
    _code_example: ClassVar[str | None] = """
Load the store and see who holds what:
```python
from agent_checkpoint_prefect import LeaseStore

store = LeaseStore.load("BLOCK_NAME")
print(store.open().list_leases())
```
"""

    path: Path | None = Field(
        default=None,
        description="The SQLite file; without it and a DSN the store that the command agent-checkpoint would use.",
    )
    dsn: SecretStr | None = Field(default=None, description="The URL of a PostgreSQL database, in place of a path.")
    synchronous: Literal["full", "normal"] = Field(
        default="full",
        description="normal is faster, and lets a power cut take back the last grants, tokens included.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> LeaseStore:
        if self.path is not None and self.dsn is not None:
            raise ValueError("path and dsn: only one of them can say where the leases are kept")
        return self

    def open(self) -> StateStore:
        """The store, created on first use, and shared by all blocks of this process that name it."""
        if self.dsn is not None:
            return store_at(self.dsn.get_secret_value(), self.synchronous)
        path = None if self.path is None else os.fspath(self.path)
        if self.path is not None and path is not None and path.startswith("~"):
            path = os.fspath(self.path.expanduser())
        return store_at(locate(path, os.environ), self.synchronous)


class FencedLock(_Strict):
    """A lock, or with a limit a concurrency limit, whose holders have leases with fencing tokens.

    It needs no Prefect server. A holder that crashes gives way at once, one that
    freezes after its ttl, and when it wakes up it is refused.

    Where a method has a twin with an ``a`` in front, that one is for async code:
    nothing here guesses.
    """

    _block_type_name: ClassVar[str | None] = "Fenced Lock"
    _block_type_slug: ClassVar[str | None] = "fenced-lock"
    _logo_url: ClassVar[Any] = LOGO
    _documentation_url: ClassVar[Any] = DOCUMENTATION
    _description: ClassVar[str | None] = (
        "A lock or concurrency limit of leases with fencing tokens: no server, no slot lost by a crash."
    )
    _code_example: ClassVar[str | None] = """
Load the lock and hold a name while you work:
```python
from agent_checkpoint_prefect import FencedLock

lock = FencedLock.load("BLOCK_NAME")
with lock.lease("orders") as lease:
    lease.check()  # before what cannot be undone
    print(lease.token)
```
"""

    store: LeaseStore = Field(default_factory=LeaseStore, description="Where the leases are kept.")
    namespace: str = Field(default="default", description="Separates the names of one team or project from others.")
    ttl_seconds: float = Field(
        default=30, ge=0.1, le=30 * 86_400, description="How long a lease outlives its last heartbeat, in seconds."
    )
    limit: int = Field(default=1, ge=1, le=10_000, description="How many may hold one name at a time.")
    timeout_seconds: float | None = Field(
        default=None, ge=0, description="How long to wait for a name, in seconds; without it for ever."
    )
    on_lost: Literal["cancel", "raise", "warn"] = Field(
        default="cancel",
        description="What a lost lease does to the code under it: interrupts it, raises at its end, or warns.",
    )

    @field_validator("namespace")
    @classmethod
    def _plain_namespace(cls, value: str) -> str:
        if names.NAMESPACE.fullmatch(value) is None:
            raise ValueError("namespace: must be 1 to 64 characters without slashes and control characters")
        return value

    # Names

    def lease(
        self,
        name: str,
        *,
        timeout_seconds: float | None = OWN,
        ttl_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AbstractContextManager[FencedLease]:
        """A ``with`` block that holds ``name``, renewed in the background.

        ``timeout_seconds`` is how long to wait for it (0: not at all, None: for
        ever); ``metadata`` goes on record beside the ids of the run.

        Raises:
            LeaseHeldError, WaitTimeoutError: at the start: another one holds it.
            LeaseReentrancyError: at the start: this run holds it already.
            LeaseLostError: it was lost, and ``on_lost`` is not ``"warn"``.
        """
        return holding.block(self._ask(name, timeout_seconds, ttl_seconds, metadata), self.on_lost)

    def alease(
        self,
        name: str,
        *,
        timeout_seconds: float | None = OWN,
        ttl_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[FencedLease]:
        """See ``lease``."""
        return holding.ablock(self._ask(name, timeout_seconds, ttl_seconds, metadata), self.on_lost)

    def acquire(
        self,
        name: str,
        *,
        timeout_seconds: float | None = OWN,
        ttl_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> FencedLease:
        """Take ``name`` until ``release()``; it is renewed while this thread lives and somebody has the lease.

        A loss interrupts nothing here: look at ``lost`` or call ``check()``. The rest is as for ``lease``.
        """
        return holding.acquire(self._ask(name, timeout_seconds, ttl_seconds, metadata))

    async def aacquire(
        self,
        name: str,
        *,
        timeout_seconds: float | None = OWN,
        ttl_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> FencedLease:
        """See ``acquire``; it is renewed while this event loop is open."""
        return await holding.aacquire(self._ask(name, timeout_seconds, ttl_seconds, metadata))

    def try_acquire(
        self, name: str, *, ttl_seconds: float | None = None, metadata: Mapping[str, Any] | None = None
    ) -> FencedLease | None:
        """Take ``name`` if it is free; None where another one holds it."""
        try:
            return self.acquire(name, timeout_seconds=0, ttl_seconds=ttl_seconds, metadata=metadata)
        except LeaseHeldError:
            return None

    async def atry_acquire(
        self, name: str, *, ttl_seconds: float | None = None, metadata: Mapping[str, Any] | None = None
    ) -> FencedLease | None:
        """See ``try_acquire``."""
        try:
            return await self.aacquire(name, timeout_seconds=0, ttl_seconds=ttl_seconds, metadata=metadata)
        except LeaseHeldError:
            return None

    def fenced(
        self, template: str, *, timeout_seconds: float | None = OWN, ttl_seconds: float | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for functions, under ``@flow`` or ``@task``: each call holds a name made of its arguments.

        ``"orders-{customer_id}"`` is filled in by ``str.format``. Ownership is
        checked again when the body ends.
        """
        return decorating.fenced(self, template, {"timeout_seconds": timeout_seconds, "ttl_seconds": ttl_seconds})

    def inspect(self, name: str) -> Lease | None:
        """The live lease of a name (the one that was granted last); None without one."""
        return self.store.open().get_lease(names.scope_of_name(self.namespace, name))

    async def ainspect(self, name: str) -> Lease | None:
        """See ``inspect``."""
        return await awaited(self.store.open()).get_lease(names.scope_of_name(self.namespace, name))

    def list_leases(self) -> list[Lease]:
        """The live leases of this namespace, latest grant first; those of result records too."""
        return [lease for lease in self.store.open().list_leases() if self._is_ours(lease)]

    async def alist_leases(self) -> list[Lease]:
        """See ``list_leases``."""
        return [lease for lease in await awaited(self.store.open()).list_leases() if self._is_ours(lease)]

    def force_release(self, name: str, *, reason: str) -> list[Lease]:
        """End the leases of a name against their holders' will; those. ``reason`` goes on record.

        Raises:
            NotFoundError: nobody holds it.
        """
        store, scope = self.store.open(), names.scope_of_name(self.namespace, name)
        held = [lease for lease in store.list_leases() if lease.scope == scope]
        if len(held) < 2:
            return [store.force_release(scope, reason=reason)]
        ended = []
        for lease in held:
            with suppress(NotFoundError, StaleLeaseError):  # it was over by itself
                ended.append(store.force_release(scope, reason=reason, token=lease.token))
        return ended

    async def aforce_release(self, name: str, *, reason: str) -> list[Lease]:
        """See ``force_release``."""
        store, scope = awaited(self.store.open()), names.scope_of_name(self.namespace, name)
        held = [lease for lease in await store.list_leases() if lease.scope == scope]
        if len(held) < 2:
            return [await store.force_release(scope, reason=reason)]
        ended = []
        for lease in held:
            with suppress(NotFoundError, StaleLeaseError):
                ended.append(await store.force_release(scope, reason=reason, token=lease.token))
        return ended

    def release_flow_run(self, flow_run_id: object, *, reason: str = "its flow run is over") -> int:
        """End every lease of this namespace that a flow run holds; how many those were."""
        return self._release_run("flow_run_id", flow_run_id, reason)

    def _release_run(self, kind: str, run_id: object, reason: str) -> int:
        store, ended = self.store.open(), 0
        for lease in self.list_leases():
            if lease.metadata.get(kind) == str(run_id):
                with suppress(NotFoundError, StaleLeaseError):  # it was over by itself
                    store.force_release(lease.scope, reason=reason, token=lease.token)
                    ended += 1
        return ended

    async def arelease_flow_run(self, flow_run_id: object, *, reason: str = "its flow run is over") -> int:
        """See ``release_flow_run``."""
        store, ended = awaited(self.store.open()), 0
        for lease in await self.alist_leases():
            if lease.metadata.get("flow_run_id") == str(flow_run_id):
                with suppress(NotFoundError, StaleLeaseError):  # it was over by itself
                    await store.force_release(lease.scope, reason=reason, token=lease.token)
                    ended += 1
        return ended

    def release_on_crash(self, flow: Any, flow_run: Any, state: Any) -> None:  # noqa: ARG002 -- Prefect's signature
        """For ``@flow(on_crashed=[lock.release_on_crash], on_cancellation=[…])``: end what the run holds.

        For ``on_failure`` too, and for tasks, whose hooks Prefect calls alike.
        """
        is_flow = isinstance(flow_run, FlowRun)
        kind, what = ("flow_run_id", "flow run") if is_flow else ("task_run_id", "task run")
        self._release_run(kind, flow_run.id, reason=f"its {what} is {str(state.type.value).lower()}")

    def publish_artifact(self, key: str = "fenced-locks") -> Any:
        """Publish a table of who holds what as a Prefect artifact; its id. It needs an API."""
        return artifacts.publish(key, self.list_leases())

    async def apublish_artifact(self, key: str = "fenced-locks") -> Any:
        """See ``publish_artifact``."""
        return await artifacts.apublish(key, await self.alist_leases())

    # Result records: Prefect's LockManager

    def acquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """Take the lock of a result record for a transaction; True also where it has it already.

        With ``acquire_timeout`` (seconds) False says that another one has it;
        without one that raises, after the block's own timeout, since Prefect
        does not look at the answer. With ``hold_timeout`` the lock lasts so
        long; without one it is renewed until it is released.

        Raises:
            WaitTimeoutError: another one has it.
            InvalidInputError: the block has a limit of more than 1.
        """
        return self._records().acquire(key, holder, acquire_timeout, hold_timeout)

    async def aacquire_lock(
        self, key: str, holder: str, acquire_timeout: float | None = None, hold_timeout: float | None = None
    ) -> bool:
        """See ``acquire_lock``."""
        return await self._records().aacquire(key, holder, acquire_timeout, hold_timeout)

    def release_lock(self, key: str, holder: str) -> None:
        """Give the lock of a result record back; silent where it was lost or given back before."""
        self._records().release(key, holder)

    def is_locked(self, key: str) -> bool:
        """Whether the result record is locked."""
        return self._records().is_locked(key)

    def is_lock_holder(self, key: str, holder: str) -> bool:
        """Whether the holder has the lock of the result record, by the store at this moment."""
        return self._records().is_holder(key, holder)

    def wait_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """Wait until the result record is not locked, at most ``timeout`` seconds; whether it came true."""
        return self._records().wait(key, timeout)

    async def await_for_lock(self, key: str, timeout: float | None = None) -> bool:
        """See ``wait_for_lock``."""
        return await self._records().await_(key, timeout)

    def _records(self) -> RecordLocks:
        if self.limit > 1:
            raise InvalidInputError(
                f"limit: is {self.limit}; as a lock manager of result records it must be 1", field="limit"
            )
        return RecordLocks(self.store.open(), self.namespace, self.ttl_seconds, self.timeout_seconds)

    def _ask(
        self,
        name: str,
        timeout_seconds: float | None,
        ttl_seconds: float | None,
        metadata: Mapping[str, Any] | None,
    ) -> holding.Ask:
        wait = self.timeout_seconds if timeout_seconds is OWN else timeout_seconds
        if wait is not None and not wait >= 0:
            raise InvalidInputError("timeout_seconds: must be 0 seconds or more, or None", field="timeout_seconds")
        return holding.Ask(
            self.store.open(),
            name,
            names.scope_of_name(self.namespace, name),
            self.ttl_seconds if ttl_seconds is None else ttl_seconds,
            math.inf if wait is None else wait,
            self.limit,
            metadata or {},
        )

    def _is_ours(self, lease: Lease) -> bool:
        return lease.scope.startswith(names.prefixes(self.namespace))
