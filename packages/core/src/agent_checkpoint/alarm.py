"""A daemon thread that works when something is due, and ends when nothing is for a while."""

from __future__ import annotations

import logging
import threading

from agent_checkpoint.names import NS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_checkpoint.clock import Clock

# How long a thread with nothing to do stays: starting one costs as much as a lease.
LINGER_SECONDS = 2.0
# After an error that nobody foresaw, so that it does not repeat itself at full speed.
PAUSE_SECONDS = 0.5


class Alarm:
    """Calls ``work`` in a thread of its own whenever the time that ``due`` names has come.

    ``due`` and ``work`` are called from that thread alone; ``due`` returns
    ticks, or None for nothing to do.
    """

    def __init__(self, name: str, clock: Clock, due: Callable[[], int | None], work: Callable[[], object]) -> None:
        self._name = name
        self._clock = clock
        self._due = due
        self._work = work
        self._changed = threading.Condition()
        self._running = False
        self._wakes_at: int | None = None

    def set(self, at: int) -> None:
        """Be sure that the thread wakes up at ``at`` ticks, or before."""
        with self._changed:
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            elif self._wakes_at is None or at < self._wakes_at:
                self._wakes_at = at
                self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            try:
                self._work()
            except Exception:
                logging.getLogger("agent_checkpoint").exception("%s: unexpected error, going on", self._name)
                with self._changed:
                    self._changed.wait(PAUSE_SECONDS)

    def _wait(self) -> bool:
        """Until something is due; False when nothing was for a while, and this thread is over."""
        with self._changed:
            lingered = False
            while True:
                due = self._due()
                left = LINGER_SECONDS if due is None else (due - self._clock.ticks_ns()) / NS
                if due is not None and left <= 0:
                    self._wakes_at = None
                    return True
                if due is None and lingered:
                    self._running = False
                    return False
                self._wakes_at = due
                notified = self._clock.wait(self._changed, left)
                lingered = due is None and not notified
