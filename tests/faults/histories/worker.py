"""A worker: leases, checkpoints, effects and reads without a pause, until it is killed. Each call is written down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.histories.control import IN_THE_LOCK, Control, SteppingClock, stop
from tests.faults.histories.recorder import Recorder

from agent_checkpoint import Checkpoint, Lease, StateStore
from agent_checkpoint.acting import Acting
from agent_checkpoint.holding import HeldLease

# The scopes and their limits; those with two slots are asked for more often, so that both are taken.
SCOPES = {**{f"one-{number}": 1 for number in range(6)}, "two-0": 2, "two-1": 2}
ASKED_FOR = [scope for scope, limit in SCOPES.items() for _ in range(limit)]
SHORTEST_TTL, LONGEST_TTL = 0.2, 0.4
WAIT_SECONDS = 0.2
# What a writer waits for a lock on which somebody may be stopped.
BUSY_SECONDS = 0.4
# The holders of one scope meet at the effects of that much time.
KEY_NS = 250_000_000
# Checkpoints that a prune leaves of a workflow.
KEPT_CHECKPOINTS = 5
# Fences of leases that are over, to be presented late.
KEPT_FENCES = 5

Held = Lease | HeldLease


class Worker:
    """What one process has: its store, its record, its dice."""

    def __init__(self, address: str, folder: Path, owner: str, seed: int) -> None:
        self.control = Control(folder / "control")
        self.store = StateStore(address, busy_timeout_seconds=BUSY_SECONDS, clock=SteppingClock(self.control))
        self.recorder = Recorder(folder, owner)
        self.owner = owner
        self.random = Random(seed)
        self._marks = 0
        self._over: list[Held] = []

    def mark(self) -> int:
        """A number that this worker has not given before."""
        self._marks += 1
        return self._marks

    def acquire(self, scope: str, limit: int, wait_seconds: float, previous: int | None = None) -> Lease | None:
        """Ask for a lease, half the time bound to this process, or for the ``previous`` one; None when refused."""
        ttl = round(self.random.uniform(SHORTEST_TTL, LONGEST_TTL), 3)
        bound = self.random.random() < 0.5
        more: dict[str, Any] = {"limit": limit, "pid": os.getpid() if bound else None, "reclaim": previous is not None}
        return self.recorder.call(
            "acquire" if previous is None else "reclaim",
            lambda: self.store.acquire(scope, self.owner, ttl, wait_seconds=wait_seconds, **more),
            lambda lease: {"token": lease.token, "slot": lease.slot},
            scope=scope,
            limit=limit,
            ttl=round(ttl * 1e9),
            bound=bound,
            previous=previous,
        )

    def release(self, lease: Held) -> None:
        """Give it back."""
        self.recorder.call("release", lambda: self.store.release(*lease.fence), **naming(lease))

    def read(self, workflow: str) -> Checkpoint | None:
        """The latest checkpoint of a workflow."""
        return self.recorder.call("read", lambda: self.store.get_checkpoint(workflow), seen, workflow=workflow)

    def put(self, workflow: str, lease: Held | None, data: dict[str, Any] | None = None, **known: Any) -> None:
        """Save a checkpoint that says whose it is, under a lease or under none."""
        mark = self.mark()
        data = {"by": self.owner, "mark": mark, **(data or {})}
        self.recorder.call(
            "put" if lease is not None else "bare",
            lambda: self.store.put_checkpoint(workflow, data, lease=lease),
            lambda saved: {"sequence": saved.sequence},
            workflow=workflow,
            mark=mark,
            **known,
            **({} if lease is None else naming(lease)),
        )


class Mixed(Worker):
    """Everything, in any order."""

    def turn(self) -> None:
        """One way from a lease to its end, or from a refusal to something else."""
        scope = self.random.choice(ASKED_FOR)
        if self.random.random() < 0.15:
            self.hold(scope)
            return
        lease = self.acquire(scope, SCOPES[scope], WAIT_SECONDS if self.random.random() < 0.3 else 0)
        if lease is None:
            self.read(workflow_of(scope))
            return
        self.work_under(lease)
        if SCOPES[scope] == 1 and self.random.random() < 0.05:
            self.put_away(lease)
            lease = self.acquire(scope, 1, 0, previous=lease.token) or lease
            self.work_under(lease)
        if self.random.random() < 0.95:
            self.release(lease)
        self.put_away(lease)

    def hold(self, scope: str) -> None:
        """The same, with a lease that is renewed in the background."""
        ttl = round(self.random.uniform(SHORTEST_TTL, LONGEST_TTL), 3)
        limit = SCOPES[scope]
        hold = self.store.hold(scope, self.owner, ttl, limit=limit)
        known = {"scope": scope, "limit": limit, "ttl": round(ttl * 1e9), "bound": True}
        held = self.recorder.call(
            "hold", hold.__enter__, lambda held: {"token": held.token, "slot": held.slot}, **known
        )
        if held is None:
            return
        self.work_under(held)
        self.recorder.call("leave", lambda: hold.__exit__(None, None, None), **naming(held))
        self.put_away(held)

    def put_away(self, lease: Held) -> None:
        """Keep the fence of a lease that is over, or will be."""
        self._over = [*self._over[1 - KEPT_FENCES :], lease]

    def work_under(self, lease: Held) -> None:
        """Some of what a holder does."""
        for _ in range(self.random.randrange(1, 12)):
            self.random.choices(ACTIONS, WEIGHTS)[0](self, lease)
            if self.control.is_asked(IN_THE_LOCK):
                self.write(lease, stop)

    def save(self, lease: Held) -> None:
        """A checkpoint under the lease."""
        self.put(workflow_of(lease.scope), lease, {"filling": "x" * self.random.randrange(300)})

    def save_late(self, _: Held) -> None:
        """A checkpoint, or a heartbeat, under a lease that is over, if there is any."""
        if self._over:
            late = self.random.choice(self._over)
            self.random.choice((self.save, self.beat))(late)

    def beat(self, lease: Held) -> None:
        """A heartbeat that is told of."""
        self.recorder.call("beat", lambda: self.store.heartbeat(*lease.fence), **naming(lease))

    def check(self, lease: Held) -> None:
        """Ask whether it is live."""
        self.recorder.call("check", lambda: self.store.check_lease(*lease.fence), **naming(lease))

    def look(self, lease: Held) -> None:
        """Read where its workflow stands."""
        self.read(workflow_of(lease.scope))

    def force(self, _: Held) -> None:
        """End somebody's lease, perhaps one's own."""
        scope = self.random.choice(ASKED_FOR)
        found = self.recorder.call("find", lambda: self.store.get_lease(scope))
        if found is not None:
            self.recorder.call(
                "force",
                lambda: self.store.force_release(found.scope, reason="for a test", token=found.token),
                victim=found.owner,
                **naming(found),
            )

    def prune(self, lease: Held) -> None:
        """Remove what is old of a workflow."""
        workflow = workflow_of(lease.scope)
        self.recorder.call("prune", lambda: self.store.prune_checkpoints(KEPT_CHECKPOINTS, workflow), workflow=workflow)

    def sweep(self, _: Held) -> None:
        """Put on record which leases are over."""
        self.recorder.call("sweep", self.store.sweep)

    def write(self, lease: Held, inside: Callable[[], None] = lambda: None) -> None:
        """An adapter's write: the fence is checked, something happens, it is committed."""

        def body() -> None:
            with self.store.transaction(component="tests", action="test.write", fence=lease) as part:
                part.event("test.happened")
                inside()

        self.recorder.call("write", body, stops=inside is stop, **naming(lease))

    def act(self, lease: Held) -> None:
        """Do something outside that must not happen twice; outside is the record itself."""
        key, mark = f"{lease.scope}-{time.monotonic_ns() // KEY_NS}", self.mark()
        known = {"key": key, "mark": mark, **naming(lease)}
        acting = self.store.effect(key, lease=lease)
        self.recorder.call(
            "begin", acting.__enter__, lambda begun: {"fresh": begun.fresh, "result": begun.result}, **known
        )
        if acting.fresh:
            self.random.choices((self.do, self.fail, self.walk_away), (80, 10, 10))[0](acting, known)
        elif self.random.random() < 0.02:
            self.resolve(known)

    def do(self, acting: Acting, known: dict[str, Any]) -> None:
        """Act, and tell."""
        self.recorder.call("act", lambda: None, **known)
        if self.random.random() < 0.7:
            self.recorder.call("done", lambda: acting.done(known["mark"]), **known)
        else:
            self.done_with_checkpoint(acting, known["scope"], known)

    def fail(self, acting: Acting, known: dict[str, Any]) -> None:
        """Tell that it did not happen."""
        self.recorder.call("fail", acting.failed, **known)

    def walk_away(self, acting: Acting, known: dict[str, Any]) -> None:
        """Act or not, and never tell, like one who died; but the lease may go on."""
        if self.random.random() < 0.5:
            self.recorder.call("act", lambda: None, **known)

    def resolve(self, known: dict[str, Any]) -> None:
        """Decide that it happened, if nobody has told."""
        key, mark = known["key"], known["mark"]
        self.recorder.call("resolve", lambda: self.store.resolve_effect(key, done=mark), key=key, mark=mark)

    def done_with_checkpoint(self, acting: Acting, scope: str, known: dict[str, Any]) -> None:
        """Tell that it is done, and save a checkpoint in the same transaction."""
        workflow, data = workflow_of(scope), {"by": self.owner, "mark": known["mark"]}
        self.recorder.call(
            "done",
            lambda: acting.done(known["mark"], workflow=workflow, data=data),
            lambda saved: {} if saved is None else {"sequence": saved.sequence},
            workflow=workflow,
            **known,
        )


# What a holder does, and how often of a hundred times.
SHARES = {
    Mixed.save: 49,
    Mixed.act: 12,
    Mixed.look: 10,
    Mixed.beat: 10,
    Mixed.check: 8,
    Mixed.save_late: 4,
    Mixed.write: 4,
    Mixed.sweep: 1,
    Mixed.prune: 1,
    Mixed.force: 1,
}
ACTIONS, WEIGHTS = list(SHARES), list(SHARES.values())


def workflow_of(scope: str) -> str:
    """The workflow that a scope protects."""
    return f"work-{scope}"


def naming(lease: Held) -> dict[str, Any]:
    """What a record says of a lease that is presented."""
    return {"scope": lease.scope, "token": lease.token}


def seen(found: Checkpoint | None) -> dict[str, Any]:
    """What a record says of a checkpoint that was read."""
    if found is None:
        return {"sequence": 0}
    return {"sequence": found.sequence, "by": found.data["by"], "mark": found.data["mark"]}
