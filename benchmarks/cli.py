"""The command as a process, against the least that a Python command with a database needs.

The peer imports what no such command can do without, and does nothing. The
rows without the command show how much of the cost is argparse and output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from agent_checkpoint import StateStore
from benchmarks.harness import Plan, Row, Target, interleave, process

COMMAND = Path(sys.executable).with_name("agent-checkpoint")
LEAST = "import argparse, json, sqlite3"
TARGET = Target("≤", 1.75)
ROUNDS = 30
# Processes of either side in a round.
STEPS = 3
SCOPE = "release"
WORKFLOW = "deploy-v2"
# Longer than any run.
TTL_SECONDS = 3600

SHOW = "import sys; from agent_checkpoint import StateStore; StateStore(sys.argv[1]).get_lease(sys.argv[2])"
PUT = "import sys; from agent_checkpoint import StateStore; StateStore(sys.argv[1]).put_checkpoint(sys.argv[2], {})"


def measure(plan: Plan) -> Iterator[Row]:
    """Seconds from start to end, on disk, at FULL."""
    path = plan.places["disk"] / "cli.db"
    with StateStore(path) as store:
        store.initialize()
        store.acquire(SCOPE, "worker-a", TTL_SECONDS)
    command, database = str(COMMAND), str(path)
    show = (command, "--db", database, "lease", "show", SCOPE)
    put = (command, "--db", database, "checkpoint", "put", WORKFLOW, "--data", "{}")
    yield _compare(plan, "lease show", show, TARGET)
    yield _compare(plan, "checkpoint put", put, TARGET)
    yield _compare(plan, "get_lease, no command", (sys.executable, "-c", SHOW, database, SCOPE))
    yield _compare(plan, "put_checkpoint, no command", (sys.executable, "-c", PUT, database, WORKFLOW))


def _compare(plan: Plan, case: str, command: tuple[str, ...], target: Target | None = None) -> Row:
    bytecode = plan.places["disk"] / "bytecode"
    ours, theirs = interleave(
        process(command, bytecode),
        process((sys.executable, "-c", LEAST), bytecode),
        plan.rounds(ROUNDS),
        plan.steps(STEPS),
    )
    return Row("cli", case, "s", "bare imports", ours, theirs, target)
