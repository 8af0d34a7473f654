"""What every test may ask for: a store on a real file, and time that it turns itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from agent_checkpoint import StateStore
from agent_checkpoint.testing import FakeClock

# Without a deadline: a busy machine is no failure.
settings.register_profile("short", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=1_000, deadline=None)
MEMORY = Path("/dev/shm")
# Several times what the files of one run take.
ROOM_BYTES = 2 << 30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long forms too, with all files on the disk")


def pytest_configure(config: pytest.Config) -> None:
    # Hundreds of processes import the same modules: where nobody may keep what it compiled, that takes minutes.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    settings.load_profile("long" if config.getoption("--long") else "short")
    if not config.getoption("--long") and has_room(MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def has_room(folder: Path) -> bool:
    """Whether temporary files may be there, programs among them."""
    return (
        os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free > ROOM_BYTES
        and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="a long form: runs with --long"))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that run nothing but what is measured elsewhere: measuring takes most of their time."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


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
