"""Checkpoints that are saved under fences, live and stale ones, or under none.

What a call must have led to is said after it returned: where it slept, time
has passed and others have acted before its write landed.
"""

from __future__ import annotations

from random import Random
from typing import Any

from tests.faults.model.base import WORKFLOWS, Model
from tests.faults.model.shadow import Expected, Fence, check

from agent_checkpoint import Fence as RealFence
from agent_checkpoint import SequenceConflictError, StaleLeaseError


def put_checkpoint(model: Model, dice: Random) -> None:
    """Somebody saves, under a live fence, a stale one or none."""
    fence = model.fence(dice) if dice.randrange(6) else None
    name, rebind = dice.choice(WORKFLOWS), dice.randrange(5) == 0
    workflow, data = model.book.workflow(name), model.new_data()
    expected = dice.choice((None, None, None, workflow.stands_at, workflow.last, max(0, workflow.stands_at - 1)))
    found = _put(model, dice, name, data, lease=fence and RealFence(*fence), expected_sequence=expected, rebind=rebind)
    why = model.book.why_not(name, fence, rebind)
    if why is None and expected not in (None, workflow.stands_at):
        why = "conflict"
    must = why or f"saved as {workflow.last + 1}"
    check(found == must, f"{name} under {fence}, rebind {rebind}, expected {expected}: {found}, must be {must}")
    events = (
        []
        if why == "conflict"
        else model.book.save(name, data, fence)
        if why is None
        else refused(model, name, fence, why)
    )
    model.did(f"checkpoint {why or 'saved'}")
    model.settle([] if fence is None else [fence.scope], events)


def _put(model: Model, dice: Random, name: str, data: Any, **more: Any) -> str:
    """Save it; what became of it, in a word or some."""
    worker = model.worker(dice)
    with model.world.acting_as(worker.process):
        try:
            return f"saved as {worker.store.put_checkpoint(name, data, **more).sequence}"
        except StaleLeaseError as stale:
            return stale.reason
        except SequenceConflictError:
            return "conflict"


def refused(model: Model, workflow: str, fence: Fence | None, why: str) -> list[Expected]:
    """Count a stale checkpoint; one without a fence under the scope that it lacked."""
    scope = fence.scope if fence is not None else model.book.workflow(workflow).protected_by or ""
    return model.book.refuse("checkpoint.put", why, fence, scope, workflow)


def read_checkpoint(model: Model, dice: Random) -> None:
    """Somebody reads where a workflow stands."""
    name = dice.choice(WORKFLOWS)
    kept = model.book.workflow(name).kept
    found = model.worker(dice).store.get_checkpoint(name)
    got = found and (found.sequence, found.data, found.token)
    must = (kept[-1].sequence, kept[-1].data, kept[-1].fence and kept[-1].fence.token) if kept else None
    check(got == must, f"{name} stands at {got}, must stand at {must}")
    model.did("checkpoint read")
