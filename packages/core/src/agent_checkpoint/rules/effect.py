"""What may be done about an effect: an action in the world outside that must not happen twice.

It is recorded before the action and after it. What was begun and never told of
may have happened or not: nobody here can know, so it is never begun again
before somebody who looked outside has decided.
"""

from __future__ import annotations

from agent_checkpoint.errors import (
    EffectMismatchError,
    EffectRunningError,
    EffectUnknownError,
    InvalidInputError,
    StaleLeaseError,
)
from agent_checkpoint.records import EffectRow, Fence
from agent_checkpoint.times import rfc3339, utc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from agent_checkpoint.errors import AgentCheckpointError
    from agent_checkpoint.records import EffectState, Moment

# The states in which nobody has told what became of it.
OPEN = ("begun", "unknown")
# What tells one try of a key from another.
TRY = ("scope", "owner", "token", "begun_at", "process")


def begin(
    row: EffectRow | None, key: str, digest: str | None, fence: Fence, running: bool, moment: Moment, process: str
) -> EffectRow | AgentCheckpointError:
    """The effect as begun now; or as done already; or why neither.

    ``running``: the lease that began it lives, and so does the process.
    """
    if row is not None:
        if digest is not None and row.digest is not None and digest != row.digest:
            return _mismatch(row, digest)
        if row.state == "done":
            return row
        if row.state == "begun" and running:
            return is_running(row)
        if row.state in OPEN:
            return unknown(row)
        digest = digest or row.digest
    return EffectRow(key, *fence, "begun", digest, None, moment.wall_ns, None, 0, process)


def same_try(row: EffectRow, begun: EffectRow) -> bool:
    """Whether it is the try that was begun then, and no later one, be it under the same lease."""
    return all(getattr(row, part) == getattr(begun, part) for part in TRY)


def knows_more(row: EffectRow, other: EffectRow) -> bool:
    """Whether a row is to be believed rather than another one of the same key, from a copy of the store.

    What is done stays done. Of the same try, what was told of it counts; of two
    tries the one that nobody has told of, for it may have happened. Not the later
    one: the wall clock may have stepped between them.
    """
    if "done" in (row.state, other.state):
        return row.state == "done"
    if same_try(row, other):
        return row.state not in OPEN or other.state in OPEN
    return row.state in OPEN or other.state not in OPEN


def end(
    row: EffectRow | None, begun: EffectRow, state: EffectState, result: str | None, late: bool, moment: Moment
) -> EffectRow | StaleLeaseError:
    """The effect once whoever began it tells what became of it, however late, while nobody else has decided."""
    if row is not None and row.state in OPEN and same_try(row, begun):
        return row._replace(state=state, result=result, ended_at=moment.wall_ns, late=int(late))
    became = "was never begun" if row is None else f"was begun by token {row.token}, and is {row.state}"
    return StaleLeaseError(
        f"effect {begun.key!r} {became}: what token {begun.token} has to say of it comes too late",
        hint="look at it with 'agent-checkpoint effect show'; what happened outside may have happened twice",
        reason="superseded" if row is not None else "unknown",
        scope=begun.scope,
        owner=begun.owner,
        token=begun.token,
        key=begun.key,
    )


def resolve(
    row: EffectRow, looked_at: EffectRow, live: bool, state: EffectState, result: str | None, moment: Moment
) -> EffectRow | AgentCheckpointError:
    """The effect as somebody who looked outside decides; ``live``: the lease that began it is.

    What they saw says nothing of a try that was begun after the one they looked at.
    """
    if row.state not in OPEN:
        return InvalidInputError(
            f"key: effect {row.key!r} is {row.state}, there is nothing to resolve", field="key", state=row.state
        )
    if live or not same_try(row, looked_at):
        return is_running(row)
    return row._replace(state=state, result=result, ended_at=moment.wall_ns)


def is_running(row: EffectRow) -> EffectRunningError:
    """Whoever began it may be at it still."""
    return EffectRunningError(
        f"effect {row.key!r} was begun by {row.owner!r} (token {row.token} of scope {row.scope!r}), "
        "whose lease is live: it may be under way",
        hint="try again when that lease has ended",
        **_facts(row),
    )


def unknown(row: EffectRow) -> EffectUnknownError:
    """Nobody has told what became of it."""
    return EffectUnknownError(
        f"effect {row.key!r} was begun by {row.owner!r} (token {row.token}) at {rfc3339(row.begun_at)}, and nobody "
        "has told what became of it: it may have happened",
        hint=f"look whether it happened, then: {to_resolve(row.key)}",
        **_facts(row),
    )


def to_resolve(key: str) -> str:
    """The command that says what became of an effect, as a shell takes it."""
    from shlex import quote

    dashes = "-- " if key.startswith("-") else ""
    return f"agent-checkpoint effect resolve --done {dashes}{quote(key)} (or --retry)"


def _mismatch(row: EffectRow, digest: str) -> EffectMismatchError:
    return EffectMismatchError(
        f"effect {row.key!r} is known for another request: {row.digest}, not {digest}",
        hint="one key is for one request: give the other one a key of its own",
        request_digest=digest,
        recorded_digest=row.digest,
        **_facts(row),
    )


def _facts(row: EffectRow) -> dict[str, Any]:
    return {
        "key": row.key,
        "scope": row.scope,
        "owner": row.owner,
        "token": row.token,
        "begun_at": utc(row.begun_at),
    }
