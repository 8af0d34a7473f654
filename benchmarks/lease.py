"""What a lease costs: acquire, heartbeat and release against the floor.

On disk nearly all of it is the disk; on tmpfs it is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from agent_checkpoint import StateStore
from benchmarks.floor import OWNER, Floor
from benchmarks.harness import Plan, Row, Target, interleave, timed

SCOPE = "release"
OPERATIONS = 3
ROUNDS = 40
STEPS = 20
# Cycles in a step: a few milliseconds at either place.
CYCLES = {"disk": 5, "tmpfs": 10}
TARGETS = {("disk", "full"): Target("≥", 0.75), ("tmpfs", "full"): Target("≥", 0.55)}


def measure(plan: Plan) -> Iterator[Row]:
    """Operations a second at each place, with and without a sync at every commit."""
    for place, folder in plan.places.items():
        for synchronous in ("full", "normal"):
            yield _compare(plan, place, folder, synchronous)


def _compare(plan: Plan, place: str, folder: Path, synchronous: Literal["full", "normal"]) -> Row:
    cycles = CYCLES[place]
    path = folder / f"lease-{synchronous}.db"
    floor_path = folder / f"lease-{synchronous}-floor.db"
    with StateStore(floor_path) as empty:
        empty.initialize()
    with StateStore(path, synchronous=synchronous) as store, closing(Floor(floor_path, SCOPE, synchronous)) as floor:
        store.initialize()
        ours, theirs = interleave(
            timed(lambda: _ours(store, cycles)), timed(lambda: _floor(floor, cycles)), plan.rounds(ROUNDS), STEPS
        )
    return Row(
        "lease",
        f"{synchronous.upper()}, {place}",
        "operations/s",
        "floor",
        tuple(OPERATIONS * cycles / seconds for seconds in ours),
        tuple(OPERATIONS * cycles / seconds for seconds in theirs),
        TARGETS.get((place, synchronous)),
    )


def _ours(store: StateStore, cycles: int) -> None:
    for _ in range(cycles):
        token = store.acquire(SCOPE, OWNER).token
        store.heartbeat(SCOPE, OWNER, token)
        store.release(SCOPE, OWNER, token)


def _floor(floor: Floor, cycles: int) -> None:
    for _ in range(cycles):
        floor.acquire()
        floor.heartbeat()
        floor.release()
