"""The end of a round: the whole log, every table and the shadow say the same."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.faults.model.asking import look
from tests.faults.model.base import SCOPES, Model
from tests.faults.model.holders import give_back, sweep
from tests.faults.model.replay import Replay, archived
from tests.faults.model.shadow import LIFE, TURN, check

from agent_checkpoint import Event
from agent_checkpoint.times import rfc3339

DATA = "SELECT workflow, sequence, data, scope, token FROM checkpoints ORDER BY workflow, sequence"
REFUSALS = "SELECT scope, token, action, reason, times FROM refusals"
LATE = "SELECT key, state, result, late FROM effects ORDER BY key"
# Even those who cannot be proven dead are not waited for by then.
TURNS = 2 * LIFE // TURN


def finish(model: Model) -> None:
    """Look at everything that there is."""
    _everybody_is_served(model)
    sweep(model, Random(0))
    for scope in SCOPES:
        model.compare(scope)
    _compare_log(model)
    _compare_saved(model)
    replay, restored = Replay(), iter(model.restored)
    for event in _whole_log(model):
        replay.tell(event, restored=next(restored) if event["kind"] == "store.restored" else None)
    replay.compare(model.ground.rows, "at the end")


def _everybody_is_served(model: Model) -> None:
    """Holders come to their end, waiters wake and look: each has its turn.

    Not where the wall clock decides about a ticket: there nobody can tell for how
    long a slot has been free, and the others wait for its life.
    """
    now = model.world.now
    if not now.domain or any(each.clock(now) == "wall" for scope in SCOPES for each in model.places(scope)):
        return
    for _ in range(TURNS):
        model.world.pass_time(2 * TURN)
        for scope in SCOPES:
            for grant in model.leases.in_time(scope):
                give_back(model, grant.fence, model.workers[0])
        for person in sorted(model.persons, key=lambda each: -each.waiter._ask.ticket):
            look(model, person, rang=False)
        if not model.persons:
            return
    check(False, f"{len(model.persons)} wait for ever")


def _whole_log(model: Model) -> list[dict[str, Any]]:
    """Every event as a line of an archive tells it, those first that are in one."""
    found = [event for file, _ in model.archives for event in archived(file)]
    return found + [_line(event) for event in model.ground.events("start")]


def _line(event: Event) -> dict[str, Any]:
    return {**event._asdict(), "at": rfc3339(event.at)}


def _compare_log(model: Model) -> None:
    """Nothing of the log was changed, lost or told twice since it was first read."""
    found = _whole_log(model)
    for old in found:
        old.pop("sha256", None)
    known = [json.loads(json.dumps(_line(event))) for event in model.log]
    check(found == known, f"the log has {len(found)} events, or others than the {len(known)} that were read")


def _compare_saved(model: Model) -> None:
    """Checkpoints with their data, effects with their results, and refusals with their numbers."""
    known = [
        (name, saved.sequence, saved.data, *((saved.fence and (saved.fence.scope, saved.fence.token)) or (None, None)))
        for name, workflow in sorted(model.book.workflows.items())
        for saved in workflow.kept
    ]
    found = [(name, number, json.loads(data), *whose) for name, number, data, *whose in model.ground.rows(DATA)]
    check(found == known, f"the checkpoints are {found}, must be {known}")
    counted = {(scope, token, action, why): times for scope, token, action, why, times in model.ground.rows(REFUSALS)}
    check(counted == model.book.refusals, f"the refusals are {counted}, must be {dict(model.book.refusals)}")
    effects = [(key, effect.state, effect.result, effect.late) for key, effect in sorted(model.book.effects.items())]
    stored = [
        (key, state, result and json.loads(result), bool(late)) for key, state, result, late in model.ground.rows(LATE)
    ]
    check(stored == effects, f"the effects are {stored}, must be {effects}")
