"""The check before each superstep, where LangGraph asks for the next version of a channel.

LangGraph takes ``saver.get_next_version`` once for each run, then reads the
checkpoint that the run begins from: that read tells which thread, and under
which lease. A later read changes nothing for a run that has begun. Whoever
takes it and reads nothing after it is not checked here: a graph that is drawn
writes nothing, and an update of the state is checked by its writes.
"""

from __future__ import annotations

from contextvars import ContextVar
from random import getrandbits
from typing import TYPE_CHECKING

from agent_checkpoint import StaleLeaseError
from agent_checkpoint_langgraph.mapping import scope_of
from agent_checkpoint_langgraph.ownership import put_on_record

if TYPE_CHECKING:
    from agent_checkpoint_langgraph.core import Core
    from agent_checkpoint_langgraph.ownership import ThreadLease

    Read = tuple[Core, str, ThreadLease | None]

_newest: ContextVar[Supersteps | None] = ContextVar("agent_checkpoint_langgraph_run", default=None)


class Supersteps:
    """Counts the versions of one run, and checks before each that the run may go on."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._read: Read | None = None
        _newest.set(self)

    def begin(self, read: Read) -> None:
        """The run reads the checkpoint that it begins from."""
        if read[0] is self._core and self._read is None:
            self._read = read

    def __call__(self, current: str | float | None, channel: None = None) -> str:
        """The version after ``current``: it sorts after it, and two branches never give the same.

        Raises:
            StaleLeaseError: the run was superseded; it must stop.
        """
        if self._read is not None and self._core.fencing != "off":
            _, thread_id, lease = self._read
            check(self._core, thread_id, lease)
        return next_version(current)


def next_version(current: str | float | None) -> str:
    """A version that sorts after ``current``, and that no other branch gives."""
    number = 0 if current is None else int(current.split(".")[0] if isinstance(current, str) else current)
    return f"{number + 1:032}.{getrandbits(32):08x}"


def note_read(core: Core, thread_id: str, lease: ThreadLease | None) -> None:
    """A checkpoint of a thread is read in this context, under that lease."""
    newest = _newest.get()
    if newest is not None:
        newest.begin((core, thread_id, lease))


def check(core: Core, thread_id: str, lease: ThreadLease | None) -> None:
    """Raise ``StaleLeaseError`` where a write to the thread would be refused."""
    if lease is not None:
        lease.check()
        return
    scope = scope_of(thread_id)
    try:
        core.store.check_scope(scope, required=core.fencing == "required")
    except StaleLeaseError:
        put_on_record(core.store, scope, None)
        raise
