"""What ``import agent_checkpoint`` adds to the start of a program that uses SQLite and JSON anyway."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.harness import Plan, Row, Target, interleave, process

ROUNDS = 30
# Processes of either side in a round.
STEPS = 3


def measure(plan: Plan) -> Iterator[Row]:
    """Seconds of a process that imports and ends."""
    bytecode = plan.places["disk"] / "bytecode"
    ours, theirs = interleave(
        process((sys.executable, "-c", "import agent_checkpoint"), bytecode),
        process((sys.executable, "-c", "import sqlite3, json"), bytecode),
        plan.rounds(ROUNDS),
        plan.steps(STEPS),
    )
    yield Row("import", "agent_checkpoint", "s", "sqlite3, json", ours, theirs, Target("≤", 1.5))
