"""The block around an action that must not happen twice.

    with store.effect("refund-42", lease=lease, request=order) as effect:
        if effect.fresh:
            effect.done(refund(order, effect.idempotency_key))

*Begun* is committed before the block runs, *done* after the action. Whoever is
killed in between leaves an effect of which nobody can say whether it happened.
"""

from __future__ import annotations

from contextlib import suppress

from agent_checkpoint import checkpoints, effects, names, payload
from agent_checkpoint.errors import AgentCheckpointError, EffectUnknownError
from agent_checkpoint.names import NOTHING
from agent_checkpoint.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
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
        fence = checkpoints.fence_of(lease, None, None, None)
        assert fence is not None
        self.key = names.name("key", key)
        """What names the action: one key, one action."""
        self.idempotency_key = effects.idempotency_key(key)
        """The same for every try of this key: for systems that take one."""
        self.fence: Fence = fence
        """What it is recorded under; its token is for systems that compare tokens."""
        self._changes = changes
        self._digest = effects.digest_of(request)
        self._resolve = resolve
        self._row: EffectRow | None = None
        self._told = False
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
            save = checkpoints.valid_save(workflow, data, self.fence, None, rebind, payload.MAX_BYTES)
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
        effects.leave(self._changes, self.key, self.fence, names.text("why", why))
        self._told = True

    def _tell(self, state: EffectState, stored: str | None, save: Any, data: Any) -> effects.Told:
        self._check_open()
        told = effects.tell(self._changes, self.key, self.fence, state, stored, save, data)
        self._told = True
        self.late = told.late
        assert self._row is not None
        self._row = self._row._replace(result=stored)
        return told

    def _check_open(self) -> None:
        if not self.fresh or self._told:
            why = "it was told already" if self._told else "this caller was not to act: it is done, or not begun"
            names.invalid("effect", f"has nothing to tell: {why}")

    def _begin(self) -> None:
        begun = self._changes, self.key, self.fence, self._digest
        try:
            self._row, self.fresh = effects.begin(*begun)
        except EffectUnknownError:
            if self._resolve is None:
                raise
            found = effects.find(self._changes.database, self.key)
            resolution = None if found is None else self._resolve(found)
            if resolution is None:
                raise
            resolve(self._changes, self.key, resolution, self.fence.owner)
            self._row, self.fresh = effects.begin(*begun)

    def __enter__(self) -> Acting:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if not self.fresh or self._told:
            return
        # It may have happened, and nobody is going to tell: the next one must not wait for our lease to hear that.
        why = "the block ended without done() or failed()" if kind is None else f"{kind.__name__} in the block"
        with suppress(AgentCheckpointError):
            effects.leave(self._changes, self.key, self.fence, why)
        if kind is None:
            assert self._row is not None
            raise EffectUnknownError(
                f"effect {self.key!r}: {why}: whether it happened is not on record",
                hint="call done(result) after the action, or failed() where it surely did not happen",
                key=self.key,
                scope=self.fence.scope,
                owner=self.fence.owner,
                token=self.fence.token,
            )


def resolve(changes: Changes, key: str, resolution: Resolution, by: str) -> Effect:
    """Record what a ``resolve`` function found."""
    if not isinstance(resolution, Resolution):
        names.invalid("resolve", f"must return a Resolution or None, not {type(resolution).__name__}")
    happened, result = resolution
    return decide(changes, key, result if happened else NOTHING, not happened, by)


def decide(changes: Changes, key: str, done: Any, retry: bool, by: str) -> Effect:
    """Record what somebody found who looked."""
    if names.flag("retry", retry) is (done is not NOTHING):
        names.invalid("done", "give either the result of what happened, or retry, not both")
    stored = None if retry else payload.encode("done", done)
    return effects.resolve(changes, names.name("key", key), "failed" if retry else "done", stored, by)
