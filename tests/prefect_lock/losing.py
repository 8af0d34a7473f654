"""Losing a lease while the code in its block goes on, as the background heartbeat finds out."""

from __future__ import annotations

import threading

from agent_checkpoint_prefect import FencedLease, FencedLock

from .conftest import WATCHDOG_SECONDS, elsewhere, take_away


def lose(lock: FencedLock, lease: FencedLease, reason: str = "released") -> None:
    """End a lease in the store, and let its holder hear of it: when this returns, it has been told."""
    take_away(lock, lease)
    elsewhere(hear, lease, reason)
    for thread in threading.enumerate():
        if thread.name == "agent-checkpoint-lost":
            thread.join(WATCHDOG_SECONDS)


def hear(lease: FencedLease, reason: str) -> None:
    """Nobody else has part in it: a heartbeat does just this."""
    lease._held.declare_lost(reason)
