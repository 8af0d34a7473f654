"""For the tests of programs that use a store: time turned by hand, frozen processes, and zombies.

``zombie`` proves that an agent of yours, frozen, superseded and woken, changes
nothing any more. pytest has it as a fixture of that name. Nothing here imports pytest.
"""

from __future__ import annotations

from agent_checkpoint.testing.agents import Ended
from agent_checkpoint.testing.fakes import EPOCH_NS, FakeClock, FakeProcesses
from agent_checkpoint.testing.freezing import Frozen, freeze, kill
from agent_checkpoint.testing.outcome import ZombieOutcome
from agent_checkpoint.testing.pausing import pause_here
from agent_checkpoint.testing.story import zombie

__all__ = [
    "EPOCH_NS",
    "Ended",
    "FakeClock",
    "FakeProcesses",
    "Frozen",
    "ZombieOutcome",
    "freeze",
    "kill",
    "pause_here",
    "zombie",
]
