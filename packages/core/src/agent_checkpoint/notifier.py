"""Telling plugins of what background threads did, from a thread of its own.

A listener may be slow; the heartbeat must not be. So events of heartbeats wait
in a bounded queue: what does not fit is dropped with a word in the log, the
events table has it all the same.
"""

from __future__ import annotations

import logging
import os
from collections import deque

from agent_checkpoint.alarm import Alarm
from agent_checkpoint.clock import Clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_checkpoint.errors import FenceRefusedError
    from agent_checkpoint.plugins import Plugins
    from agent_checkpoint.records import Event, Write

MOST_WAITING = 1_000


class Notifier:
    """The plugins of a store, for changes that must not wait for listeners."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins
        self._clock = Clock()  # a listener takes real time, whatever clock the store has
        self._start()

    def _start(self) -> None:
        """Anew in a forked child, which has none of its parent's threads."""
        self._pid = os.getpid()
        self._waiting: deque[Event] = deque()
        self._alarm = Alarm("agent-checkpoint-notifier", self._clock, self._due, self._tell_next)

    def check_fence(self, write: Write) -> FenceRefusedError | None:
        """See ``Plugins.check_fence``."""
        return self._plugins.check_fence(write)

    def listening(self) -> bool:
        """See ``Plugins.listening``."""
        return self._plugins.listening()

    def tell(self, events: Sequence[Event]) -> None:
        """Tell every listener each event, soon."""
        if self._pid != os.getpid():
            self._start()
        for event in events:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(event)
            else:
                log = logging.getLogger("agent_checkpoint.plugins")
                log.error("listeners are too slow: event %s (%s) is recorded, but told to nobody", event.id, event.kind)
        if self._waiting:
            self._alarm.set(0)

    def _due(self) -> int | None:
        return 0 if self._waiting else None

    def _tell_next(self) -> None:
        self._plugins.tell([self._waiting.popleft()])
