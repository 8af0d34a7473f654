"""The two hooks: what happens is appended to a file, and writes wait for business hours.

Settings come from the environment at each call; what they mean is decided in
``hours``. A setting that is not understood refuses every protected write: a
guard with a typing error must not stand open.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

from agent_checkpoint import Event, FenceRefusedError, hookimpl
from agent_checkpoint_business_hours import event_log, hours

__all__ = ["EVENT_LOG", "BusinessHours", "plugin"]

EVENT_LOG = "AGENT_CHECKPOINT_EVENT_LOG"


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


class BusinessHours:
    """The plugin; tests give it an environment and a clock of their own."""

    def __init__(self, environ: Mapping[str, str] = os.environ, now: Callable[[], datetime] = _utc_now) -> None:
        self._environ = environ
        self._now = now

    @hookimpl
    def check_fence(self) -> None:
        """Refuse a protected write outside the hours, or when the hours cannot be understood.

        The rule is the same for every write, so this asks for no record: a hook
        may leave out the arguments it does not need.

        Raises:
            FenceRefusedError: the reason says when writes are allowed next, or which setting is wrong.
        """
        try:
            allowed = hours.read(self._environ)
        except ValueError as error:
            raise FenceRefusedError(str(error)) from error
        opens_at = None if allowed is None else hours.closed_until(self._now(), allowed)
        if opens_at is not None:
            raise FenceRefusedError(f"writes are closed until {opens_at.isoformat()} ({allowed})")

    @hookimpl
    def event_recorded(self, event: Event) -> None:
        """Append the event to the file that AGENT_CHECKPOINT_EVENT_LOG names, if it names one."""
        path = self._environ.get(EVENT_LOG)
        if path:
            event_log.append(path, event)


plugin = BusinessHours()
