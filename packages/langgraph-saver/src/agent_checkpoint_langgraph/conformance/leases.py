"""How the leases of ``AgentCheckpointSaver`` are taken and lost, for the clauses."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from agent_checkpoint import LeaseHeldError, StaleLeaseError
from agent_checkpoint_langgraph.mapping import scope_of
from agent_checkpoint_langgraph.ownership import ThreadLease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from langchain_core.runnables import RunnableConfig

    from agent_checkpoint_langgraph.saver import AgentCheckpointSaver


class StoreLeases:
    """Takes leases of the store and renews none; their time runs out when a clause says so."""

    refusals: tuple[type[Exception], ...] = (StaleLeaseError, LeaseHeldError)

    def __init__(self, saver: AgentCheckpointSaver) -> None:
        saver.setup()
        self._saver = saver
        self._store = saver.store

    async def take(self, thread_id: str, owner: str) -> ThreadLease:
        """A lease that nobody else holds."""
        taken = self._store.acquire(scope_of(thread_id), owner, ttl_seconds=600)
        return ThreadLease(self._store, thread_id, taken)

    async def supersede(self, thread_id: str, owner: str) -> ThreadLease:
        """A lease that somebody else holds."""
        self._store.force_release(scope_of(thread_id), reason="superseded by a clause")
        return await self.take(thread_id, owner)

    async def expire(self, lease: ThreadLease) -> None:
        """As if its seconds were over."""
        self._store.expire(*lease.fence, reason="a clause")

    async def release(self, lease: ThreadLease) -> None:
        """As its holder does."""
        self._store.release(*lease.fence)

    def config(self, lease: ThreadLease, config: RunnableConfig) -> RunnableConfig:
        """The lease goes with the config."""
        return lease.config(config)

    @contextmanager
    def holding(self, lease: ThreadLease) -> Iterator[None]:
        """The lease is bound to the saver."""
        self._saver.bind(lease)
        try:
            yield
        finally:
            self._saver.unbind(lease.thread_id)
