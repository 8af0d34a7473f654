"""The floor: what bare sqlite3 takes for the rows that an operation on a lease must write.

It is fixed: per operation BEGIN IMMEDIATE, one SELECT, one upsert, one event
INSERT, COMMIT, of the same rows in the same tables as ours, at the same
``synchronous``. Nothing may be added to it.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from agent_checkpoint.ledger.events import RECORD
from agent_checkpoint.ledger.leases import OF_SCOPE, SAVE

OWNER = "worker-a"
TTL_NS = 60 * 10**9
# As long as the boot id that ours stores.
DOMAIN = "b7a1c3d5-0000-4000-8000-00005eedf100"


class Floor:
    """One worker's lease on one scope, kept by hand in a store's own tables."""

    def __init__(self, path: Path, scope: str, synchronous: str, busy_timeout_seconds: float = 10) -> None:
        self._scope = scope
        self._token = 0
        self._acquired_at = 0
        self._connection = sqlite3.connect(path, timeout=busy_timeout_seconds, isolation_level=None)
        self._connection.execute(f"PRAGMA synchronous={synchronous}")

    def acquire(self) -> None:
        """Write what a grant writes."""
        self._token += 1
        self._acquired_at = time.time_ns()
        self._operate("live", "lease.acquired", '{"ttl_seconds":60.0,"slot":0}')

    def heartbeat(self) -> None:
        """Write what a heartbeat writes."""
        self._operate("live", "lease.heartbeat", "{}")

    def release(self) -> None:
        """Write what a release writes."""
        self._operate("released", "lease.released", "{}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _operate(self, state: str, kind: str, detail: str) -> None:
        scope, token, execute = self._scope, self._token, self._connection.execute
        now = time.time_ns()  # changes with every operation: an unchanged page would not be written
        row = (scope, 0, OWNER, token, state, TTL_NS, self._acquired_at, now, now + TTL_NS, DOMAIN, now, "{}", "")
        execute("BEGIN IMMEDIATE")
        try:
            execute(OF_SCOPE, (scope,)).fetchone()
            execute(SAVE, row)
            execute(RECORD, (None, now, kind, scope, OWNER, token, None, None, detail))
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
