"""The pytest plugin of agent-checkpoint: the fixtures ``zombie``, ``agent_checkpoint_clock`` and ``…_store``.

It is loaded in every pytest run of an environment that has the package, so it
imports nothing of it before a test asks. ``-p no:agent_checkpoint`` leaves it out.
"""

from __future__ import annotations

import typing

import pytest

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent_checkpoint import StateStore
    from agent_checkpoint.testing import FakeClock, ZombieOutcome


@pytest.fixture
def zombie() -> Callable[..., ZombieOutcome]:
    """``agent_checkpoint.testing.zombie``: freeze an agent under its lease, supersede it, wake it; what it did then."""
    from agent_checkpoint.testing import zombie

    return zombie


@pytest.fixture
def agent_checkpoint_clock() -> FakeClock:
    """A clock that stands still until the test turns it: ``advance(seconds)``."""
    from agent_checkpoint.testing import FakeClock

    return FakeClock()


@pytest.fixture
def agent_checkpoint_store(tmp_path: Path, agent_checkpoint_clock: FakeClock) -> Iterator[StateStore]:
    """An empty store in ``tmp_path``, whose time is ``agent_checkpoint_clock``."""
    from agent_checkpoint import StateStore

    with StateStore(tmp_path / "agents.db", clock=agent_checkpoint_clock) as store:
        store.initialize()
        yield store
