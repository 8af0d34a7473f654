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
LINGER_NS = 2 * NS
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
        # Taken as a lock: an interrupt that strikes in the condition's own Python would leave it taken.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._serving: object = None
        """Whose turn it is: each thread has a mark of its own, and ends when it is not this one."""
        self._wakes_at: int | None = None

    def set(self, at: int) -> None:
        """Be sure that the thread wakes up at ``at`` ticks, or before.

        Raises:
            RuntimeError: there can be no more threads.
        """
        with self._lock:
            if self._serving is None:
                self._begin()
            elif self._wakes_at is None or at < self._wakes_at:
                self._changed.notify()  # first: an interrupt may come between the two
                self._wakes_at = at

    def _begin(self) -> None:
        mark = object()
        try:
            self._serving = mark
            threading.Thread(target=self._run, args=(mark,), name=self._name, daemon=True).start()
        except BaseException:  # interrupted, it may have started all the same: then it finds another mark
            self._serving = None
            raise

    def _run(self, mark: object) -> None:
        going_on = True
        while going_on:
            try:
                going_on = self._wait(mark)
                if going_on:
                    self._work()
            except Exception:
                logging.getLogger("agent_checkpoint").exception("%s: unexpected error, going on", self._name)
                with self._lock:
                    self._changed.wait(PAUSE_SECONDS)

    def _wait(self, mark: object) -> bool:
        """Until something is due; False when nothing was for a while, and this thread is over."""
        with self._lock:
            lingered = False
            while self._serving is mark:
                due, now = self._due(), self._clock.ticks_ns()
                if due is not None and due <= now:
                    self._wakes_at = None
                    return True
                if due is None and lingered:
                    self._serving = None
                    return False
                # Never for long: what was due may be so no more. So whoever sets a later time need not wake it up,
                # which would take as long as all the rest of a lease that is held for a moment.
                longest = now + LINGER_NS
                self._wakes_at = until = longest if due is None else min(due, longest)
                notified = self._clock.wait(self._changed, until)
                lingered = due is None and not notified
            return False
