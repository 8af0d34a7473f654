"""An old state in place of what is here: nothing that was handed out since comes again."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random

from tests.faults.model.base import SCOPES, Model
from tests.faults.model.keeping import Remembered, copied
from tests.faults.model.replay import recorded
from tests.faults.model.shadow import Expected, Grant, Scope, check

from agent_checkpoint import LeaseHeldError


def restore(model: Model, dice: Random) -> None:
    """Somebody restores a backup, which is refused while a lease is live."""
    if not model.backups:
        return
    then = dice.choice(model.backups)
    live = [each.fence for scope in SCOPES for each in model.leases.live(scope)]
    try:
        model.worker(dice).store.restore(then.file)
    except LeaseHeldError:
        check(live, "a restore was refused though no lease is live")
        model.did("restore refused")
        model.settle(SCOPES, [])
        return
    check(not live, f"a restore was let in though {live} are live")
    model.log, model.archives = list(then.log), list(then.archives)
    ended = _bring_back(model, then)
    model.world.faults["restore"] += 1
    model.did("restore")
    model.settle_ends(Expected("store.restored", detail={"leases_expired": len(ended)}), ended)
    model.restored = [*then.restored, recorded(model.ground.rows)]
    for name in SCOPES:
        model.compare(name)


def _bring_back(model: Model, then: Remembered) -> list[Expected]:
    """The shadow as it must be now; the events about leases that ended."""
    handed_out = {name: scope.last for name, scope in model.leases.scopes.items()}
    ended = _restore_leases(model, then)
    for name in SCOPES:
        _raise_tokens(model, name, handed_out.get(name, 0))
    for name, workflow in model.book.workflows.items():
        kept, last = then.workflows.get(name, ([], 0))
        workflow.kept, workflow.last = list(kept), max(last, workflow.last)
    _restore_effects(model, then)
    model.book.refusals, model.book.refused_at = Counter(then.refusals), dict(then.refused_at)
    model.tickets.clear()
    return ended


def _restore_effects(model: Model, then: Remembered) -> None:
    """What was tried, and what became of it, stays known; a try that nobody has told of most of all."""
    for key, old in then.effects.items():
        new = model.book.effects[key]
        forgotten = old.begun is not new.begun and old.state in ("begun", "unknown") and new.state == "failed"
        if forgotten or (old.state == "done" and new.state != "done"):
            model.book.effects[key] = copy.copy(old)


def _restore_leases(model: Model, then: Remembered) -> list[Expected]:
    """Every lease as the backup has it, or where it has none as it was here, ended; the events."""
    now, ended = model.world.now, []
    for name, scope in model.leases.scopes.items():
        old = copied(then.scopes[name]) if name in then.scopes else Scope(name)
        # Nobody in the backup was granted it, but somebody here: those ask with that limit, and no other.
        if not old.slots and old.limit is None and scope.slots and scope.limit is not None:
            old.set_limit(scope.limit, now)
        known: dict[int, Grant] = {**scope.slots, **old.slots}
        for grant in known.values():
            if grant.state == "live":
                ended.append(grant.event("lease.expired", reason="restored"))
                grant.end("expired", now)
        old.slots = known
        model.leases.scopes[name] = old
    return ended


def _raise_tokens(model: Model, name: str, handed_out: int) -> None:
    """The last token of each scope stands beyond all that were handed out; how far, the store says."""
    scope = model.leases.scope(name)
    if not scope.slots:
        return
    latest = max(scope.slots.values(), key=lambda grant: grant.fence.token)
    stored = {slot: token for slot, token, _, _ in model.ground.leases(name)}
    token = stored.get(latest.slot, 0)
    check(token >= handed_out, f"scope {name} goes on behind token {token}, though {handed_out} was handed out")
    latest.fence = latest.fence._replace(token=token)
    scope.last = token
