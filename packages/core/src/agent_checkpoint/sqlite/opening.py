"""One connection to a database file: opened right, and waiting so that signals are heard."""

from __future__ import annotations

import os
import sqlite3
import sys
from itertools import count
from time import monotonic, sleep

from agent_checkpoint.errors import NotAStoreError
from agent_checkpoint.sqlite.translate import is_busy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

# Stamped into the file's header: "ACPT".
APPLICATION_ID = 0x41435054
# How long SQLite itself waits for a lock, see ``patiently``.
SLICE_SECONDS = 0.2

_numbers = count(1)


class Connection(sqlite3.Connection):
    """A connection, which file it is to, and its one cursor.

    Every statement goes through ``run``: a cursor for each would be a tenth of
    the cost of a write. Its rows are fetched before the next statement.
    """

    identity: tuple[int, int] | None = None
    number = 0
    """Which connection of this process it is: counted, for an address comes again."""
    commits = 0
    """How many changes were committed by it."""
    level = ""
    """Its ``synchronous``."""
    loan: Any
    """Who has it, for its pool."""
    run: Callable[..., sqlite3.Cursor]

    def close(self) -> None:
        """Close it and its cursor: a statement that failed, and is there still, would keep the files open."""
        run = self.__dict__.get("run")  # not there where opening it has failed
        try:
            if run is not None:
                run.__self__.close()
        except sqlite3.Error:
            pass  # it was closed before
        finally:
            super().close()


def connect(path: str, synchronous: str) -> Connection:
    """Open the file, which must be there.

    The busy timeout is set first: everything after it may have to wait. It is
    short, see ``patiently``.
    """
    # Percent-encoded bytes: a path is no URI, and need not be UTF-8.
    name = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"/._-" else f"%{byte:02x}"
        for byte in os.fsencode(path)
    )
    connection = sqlite3.connect(
        f"file:{name}?mode=rw",
        timeout=SLICE_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
        factory=Connection,
    )
    try:
        connection.number = next(_numbers)
        connection.run = connection.cursor().execute
        connection.run(f"PRAGMA synchronous={synchronous}")
        connection.level = synchronous
        # A damaged page is found where it is read first, not where it is used.
        connection.run("PRAGMA cell_size_check=1")
        if sys.platform == "darwin":
            # There fsync leaves the data in the drive's cache.
            connection.run("PRAGMA fullfsync=1")
    except BaseException:
        connection.close()
        raise
    return connection


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
    found = patiently(busy_seconds, lambda: connection.execute("PRAGMA application_id").fetchone()[0])
    if found != APPLICATION_ID:
        raise NotAStoreError(f"{path} is an SQLite database of another program", database=path)
