"""What is under the model: a SQLite file, or a schema of a PostgreSQL server; ``rules`` has a third."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from typing import Any

from tests import postgres
from tests.faults.model.base import PlaceRow
from tests.faults.model.shadow import Ask
from tests.faults.model.world import World

from agent_checkpoint import Event, StateStore, leases
from agent_checkpoint.names import NS

LEASES = "SELECT slot, token, owner, state FROM leases WHERE scope = ? ORDER BY slot"
PLACES = "SELECT number, expires_at, domain, beat_ticks, passed FROM tickets WHERE scope = ? ORDER BY number"
LAST_EVENT = "SELECT COALESCE(MAX(id), 0) FROM events"
# Longer than an autovacuum takes.
LONGEST_SECONDS = 60
PAUSE_SECONDS = 0.01
ALL_EVENTS = 100_000
MEMORY = "/dev/shm"
PREFIX = "agent-checkpoint-model-"
_schemas = itertools.count(1)


class Stored:
    """A store on a database, and a folder beside it; every process opens the store anew."""

    def __init__(self, world: World, folder: str, address: str) -> None:
        self.world = world
        self.folder = folder
        self.address = address
        self._files = itertools.count(1)
        self._reader = self.open()
        self._reader.initialize()

    def open(self) -> StateStore:
        """A store for another process."""
        return StateStore(self.address, synchronous="normal", clock=self.world.clock, processes=self.world.table)

    def waiter(self, store: StateStore, ask: Ask, wait_seconds: float, holder: object) -> Any:
        """The store's own waiter, to be stepped by hand."""
        process = "" if ask.process is None else store._database.identify(ask.process.process.pid)
        asked = leases.valid_ask(ask.scope, ask.owner, ask.ttl / NS, None, process=process)
        return store._waiter(asked, wait_seconds, holder)

    def new_file(self, suffix: str) -> str:
        """A path where nothing is."""
        return os.path.join(self.folder, f"{next(self._files)}{suffix}")

    def events(self, after: str) -> list[Event]:
        """The log behind a cursor."""
        return self._reader.events(limit=ALL_EVENTS, after=after)

    def leases(self, scope: str) -> list[tuple[int, int, str, str]]:
        """Slot, token, owner and recorded state of a scope's leases, by slot."""
        return self.rows(LEASES, (scope,))

    def places(self, scope: str) -> list[PlaceRow]:
        """The queue of a scope."""
        return self.rows(PLACES, (scope,))

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """What a query finds."""
        with self._reader.read() as reader:
            return [tuple(row) for row in reader.rows(sql, parameters)]

    def close(self) -> None:
        """Remove it all."""
        self._reader.close()
        shutil.rmtree(self.folder)


class OnSqlite(Stored):
    """A SQLite file in memory, where there is some."""

    def __init__(self, world: World) -> None:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY if os.path.isdir(MEMORY) else None)
        super().__init__(world, folder, os.path.join(folder, "agents.db"))
        self.events("start")  # looks at the file system
        world.one_kernel = self._reader._database.one_kernel  # type: ignore[attr-defined]


class OnPostgres(Stored):
    """A schema of the tests' own server, which has its own way of backups."""

    def __init__(self, world: World) -> None:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        super().__init__(world, folder, postgres.url(f"model_{os.getpid()}_{next(_schemas)}"))

    def events(self, after: str) -> list[Event]:
        """The log behind a cursor, once what is committed can be read: the server's own work may hold it back."""
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until:
            with self._reader.read() as reader:
                if reader.rows(LAST_EVENT)[0][0] < reader.horizon:
                    break
            time.sleep(PAUSE_SECONDS)
        return super().events(after)
