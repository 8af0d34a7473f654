"""What is removed, put away and brought back: prunes, archives, backups, restores."""

from __future__ import annotations

import copy
from collections import Counter
from datetime import datetime, timedelta, timezone
from random import Random
from typing import Any, NamedTuple

from tests.faults.model.base import WORKFLOWS, Model
from tests.faults.model.replay import Replay
from tests.faults.model.saved import Effect, Saved
from tests.faults.model.shadow import Expected, Scope, check

from agent_checkpoint import Event, archive

MOST_BACKUPS = 3
# Between the oldest events and those that are still to come.
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
BEFORE = (timedelta(), timedelta(seconds=20), timedelta(hours=2))


class Remembered(NamedTuple):
    """The store as it was when a backup was made."""

    file: str
    scopes: dict[str, Scope]
    workflows: dict[str, tuple[list[Saved], int]]
    effects: dict[str, Effect]
    refusals: Counter[Any]
    refused_at: dict[Any, int]
    log: list[Event]
    archives: list[tuple[str, int]]
    restored: list[Replay]


def prune(model: Model, dice: Random) -> None:
    """Somebody removes old checkpoints, of one workflow or of all."""
    keep, name = dice.choice((1, 2, 3)), dice.choice((None, *WORKFLOWS))
    removed = model.worker(dice).store.prune_checkpoints(keep, name)
    must, events = [], []
    for each in WORKFLOWS if name is None else (name,):
        workflow = model.book.workflow(each)
        gone = workflow.kept[:-keep]
        if gone:
            workflow.kept = workflow.kept[-keep:]
            must.append((each, len(gone), gone[0].sequence, gone[-1].sequence))
            detail = {"count": len(gone), "from_sequence": gone[0].sequence, "to_sequence": gone[-1].sequence}
            events.append(Expected("checkpoint.pruned", workflow=each, detail=detail))
    check([tuple(each) for each in removed] == must, f"pruned {removed}, must be {must}")
    model.did("prune")
    model.settle([], events)


def archive_events(model: Model, dice: Random) -> None:
    """Somebody moves the older part of the log into a file."""
    store = model.worker(dice).store
    before = dice.choice(model.log).at + dice.choice((1, -1)) * dice.choice(BEFORE)
    kept_from = sum(count for _, count in model.archives)
    rest = model.log[kept_from:]
    # The part before the first event that is not older; never the last event of all.
    older = next((place for place, event in enumerate(rest) if event.at >= before), len(rest))
    count = min(older, len(rest) - 1)
    file = model.ground.new_file(".jsonl")
    written = store.archive_events(before, file)
    check(written.events == count, f"an archive before {before} has {written.events} events, must have {count}")
    check(archive.verify(file) == written, f"{file} is not what was told of it")
    events = []
    if count:
        quiet = min((before - EPOCH) // timedelta(microseconds=1) * 1_000, model.world.now.wall)
        forgotten = model.book.forget_refusals(quiet)
        check(written.refusals == forgotten, f"{written.refusals} counters were archived, must be {forgotten}")
        model.archives.append((file, count))
        events.append(Expected("events.archived", detail={"count": count, "sha256": written.sha256}))
    model.did("archive")
    model.settle([], events)


def backup(model: Model, dice: Random) -> None:
    """Somebody copies the store."""
    if len(model.backups) >= MOST_BACKUPS:
        return
    file = model.ground.new_file(".backup")
    model.worker(dice).store.backup(file)
    book = model.book
    model.backups.append(
        Remembered(
            file,
            {name: copied(scope) for name, scope in model.leases.scopes.items()},
            {name: (list(workflow.kept), workflow.last) for name, workflow in book.workflows.items()},
            {key: copy.copy(effect) for key, effect in book.effects.items()},
            Counter(book.refusals),
            dict(book.refused_at),
            list(model.log),
            list(model.archives),
            list(model.restored),
        )
    )
    model.did("backup")
    model.settle([], [])


def copied(scope: Scope) -> Scope:
    """With leases of its own, of the same processes."""
    copied = copy.copy(scope)
    copied.slots = {slot: copy.copy(grant) for slot, grant in scope.slots.items()}
    return copied
