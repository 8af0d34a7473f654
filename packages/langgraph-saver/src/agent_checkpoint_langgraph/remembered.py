"""What this process remembers of the checkpoints that it saved or read last.

It saves reading back what the next checkpoint is a difference to. Nothing here
is trusted: a save names the row that it builds on, and is done anew where that
row is gone. It changes only after a commit.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent_checkpoint_langgraph.mapping import Address
    from agent_checkpoint_langgraph.serde import Typed

# How many bytes of values are remembered at most, all threads together.
MOST_BYTES = 64 * 1024 * 1024
# And of how many namespaces; each costs some kilobytes beside its values.
MOST_ENTRIES = 2_000


class Stored(NamedTuple):
    """A value as it is stored: its row, what lies between it and its full copy, and its bytes."""

    number: int
    depth: int
    weight: int
    value: Typed


class Known(NamedTuple):
    """A saved checkpoint: its row and revision, the versions of its channels, and the values that these have."""

    number: int
    revision: int
    checkpoint_id: str
    versions: Mapping[str, Any]
    state: Mapping[str, Stored]

    @property
    def size(self) -> int:
        """Bytes that it keeps in memory."""
        return sum(len(stored.value[1]) for stored in self.state.values())


class Remembered:
    """The latest checkpoint of each namespace that was used lately; safe for many threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[str, str], Known] = OrderedDict()
        self._lock = Lock()

    def parent_of(self, where: Address) -> Known | None:
        """The checkpoint that an address names, if it is the one that was remembered last of its namespace."""
        key = (where.thread_id, where.namespace)
        with self._lock:
            known = self._known.get(key)
            if known is None or known.checkpoint_id != where.checkpoint_id:
                return None
            self._known.move_to_end(key)
            return known

    def still(self, where: Address, number: int, revision: int) -> Known | None:
        """The checkpoint of this row, if it is the one that was remembered last of its namespace."""
        known = self.parent_of(where)
        return known if known is not None and (known.number, known.revision) == (number, revision) else None

    def note(self, thread_id: str, namespace: str, known: Known) -> None:
        """Remember a checkpoint that is committed, in place of the one before it."""
        with self._lock:
            if self._known.get((thread_id, namespace)) is known:
                return
            self._drop((thread_id, namespace))
            self._known[(thread_id, namespace)] = known
            self._bytes += known.size
            while self._known and (self._bytes > self._most_bytes or len(self._known) > MOST_ENTRIES):
                self._drop(next(iter(self._known)))

    def forget(self, thread_id: str) -> None:
        """Remember nothing of a thread any more."""
        with self._lock:
            for key in [key for key in self._known if key[0] == thread_id]:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self._bytes -= known.size
