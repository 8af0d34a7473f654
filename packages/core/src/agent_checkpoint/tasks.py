"""Calls that run in a thread for a task, and come to their end whatever becomes of the task."""

from __future__ import annotations

import asyncio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")
    Run = Callable[..., asyncio.Future[Any]]
    """Begins a call in a thread. A future, not a task: a loop that ends cancels all of its tasks."""


async def uncancelled(running: asyncio.Future[T]) -> T:
    """Wait for a call to its end, even when cancelled; then be cancelled."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await settled(running)
        if not running.cancelled():
            running.exception()  # nobody is there to hear of it
        raise


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, through further cancellations."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
