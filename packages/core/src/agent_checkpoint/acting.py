"""The block around an action that must not happen twice.

    with store.effect("refund-42", lease=lease, request=order) as effect:
        if effect.fresh:
            effect.done(refund(order, effect.idempotency_key))

*Begun* is committed before the block runs, *done* after the action. Whoever is
killed in between leaves an effect of which nobody can say whether it happened.
"""

from __future__ import annotations

import os
from contextlib import suppress

from agent_checkpoint import checkpoints, effects, names, payload
from agent_checkpoint.errors import AgentCheckpointError, EffectUnknownError, InvalidInputError
from agent_checkpoint.names import NOTHING
from agent_checkpoint.record import Record
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.times import rfc3339, utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from types import TracebackType
    from typing import Any

    from agent_checkpoint.change import Changes
    from agent_checkpoint.records import Checkpoint, Effect, EffectRow, EffectState, Fence, Fenced

    Resolve = Callable[[Effect], "Resolution | None"]


class Resolution(Record):
    """What somebody found who looked whether an effect happened: it did, with this result, or it surely did not."""

    happened: bool
    result: Any = None


class Acting:
    """One caller's way through an effect; made by ``store.effect`` and the ``effect`` of a held lease."""

    def __init__(self, changes: Changes, key: str, lease: Fenced, request: Any, resolve: Resolve | None) -> None:
        self.key = names.name("key", key)
        """What names the action: one key, one action."""
        self.idempotency_key = effects.idempotency_key(key)
        """The same for every try of this key: for systems that take one."""
        self.fence: Fence = fencing.presented_by(lease)
        """What it is recorded under; its token is for systems that compare tokens."""
        self._changes = changes
        self._digest = effects.digest_of(request)
        self._resolve = resolve
        self._row: EffectRow | None = None
        self._told = False
        self._pid = 0
        self.fresh = False
        """Whether this caller may act: only one ever is told so, until it says that it failed."""
        self.late = False
        """Whether the lease was lost before it was told what became of the action."""

    @property
    def result(self) -> Any:
        """What was recorded when it was done; None before."""
        return None if self._row is None or self._row.result is None else payload.decode(self._row.result)

    def done(
        self, result: Any = None, *, workflow: str | None = None, data: Any = NOTHING, rebind: bool = False
    ) -> Checkpoint | None:
        """Record that it happened, with a JSON result; and with ``workflow`` and ``data`` a checkpoint, all or nothing.

        Recorded even when the lease was lost meanwhile (``late``), while nobody
        else has decided; the checkpoint then is not.

        Raises:
            StaleLeaseError: the lease was lost, and there was a checkpoint to save; or somebody else has decided.
            FenceRefusedError: a plugin vetoed the checkpoint; that it happened is recorded.
            InvalidInputError: a value breaks its rule, or there is nothing to tell.
        """
        stored = payload.encode("result", result)
        save = None
        if workflow is not None or data is not NOTHING:
            if workflow is None or data is NOTHING:
                names.invalid("workflow", "goes with data, and data with workflow")
            save = checkpoints.valid_save(workflow, data, self.fence, None, rebind, self._changes.max_payload_bytes)
        told = self._tell("done", stored, save, data)
        if told.refused is not None:
            raise told.refused
        return told.checkpoint

    def failed(self) -> None:
        """Record that it surely did not happen: the next try is fresh.

        Raises:
            StaleLeaseError: somebody else has decided.
            InvalidInputError: there is nothing to tell.
        """
        self._tell("failed", None, None, None)

    def leave(self, why: str) -> None:
        """Record that nobody knows whether it happened: somebody has to look.

        Raises:
            InvalidInputError: there is nothing to tell.
        """
        self._check_open()
        effects.leave(self._changes, self._begun(), names.text("why", why))
        self._told = True

    def _tell(self, state: EffectState, stored: str | None, save: Any, data: Any) -> effects.Told:
        self._check_open()
        told = effects.tell(self._changes, self._begun(), state, stored, save, data)
        self._told = True
        self.late = told.late
        self._row = self._begun()._replace(result=stored)
        return told

    def _begun(self) -> EffectRow:
        assert self._row is not None
        return self._row

    def _check_open(self) -> None:
        if not self.fresh or self._told:
            why = "it was told already" if self._told else "this caller was not to act: it is done, or not begun"
            names.invalid("effect", f"has nothing to tell: {why}")

    def _begin(self) -> None:
        self._row, self.fresh = effects.begin(self._changes, self.key, self.fence, self._digest)

    def _look(self, resolve: Resolve) -> bool:
        """Have somebody look whether it happened; False when they cannot tell."""
        found = effects.look(self._changes.database, self.key)
        if found is None or found[1].state != "unknown":
            return True  # another has decided, or begun it anew
        resolution = resolve(found[1])
        if resolution is None:
            return False
        state, stored = _decision(resolution)
        # Known by now: another was faster, and what they found counts.
        with suppress(InvalidInputError):
            effects.resolve(self._changes, found[0], state, stored, self.fence.owner)
        return True

    def __enter__(self) -> Acting:
        self._row, self.fresh, self.late, self._told = None, False, False, False
        self._pid = os.getpid()
        try:
            self._begin()
        except EffectUnknownError:
            if self._resolve is None or not self._look(self._resolve):
                raise
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self.fresh or self._told or os.getpid() != self._pid:
            return
        # It may have happened, and nobody is going to tell: the next one must not wait for our lease to hear that.
        why = "the block ended without done() or failed()" if kind is None else f"{kind.__name__} in the block"
        with suppress(AgentCheckpointError):
            effects.leave(self._changes, self._begun(), why)
        if kind is None:
            raise EffectUnknownError(
                f"effect {self.key!r}: {why}: whether it happened is not on record",
                hint="call done(result) after the action, or failed() where it surely did not happen",
                key=self.key,
                scope=self.fence.scope,
                owner=self.fence.owner,
                token=self.fence.token,
                begun_at=utc(self._begun().begun_at),
            )


def _decision(resolution: object) -> tuple[EffectState, str | None]:
    """What a ``resolve`` function found, as it is stored."""
    if not isinstance(resolution, Resolution):
        names.invalid("resolve", f"must return a Resolution or None, not {type(resolution).__name__}")
    happened, result = resolution
    if names.flag("happened", happened):
        return "done", payload.encode("result", result)
    if result is not None:
        names.invalid("result", "goes with what happened")
    return "failed", None


def decide(changes: Changes, key: str, done: Any, retry: bool, by: str, begun_at: datetime | None) -> Effect:
    """Record what somebody found who looked; with ``begun_at`` at that try, and no later one."""
    if names.flag("retry", retry) is (done is not NOTHING):
        names.invalid("done", "give either the result of what happened, or retry, not both")
    stored = None if retry else payload.encode("done", done)
    if begun_at is not None:
        names.aware("begun_at", begun_at)
    found = effects.look(changes.database, key)
    if found is None:
        raise effects.missing(key)
    if begun_at is not None and begun_at != found[1].begun_at:
        names.invalid(
            "begun_at",
            f"is not that of the latest try of {key!r}, which was begun at {rfc3339(found[1].begun_at)}",
            hint="what was seen says nothing of a later try: look at it, and decide again",
            found=found[1].begun_at,
        )
    return effects.resolve(changes, found[0], "failed" if retry else "done", stored, by)
