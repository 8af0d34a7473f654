"""Stores on a real PostgreSQL, each in a schema of its own, by the server's clock."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from tests import postgres

from agent_checkpoint import StateStore

_schemas = itertools.count(1)


@pytest.fixture
def server() -> postgres.Server:
    """The server that the tests of this process share; for its owner."""
    return postgres.server()


@pytest.fixture
def schema() -> str:
    return f"store_{os.getpid()}_{next(_schemas)}"


@pytest.fixture
def url(server: postgres.Server, schema: str) -> str:
    return server.url(schema)


@pytest.fixture
def store(url: str) -> Iterator[StateStore]:
    with StateStore(url) as opened:
        opened.initialize()
        yield opened


@pytest.fixture
def own() -> Iterator[postgres.Server]:
    """A server that the test may kill: what it answered is on disk."""
    mine = postgres.Server("wal_writer_delay=10000ms").start()
    yield mine
    mine.remove()
