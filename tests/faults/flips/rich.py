"""A store with something of everything in it, at rest, and as a kill leaves it with its log beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from agent_checkpoint import StateStore
from agent_checkpoint.errors import AgentCheckpointError
from agent_checkpoint.testing import EPOCH_NS, FakeClock, FakeProcesses

SCOPES = [f"release/service-{number}" for number in range(18)]
LIMITED = "pool/builders"
WORKFLOWS = [f"deploy/service-{number}" for number in range(12)]
EFFECTS = [f"refund-{number}" for number in range(12)]
LARGE = {"log": [f"a line of a long report, number {number}" for number in range(700)]}
# Wall seconds from the first grant to the time at which everything is asked.
LATER = 5_000.0


class Rich(NamedTuple):
    """The bytes of the database at rest, and those of the database and of its log as after a kill."""

    rest: bytes
    killed: bytes
    log: bytes


def build() -> Rich:
    """Make the store; the same bytes every time, as far as SQLite's salts allow."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        clock = FakeClock()
        with open_at(path, clock) as store:
            store.initialize()
            _fill(store, clock)
        rest = path.read_bytes()
        with open_at(path, clock) as store:
            _go_on(store, clock)
            killed, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    return Rich(rest, killed, log)


def open_at(path: Path, clock: FakeClock | None = None) -> StateStore:
    """The store, at the time at which it is asked."""
    clock = clock or FakeClock(wall_ns=EPOCH_NS + round(LATER * 1e9), ticks_ns=round((1_000 + LATER) * 1e9))
    processes = FakeProcesses()
    processes.pid = 7
    processes.start(7)
    return StateStore(path, clock=clock, processes=processes, synchronous="normal", busy_timeout_seconds=2)


def _fill(store: StateStore, clock: FakeClock) -> None:
    store.set_limit(LIMITED, 3)
    store.set_retention("checkpoints.keep_last", 5)
    for round_ in range(3):
        for number, scope in enumerate(SCOPES):
            lease = store.acquire(scope, f"worker-{number % 5}", 30 + number, metadata={"round": round_, "at": scope})
            clock.advance(0.25)
            if number % 3 == 0:
                store.heartbeat(*lease.fence)
            if number < len(WORKFLOWS):
                data = LARGE if number == 3 else {"stage": round_, "items": list(range(number))}
                store.put_checkpoint(WORKFLOWS[number], data, lease=None if number % 4 == 3 else lease)
            if number < len(EFFECTS) and round_ == number % 3:
                _act(store, EFFECTS[number], number, lease)
            if number % 4 != 1:
                store.release(*lease.fence)
        clock.advance(60)
        _refuse(store, round_)
    store.prune_checkpoints(2, WORKFLOWS[0])
    for number in range(3):
        store.acquire(LIMITED, f"builder-{number}", 9_000)
    store.acquire(SCOPES[5], "keeper", 9_000)
    store.acquire(SCOPES[6], "keeper", 9_000, pid=7)


def _go_on(store: StateStore, clock: FakeClock) -> None:
    """The commits that are in the log alone."""
    for number in (2, 7):
        lease = store.acquire(SCOPES[number], "late", 9_000)
        store.put_checkpoint(WORKFLOWS[number], {"late": number}, lease=lease)
        clock.advance(1)
    store.set_limit("pool/new", 2)


def _act(store: StateStore, key: str, number: int, lease: object) -> None:
    try:
        with store.effect(key, lease=lease, request={"order": number}) as effect:  # type: ignore[arg-type]
            if number % 4 == 0:
                effect.done({"receipt": "r" * number})
            elif number % 4 == 1:
                effect.failed()
            elif number % 4 == 2:
                effect.leave("nobody knows")
            else:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, AgentCheckpointError):
        pass


def _refuse(store: StateStore, round_: int) -> None:
    for _ in range(round_ + 1):
        for scope in SCOPES[:4]:
            try:
                store.put_checkpoint(WORKFLOWS[0], 1, lease_scope=scope, owner="zombie", token=1)
            except AgentCheckpointError:
                continue
