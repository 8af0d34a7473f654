"""What is done to leases that were granted: by their holders, by stale ones, by others."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.faults.model.asking import TTLS
from tests.faults.model.base import SCOPES, Model, Worker
from tests.faults.model.shadow import Expected, Fence, Grant, check

from agent_checkpoint import InvalidInputError, NotFoundError, StaleLeaseError
from agent_checkpoint.names import NS


def heartbeat(model: Model, dice: Random) -> None:
    """Somebody renews its lease, or one that it had, with the same ttl or another."""
    fence, worker, ttl = model.fence(dice), model.worker(dice), dice.choice((None, None, *TTLS))

    def renew(grant: Grant) -> Expected:
        changed = {} if ttl in (None, grant.ttl) else {"ttl_seconds": (ttl or 0) / NS}
        grant.ttl = ttl or grant.ttl
        grant.speak(model.world.now)
        return grant.event("lease.heartbeat", **changed)

    seconds = None if ttl is None else ttl / NS
    _by_fence(model, fence, worker, "lease.heartbeat", lambda store: store.heartbeat(*fence, seconds), renew)


def release(model: Model, dice: Random) -> None:
    """Somebody gives its lease back, or one that it had."""
    give_back(model, model.fence(dice), model.worker(dice))


def give_back(model: Model, fence: Fence, worker: Worker) -> None:
    """Release a lease."""

    def end(grant: Grant) -> Expected:
        grant.end("released", model.world.now)
        return grant.event("lease.released")

    _by_fence(model, fence, worker, "lease.release", lambda store: store.release(*fence), end)


def expire(model: Model, dice: Random) -> None:
    """A supervisor ends a lease whose owner it knows to be dead."""
    fence, worker = model.fence(dice), model.worker(dice)

    def end(grant: Grant) -> Expected:
        grant.end("expired", model.world.now)
        return grant.event("lease.expired", reason="seen dead")

    _by_fence(model, fence, worker, "lease.expire", lambda store: store.expire(*fence, reason="seen dead"), end)


def _by_fence(
    model: Model,
    fence: Fence,
    worker: Worker,
    action: str,
    call: Callable[[Any], Any],
    done: Callable[[Grant], Expected],
) -> None:
    why = model.leases.why_stale(fence)
    error = None
    with model.world.acting_as(worker.process):
        try:
            call(worker.store)
        except StaleLeaseError as stale:
            error = stale
    _agree(f"{action} under {fence}", error, why)
    if why is None:
        grant = model.leases.scope(fence.scope).find(fence.token)
        assert grant is not None
        events = [done(grant)]
    else:
        events = model.book.refuse(action, why, fence, fence.scope)
    model.did(f"{action} {why or 'done'}")
    model.settle([fence.scope], events)


def _agree(what: str, error: StaleLeaseError | None, why: str | None) -> None:
    reason = error and error.reason
    check(reason == why, f"{what}: {reason or 'passed'}, must be {why or 'passed'}")


def force_release(model: Model, dice: Random) -> None:
    """Somebody ends a lease against its owner's will, named by its token or not."""
    fence = model.fence(dice)
    token = fence.token if dice.randrange(2) else None
    store = model.worker(dice).store
    in_time = model.leases.in_time(fence.scope)
    named = [each for each in in_time if token in (None, each.fence.token)]
    must = "done" if len(named) == 1 else "stale" if token else "invalid" if named else "missing"
    try:
        store.force_release(fence.scope, reason="by hand", token=token)
    except (StaleLeaseError, NotFoundError, InvalidInputError) as error:
        outcome = {StaleLeaseError: "stale", NotFoundError: "missing", InvalidInputError: "invalid"}[type(error)]
    else:
        outcome = "done"
    check(outcome == must, f"force-release of {fence.scope} (token {token}): {outcome}, must be {must}")
    events = []
    if must == "done":
        named[0].end("force-released", model.world.now)
        events.append(named[0].event("lease.force-released", reason="by hand"))
    model.did(f"force-release {must}")
    model.settle([fence.scope], events)


def set_limit(model: Model, dice: Random) -> None:
    """Somebody sets how many leases a scope may have."""
    name, limit = dice.choice(SCOPES), dice.choice((1, 1, 2, 3))
    scope = model.leases.scope(name)
    before = scope.most
    found = model.worker(dice).store.set_limit(name, limit)
    check(found == (name, limit, before), f"the limit of {name} was set: {found}, must be {(name, limit, before)}")
    scope.set_limit(limit, model.world.now)
    changed = Expected("lease.limit-set", name, detail={"limit": limit, "previous": before})
    model.did("set-limit")
    model.settle([name], [changed] if limit != before else [])


def sweep(model: Model, dice: Random) -> None:
    """Somebody puts on record which leases are over."""
    over = [each for scope in sorted(model.leases.scopes) for each in model.leases.over(scope)]
    events = [model.leases.end_of(each) for each in over]
    found = [tuple(each.fence) for each in model.worker(dice).store.sweep()]
    check(found == [each.fence for each in over], f"the sweep found {found}, must find {[each.fence for each in over]}")
    for each in over:
        each.end("expired", model.world.now)
    model.did("sweep")
    model.settle(SCOPES, events)


def check_lease(model: Model, dice: Random) -> None:
    """Somebody looks whether its fence counts, and who holds what."""
    fence, worker = model.fence(dice), model.worker(dice)
    why = model.leases.why_stale(fence)
    error = None
    try:
        left = worker.store.check_lease(*fence).left_ns
    except StaleLeaseError as stale:
        error = stale
    else:
        grant = model.leases.scope(fence.scope).find(fence.token)
        must = grant.left(model.world.now)[0] if grant else 0
        check(left == must, f"{fence} has {left} ns left, must have {must}")
    _agree(f"check under {fence}", error, why)
    live = sorted(each.fence for scope in SCOPES for each in model.leases.in_time(scope))
    listed = sorted(tuple(each.fence) for each in worker.store.list_leases())
    check(listed == live, f"{listed} are listed as live, must be {live}")
    model.did("check")
