"""What a plugin may hook into. Project name and entry-point group: ``agent_checkpoint``."""

from __future__ import annotations

import pluggy

from agent_checkpoint.records import Event, Write

PROJECT = "agent_checkpoint"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def check_fence(write: Write) -> None:
    """Veto a protected write by raising ``FenceRefusedError``, with a reason.

    Called before the write lock is taken; any other exception refuses as well.
    Must not call the store.
    """


@hookspec
def event_recorded(event: Event) -> None:
    """Hear an event after its commit, with no lock held; exceptions are logged.

    A consumer that must miss none reads ``store.events(after=cursor)`` instead:
    a process can die between the commit and this call. Must not call the store.
    """
