"""Who may change what is protected: the fencing rule, applied inside the write's transaction.

Source of the rule: a token that grows with every grant lets the protected side
refuse a holder that was superseded while it slept. Here the protected side is
the store itself, so a refusal needs no co-operation of the late worker.
"""

from __future__ import annotations

from agent_checkpoint.errors import SequenceConflictError, StaleLeaseError
from agent_checkpoint.names import integer, invalid, name
from agent_checkpoint.record import Record
from agent_checkpoint.records import Fence, Happened
from agent_checkpoint.rules.expiry import remaining

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_checkpoint.errors import AgentCheckpointError
    from agent_checkpoint.records import LeaseRow, Moment, Write

STOP = "stop this worker: what it would do may have been done by another; read the checkpoint, acquire again"
_WHY = {
    "expired": "expired before this call",
    "released": "was released",
    "superseded": "was superseded by a later grant",
    "unknown": "was never granted",
    "wrong-owner": "belongs to another owner",
}


class Workflow(Record):
    """Where a workflow stands: its latest sequence (0: none) and the scope that protects it.

    Sequences up to ``floor`` were handed out in a store that a backup replaced.
    """

    sequence: int
    scope: str | None
    floor: int = 0

    @property
    def following(self) -> int:
        """The sequence of the next checkpoint."""
        return max(self.sequence, self.floor) + 1


def presented(scope: object, owner: object, token: object) -> Fence:
    """The fence that a caller presents, its parts checked.

    Raises:
        InvalidInputError: a part breaks its rule.
    """
    return Fence._make((name("scope", scope), name("owner", owner), integer("token", token, 1)))


def presented_by(lease: object) -> Fence:
    """The fence of a lease, or one that is presented itself, its parts checked.

    Raises:
        InvalidInputError: it is neither, or a part breaks its rule.
    """
    fence = getattr(lease, "fence", None)
    if not isinstance(fence, Fence):
        invalid("lease", f"must be a Lease, a HeldLease or a Fence, not {type(lease).__name__}")
    return presented(*fence)


def live(rows: Sequence[LeaseRow], fence: Fence, moment: Moment) -> LeaseRow | StaleLeaseError:
    """The live lease of a scope that the fence matches, else the error that says why there is none."""
    latest = current = None
    for row in rows:
        if latest is None or row.token > latest.token:
            latest = row
        if row.token == fence.token:
            current = row
    if current is None:
        reason = "unknown" if latest is None or fence.token > latest.token else "superseded"
        current = latest
    elif fence.owner != current.owner:
        reason = "wrong-owner"
    elif current.state == "live":
        if remaining(current, moment).ns:
            return current
        reason = "expired"
    else:
        reason = "expired" if current.state == "expired" else "released"
    return _stale(reason, _WHY[reason], fence, current)


def binding(
    workflow: str, found: Workflow, fence: Fence | None, expected: int | None, rebind: bool
) -> StaleLeaseError | SequenceConflictError | None:
    """Whether a workflow takes a checkpoint under this (already live) fence."""
    scope = fence.scope if fence else None
    if found.scope is not None and found.scope != scope and not rebind:
        reason = "protected" if fence is None else "scope-mismatch"
        return StaleLeaseError(
            f"workflow {workflow!r} is protected by scope {found.scope!r}: "
            + ("a write needs a live lease on it" if fence is None else f"a lease on {scope!r} does not count"),
            hint=f"acquire a lease on {found.scope!r}, or move the workflow on purpose with rebind (--rebind)",
            reason=reason,
            scope=scope,
            owner=fence.owner if fence else None,
            token=fence.token if fence else None,
            workflow=workflow,
            protected_by=found.scope,
        )
    if expected is not None and expected != found.sequence:
        return SequenceConflictError(
            f"workflow {workflow!r} is at sequence {found.sequence}, not {expected}",
            hint="read the latest checkpoint and decide again",
            workflow=workflow,
            expected=expected,
            found=found.sequence,
        )
    return None


def guard(granted: bool, scope: str, fence: Fence | None, required: bool) -> StaleLeaseError | None:
    """Whether a scope lets pass what is written under another fence, or under none.

    Without a fence it does so until its first grant, unless one is required
    anyway: a writer that slept through somebody's whole lease must not land.
    """
    if fence is not None and fence.scope == scope:
        return None
    if fence is None and not (granted or required):
        return None
    why = f"a lease on {fence.scope!r} does not count" if fence else "a write needs a live lease on it"
    since = "" if fence or required else ", since it was leased before"
    return StaleLeaseError(
        f"scope {scope!r} is protected: {why}{since}",
        hint=f"acquire a lease on {scope!r} and write under it",
        reason="scope-mismatch" if fence else "protected",
        scope=fence.scope if fence else None,
        owner=fence.owner if fence else None,
        token=fence.token if fence else None,
        protected_by=scope,
    )


def saved(workflow: str, found: Workflow, fence: Fence | None, size_bytes: int) -> tuple[Happened, ...]:
    """The events of an accepted checkpoint; leaving a protecting scope is one of its own."""
    scope, owner, token = fence or (None, None, None)
    events = (Happened("checkpoint.saved", scope, owner, token, workflow, found.following, {"size_bytes": size_bytes}),)
    if found.scope is None or found.scope == scope:
        return events
    moved = {"from_scope": found.scope, "to_scope": scope}
    return (Happened("checkpoint.rebound", scope, owner, token, workflow, found.following, moved), *events)


def refusal(write: Write, error: AgentCheckpointError, scope: str | None) -> Happened:
    """The audit event of a refused write: what was presented, and why it did not count."""
    detail = {"action": write.action, "component": write.component, **error.facts}
    for known in ("scope", "owner", "token", "workflow"):
        detail.pop(known, None)
    return Happened("write.refused", scope, write.owner, write.token, write.workflow, None, detail)


def _stale(reason: str, why: str, fence: Fence, current: LeaseRow | None) -> StaleLeaseError:
    facts: dict[str, object] = {}
    if current is not None and current.token != fence.token:
        facts = {"current_token": current.token, "current_owner": current.owner}
    return StaleLeaseError(
        f"the lease of {fence.owner!r} on scope {fence.scope!r} with token {fence.token} {why}",
        hint=STOP,
        reason=reason,
        scope=fence.scope,
        owner=fence.owner,
        token=fence.token,
        **facts,
    )
