"""Actions outside that must not happen twice: begun, told of in time or late, left, decided about by others."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.faults.model.base import KEYS, WORKFLOWS, Action, Model, Worker
from tests.faults.model.saved import Effect, Try
from tests.faults.model.shadow import Expected, check
from tests.faults.model.writing import refused

from agent_checkpoint import (
    EffectMismatchError,
    EffectRunningError,
    EffectUnknownError,
    InvalidInputError,
    NotFoundError,
    StaleLeaseError,
)
from agent_checkpoint import Fence as RealFence

# Two requests, and none: a key is for one request.
REQUESTS = (None, 1, 1, 1, 2)
WORDS = {
    EffectMismatchError: "mismatch",
    EffectRunningError: "running",
    EffectUnknownError: "unknown",
    NotFoundError: "missing",
    InvalidInputError: "invalid",
}


def begin_effect(model: Model, dice: Random) -> None:
    """Somebody wants to act outside, once."""
    fence, worker, key, request = model.fence(dice), model.worker(dice), dice.choice(KEYS), dice.choice(REQUESTS)
    acting = worker.store.effect(key, lease=RealFence(*fence), request=request)
    found = _begin(model, worker, acting)
    known, stale = model.book.effects.get(key), model.leases.why_stale(fence)
    must = stale or model.book.why_not_begin(key, request) or ("done" if known and known.state == "done" else "begun")
    check(found == must, f"effect {key} under {fence}, request {request}: {found}, must be {must}")
    events = []
    if stale:
        events = model.book.refuse("effect.begin", stale, fence, fence.scope)
    elif must == "begun":
        begun = Try(fence, model.world.written_down(worker.process))
        model.book.effects[key] = Effect(begun, known.digest if known and request is None else request)
        model.actions.append(Action(key, acting, begun, worker.process))
        events = [Expected("effect.begun", *fence, detail={"key": key})]
    elif must == "done":
        check(known and acting.result == known.result, f"effect {key} has the result {acting.result}")
    model.did(f"effect {must}")
    model.settle([fence.scope], events)


def _begin(model: Model, worker: Worker, acting: Any) -> str:
    with model.world.acting_as(worker.process):
        try:
            acting.__enter__()
        except StaleLeaseError as stale:
            return stale.reason
        except tuple(WORDS) as error:
            return WORDS[type(error)]
    return "begun" if acting.fresh else "done"


def end_effect(model: Model, dice: Random) -> None:
    """Whoever began an effect tells what became of it, however late; or goes away without a word."""
    model.actions = [each for each in model.actions if not each.process.ended]
    if not model.actions:
        return
    action = dice.choice(model.actions)
    model.actions.remove(action)
    how = dice.choice(("done", "done", "failed", "left"))
    if how == "left":
        _leave(model, action)
    else:
        _tell(model, action, how, dice.choice(WORKFLOWS) if how == "done" and dice.randrange(2) else None)


def _tell(model: Model, action: Action, how: str, workflow: str | None) -> None:
    """Tell, perhaps with a checkpoint: what happened counts however late, the checkpoint does not."""
    fence, data, effect = action.begun.fence, model.new_data(), model.book.effects[action.key]
    stale = model.leases.why_stale(fence)
    decided = effect.begun is not action.begun or effect.state not in ("begun", "unknown")
    why = None if decided or workflow is None else model.book.why_not(workflow, fence, False)
    must = "superseded" if decided else why or "told"
    found = _told(model, action, how, data, workflow)
    check(found == must, f"effect {action.key} by {fence}, {how}: {found}, must be {must}")
    if decided:
        events = model.book.refuse(f"effect.{how}", "superseded", fence, fence.scope)
    else:
        effect.state, effect.late, effect.result = how, stale is not None, data if how == "done" else None
        late = {"late": True} if stale else {}
        events = [Expected(f"effect.{how}", *fence, detail={"key": action.key, **late})]
        if workflow is not None:
            events += refused(model, workflow, fence, why) if why else model.book.save(workflow, data, fence)
    model.did(f"effect {how} {must}")
    model.settle([fence.scope], events)


def _told(model: Model, action: Action, how: str, data: Any, workflow: str | None) -> str:
    with model.world.acting_as(action.process):
        try:
            if how == "failed":
                action.acting.failed()
            elif workflow is None:
                action.acting.done(data)
            else:
                action.acting.done(data, workflow=workflow, data=data)
        except StaleLeaseError as stale:
            return stale.reason
    return "told"


def _leave(model: Model, action: Action) -> None:
    effect = model.book.effects[action.key]
    with model.world.acting_as(action.process):
        action.acting.leave("it went away")
    events = []
    if effect.begun is action.begun and effect.state == "begun":
        effect.state = "unknown"
        events.append(Expected("effect.unknown", *action.begun.fence, detail={"key": action.key}))
    model.did("effect left")
    model.settle([], events)


def resolve_effect(model: Model, dice: Random) -> None:
    """Somebody has looked outside, and decides."""
    key, happened = dice.choice(KEYS), dice.randrange(2) == 0
    effect, data = model.book.effects.get(key), model.new_data()
    must = "resolved"
    if effect is None:
        must = "missing"
    elif effect.state in ("done", "failed"):
        must = "invalid"
    elif model.book.is_leased(effect):
        must = "running"
    found = "resolved"
    try:
        model.worker(dice).store.resolve_effect(key, **({"done": data} if happened else {"retry": True}), by="me")
    except tuple(WORDS) as error:
        found = WORDS[type(error)]
    check(found == must, f"effect {key} is to be resolved: {found}, must be {must}")
    events = []
    if effect is not None and must == "resolved":
        effect.state, effect.result = ("done", data) if happened else ("failed", None)
        detail = {"key": key, "decision": "done" if happened else "retry", "by": "me"}
        events.append(Expected("effect.resolved", *effect.begun.fence, detail=detail))
    model.did(f"effect {must}")
    model.settle([], events)


def read_effect(model: Model, dice: Random) -> None:
    """Somebody looks at an effect."""
    key = dice.choice(KEYS)
    found = model.worker(dice).store.get_effect(key)
    state = found and found.state
    must = model.book.shown_state(key) if key in model.book.effects else None
    check(state == must, f"effect {key} is shown as {state}, must be {must}")
    model.did("effect read")
