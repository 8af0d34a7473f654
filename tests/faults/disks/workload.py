"""What is done to a store while its disk fails: every kind of change, one step after the other.

A step is a generator: what it has to read it reads before its ``yield``, so
that the faults that come there meet the change alone. It can be taken again,
whether it failed or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from tests.faults.disks.truth import WORKFLOW, Broken, Call, Mark, must
from tests.faults.disks.world import HOUR, World

from agent_checkpoint import Fence, FencedWrite, OutcomeUnknownError, StateStore
from agent_checkpoint import effects as effect_calls
from agent_checkpoint.errors import AgentCheckpointError, StaleLeaseError, StorageError, WaitTimeoutError
from agent_checkpoint.heart import QUIET
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.rules import grant

Step = Callable[[World], Iterator[None]]

EVER = datetime.max.replace(tzinfo=timezone.utc)
LARGE, HUGE = 100_000, 4_200_000  # the last one fills the log until SQLite copies it back
RESULT = "result of {}"


def initialize(world: World) -> Iterator[None]:
    yield
    world.call([Mark("store.initialized")], world.store.initialize)


def migrate(world: World) -> Iterator[None]:
    yield
    files = {"sqlite": [str(world.folder / "0001_notes.sql")]}
    world.call([Mark("store.migrated")], lambda: world.store.migrate("tests", files))


def acquire(world: World, scope: str = "release") -> Iterator[None]:
    owner = f"worker-{world.next()}"
    fence = world.fence(scope)
    if fence is not None and scope == "release":
        yield from release(world)
    yield
    marks = [Mark("lease.acquired", scope, owner)]
    world.call(marks, lambda: world.store.acquire(scope, owner, ttl_seconds=HOUR))


def release(world: World) -> Iterator[None]:
    fence = world.fence("release")
    if fence is None:
        fence = leased(world)
    yield
    world.call([Mark("lease.released", *fence)], lambda: world.store.release(*fence))


def leased(world: World) -> Fence:
    """A live lease of the scope that protects the workflow."""
    fence = world.fence("release")
    if fence is None:
        owner = f"worker-{world.next()}"
        lease = world.call(
            [Mark("lease.acquired", "release", owner)],
            lambda: world.store.acquire("release", owner, ttl_seconds=HOUR),
        )
        fence = Fence(*lease.fence)
    return fence


def heartbeat(world: World) -> Iterator[None]:
    fence = leased(world)
    yield
    world.call([Mark("lease.heartbeat", *fence)], lambda: world.store.heartbeat(*fence))


def quiet_heartbeat(world: World) -> Iterator[None]:
    """As the heartbeat thread of ``hold`` makes it: not flushed, no event."""
    fence = leased(world)
    world.clock.advance(1)

    def renew(change: Any) -> None:
        for row in lease_rows.of_scope(change.transaction, fence.scope):
            if row.token == fence.token:
                lease_rows.save(change.transaction, grant.renewed(row, row.ttl_ns, change.transaction.moment))

    yield
    world.call([], lambda: world.store._changes.run((f"scope:{fence.scope}",), renew, terms=QUIET))


def put(world: World, size: int = 10) -> Iterator[None]:
    fence, data = leased(world), {"number": world.next(), "filling": "x" * size}
    yield
    marks = [Mark("checkpoint.saved", *fence)]
    world.call(marks, lambda: world.store.put_checkpoint(WORKFLOW, data, lease=fence), data)


def put_large(world: World) -> Iterator[None]:
    return put(world, LARGE)


def put_huge(world: World) -> Iterator[None]:
    return put(world, HUGE)


def effect_begun(world: World) -> Iterator[None]:
    fence, key = leased(world), f"key-{world.next()}"
    yield
    world.call(
        [Mark("effect.begun", *fence, key=key)], lambda: effect_calls.begin(world.store._changes, key, fence, None)
    )


def effect_done(world: World) -> Iterator[None]:
    fence, key = leased(world), f"key-{world.next()}"
    marks = [Mark("effect.begun", *fence, key=key)]
    row, _ = world.call(marks, lambda: effect_calls.begin(world.store._changes, key, fence, None))
    result = json.dumps(RESULT.format(key))
    yield
    marks = [Mark("effect.done", *fence, key=key)]
    world.call(marks, lambda: effect_calls.tell(world.store._changes, row, "done", result, None, None))


def stale_put(world: World) -> Iterator[None]:
    """A write by a lease that is over: refused, whatever the disk says, and put on record where it can be."""
    for _ in release(world):
        pass
    fence = world.store.list_leases(include_expired=True)
    (stale,) = [Fence(*lease.fence) for lease in fence if lease.scope == "release"]
    yield
    call = Call([Mark("write.refused", *stale)])
    world.truth.calls.append(call)
    world.operations += 1
    try:
        world.store.put_checkpoint(WORKFLOW, {"stale": True}, lease=stale)
        raise Broken("a stale write was taken")
    except StaleLeaseError as error:
        # Not on record where the answer of the commit says so, or was lost.
        call.state = "done" if error.recorded else "unknown"
        if not error.recorded:
            raise StorageError("not on record") from error
    except StorageError:  # it came before the lease was looked at
        world.truth.calls.remove(call)
        raise


def set_limit(world: World) -> Iterator[None]:
    limit = 3 + world.next() % 50
    yield
    world.call([Mark("lease.limit-set", "pool")], lambda: world.store.set_limit("pool", limit))


def acquire_pool(world: World) -> Iterator[None]:
    return acquire(world, "pool")


def wait_in_vain(world: World) -> Iterator[None]:
    """A ticket in the queue, and its end; it leaves no event."""
    leased(world)
    beside = world.opened()

    def wait() -> None:
        try:
            beside.acquire("release", "late", wait_seconds=0.05)
        except WaitTimeoutError:
            return
        raise Broken("granted twice")

    yield
    try:
        world.call([], wait)
    finally:
        beside.close()


def force_release(world: World) -> Iterator[None]:
    if world.fence("pool") is None:
        world.call([Mark("lease.acquired", "pool", "p")], lambda: world.store.acquire("pool", "p", ttl_seconds=HOUR))
    token = max(lease.token for lease in world.store.list_leases() if lease.scope == "pool")
    yield
    marks = [Mark("lease.force-released", "pool", token=token)]
    world.call(marks, lambda: world.store.force_release("pool", reason="test", token=token))


def prune(world: World) -> Iterator[None]:
    for _ in range(3):
        for _ in put(world):
            pass
    yield
    world.call([Mark("checkpoint.pruned")], lambda: world.store.prune_checkpoints(2, WORKFLOW))


def group(world: World) -> Iterator[None]:
    """Writes of an adapter in one commit, a refused and a large one among them."""
    fence = leased(world)
    texts = [f"note-{world.next()}" for _ in range(3)]
    stale = Fence(fence.scope, fence.owner, fence.token + 1_000_000 + world.next())
    writes = [_note(text, fence, LARGE if number == 1 else 10) for number, text in enumerate(texts)]
    writes.insert(1, FencedWrite("tests", "test.note", fence=stale))
    yield
    calls = [Call([Mark("test.noted", *fence, key=text)]) for text in texts]
    calls.insert(1, Call([Mark("write.refused", *stale)]))
    world.truth.calls += calls
    world.operations += len(calls)
    failed: AgentCheckpointError | None = None
    for call, outcome in zip(calls, world.store.write_all(writes), strict=True):
        error = outcome.error
        refused = isinstance(error, StaleLeaseError)
        if refused:
            must(call is calls[1], f"refused: {error}")
        if error is None or (refused and error.recorded):
            must(refused or call is not calls[1], "a stale write was taken")
            call.state = "done"
        elif isinstance(error, OutcomeUnknownError) or refused:
            call.state, failed = "unknown", error
        elif isinstance(error, StorageError):
            world.truth.calls.remove(call)
            failed = error
        else:
            raise error
    if failed is not None:
        raise StorageError("a write of the group failed") from failed


def _note(text: str, fence: Fence, size: int) -> FencedWrite:
    def body(part: Any) -> str:
        part.run("INSERT INTO tests_notes VALUES (?, ?)", (text, bytes(size)))
        part.event("test.noted", {"note": text})
        return text

    return FencedWrite("tests", "test.note", body, fence)


def reopen(world: World) -> Iterator[None]:
    """The last connection copies the log back and removes it; the next makes it anew."""
    leased(world)
    yield
    world.store.close()
    world.store = world.opened()
    for _ in put(world):
        pass


def backup(world: World) -> Iterator[None]:
    name = world.folder / f"{world.next()}.backup"
    yield
    try:
        world.call([], lambda: world.store.backup(name))
    except StorageError:
        must(not name.exists(), "half a backup has its name")
        raise
    with StateStore(name, clock=world.clock) as copy:
        world.check(copy)


def archive(world: World) -> Iterator[None]:
    """Several transactions: what fails after the first of them leaves it on record."""
    leased(world)
    name = world.folder / f"{world.next()}.jsonl"
    call = Call([Mark("events.archived")])
    yield
    world.truth.calls.append(call)
    world.operations += 1
    try:
        world.store.archive_events(EVER, name)
        call.state = "done"
    except StorageError:
        call.state = "unknown"
        raise


STEPS: tuple[Step, ...] = (
    initialize,
    migrate,
    acquire,
    heartbeat,
    quiet_heartbeat,
    put,
    put_large,
    effect_begun,
    effect_done,
    release,
    stale_put,
    set_limit,
    acquire_pool,
    wait_in_vain,
    quiet_heartbeat,
    prune,
    group,
    reopen,
    force_release,
    quiet_heartbeat,
    backup,
    archive,
    put,
    acquire,
    put_huge,
    quiet_heartbeat,
    reopen,
)
