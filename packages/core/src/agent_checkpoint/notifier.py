"""Telling plugins of what background threads did, from a thread of its own.

A listener may be slow; the heartbeat must not be. So events of heartbeats wait
in a bounded queue: what does not fit is dropped with a word in the log, the
events table has it all the same.
"""

from __future__ import annotations

import logging
import os
import queue
import threading

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
        self._waiting: queue.Queue[Event] = queue.Queue(MOST_WAITING)
        self._pid = 0

    def check_fence(self, write: Write) -> FenceRefusedError | None:
        """See ``Plugins.check_fence``."""
        return self._plugins.check_fence(write)

    def listening(self) -> bool:
        """See ``Plugins.listening``."""
        return self._plugins.listening()

    def tell(self, events: Sequence[Event]) -> None:
        """Tell every listener each event, soon."""
        self._be_running()
        for event in events:
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                log = logging.getLogger("agent_checkpoint.plugins")
                log.error("listeners are too slow: event %s (%s) is recorded, but told to nobody", event.id, event.kind)

    def _be_running(self) -> None:
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._pid = os.getpid()
            self._waiting = queue.Queue(MOST_WAITING)
            threading.Thread(target=self._serve, name="agent-checkpoint-notifier", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._plugins.tell([self._waiting.get()])
