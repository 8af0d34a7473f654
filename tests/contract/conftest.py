"""What holds for every database is tested on every database."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import postgres

from agent_checkpoint import StateStore
from agent_checkpoint.testing import FakeClock

DATABASES = ("sqlite", "postgresql") if postgres.is_installed() else ("sqlite",)
_schemas = itertools.count(1)


@pytest.fixture(params=DATABASES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a store is: a path or a URL."""
    if request.param == "sqlite":
        return tmp_path / "agents.db"
    return postgres.url(f"test_{os.getpid()}_{next(_schemas)}")


@pytest.fixture
def store(path: Path | str, clock: FakeClock) -> Iterator[StateStore]:
    with StateStore(path, clock=clock) as opened:
        opened.initialize()
        yield opened
