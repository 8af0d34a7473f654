"""Who in this process holds what, so that nobody waits for itself.

A holder is a thread, or an asyncio task. Only the grants of this process are
known: that is where a caller could wait for itself.
"""

from __future__ import annotations

import weakref
from _thread import _local

from agent_checkpoint import forks
from agent_checkpoint.errors import ReentrancyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.records import Lease, LeaseRow

# Grants that nobody gave back are forgotten, oldest first, when there are more than these.
KEPT = 1_000


class _Thread:
    """What stands for a thread: its ident comes again when it is over."""

    __slots__ = ("__weakref__",)


class _Mine(_local):
    def __init__(self) -> None:
        self.thread = _Thread()


_mine = _Mine()


def _in_child() -> None:
    """What the parent's thread holds, this one does not."""
    global _mine
    _mine = _Mine()


forks.at_fork(in_child=_in_child)


class Holders:
    """The latest grants of one store in this process, and who got them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], weakref.ref[object]] = {}

    def note(self, lease: Lease, holder: object = None) -> None:
        """The lease was granted to ``holder``, or to this thread."""
        held = self._held
        held[lease.row.scope, lease.row.token] = weakref.ref(holder or _mine.thread)
        if len(held) > KEPT:
            held.pop(next(iter(held)), None)

    def forget(self, scope: str, token: int) -> None:
        """The lease was given back."""
        self._held.pop((scope, token), None)

    def refuse_waiting(self, live: Iterable[LeaseRow], holder: object = None) -> None:
        """Raise ``ReentrancyError`` when one of these leases is the holder's own."""
        holder = holder or _mine.thread
        for row in live:
            known = self._held.get((row.scope, row.token))
            if known is not None and known() is holder:
                what = "thread" if isinstance(holder, _Thread) else "task"
                raise ReentrancyError(
                    f"this {what} holds scope {row.scope!r} itself (owner {row.owner!r}, token {row.token}): "
                    "it would wait for itself",
                    hint="use the lease that it has, or release it first; leases are not re-entrant",
                    scope=row.scope,
                    owner=row.owner,
                    token=row.token,
                )
