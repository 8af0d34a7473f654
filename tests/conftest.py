"""What every test may ask for: a store on a real file, and time that it turns itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.testing import FakeClock


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="a long form: runs with --long"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agents.db"


@pytest.fixture
def store(path: Path, clock: FakeClock) -> Iterator[StateStore]:
    with StateStore(path, clock=clock) as opened:
        opened.initialize()
        yield opened
