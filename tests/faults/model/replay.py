"""The audit log told again, from its first event: who holds what, which counters stand where."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.faults.model.shadow import check

LIVE = "SELECT scope, slot, token FROM leases WHERE state = 'live' ORDER BY scope, slot"
EVERY_LEASE = "SELECT scope, slot, token FROM leases"
# One is what a scope has without a word about it.
LIMITS = "SELECT scope, slots FROM limits WHERE slots > 1 ORDER BY scope"
CHECKPOINTS = "SELECT workflow, sequence, scope, token FROM checkpoints ORDER BY workflow, sequence"
FLOORS = "SELECT workflow, sequence FROM floors"
EFFECTS = "SELECT key, state, scope, token, late FROM effects ORDER BY key"
ENDS = ("lease.released", "lease.expired", "lease.force-released")
OUTCOMES = {"effect.begun": "begun", "effect.unknown": "unknown", "effect.done": "done", "effect.failed": "failed"}


class Replay:
    """What the events so far say of the store."""

    def __init__(self) -> None:
        self.holders: dict[tuple[str, int], int] = {}
        self.tokens: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.checkpoints: dict[str, list[tuple[int, str | None, int | None]]] = {}
        self.sequences: dict[str, int] = {}
        self.effects: dict[str, tuple[str, str, int, int]] = {}

    def tell(self, event: dict[str, Any], *, restored: Replay | None = None) -> None:
        """The next event; a restore that is told of leads to what ``restored`` has of what no event tells."""
        kind = event["kind"]
        if kind == "store.restored" and restored is not None:
            self.tokens, self.limits = dict(restored.tokens), dict(restored.limits)
            self.sequences, self.effects = dict(restored.sequences), dict(restored.effects)
        elif kind.startswith("lease."):
            self._lease(kind, event)
        elif kind.startswith("checkpoint."):
            self._checkpoint(kind, event)
        elif kind.startswith("effect."):
            self._effect(kind, event)

    def _lease(self, kind: str, event: dict[str, Any]) -> None:
        scope, token, detail = event["scope"], event["token"], event["detail"]
        if kind == "lease.limit-set":
            self.limits[scope] = detail["limit"]
        elif kind in ("lease.acquired", "lease.reclaimed"):
            slot = (scope, detail["slot"])
            check(
                (kind == "lease.reclaimed") == (slot in self.holders),
                f"{kind}, token {token}: {slot} was not so before",
            )
            check(
                token == self.tokens.get(scope, 0) + 1, f"{kind} with token {token}, after {self.tokens.get(scope, 0)}"
            )
            self.tokens[scope], self.holders[slot] = token, token
        elif kind in ENDS:
            slots = [slot for slot, held in self.holders.items() if slot[0] == scope and held == token]
            # One that only the replaced store knew ends by the restore, and its grant is in no log.
            check(
                len(slots) == 1 or detail.get("reason") == "restored",
                f"{kind} of {scope} token {token}, which nobody holds",
            )
            for slot in slots:
                del self.holders[slot]

    def _checkpoint(self, kind: str, event: dict[str, Any]) -> None:
        workflow, sequence, detail = event["workflow"], event["sequence"], event["detail"]
        kept = self.checkpoints.setdefault(workflow, [])
        if kind == "checkpoint.saved":
            last = self.sequences.get(workflow, 0)
            check(sequence == last + 1, f"{workflow} was saved as {sequence}, after {last}")
            self.sequences[workflow] = sequence
            kept.append((sequence, event["scope"], event["token"]))
        elif kind == "checkpoint.pruned":
            gone = [each for each in kept if each[0] <= detail["to_sequence"]]
            check(len(gone) == detail["count"], f"{workflow}: {detail['count']} were pruned of {len(gone)}")
            del kept[: len(gone)]

    def _effect(self, kind: str, event: dict[str, Any]) -> None:
        key, detail = event["detail"]["key"], event["detail"]
        whose = (event["scope"], event["token"])
        before = self.effects.get(key)
        if kind == "effect.begun":
            check(before is None or before[0] == "failed", f"effect {key} was begun when it was {before}")
        else:
            check(
                before is not None and before[1:3] == whose, f"{kind} of effect {key} under {whose}, which is {before}"
            )
            check(
                before is not None and before[0] in ("begun", "unknown"), f"{kind} of effect {key}, which is {before}"
            )
        decided = {"done": "done", "retry": "failed"}
        state = OUTCOMES[kind] if kind in OUTCOMES else decided[detail["decision"]]
        late = before[3] if before is not None and kind == "effect.resolved" else int(bool(detail.get("late")))
        self.effects[key] = (state, *whose, late)

    def compare(self, rows: Any, place: str) -> None:
        """What the log says is what the tables say; heartbeats aside."""
        tables = recorded(rows)
        self.limits = {scope: limit for scope, limit in self.limits.items() if limit > 1}
        for name in ("holders", "tokens", "limits", "sequences", "effects"):
            told, stored = getattr(self, name), getattr(tables, name)
            check(told == stored, f"{place}: the log tells the {name} {told}, the tables have {stored}")
        told_kept = {name: kept for name, kept in self.checkpoints.items() if kept}
        check(
            told_kept == tables.checkpoints, f"{place}: the log tells {told_kept}, the tables have {tables.checkpoints}"
        )


def recorded(rows: Any) -> Replay:
    """What the tables say; ``rows`` asks them."""
    found = Replay()
    found.holders = {(scope, slot): token for scope, slot, token in rows(LIVE)}
    for scope, _, token in rows(EVERY_LEASE):
        found.tokens[scope] = max(token, found.tokens.get(scope, 0))
    found.limits = dict(rows(LIMITS))
    for workflow, sequence, scope, token in rows(CHECKPOINTS):
        found.checkpoints.setdefault(workflow, []).append((sequence, scope, token))
        found.sequences[workflow] = sequence
    for workflow, floor in rows(FLOORS):
        found.sequences[workflow] = max(floor, found.sequences.get(workflow, 0))
    found.effects = {key: tuple(rest) for key, *rest in rows(EFFECTS)}
    return found


def archived(file: str) -> Iterable[dict[str, Any]]:
    """The events in an archive."""
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            if "cursor" in event:
                yield event
