"""One connection to a database file: opened right, noted while it is open, waiting so that signals are heard."""

from __future__ import annotations

import os
import sqlite3
import sys
from _thread import get_ident
from itertools import count
from time import monotonic, sleep

from agent_checkpoint import forks
from agent_checkpoint.errors import NotAStoreError, ReentrancyError
from agent_checkpoint.sqlite.translate import is_busy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

# Stamped into the file's header: "ACPT".
APPLICATION_ID = 0x41435054
# How long SQLite itself waits for a lock, see ``patiently``.
SLICE_SECONDS = 0.2

_numbers = count(1)


class Note:
    """That a connection is open, or about to be: to which file, and which thread uses it (0: none)."""

    __slots__ = ("generation", "identity", "kept", "thread")

    def __init__(self) -> None:
        self.generation = forks.settled()
        self.identity: tuple[int, int] | None = None
        self.kept: tuple[object, ...] = ()
        """What SQLite has of it in this process."""
        self.thread = get_ident()


opened: set[Note] = set()
"""Every connection of this process, from before it is opened until after it was closed, whoever has it."""

inside_sqlite: list[bool] = []
"""Whether another thread may be in SQLite's own code, at the fork that is coming; empty while nobody knows."""

# Files that were open when this process was forked.
_poisoned: set[tuple[int, int]] = set()
# SQLite's locks for the whole process may be those of a thread that is not here.
_all_poisoned = False
# What is the parent's, should it be impossible to leak it.
_abandoned: list[Note] = []


class Connection:
    """A connection, which file it is to, and its one cursor.

    Every statement goes through ``run``: a cursor for each would be a tenth of
    the cost of a write. Its rows are fetched before the next statement. Who
    loses it, as by an interrupt, closes it: nothing refers back to it.
    """

    __slots__ = ("commits", "level", "note", "number", "raw", "run")

    def __init__(self, path: str, synchronous: str = "FULL") -> None:
        """Open the file, which must be there.

        Raises:
            ReentrancyError: this process was forked while the file was in use.
        """
        self.note = Note()
        self.number = next(_numbers)
        """Which connection of this process it is: counted, for an address comes again."""
        self.commits = 0
        """How many changes were committed by it."""
        self.level = synchronous
        """Its ``synchronous``."""
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str) -> None:
        note = self.note
        # Noted before it is opened: either it sees a fork coming, or the fork sees it.
        opened.add(note)
        while forks.coming and not forks.is_mine():
            opened.discard(note)
            forks.wait()
            opened.add(note)
        while True:
            note.identity = _identity(path)
            self.raw = _opened(path)
            if _identity(path) == note.identity:
                break
            self.raw.close()  # another file was put there between the two
        self.run: Callable[..., sqlite3.Cursor] = self.raw.cursor().execute
        note.kept = (self.raw, self.run)
        self.run(f"PRAGMA synchronous={self.level}")
        # A damaged page is found where it is read first, not where it is used.
        self.run("PRAGMA cell_size_check=1")
        if sys.platform == "darwin":
            # There fsync leaves the data in the drive's cache.
            self.run("PRAGMA fullfsync=1")

    @property
    def identity(self) -> tuple[int, int] | None:
        """Which file it is to: its device and inode, None where there was none."""
        return self.note.identity

    def close(self) -> None:
        """Close it and its cursor: a statement that failed, and is there still, would keep the files open."""
        note: Note | None = getattr(self, "note", None)
        if note is None or note.generation != forks.generation():
            return  # interrupted before it was anything, or the parent's
        run, raw = getattr(self, "run", None), getattr(self, "raw", None)
        if run is not None:
            try:  # noqa: SIM105 -- contextlib would be half a millisecond of each command
                run.__self__.close()
            except sqlite3.ProgrammingError:
                pass  # it was closed before
        if raw is not None:
            raw.close()
        opened.discard(note)

    def __del__(self) -> None:
        note: Note | None = getattr(self, "note", None)
        if note is None or note.generation != forks.generation():
            return  # the parent's, and noted until that has been seen to
        try:
            self.close()
        finally:  # interrupted in there it is closed as well, with what it is made of
            opened.discard(note)


def abandon() -> None:
    """In a forked child: what is open stays the parent's.

    Closing it would run SQLite's clean-up on locks and shared memory that the
    parent is using; so the file cannot be opened anew here either.
    """
    global _all_poisoned
    theirs = [note for note in opened.copy() if note.generation != forks.generation()]
    _abandoned.extend(theirs)  # first of all, for the garbage collector may run in here
    _poisoned.update(note.identity for note in theirs if note.identity is not None)
    me = get_ident()  # nobody knows, when what goes before a fork was interrupted
    inside = inside_sqlite[-1] if inside_sqlite else any(note.thread not in (0, me) for note in theirs)
    _all_poisoned = _all_poisoned or inside
    inside_sqlite.clear()
    for note in theirs:
        leak(note.kept)
        opened.discard(note)


def leak(connections: object) -> None:
    """Keep an object alive until the process ends, beyond the interpreter's own clean-up where ``ctypes`` is there."""
    try:
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connections))
    except Exception:
        return  # it is kept as long as the interpreter lives


def _identity(path: str) -> tuple[int, int] | None:
    try:
        file = os.stat(path)
    except OSError:
        return None  # SQLite will say so
    identity = (file.st_dev, file.st_ino)
    if _all_poisoned:
        raise ReentrancyError(
            "this process was forked while another thread was inside SQLite, whose own locks cannot be trusted here",
            hint="start the process anew (multiprocessing: spawn), or fork before the threads begin",
            database=path,
        )
    if identity in _poisoned:
        raise ReentrancyError(
            f"this process was forked while {path} was in use, so SQLite's locks cannot be trusted here",
            hint="start the process anew (multiprocessing: spawn), or fork outside of transactions",
            database=path,
        )
    return identity


def _opened(path: str) -> sqlite3.Connection:
    """The busy timeout is set first: everything after it may have to wait. It is short, see ``patiently``."""
    # Percent-encoded bytes: a path is no URI, and need not be UTF-8.
    name = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"/._-" else f"%{byte:02x}"
        for byte in os.fsencode(path)
    )
    return sqlite3.connect(
        f"file:{name}?mode=rw", timeout=SLICE_SECONDS, isolation_level=None, check_same_thread=False, uri=True
    )


def patiently(seconds: float, step: Callable[[], T]) -> T:
    """Run a step that another connection may be in the way of, again until the time is over.

    SQLite waits inside of C, where no signal is heard: so it waits in slices,
    and Ctrl-C ends the wait between two of them.
    """
    deadline = monotonic() + seconds
    while True:
        try:
            return step()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or monotonic() >= deadline:
                raise
        sleep(0.002)  # some steps (journal_mode) are refused at once


def refuse_foreign(connection: Connection, path: str, busy_seconds: float) -> None:
    """Raise ``NotAStoreError`` for somebody else's SQLite database, before anything is changed in it."""
    found = patiently(busy_seconds, lambda: connection.run("PRAGMA application_id").fetchone()[0])
    if found != APPLICATION_ID:
        raise NotAStoreError(f"{path} is an SQLite database of another program", database=path)
