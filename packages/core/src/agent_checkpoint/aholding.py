"""Holding a lease in asyncio: the same heart beats for it, and no thread is parked by waiting.

Renewal is a thread's work here too: a task on the event loop would be starved
by the first call that blocks.
"""

from __future__ import annotations

import asyncio
import logging

from agent_checkpoint.errors import AgentCheckpointError
from agent_checkpoint.holding import Held
from agent_checkpoint.tasks import uncancelled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType
    from typing import Any, TypeVar

    from agent_checkpoint.aacting import AsyncActing
    from agent_checkpoint.acting import Resolution
    from agent_checkpoint.database import Bell
    from agent_checkpoint.holding import Hold
    from agent_checkpoint.records import Effect, Lease
    from agent_checkpoint.tasks import Run
    from agent_checkpoint.waiting import Waiter

    T = TypeVar("T")


class AsyncHeldLease(Held):
    """What ``async with store.hold(…)`` gives."""

    _run: Run

    def effect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> AsyncActing:
        """See ``AsyncStateStore.effect``: under this lease."""
        from agent_checkpoint.aacting import AsyncActing
        from agent_checkpoint.acting import Acting

        return AsyncActing(Acting(self._hold.changes, key, self, request, resolve), self._run)

    async def check(self) -> Lease:
        """See ``HeldLease.check``."""
        self._check_deadline()
        lease: Lease = await self._run(self._check_store)
        return lease


class AsyncHold:
    """A lease for the length of an ``async with`` block."""

    def __init__(self, hold: Hold, run: Run) -> None:
        self._hold = hold
        self._on_lost = hold.on_lost
        self._run = run

    async def __aenter__(self) -> AsyncHeldLease:
        loop = asyncio.get_running_loop()
        hold = self._hold
        hold.on_lost = _in_loop(loop, self._on_lost)
        waiter = hold.waiter(asyncio.current_task())
        try:
            lease = await wait(waiter, self._run)
            held = AsyncHeldLease(hold, lease, waiter.asked_at, lambda: not loop.is_closed())
            held._run = self._run
            return hold.start(held)
        except BaseException:
            hold.stop()
            await _leave(waiter, self._run)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        held = self._hold.stop()
        if held is None:
            return
        try:
            if kind is GeneratorExit:  # thrown away: nothing can be awaited any more
                self._hold.give_back(held, False)
            else:
                await uncancelled(self._run(self._hold.give_back, held, kind is None))
        except AgentCheckpointError:
            if kind is None:
                raise


async def wait(waiter: Waiter, run: Run) -> Lease:
    """Step a waiter to its lease; a task that is cancelled leaves neither a ticket nor a lease behind."""
    rang = False
    try:
        while True:
            found = await uncancelled(run(waiter.step, rang))
            if not isinstance(found, float):
                lease: Lease = found
                return lease
            rang = await _rest(waiter.bell, found)
    except GeneratorExit:  # thrown away: nothing can be awaited any more
        waiter.leave()
        raise
    except BaseException:
        await _leave(waiter, run)
        raise


async def _leave(waiter: Waiter, run: Run) -> None:
    try:
        await uncancelled(run(waiter.leave))
    except AgentCheckpointError:  # the store was closed: there is a bell to close at most
        waiter.leave()


async def _rest(bell: Bell | None, seconds: float) -> bool:
    """Pause, until the bell rings; whether it rang."""
    if bell is None:
        await asyncio.sleep(seconds)
        return False
    # Not by wait_for, which before Python 3.12 can swallow a cancellation.
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    timer = loop.call_later(seconds, over.set)
    loop.add_reader(bell.fileno(), over.set)
    try:
        await over.wait()
        return bell.wait(0)
    finally:
        timer.cancel()
        loop.remove_reader(bell.fileno())


def _in_loop(
    loop: asyncio.AbstractEventLoop, on_lost: Callable[[Any, str], object] | None
) -> Callable[[Any, str], object] | None:
    """A coroutine function runs as a task of the loop, anything else in its own thread."""
    if on_lost is None or not asyncio.iscoroutinefunction(on_lost):
        return on_lost

    def call(held: Any, reason: str) -> None:
        if loop.is_closed():
            return  # there is nobody to tell
        running = on_lost(held, reason)
        try:
            asyncio.run_coroutine_threadsafe(running, loop).add_done_callback(log)
        except RuntimeError:
            running.close()

    def log(told: Future[Any]) -> None:
        error = None if told.cancelled() else told.exception()
        if error is not None:
            logging.getLogger("agent_checkpoint").error("on_lost failed: %r", error, exc_info=error)

    return call
