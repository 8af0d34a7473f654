"""What must be true of what is saved under leases: checkpoints, effects, and the count of refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from tests.faults.model.shadow import Expected, Fence, Leases
from tests.faults.model.world import Identity

Refusal = tuple[str, int, str, str]
"""Scope, token (0: none), action, reason."""


class Saved(NamedTuple):
    """A checkpoint."""

    sequence: int
    data: Any
    fence: Fence | None


class Workflow:
    """A workflow's checkpoints that are there, and the sequence behind which it goes on."""

    def __init__(self) -> None:
        self.kept: list[Saved] = []
        self.last = 0

    @property
    def stands_at(self) -> int:
        """The sequence of its latest checkpoint, 0 for none."""
        return self.kept[-1].sequence if self.kept else 0

    @property
    def protected_by(self) -> str | None:
        """The scope that its latest checkpoint was written under."""
        fence = self.kept[-1].fence if self.kept else None
        return None if fence is None else fence.scope


class Try:
    """One try of an effect: under which fence, by which process."""

    def __init__(self, fence: Fence, process: Identity) -> None:
        self.fence = fence
        self.process = process


class Effect:
    """What is on record of an effect: begun, unknown, done or failed."""

    def __init__(self, begun: Try, digest: int | None) -> None:
        self.begun = begun
        self.digest = digest
        self.state = "begun"
        self.result: Any = None
        self.late = False


class Book:
    """Everything that is saved, and what must become of whoever wants to save more."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.workflows: dict[str, Workflow] = {}
        self.effects: dict[str, Effect] = {}
        self.refusals: Counter[Refusal] = Counter()
        self.refused_at: dict[Refusal, int] = {}

    def workflow(self, name: str) -> Workflow:
        """That workflow."""
        return self.workflows.setdefault(name, Workflow())

    def refuse(
        self, action: str, reason: str, fence: Fence | None, scope: str, workflow: str | None = None
    ) -> list[Expected]:
        """Count a refused write; the event, if it is the first of its kind."""
        key = (scope, fence.token if fence else 0, action, reason)
        self.refusals[key] += 1
        self.refused_at[key] = self.leases.world.now.wall
        if self.refusals[key] > 1:
            return []
        owner, token = (fence.owner, fence.token) if fence else (None, None)
        return [Expected("write.refused", scope, owner, token, workflow, None, {"action": action, "reason": reason})]

    def forget_refusals(self, quiet: int) -> int:
        """Those that counted nothing since that time are archived, and begin anew: how many."""
        gone = [key for key in self.refusals if self.refused_at[key] < quiet]
        for key in gone:
            del self.refusals[key]
        return len(gone)

    def why_not(self, name: str, fence: Fence | None, rebind: bool) -> str | None:
        """Why a checkpoint is stale; None: it is not."""
        stale = fence and self.leases.why_stale(fence)
        if stale:
            return stale
        scope = self.workflow(name).protected_by
        if scope is None or rebind or (fence is not None and fence.scope == scope):
            return None
        return "protected" if fence is None else "scope-mismatch"

    def save(self, name: str, data: Any, fence: Fence | None) -> list[Expected]:
        """Write the next checkpoint down; its events."""
        workflow = self.workflow(name)
        before, scope = workflow.protected_by, fence.scope if fence else None
        workflow.last += 1
        workflow.kept.append(Saved(workflow.last, data, fence))
        whose = (*(fence or (None, None, None)), name, workflow.last)
        events = [Expected("checkpoint.saved", *whose)]
        if before is not None and before != scope:
            events.insert(0, Expected("checkpoint.rebound", *whose, {"from_scope": before, "to_scope": scope}))
        return events

    def is_running(self, effect: Effect) -> bool:
        """Whether whoever began it may be at it."""
        return self.is_leased(effect) and not self.leases.world.is_dead(effect.begun.process)

    def is_leased(self, effect: Effect) -> bool:
        """Whether the lease that it was begun under keeps others out."""
        fence = effect.begun.fence
        return any(each.fence == fence for each in self.leases.live(fence.scope))

    def why_not_begin(self, key: str, digest: int | None) -> str | None:
        """Why an effect is neither begun nor done for a live fence: mismatch, running or unknown; None: it is."""
        effect = self.effects.get(key)
        if effect is None:
            return None
        if digest is not None and effect.digest is not None and digest != effect.digest:
            return "mismatch"
        if effect.state in ("done", "failed"):
            return None
        return "running" if effect.state == "begun" and self.is_running(effect) else "unknown"

    def shown_state(self, key: str) -> str:
        """An effect's state as everybody is shown it."""
        effect = self.effects[key]
        return "unknown" if effect.state == "begun" and not self.is_running(effect) else effect.state
