"""The frozen values that go in and out of the store."""

from __future__ import annotations

import json

from agent_checkpoint.record import Record
from agent_checkpoint.times import utc

__all__ = [
    "LEASE_FIELDS",
    "Check",
    "Checkpoint",
    "CheckpointInfo",
    "Effect",
    "EffectRow",
    "Event",
    "Fence",
    "Happened",
    "Lease",
    "LeaseRow",
    "Limit",
    "LimitRow",
    "Moment",
    "Pruned",
    "Refusals",
    "Status",
    "Ticket",
    "Waiting",
    "Write",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any, Literal, Protocol

    class Fenced(Protocol):
        """A fence, or what has one: a lease, or one that is held."""

        @property
        def fence(self) -> Fence:
            """What a protected write presents."""

    EffectState = Literal["begun", "done", "failed", "unknown"]
    LeaseState = Literal["live", "expired", "released", "force-released"]


class Fence(Record):
    """What a protected write presents: the proof that its worker was granted the scope."""

    scope: str
    owner: str
    token: int

    @property
    def fence(self) -> Fence:
        """Itself: whatever has a fence may be presented."""
        return self


class LeaseRow(Record):
    """A lease as it is stored: one row for each (scope, slot), never deleted.

    Wall times are nanoseconds since 1970. ``beat_ticks`` is the monotonic time in
    ``domain`` of the grant or of the last heartbeat, and once it has ended, of
    its end. ``process`` is the identity of the process it is bound to ("": none).
    """

    scope: str
    slot: int
    owner: str
    token: int
    state: LeaseState
    ttl_ns: int
    acquired_at: int
    heartbeat_at: int
    expires_at: int
    domain: str
    beat_ticks: int
    metadata: str
    process: str = ""


class LimitRow(Record):
    """How many leases a scope may have, and since when (monotonic time in ``domain``)."""

    slots: int
    domain: str
    since_ticks: int


class Ticket(Record):
    """A place in the queue of a scope, with a life of its own: whoever waits renews it.

    ``passed``: somebody behind it was served first, since it did not take its
    turn; it keeps its place for when it wakes up. ``bell`` is what to ring when
    its turn comes ("": it looks for itself).
    """

    number: int
    scope: str
    owner: str
    ttl_ns: int
    asked_at: int
    expires_at: int
    domain: str
    beat_ticks: int
    passed: int
    process: str
    bell: str


class Beat(Record):
    """How long a live lease still lives, and nothing else of it."""

    ttl_ns: int
    expires_at: int
    domain: str
    beat_ticks: int


class Lease(Record):
    """An owner's right to a scope, as it was when the store was read.

    Times are aware UTC datetimes. They are for people: what decides is the
    store's clock rule.
    """

    row: LeaseRow
    state: LeaseState
    left_ns: int
    expires_ns: int
    owner_alive: bool | None = None
    """Whether the process it is bound to lives: None where nobody can tell, or it is bound to none."""

    @property
    def scope(self) -> str:
        """What is protected."""
        return self.row.scope

    @property
    def slot(self) -> int:
        """Which of the scope's leases this is; 0 where a scope has one."""
        return self.row.slot

    @property
    def owner(self) -> str:
        """The label of who asked for it."""
        return self.row.owner

    @property
    def token(self) -> int:
        """The fencing token: higher than that of every earlier grant of the scope."""
        return self.row.token

    @property
    def ttl_seconds(self) -> float:
        """How long it lasts after its last heartbeat."""
        return self.row.ttl_ns / 1e9

    @property
    def acquired_at(self) -> datetime:
        """When it was granted."""
        return utc(self.row.acquired_at)

    @property
    def heartbeat_at(self) -> datetime:
        """When it was granted or extended last."""
        return utc(self.row.heartbeat_at)

    @property
    def expires_at(self) -> datetime:
        """When it ends, or ended, without another heartbeat."""
        return utc(self.expires_ns)

    @property
    def remaining_seconds(self) -> float:
        """How long it still lived at the time of reading; 0.0 when it is not live."""
        return self.left_ns / 1e9

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON object that came with the grant."""
        return dict(json.loads(self.row.metadata))

    @property
    def process(self) -> dict[str, Any] | None:
        """The process it is bound to, as the kernel identified it at the grant; None for none."""
        return dict(json.loads(self.row.process)) if self.row.process else None

    @property
    def fence(self) -> Fence:
        """The part of the lease that a protected write presents."""
        row = self.row
        return Fence._make((row.scope, row.owner, row.token))

    @staticmethod
    def from_env(scope: str | None = None) -> Fence:
        """The fence of the innermost lease in this process's environment, or of the innermost on ``scope``.

        For programs that run under ``agent-checkpoint run``: hand it to a
        protected write as ``lease=``. Nothing is asked of the store.

        Raises:
            NotFoundError: the environment carries none.
            InvalidInputError: a variable is malformed.
        """
        from agent_checkpoint.environment import innermost

        return innermost(scope)

    def asdict(self) -> dict[str, Any]:
        """All of the above by name, without the fence: what the command prints."""
        return {name: getattr(self, name) for name in LEASE_FIELDS}

    def __repr__(self) -> str:
        return f"Lease({', '.join(f'{name}={value!r}' for name, value in self.asdict().items())})"


LEASE_FIELDS = (
    "scope",
    "slot",
    "owner",
    "token",
    "state",
    "ttl_seconds",
    "acquired_at",
    "heartbeat_at",
    "expires_at",
    "remaining_seconds",
    "metadata",
    "process",
    "owner_alive",
)


class Limit(Record):
    """How many leases a scope may have at once, and how many before."""

    scope: str
    limit: int
    previous: int


class Waiting(Record):
    """Somebody in the queue of a scope; ``position`` counts from 1."""

    scope: str
    position: int
    owner: str
    asked_at: datetime
    process: dict[str, Any] | None
    owner_alive: bool | None


class Checkpoint(Record):
    """A saved state; ``scope``, ``owner``, ``token`` are None when it was written unprotected."""

    workflow: str
    sequence: int
    data: Any
    saved_at: datetime
    scope: str | None
    owner: str | None
    token: int | None


class CheckpointInfo(Record):
    """A checkpoint as lists show it: ``size_bytes`` of encoded JSON in place of the data."""

    workflow: str
    sequence: int
    size_bytes: int
    saved_at: datetime
    scope: str | None
    owner: str | None
    token: int | None


class Pruned(Record):
    """What a prune removed, or with ``dry_run`` would remove, from one workflow."""

    workflow: str
    removed: int
    from_sequence: int
    to_sequence: int


class Event(Record):
    """One line of the audit log. ``cursor`` is opaque: hand it to ``events(after=…)``."""

    cursor: str
    id: int
    at: datetime
    kind: str
    scope: str | None
    owner: str | None
    token: int | None
    workflow: str | None
    sequence: int | None
    detail: dict[str, Any]


class Refusals(Record):
    """How often writes were refused to one (scope, token, action) for one reason; the first is an event too.

    ``token`` is None for writes that presented no fence.
    """

    scope: str
    token: int | None
    action: str
    reason: str
    times: int
    first_at: datetime
    last_at: datetime


class Status(Record):
    """One consistent look at the store: the four questions for every scope and workflow."""

    database: str
    at: datetime
    leases: list[Lease]
    queues: list[Waiting]
    checkpoints: list[CheckpointInfo]
    refusals: list[Refusals]


class EffectRow(Record):
    """An effect as it is stored: one row for each key, never deleted. Times are nanoseconds since 1970.

    ``state`` is begun, done, failed or unknown; begun under a lease that is not
    live is unknown too.
    """

    key: str
    scope: str
    owner: str
    token: int
    state: EffectState
    digest: str | None
    result: str | None
    begun_at: int
    ended_at: int | None
    late: int
    process: str


class Effect(Record):
    """An external action that is recorded before and after, so that it is not done twice.

    ``state`` is begun (it may be under way), done, failed (it surely did not
    happen) or unknown. ``done_at`` is when it was told what became of it;
    ``late``: that was after the lease was lost. ``idempotency_key`` is the same
    for every try of this key, for systems that take one.
    """

    key: str
    state: EffectState
    scope: str
    owner: str
    token: int
    request_digest: str | None
    result: Any
    begun_at: datetime
    done_at: datetime | None
    late: bool
    idempotency_key: str


class Check(Record):
    """One line of a health report; ``verdict`` broken makes ``doctor`` exit with 74."""

    check: str
    verdict: Literal["ok", "warning", "broken"]
    value: Any
    message: str


class Write(Record):
    """A protected write as a ``check_fence`` hook sees it, before it happens.

    ``sequence`` is the expected sequence where the writer named one.
    """

    component: str
    action: str
    scope: str | None
    owner: str | None
    token: int | None
    workflow: str | None
    sequence: int | None
    detail: dict[str, Any]


class Happened(Record):
    """An event on its way into the log, before the log gave it an id and a time."""

    kind: str
    scope: str | None = None
    owner: str | None = None
    token: int | None = None
    workflow: str | None = None
    sequence: int | None = None
    detail: dict[str, Any] = {}  # noqa: RUF012 -- a named tuple's default, never mutated


class Moment(Record):
    """The time at which a change is decided, read once, after the write lock.

    ``ticks_ns`` is the kernel's monotonic clock and means something within
    ``domain`` only (a boot of a kernel; "" when it cannot be known).
    ``one_kernel``: only one kernel at a time can have this store open, so that
    a lease of another boot belongs to a kernel that is gone.
    """

    wall_ns: int
    ticks_ns: int
    domain: str
    one_kernel: bool
