"""What the tests of the saver share: a saver on a real database, and small ways to put and to look.

Fixtures are found by pytest; the rest is imported, ``from .conftest import …``. What one file alone needs stays there.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from langgraph.checkpoint.base import CheckpointTuple
from tests import postgres

from agent_checkpoint_langgraph import AgentCheckpointSaver

T = TypeVar("T")
# For what must come to an end by itself: a test that waits longer than this has found a hang.
WATCHDOG_SECONDS = 60
FORMAT = 4


DATABASES = ("sqlite", "postgresql") if postgres.is_installed() else ("sqlite",)
# What holds for every database is tested on every database; a test that takes a ``path`` is about a file.
ON_EVERY_DATABASE = {
    "test_conformance",
    "test_delta_channels",
    "test_leased",
    "test_list",
    "test_many_writers",
    "test_removing",
    "test_same_as_memory",
    "test_values",
    "test_writes",
}
# What is one story many times over runs on the second database with --long.
LONG_ON_A_SERVER = {"test_delta_channels", "test_same_as_memory", "test_values"}
_schemas = itertools.count(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.definition._fixtureinfo.argnames
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in ON_EVERY_DATABASE and "database" in metafunc.fixturenames and "path" not in asked:
        marks = [pytest.mark.long] if module in LONG_ON_A_SERVER else []
        again = [pytest.param(name, marks=marks) for name in DATABASES[1:]]
        metafunc.parametrize("database", [DATABASES[0], *again])


@pytest.fixture
def database() -> str:
    """Which database a test is about."""
    return "sqlite"


@pytest.fixture
def url_or_path(database: str, path: Path) -> Path | str:
    """Where the store of a test is."""
    return path if database == "sqlite" else fresh_url()


@pytest.fixture
def saver(url_or_path: Path | str) -> Iterator[AgentCheckpointSaver]:
    """A saver on a fresh store. It may lose the last commits in a power cut, which no test makes."""
    with AgentCheckpointSaver.from_conn_string(url_or_path, synchronous="normal") as opened:
        yield opened


def fresh_url(*options: str) -> str:
    """The URL of a store that is not there yet."""
    return postgres.url(f"saver_{os.getpid()}_{next(_schemas)}", *options)


def at(thread_id: Any = "thread-1", checkpoint_id: str | None = None, namespace: str = "", **more: Any) -> Any:
    """The config of a thread or of one of its checkpoints."""
    configurable = {"thread_id": thread_id, "checkpoint_ns": namespace, **more}
    return {"configurable": configurable if checkpoint_id is None else {**configurable, "checkpoint_id": checkpoint_id}}


def checkpoint(checkpoint_id: str, values: Mapping[str, Any], version: str, **more: Any) -> dict[str, Any]:
    """A checkpoint whose channels have one version all."""
    return {
        "v": FORMAT,
        "id": checkpoint_id,
        "ts": "2030-01-01T00:00:00+00:00",
        "channel_values": dict(values),
        "channel_versions": dict.fromkeys(values, version),
        "versions_seen": {},
        "updated_channels": None,
        **more,
    }


class Line:
    """A line of checkpoints of a thread, as a run leaves it, with ids that sort as they were saved."""

    def __init__(self, saver: Any, thread_id: Any = "thread-1", namespace: str = "") -> None:
        self._saver = saver
        self.head = at(thread_id, namespace=namespace)
        self._count = 0

    def put(self, values: Mapping[str, Any], checkpoint_id: str | None = None, on: Any = None, **metadata: Any) -> Any:
        """Save a checkpoint, all of whose channels are new, on the one before it or on another one; its config."""
        self._count += 1
        version = self._saver.get_next_version(str(self._count), None)
        made = checkpoint(checkpoint_id or f"id-{self._count:04}", values, version)
        step = {"source": "loop", "step": self._count, "parents": {}, **metadata}
        self.head = self._saver.put(on or self.head, made, step, made["channel_versions"])
        return self.head

    def put_many(self, count: int, **metadata: Any) -> list[Any]:
        """Save so many small ones; their configs."""
        return [self.put({"n": number}, **metadata) for number in range(count)]


def values(found: CheckpointTuple | None) -> dict[str, Any]:
    """The channels of a checkpoint that must be there."""
    assert found is not None
    return dict(found.checkpoint["channel_values"])


def ids(found: Sequence[CheckpointTuple] | Iterator[CheckpointTuple]) -> list[str]:
    return [each.config["configurable"]["checkpoint_id"] for each in found]


def rows(path: Path, sql: str, *bound: Any) -> list[Any]:
    """What is in the file, seen from outside."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql, bound).fetchall()


def rewrite(path: Path, sql: str, *bound: Any) -> int:
    """Change the file behind the saver's back; how many rows that were."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(sql, bound).rowcount


def raised(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """The error that a call must raise, to look at what it says."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value
