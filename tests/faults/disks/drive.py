"""A disk with a cache, and what is on it after the power was cut.

It is told every call that changed a file of a store. What was synced stays.
Of what was written since, anything may be there: nothing, all, the first
writes, some of them, or some of their sectors. A name that was made or removed
is safe once its folder was synced, which SQLite does with the first sync of
each log and journal; that a file which was synced has its name is taken for
granted. The shared memory of the log's index is gone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.faults.disks.vfs import CREATE, JOURNALS, Call

SECTOR = 512
CUTS = ("nothing", "all", "the first writes", "some writes", "some sectors")
"""What survives of that which was not synced."""


class Change(NamedTuple):
    """A call as it is remembered: the data of a write are its own."""

    kind: str
    file: int
    path: str
    place: int
    data: bytes
    flags: int

    @classmethod
    def of(cls, call: Call) -> Change:
        """During the call."""
        data = call.data() if call.kind == "write" else b""
        return cls(call.kind, call.file, call.path, call.place, data, call.flags)


@dataclass
class Content:
    """What is behind a name: what was synced, and the writes and truncations (None) since."""

    synced: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        """Bring everything to the disk."""
        self.synced = self.after(self.since)
        self.since = []

    def after(self, changes: list[tuple[int, bytes | None]]) -> bytearray:
        """What is there when these came to the disk."""
        content = bytearray(self.synced)
        for place, data in changes:
            if data is None:
                del content[place:]
                continue
            content.extend(bytes(max(0, place - len(content))))
            content[place : place + len(data)] = data
        return content

    def cut(self, how: str, choice: random.Random) -> bytes:
        """What is there after the power was cut."""
        return bytes(self.after(_surviving(self.since, how, choice)))


class Drive:
    """The files of one store."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._names: dict[str, Content] = {}
        self._safe_names: dict[str, Content] = {}
        self._open: dict[int, Content] = {}
        self._folder_at_sync: set[int] = set()

    def apply(self, change: Change) -> None:
        """Do what was done."""
        kind, file, path, place, data, flags = change
        if not path.startswith(self._path):
            return
        if kind == "open":
            self._open[file] = self._names.setdefault(path, Content())
            if flags & CREATE and flags & JOURNALS:
                self._folder_at_sync.add(file)
        elif kind == "write":
            self._open[file].since.append((place, data))
        elif kind == "truncate":
            self._open[file].since.append((place, None))
        elif kind == "delete":
            self._names.pop(path, None)
            if flags:
                self._safe_names = dict(self._names)
        elif kind == "sync":
            self._sync(file, path)
        elif kind == "lose":  # a sync that failed: the kernel forgets that there was something to bring there
            self._open[file].since = []

    def _sync(self, file: int, path: str) -> None:
        content = self._open[file]
        content.sync()
        if self._names.get(path) is content:
            self._safe_names[path] = content
        if file in self._folder_at_sync:
            self._folder_at_sync.remove(file)
            self._safe_names = dict(self._names)

    def cut(self, how: str, choice: random.Random) -> dict[str, bytes]:
        """The files, by their names, when the power is cut now."""
        found = {}
        for path in sorted({*self._names, *self._safe_names}):
            behind = (self._safe_names.get(path), self._names.get(path))
            content = behind[_which(how, choice)]
            if content is not None:
                found[os.path.basename(path)] = content.cut(how, choice)
        return found


def _which(how: str, choice: random.Random) -> int:
    """Whether the folder has its safe names (0) or the last ones (1)."""
    if how in ("nothing", "all"):
        return int(how == "all")
    return choice.randrange(2)


def _surviving(
    changes: list[tuple[int, bytes | None]], how: str, choice: random.Random
) -> list[tuple[int, bytes | None]]:
    if how == "nothing":
        return []
    if how == "all":
        return changes
    if how == "the first writes":
        return changes[: choice.randrange(len(changes) + 1)]
    if how == "some sectors":
        changes = [sector for change in changes for sector in _sectors(*change)]
    return [change for change in changes if choice.random() < 0.5]


def _sectors(place: int, data: bytes | None) -> Iterator[tuple[int, bytes | None]]:
    """A write in the parts that reach the disk by themselves."""
    if data is None:
        yield place, None
        return
    end = place + len(data)
    while place < end:
        stop = min(end, (place // SECTOR + 1) * SECTOR)
        yield place, data[len(data) - (end - place) : len(data) - (end - stop)]
        place = stop
