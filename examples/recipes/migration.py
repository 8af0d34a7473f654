"""Copy a table in batches, then switch to the copy. Start it again after whatever ended it: it goes on where it was.

    python migration.py OLD.db NEW.db

Two of them at once: the second waits, finds everything done, and does nothing.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import sys
from contextlib import closing

from agent_checkpoint import Effect, Resolution, StateStore

BATCH = 100


def copy_batch(old: sqlite3.Connection, new: sqlite3.Connection, after: int) -> int:
    """Copy the next rows; the last id of them. Copying them again changes nothing."""
    rows = old.execute("SELECT id, text FROM notes WHERE id > ? ORDER BY id LIMIT ?", (after, BATCH)).fetchall()
    with new:
        new.executemany("INSERT OR REPLACE INTO notes (id, text) VALUES (?, ?)", rows)
    return int(rows[-1][0]) if rows else after


def switch(new: sqlite3.Connection) -> None:
    """Let readers use the copy: the step that must not be taken twice."""
    with new:
        new.execute("INSERT INTO switched (at) VALUES (CURRENT_TIMESTAMP)")


def migrate(store: StateStore, old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    def was_switched(_: Effect) -> Resolution:
        """Asked when an earlier run began to switch, and was killed: the new database can tell."""
        return Resolution(new.execute("SELECT COUNT(*) FROM switched").fetchone()[0] > 0)

    new.execute("CREATE TABLE IF NOT EXISTS notes (id INTEGER PRIMARY KEY, text TEXT)")
    new.execute("CREATE TABLE IF NOT EXISTS switched (at TEXT)")
    with store.hold("migration/notes", f"{socket.gethostname()}:{os.getpid()}", wait_seconds=600) as lease:
        saved = store.get_checkpoint("migration/notes")
        last = saved.data["last_id"] if saved else 0
        while (reached := copy_batch(old, new, last)) > last:
            last = reached
            # Refused when the lease was lost: then another run copies from here.
            store.put_checkpoint("migration/notes", {"last_id": last}, lease=lease)
        with lease.effect("migration/notes: switch", resolve=was_switched) as effect:
            if effect.fresh:
                switch(new)
                effect.done()


if __name__ == "__main__":
    with (
        StateStore("agents.db") as state,
        closing(sqlite3.connect(sys.argv[1])) as source,
        closing(sqlite3.connect(sys.argv[2])) as target,
    ):
        state.initialize()
        migrate(state, source, target)
