"""What the store knows at the end, against what it answered: rows, and the audit log, in the order of commits."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.histories.checker import STALE, saves
from tests.faults.histories.recorder import Call

from agent_checkpoint import StateStore

CHECKPOINTS = "SELECT workflow, sequence, data, owner, token FROM checkpoints ORDER BY workflow, sequence"
EFFECTS = "SELECT key, state, result FROM effects"
MOST_EVENTS = 1_000_000
# The kinds of events that answered calls leave behind.
LEFT_BY = {
    "acquire": "lease.acquired",
    "hold": "lease.acquired",
    "beat": "lease.heartbeat",
    "release": "lease.released",
    "leave": "lease.released",
    "force": "lease.force-released",
    "reclaim": "lease.acquired",
    "put": "checkpoint.saved",
    "bare": "checkpoint.saved",
    "write": "test.happened",
    "begin": "effect.begun",
    "done": "effect.done",
    "fail": "effect.failed",
}
# Written under a live lease, so never after another grant of its slot, nor after its end.
UNDER_A_LEASE = ("checkpoint.saved", "test.happened", "effect.begun", "lease.heartbeat")
ENDINGS = ("lease.released", "lease.expired", "lease.force-released")
# How refused calls are called on record.
ACTIONS = {
    "put": "checkpoint.put",
    "beat": "lease.heartbeat",
    "release": "lease.release",
    "write": "test.write",
    "begin": "effect.begin",
}


@dataclass(frozen=True)
class Happened:
    """What a check wants of an event."""

    kind: str
    scope: str | None
    owner: str | None
    token: int | None
    workflow: str | None = None
    sequence: int | None = None
    detail: Mapping[str, Any] | None = None

    @property
    def key(self) -> str | None:
        """The key of the effect that it is about."""
        return (self.detail or {}).get("key")


@dataclass(frozen=True)
class Ledger:
    """What a store holds: its events in their order, its checkpoints, its effects, and what its doctor finds wrong."""

    events: Sequence[Happened]
    checkpoints: Sequence[tuple[str, int, dict[str, Any], str | None, int | None]]
    effects: Mapping[str, tuple[str, Any]]
    broken: Sequence[str] = ()


def ledger_of(store: StateStore) -> Ledger:
    """All of a store that nobody writes to any more."""
    found = store.events(limit=MOST_EVENTS)
    names = Happened.__dataclass_fields__
    events = [Happened(**{name: getattr(event, name) for name in names}) for event in found]
    with store.read() as reader:
        checkpoints = [(name, number, json.loads(data), *by) for name, number, data, *by in reader.rows(CHECKPOINTS)]
        effects = {key: (state, None if r is None else json.loads(r)) for key, state, r in reader.rows(EFFECTS)}
    broken = [f"{found.check}: {found.message}" for found in store.doctor() if found.verdict == "broken"]
    return Ledger(events, checkpoints, effects, broken)


def audit(calls: Sequence[Call], ledger: Ledger) -> Iterator[str]:
    """Every contradiction between what was answered and what the store knows."""
    yield from (f"the doctor finds: {found}" for found in ledger.broken)
    yield from replay(ledger.events)
    yield from answered_and_on_record(calls, ledger.events)
    yield from refusals_on_record(calls, ledger.events)
    yield from checkpoints(calls, ledger)
    yield from effects(calls, ledger)


def replay(events: Iterable[Happened]) -> Iterator[str]:
    """In commit order: tokens and sequences count up, and what is written is written by who holds the slot then."""
    scopes: dict[str, Scope] = defaultdict(Scope)
    sequences: dict[str, int] = defaultdict(int)
    for event in events:
        if event.scope is not None:
            yield from scopes[event.scope].replay(event)
        if event.kind == "checkpoint.saved" and event.workflow is not None:
            sequences[event.workflow] += 1
            if event.sequence != sequences[event.workflow]:
                yield f"a sequence out of turn, not {sequences[event.workflow]}: {event}"


class Scope:
    """Where a scope stands, as the log tells it so far."""

    def __init__(self) -> None:
        self.last = 0
        self.limit = 1
        self.held: dict[int, int] = {}
        """The slot of each live token."""

    def replay(self, event: Happened) -> Iterator[str]:
        """Take in the next event; what is wrong with it."""
        if event.kind == "lease.limit-set":
            self.limit = (event.detail or {})["limit"]
        elif event.token is None:
            return
        elif event.kind in ("lease.acquired", "lease.reclaimed"):
            yield from self._grant(event, event.token)
        elif event.kind in (*UNDER_A_LEASE, *ENDINGS) and event.token not in self.held:
            yield f"written under a lease that was over; live were {sorted(self.held)}: {event}"
        if event.kind in ENDINGS:
            self.held.pop(event.token or 0, None)

    def _grant(self, event: Happened, token: int) -> Iterator[str]:
        slot = (event.detail or {})["slot"]
        if event.kind == "lease.reclaimed":  # the one that is taken back ends with that
            before = next((held for held, its_slot in self.held.items() if its_slot == slot), 0)
            if self.held.pop(before, None) is None:
                yield f"taken back without being held: {event}"
        full = slot in self.held.values() or len(self.held) >= self.limit
        if token != self.last + 1 or full:
            yield f"granted out of turn, after {self.last} and beside {self.held}: {event}"
        self.last = token
        self.held[token] = slot


def answered_and_on_record(calls: Iterable[Call], events: Iterable[Happened]) -> Iterator[str]:
    """Each answered change has its event, and each event its call, if one without an answer."""
    answered: Counter[tuple[Any, ...]] = Counter()
    unsure: Counter[tuple[str, str | None]] = Counter()
    for call in calls:
        kind = LEFT_BY.get(call.what)
        if kind is not None:
            answered.update(_left_by(call, kind))
            unsure.update(_perhaps_left_by(call, kind))
    kinds = {*LEFT_BY.values(), "lease.reclaimed"}
    on_record = Counter(_naming(event) for event in events if event.kind in kinds and not _is_summary(event))
    for missing in answered - on_record:
        yield f"answered, but not on record: {missing}"
    extra: Counter[tuple[str, str | None]] = Counter()
    for (kind, owner, *_), times in (on_record - answered).items():
        extra[kind, owner] += times
    for left, times in extra.items():
        if times > unsure[left]:
            yield f"{times} times on record, but not answered, with {unsure[left]} calls without an answer: {left}"


def _named(call: Call) -> str | None:
    """Whom the log names: whose lease it is, nobody where none was presented."""
    return None if call.what == "bare" else call.facts.get("victim", call.owner)


def _left_by(call: Call, kind: str) -> Iterator[tuple[Any, ...]]:
    facts = call.facts
    if not call.ok:
        return
    if call.what != "begin" or facts["fresh"]:
        sequence = facts.get("sequence") if kind == "checkpoint.saved" else None
        yield kind, _named(call), facts.get("token"), sequence, facts.get("key")
    if call.what == "done" and "sequence" in facts:
        yield "checkpoint.saved", call.owner, facts["token"], facts["sequence"], None


def _perhaps_left_by(call: Call, kind: str) -> Iterator[tuple[str, str | None]]:
    if call.unsure or (call.what in ("leave", "done") and call.outcome == STALE):
        # Who leaves a block gives back what is live still, and what was done is recorded, however late.
        yield kind, _named(call)
    if call.unsure and "workflow" in call.facts and call.what == "done":
        yield "checkpoint.saved", call.owner


def _naming(event: Happened) -> tuple[Any, ...]:
    kind = "lease.acquired" if event.kind == "lease.reclaimed" else event.kind
    return kind, event.owner, event.token, event.sequence, event.key


def _is_summary(event: Happened) -> bool:
    """Whether it tells of heartbeats in the background, of which nobody heard."""
    return event.kind == "lease.heartbeat" and "count" in (event.detail or {})


def refusals_on_record(calls: Iterable[Call], events: Iterable[Happened]) -> Iterator[str]:
    """Each refused write is on record, or its answer said that it is not."""
    written = {
        (event.scope, event.token, (event.detail or {}).get("action"))
        for event in events
        if event.kind == "write.refused"
    }
    for call in calls:
        refused = call.outcome == STALE and call.what in ACTIONS and call.facts["recorded"]
        if refused and (call.scope, call.token, ACTIONS[call.what]) not in written:
            yield f"a refusal is not on record: {call}"


def checkpoints(calls: Iterable[Call], ledger: Ledger) -> Iterator[str]:
    """Sequences count on without a gap, and what was acknowledged is there as it was saved, but for what was pruned."""
    pruned: dict[str, int] = defaultdict(int)
    for event in ledger.events:
        if event.kind == "checkpoint.pruned" and event.workflow is not None:
            pruned[event.workflow] = (event.detail or {})["to_sequence"]
    last: dict[str, int] = defaultdict(int, pruned)
    kept: dict[tuple[str, int], tuple[Any, ...]] = {}
    for workflow, sequence, data, owner, token in ledger.checkpoints:
        last[workflow] += 1
        if sequence != last[workflow]:
            yield f"{workflow} has sequence {sequence} where {last[workflow]} should be"
        kept[workflow, sequence] = (data["by"], data["mark"], owner, token)
    for call in saves(calls):
        token = call.facts.get("token")
        told = (call.owner, call.facts["mark"], call.owner if token else None, token)
        workflow, sequence = call.facts["workflow"], call.facts["sequence"]
        found = kept.get((workflow, sequence))
        if found != told and sequence > pruned[workflow]:
            yield f"an acknowledged checkpoint is not there, but {found}: {call}"


def effects(calls: Iterable[Call], ledger: Ledger) -> Iterator[str]:
    """What was told of an action is what the store says of it."""
    for call in calls:
        if call.what == "done" and call.ok:
            found = ledger.effects.get(call.facts["key"])
            if found != ("done", call.facts["mark"]):
                yield f"an action that was told of is not on record, but {found}: {call}"
