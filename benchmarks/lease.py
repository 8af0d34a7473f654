"""What a lease costs: acquire, heartbeat and release against the floor, and against other locks.

On disk nearly all of it is the disk; on tmpfs it is ours. A peer without a
heartbeat of its own is compared with a cycle without one, and a peer that
renews itself in the background with ``hold``, which does so too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from shutil import which
from typing import Literal

from agent_checkpoint import StateStore
from benchmarks import locks, redis_server
from benchmarks.floor import OWNER, Floor
from benchmarks.harness import Finding, Note, Plan, Row, Target, interleave, process, timed

SCOPE = "release"
OPERATIONS = 3
ROUNDS = 40
STEPS = 20
# Cycles in a step: a few milliseconds at either place.
CYCLES = {"disk": 5, "tmpfs": 10}
TARGETS = {("disk", "full"): Target("≥", 0.75), ("tmpfs", "full"): Target("≥", 0.55)}
PEER_ROUNDS = 20
# A lock on Redis with a subscription takes its time.
PEER_STEPS = 4
PROCESS_ROUNDS = 15
COMMAND = str(Path(sys.executable).with_name("agent-checkpoint"))

Level = Literal["full", "normal"]
LEVELS: tuple[Level, ...] = ("full", "normal")


def measure(plan: Plan) -> Iterator[Finding]:
    """Operations a second at each place, with and without a sync at every commit; then beside each other lock."""
    for place, folder in plan.places.items():
        for synchronous in LEVELS:
            yield _floor(plan, place, folder, synchronous)
    yield from locks.notes("lease")
    for place, folder in plan.places.items():
        for name in locks.PEERS:
            if locks.why_absent(name) is None:
                yield from _peer(plan, place, folder, name)
    yield from _processes(plan)


def _floor(plan: Plan, place: str, folder: Path, synchronous: Level) -> Row:
    cycles = CYCLES[place]
    path = folder / f"lease-{synchronous}.db"
    floor_path = folder / f"lease-{synchronous}-floor.db"
    with StateStore(floor_path) as empty:
        empty.initialize()
    with StateStore(path, synchronous=synchronous) as store, closing(Floor(floor_path, SCOPE, synchronous)) as floor:
        store.initialize()
        ours, theirs = interleave(
            timed(lambda: _ours(store, cycles)),
            timed(lambda: _bare(floor, cycles)),
            plan.rounds(ROUNDS),
            plan.steps(STEPS),
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


def _bare(floor: Floor, cycles: int) -> None:
    for _ in range(cycles):
        floor.acquire()
        floor.heartbeat()
        floor.release()


def _peer(plan: Plan, place: str, folder: Path, name: str) -> Iterator[Row]:
    """The seconds of a cycle; a Redis syncs where ours does."""
    for synchronous in LEVELS:
        with (
            locks.opened(name, folder, synchronous == "full") as lock,
            StateStore(folder / f"lease-{synchronous}.db", synchronous=synchronous) as store,
        ):
            what, ours = _alike(store, lock)
            theirs = timed(lambda: _cycle(lock))
            figures = interleave(timed(ours), theirs, plan.rounds(PEER_ROUNDS), plan.steps(PEER_STEPS))
        yield Row("lease", f"{what}, {synchronous.upper()}, {place}", "s", name, *figures)


def _alike(store: StateStore, lock: locks.Lock) -> tuple[str, Callable[[], object]]:
    """What of ours does as much as the peer does: its name, and a cycle of it."""

    def held() -> None:
        with store.hold(SCOPE, OWNER):
            pass

    def extended() -> None:
        _ours(store, 1)

    def plain() -> None:
        store.release(*store.acquire(SCOPE, OWNER).fence)

    if lock.own_thread:
        return "hold", held
    return ("acquire+heartbeat+release", extended) if lock.extend is not None else ("acquire+release", plain)


def _cycle(lock: locks.Lock) -> None:
    lock.acquire()
    if lock.extend is not None:
        lock.extend()
    lock.release()


def _processes(plan: Plan) -> Iterator[Finding]:
    """``run`` beside ``flock(1)``: a command under a lock, from start to end."""
    flock, folder = which("flock"), plan.places["disk"]
    if flock is None:
        yield Note("lease", "flock(1) is not measured: it is not installed (util-linux has it).")
        return
    path = folder / "lease-run.db"
    with StateStore(path) as store:
        store.initialize()
    bytecode = folder / "bytecode"
    ours, theirs = interleave(
        process((COMMAND, "--db", str(path), "run", SCOPE, "--", "true"), bytecode),
        process((flock, str(folder / "run.lock"), "true"), bytecode),
        plan.rounds(PROCESS_ROUNDS),
    )
    yield Row("lease", "run SCOPE -- true, FULL, disk", "s", "flock(1)", ours, theirs)
    yield Note(
        "lease",
        "flock(1): the kernel's lock on a file, inherited by whatever the command leaves behind; no ttl, so that a "
        "frozen command keeps it for ever, no heartbeat, no token, no queue, no audit log, nothing to sync; no "
        "interpreter to start. `run` starts one, and a guard that ends the command with all of its descendants.",
    )


def servers(plan: Plan) -> Iterator[str]:
    """What serves the locks that need a server."""
    if redis_server.missing() is None:
        with redis_server.server(plan.places["disk"], synced=True) as url:
            yield redis_server.version(url)
    if flock := which("flock"):
        yield subprocess.run([flock, "--version"], capture_output=True, text=True, check=True).stdout.strip()
