"""The same block, for ``async with``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from agent_checkpoint.errors import AgentCheckpointError
from agent_checkpoint.names import NOTHING
from agent_checkpoint.tasks import uncancelled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from agent_checkpoint.acting import Acting
    from agent_checkpoint.records import Checkpoint, Fence
    from agent_checkpoint.tasks import Run


class AsyncActing:
    """See ``Acting``: what it tells is awaited. ``resolve`` runs in a thread."""

    def __init__(self, acting: Acting, run: Run) -> None:
        self._acting = acting
        self._run = run

    @property
    def key(self) -> str:
        """See ``Acting.key``."""
        return self._acting.key

    @property
    def idempotency_key(self) -> str:
        """See ``Acting.idempotency_key``."""
        return self._acting.idempotency_key

    @property
    def fence(self) -> Fence:
        """See ``Acting.fence``."""
        return self._acting.fence

    @property
    def fresh(self) -> bool:
        """See ``Acting.fresh``."""
        return self._acting.fresh

    @property
    def late(self) -> bool:
        """See ``Acting.late``."""
        return self._acting.late

    @property
    def result(self) -> Any:
        """See ``Acting.result``."""
        return self._acting.result

    async def done(
        self, result: Any = None, *, workflow: str | None = None, data: Any = NOTHING, rebind: bool = False
    ) -> Checkpoint | None:
        """See ``Acting.done``."""
        tell = partial(self._acting.done, result, workflow=workflow, data=data, rebind=rebind)
        saved: Checkpoint | None = await uncancelled(self._run(tell))  # it happened, whoever is cancelled
        return saved

    async def failed(self) -> None:
        """See ``Acting.failed``."""
        await uncancelled(self._run(self._acting.failed))

    async def leave(self, why: str) -> None:
        """See ``Acting.leave``."""
        await uncancelled(self._run(self._acting.leave, why))

    async def __aenter__(self) -> AsyncActing:
        try:
            await uncancelled(self._run(self._acting.__enter__))
        except asyncio.CancelledError:
            if self._acting.fresh:  # begun, and never entered: it surely did not happen
                with suppress(AgentCheckpointError):
                    await uncancelled(self._run(self._acting.failed))
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is GeneratorExit:  # thrown away: nothing can be awaited any more
            self._acting.__exit__(kind, None, trace)
        else:
            await uncancelled(self._run(self._acting.__exit__, kind, error, trace))
