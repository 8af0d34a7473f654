"""Commands that go on until they are interrupted: what they do between two looks at the store."""

from __future__ import annotations

import select
import sys
import time
from contextlib import suppress

from agent_checkpoint.errors import AgentCheckpointError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_checkpoint.store import StateStore

# Seconds between two looks whether anything was committed, and between two sweeps.
LOOK_SECONDS = 0.1
SWEEP_SECONDS = 1.0


def ticks(store: StateStore) -> Iterator[bool]:
    """Several times a second, for ever: whether something was committed since the last time.

    Sweeps now and then, so that a lease that ran out, or whose owner died, goes on record.

    Raises:
        BrokenPipeError: nobody reads what is printed any more.
    """
    seen: object = None
    swept = 0.0
    while True:
        if time.monotonic() - swept >= SWEEP_SECONDS:
            sweep(store)
            swept = time.monotonic()
        stamp = store.stamp()
        yield stamp != seen
        seen = stamp
        _rest()


def sweep(store: StateStore) -> None:
    """Put on record what is over, where the store can be written."""
    with suppress(AgentCheckpointError):
        store.sweep()


def _rest() -> None:
    poll = select.poll()
    with suppress(OSError, ValueError):
        poll.register(sys.stdout, 0)  # only errors: the reader is gone
    # A file or a terminal in error would be so for ever: then it is only a pause.
    started = time.monotonic()
    if any(happened & select.POLLERR for _, happened in poll.poll(LOOK_SECONDS * 1000)):
        raise BrokenPipeError
    time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - started)))
