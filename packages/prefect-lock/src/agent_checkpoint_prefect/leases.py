"""A lease in the hands of a flow or task."""

from __future__ import annotations

import asyncio
import os
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from agent_checkpoint import FencedWrite, StaleLeaseError
from agent_checkpoint_prefect import context
from agent_checkpoint_prefect.errors import LeaseLostError
from agent_checkpoint_prefect.stores import blocking
from agent_checkpoint_prefect.telling import tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_checkpoint import Effect, Fence, Resolution, StateStore
    from agent_checkpoint.aacting import AsyncActing
    from agent_checkpoint.acting import Acting
    from agent_checkpoint.aio import AsyncStateStore
    from agent_checkpoint_prefect.cancel import TaskInterrupter, ThreadInterrupter


class FencedLease:
    """The right to a name, renewed in the background until it is released.

    ``token`` grows with each grant of the name; pass it to what can refuse a
    lower one. ``slot`` is which of the lock's leases it is, 0 where it has one.
    """

    def __init__(self, name: str, store: StateStore, awaited: AsyncStateStore, metadata: dict[str, Any]) -> None:
        self.name = name
        self.metadata = metadata
        """What was put on record with it: the run's ids and names, and the caller's own."""
        self._store = store
        self._awaited = awaited
        self._hold: Any = None
        self._held: Any = None
        self._struck: TaskInterrupter | ThreadInterrupter | None = None
        self.attempt = context.attempt()
        """The attempt at a run that took it."""
        self._pid = os.getpid()
        self._context = copy_context()

    def start(self, hold: Any, held: Any) -> FencedLease:
        """It was granted: the run holds it from now on."""
        self._hold, self._held = hold, held
        context.enter(self)
        tell("acquired", self)
        return self

    @property
    def key(self) -> tuple[str, str]:
        """The store and the scope."""
        return self._store.database, self.scope

    @property
    def scope(self) -> str:
        """Its scope in the store."""
        return str(self._held.scope)

    @property
    def owner(self) -> str:
        """The label of who holds it."""
        return str(self._held.owner)

    @property
    def token(self) -> int:
        """The fencing token."""
        return int(self._held.token)

    @property
    def slot(self) -> int:
        """Which of the lock's leases it is."""
        return int(self._held.slot)

    @property
    def fence(self) -> Fence:
        """What a protected write of the store presents."""
        fence: Fence = self._held.fence
        return fence

    @property
    def lost(self) -> bool:
        """Whether it is known to be lost; asks nobody."""
        return bool(self._held.lost.is_set())

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self._hold is None

    def remaining(self) -> float:
        """Seconds until it is lost without another heartbeat; 0.0 when it is lost or given back. Asks nobody."""
        return float(self._held.remaining())

    def check(self) -> None:
        """Make sure that it is held, before what cannot be undone; plugins may veto. A refusal goes on record.

        Raises:
            LeaseLostError: it is lost, for good.
            FenceRefusedError: a plugin vetoed.
            StorageError: the store cannot be asked.
        """
        (outcome,) = self._store.write_all([self._write()])
        self._raise(outcome.error)

    async def acheck(self) -> None:
        """See ``check``."""
        (outcome,) = await self._awaited.write_all([self._write()])
        self._raise(outcome.error)

    def effect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> Acting:
        """A ``with`` block around an action outside that must not happen twice; see ``StateStore.effect``.

        The key names the action in the whole store, not under this name alone.
        """
        return self._store.effect(key, lease=self, request=request, resolve=resolve)

    def aeffect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> AsyncActing:
        """``effect`` for ``async with``; ``resolve`` runs in a thread."""
        return self._awaited.effect(key, lease=self, request=request, resolve=resolve)

    def release(self) -> None:
        """Give it back, whichever code took it; idempotent, and silent where it was lost before."""
        self.finish()

    async def arelease(self) -> None:
        """See ``release``."""
        await self.afinish()

    def finish(self) -> LeaseLostError | None:
        """Give it back; why it was lost, where the store or we know that it was."""
        hold, self._hold = self._hold, None
        if hold is None:
            return None
        try:
            blocking(hold).__exit__(None, None, None)
        except StaleLeaseError as stale:
            return self.lost_error(stale.reason)
        finally:
            self._over()
        return None

    async def afinish(self) -> LeaseLostError | None:
        """See ``finish``."""
        hold, self._hold = self._hold, None
        if hold is None:
            return None
        try:
            if blocking(hold) is hold:  # sync code took it
                await asyncio.to_thread(hold.__exit__, None, None, None)
            else:
                await hold.__aexit__(None, None, None)
        except StaleLeaseError as stale:
            return self.lost_error(stale.reason)
        finally:
            self._over()
        return None

    def _over(self) -> None:
        context.leave(self)
        if self._pid == os.getpid():  # a forked child gives nothing back
            tell("released", self)

    def when_lost(self, struck: TaskInterrupter | ThreadInterrupter) -> None:
        """Interrupt the code under it when it is lost; at once, where it is lost already."""
        self._struck = struck
        if self.lost:
            struck.strike()

    def on_lost(self, held: object, reason: str) -> None:  # noqa: ARG002 -- the signature of on_lost
        """The store says that it is lost; called in a thread of its own."""
        self._context.run(tell, "lost", self, reason=reason)  # of the run that holds it
        struck = self._struck
        if struck is not None:
            struck.strike()

    def lost_error(self, found: str = "released") -> LeaseLostError:
        """The error that says how it was lost; ``found``: how the store told it."""
        reason = self._held.lost_reason or found
        return LeaseLostError(
            f"the lease of {self.name!r} with token {self.token} was lost ({reason}) while the code under it ran; "
            f"the longest gap between its heartbeats was {self._held.heartbeat_gap:.1f} s",
            hint="what it did may have been done by another; a retry acquires again, with a new token",
            reason=reason,
            scope=self.scope,
            owner=self.owner,
            token=self.token,
        )

    def _write(self) -> FencedWrite:
        if self.lost:
            # The holder knows before the store does; the refusal goes on record with the release.
            raise self.lost_error()
        return FencedWrite("prefect", "prefect.check", None, self)

    def _raise(self, error: Exception | None) -> None:
        if isinstance(error, StaleLeaseError):
            if self._struck is not None and self._struck.here:
                self._struck = None  # the code under it hears of it right here
            self._held.declare_lost(error.reason)
            raise LeaseLostError(str(error), hint=error.hint, **error.facts) from error
        if error is not None:
            raise error

    def __repr__(self) -> str:
        return f"FencedLease({self.name!r}, token {self.token}, {self.remaining():.1f} s left)"
