"""Who in this process holds what, so that nobody waits for itself.

A holder is a thread, or an asyncio task. Only the grants of this process are
known: that is where a caller could wait for itself.
"""

from __future__ import annotations

import threading
import weakref

from agent_checkpoint.errors import ReentrancyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint.records import Lease, LeaseRow

# Grants that nobody gave back are forgotten, oldest first, when there are more than these.
KEPT = 1_000

_current = threading.current_thread


class Holders:
    """The latest grants of one store in this process, and who got them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], weakref.ref[object]] = {}

    def note(self, lease: Lease, holder: object = None) -> None:
        """The lease was granted to ``holder``, or to this thread."""
        held = self._held
        held[lease.row.scope, lease.row.token] = weakref.ref(holder or _current())
        if len(held) > KEPT:
            held.pop(next(iter(held)), None)

    def forget(self, scope: str, token: int) -> None:
        """The lease was given back."""
        self._held.pop((scope, token), None)

    def refuse_waiting(self, live: Iterable[LeaseRow], holder: object = None) -> None:
        """Raise ``ReentrancyError`` when one of these leases is the holder's own."""
        holder = holder or _current()
        for row in live:
            known = self._held.get((row.scope, row.token))
            if known is not None and known() is holder:
                what = "thread" if isinstance(holder, threading.Thread) else "task"
                raise ReentrancyError(
                    f"this {what} holds scope {row.scope!r} itself (owner {row.owner!r}, token {row.token}): "
                    "it would wait for ever",
                    hint="use the lease that it has, or release it first; leases are not re-entrant",
                    scope=row.scope,
                    owner=row.owner,
                    token=row.token,
                )
