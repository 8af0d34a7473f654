"""Effects over the pure rules alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.faults.model.ledger import Ledger

from agent_checkpoint import Effect, Fence, NotFoundError, StaleLeaseError
from agent_checkpoint.effects import digest_of, fence_of, present
from agent_checkpoint.names import NOTHING
from agent_checkpoint.records import EffectRow, Happened, Write
from agent_checkpoint.rules import effect as rule
from agent_checkpoint.rules import expiry, fence
from agent_checkpoint.rules.decision import Refused

if TYPE_CHECKING:
    from agent_checkpoint.records import EffectState


def is_leased(ledger: Ledger, row: EffectRow) -> bool:
    """Whether the lease that an effect was begun under is live."""
    lease = fence.live(ledger.of_scope(row.scope), fence_of(row), ledger.moment)
    return not isinstance(lease, StaleLeaseError) and expiry.left(lease, ledger.moment, ledger.alive(lease)).ns > 0


def is_running(ledger: Ledger, row: EffectRow) -> bool:
    """Whether whoever began it may be at it."""
    return is_leased(ledger, row) and ledger.alive(row).get(row.process) is not False


def shown(ledger: Ledger, key: str) -> Effect | None:
    """An effect as it stands."""
    row = ledger.effects.get(key)
    if row is None:
        return None
    lost = row.state == "begun" and not is_running(ledger, row)
    return present(row)._replace(state="unknown") if lost else present(row)


def resolve(ledger: Ledger, key: str, done: Any, by: str) -> None:
    """Record what somebody found; ``NOTHING``: that it did not happen."""
    known = ledger.effects.get(key)
    if known is None:
        raise NotFoundError(f"there is no effect {key!r}")
    state: EffectState = "failed" if done is NOTHING else "done"
    result = None if done is NOTHING else json.dumps(done)
    row = rule.resolve(known, known, is_leased(ledger, known), state, result, ledger.moment)
    if not isinstance(row, EffectRow):
        raise row
    ledger.effects[key] = row
    detail = {"key": key, "decision": "retry" if done is NOTHING else "done", "by": by}
    ledger.tell(Happened("effect.resolved", *fence_of(row), detail=detail))


class Acting:
    """A caller's way through an effect; ``store`` saves the checkpoint that may come with what it tells."""

    def __init__(self, store: Any, ledger: Ledger, key: str, lease: Fence, request: Any) -> None:
        self._store = store
        self._ledger = ledger
        self._key = key
        self._fence = lease
        self._digest = digest_of(request)
        self._row: EffectRow | None = None
        self.fresh = False

    @property
    def result(self) -> Any:
        """What was recorded."""
        return None if self._row is None or self._row.result is None else json.loads(self._row.result)

    def __enter__(self) -> None:
        ledger, key = self._ledger, self._key
        live = fence.live(ledger.of_scope(self._fence.scope), self._fence, ledger.moment)
        if isinstance(live, StaleLeaseError):
            ledger.refuse(Refused(live, Write("core", "effect.begin", *self._fence, None, None, {})))
        known = ledger.effects.get(key)
        running = known is not None and known.state == "begun" and is_running(ledger, known)
        process = ledger.world.table.identify()
        row = rule.begin(known, key, self._digest, self._fence, running, ledger.moment, process)
        if not isinstance(row, EffectRow):
            raise row
        self._row, self.fresh = row, row is not known
        if self.fresh:
            ledger.effects[key] = row
            ledger.tell(Happened("effect.begun", *self._fence, detail={"key": key}))

    def done(self, result: Any, *, workflow: str | None = None, data: Any = None) -> None:
        """Tell that it happened, perhaps with a checkpoint."""
        self._tell("done", json.dumps(result), workflow, data)

    def failed(self) -> None:
        """Tell that it did not happen."""
        self._tell("failed", None, None, None)

    def leave(self, why: str) -> None:
        """Go away without a word."""
        row = self._ledger.effects[self._key]
        if row.state == "begun" and rule.same_try(row, self._begun()):
            self._ledger.effects[self._key] = row._replace(state="unknown")
            detail = {"key": self._key, "why": why}
            self._ledger.tell(Happened("effect.unknown", *self._fence, detail=detail))

    def _tell(self, state: EffectState, result: str | None, workflow: str | None, data: Any) -> None:
        ledger, key = self._ledger, self._key
        live = fence.live(ledger.of_scope(self._fence.scope), self._fence, ledger.moment)
        late = isinstance(live, StaleLeaseError)
        row = rule.end(ledger.effects.get(key), self._begun(), state, result, late, ledger.moment)
        if not isinstance(row, EffectRow):
            ledger.refuse(Refused(row, Write("core", f"effect.{state}", *self._fence, None, None, {})))
        ledger.effects[key] = row
        detail = {"key": key, "late": True} if late else {"key": key}
        ledger.tell(Happened(f"effect.{state}", *self._fence, detail=detail))
        if workflow is not None:
            saved = self._store.put(workflow, data, self._fence, None, False)
            if isinstance(saved, Refused):
                ledger.refuse(saved)

    def _begun(self) -> EffectRow:
        assert self._row is not None
        return self._row
