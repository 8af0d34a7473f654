"""What callers catch.

Each class is named for what the caller should do. What a message says is also
an attribute, and each class knows the command's exit status and whether the
same call may succeed when repeated. ``facts`` has all attributes ready for JSON:
a time is a ``datetime`` as an attribute, and RFC 3339 text there.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any


class AgentCheckpointError(Exception):
    """Base of everything this package raises on purpose."""

    code = "unexpected"
    exit_status = 1
    retryable = False
    hint = ""

    def __init__(self, message: str = "", *, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = facts
        if hint:
            self.hint = hint
        for name, value in facts.items():
            setattr(self, name, value)
            if hasattr(value, "isoformat"):
                from agent_checkpoint.times import rfc3339

                facts[name] = rfc3339(value)

    @property
    def message(self) -> str:
        """The sentence for a person."""
        return str(self)


class InvalidInputError(AgentCheckpointError, ValueError):
    """A value breaks a rule; ``field`` names it."""

    code = "invalid-input"
    exit_status = 2
    field: str


class NotFoundError(AgentCheckpointError):
    """There is no such store, lease, workflow or sequence."""

    code = "not-found"
    exit_status = 66


class LeaseHeldError(AgentCheckpointError):
    """Another lease is live in this scope; try again after ``retry_after`` seconds.

    ``position`` is the place in the queue that the caller has, or would have. A
    scope that is free while others are ahead in its queue has no ``owner``,
    ``token`` and ``expires_at``: they are None.
    """

    code = "lease-held"
    exit_status = 75
    retryable = True
    scope: str
    owner: str | None
    token: int | None
    expires_at: datetime | None
    retry_after: float
    position: int


class WaitTimeoutError(LeaseHeldError, TimeoutError):
    """The scope was not granted within the seconds that the caller was willing to wait."""

    code = "wait-timeout"
    waited_seconds: float


class StaleLeaseError(AgentCheckpointError, RuntimeError):
    """The fence matches no live lease: stop, another worker may own the scope.

    ``reason`` is expired, released, superseded, unknown, wrong-owner,
    scope-mismatch or protected; ``recorded`` is False when the audit log could
    not be written (a question, such as ``check_lease``, leaves no record anyway).
    """

    code = "stale-lease"
    exit_status = 76
    reason: str
    scope: str | None
    owner: str | None
    token: int | None
    recorded: bool = True
    heartbeat_gap: float
    """For a held lease: the longest seconds between two heartbeats."""


class SequenceConflictError(AgentCheckpointError):
    """The workflow is not at the sequence that the writer expected."""

    code = "sequence-conflict"
    exit_status = 76
    workflow: str
    expected: int
    found: int


class EffectRunningError(AgentCheckpointError):
    """The effect was begun under a lease that is live: it may be under way; try again later."""

    code = "effect-running"
    exit_status = 75
    retryable = True
    key: str
    scope: str
    owner: str
    token: int
    begun_at: datetime


class EffectUnknownError(AgentCheckpointError):
    """The effect was begun, and nobody has told what became of it: somebody has to look outside.

    ``resolve_effect`` takes what they found.
    """

    code = "effect-unknown"
    exit_status = 76
    key: str
    scope: str
    owner: str
    token: int
    begun_at: datetime


class EffectMismatchError(AgentCheckpointError):
    """The effect's key is known for another request."""

    code = "effect-mismatch"
    exit_status = 76
    key: str
    request_digest: str
    recorded_digest: str


class ReentrancyError(AgentCheckpointError):
    """A call would wait for itself.

    A hook, or the body of a transaction, called the store it runs inside of; or
    a thread or task waits for a scope that it holds itself.
    """

    code = "reentrancy"
    exit_status = 2


class FenceRefusedError(AgentCheckpointError, RuntimeError):
    """A plugin vetoed a protected write; ``plugin`` says which, ``reason`` why.

    A ``check_fence`` hook raises it with the reason alone.
    """

    code = "fence-refused"
    exit_status = 77
    plugin: str
    reason: str
    recorded: bool = True


class StorageError(AgentCheckpointError):
    """The database could not do it; nothing is half-written."""

    code = "storage"
    exit_status = 74
    undone = False
    """Whether the change was surely undone, by an accident that the next try need not meet."""


class StorageBusyError(StorageError):
    """No write lock within the busy timeout; safe to retry.

    ``blocker`` is {pid, command, stopped, lock} where the kernel tells, else None.
    """

    code = "storage-busy"
    exit_status = 75
    retryable = True
    hint = "try again, or give a longer busy timeout"
    blocker: dict[str, Any] | None


class StorageFullError(StorageError):
    """The disk or the quota is full."""

    code = "storage-full"
    retryable = True
    hint = "free some space, then repeat the call"


class StorageReadOnlyError(StorageError):
    """The database or its directory cannot be written."""

    code = "storage-read-only"
    hint = "check the owner and the modes of the database and of its directory, and the mount"


class StorageCorruptError(StorageError):
    """The file is damaged."""

    code = "storage-corrupt"
    hint = "run 'agent-checkpoint doctor'; keep the file and its -wal, restore from a backup"


class NotAStoreError(StorageError):
    """The file is not an Agent Checkpoint store; it was left as it is."""

    code = "storage-not-a-store"
    hint = "name another path, or create a store with 'agent-checkpoint init'"


class UnsupportedFilesystemError(StorageError):
    """SQLite's locks cannot be trusted on this filesystem."""

    code = "storage-unsupported-filesystem"
    hint = "put the database on a local disk; to share between machines use PostgreSQL"


class StorageUnreachableError(StorageError):
    """The database cannot be opened or read."""

    code = "storage-unreachable"
    hint = "check the path, the permissions and the disk"


class ForeignStoreError(StorageError):
    """A store found by searching upwards belongs to another user."""

    code = "storage-foreign-owner"
    hint = "if you trust it name it with --db, else run 'agent-checkpoint --db PATH init'"


class SchemaVersionError(StorageError):
    """The store's schema is of another version than this package writes."""

    code = "storage-schema-version"
    component: str
    found: int
    supported: int


class NewerSchemaError(SchemaVersionError):
    """The store was written by a newer version of this package; it was left as it is."""

    code = "storage-newer-schema"
    hint = "upgrade agent-checkpoint in this environment"


class StoreMovedError(StorageError):
    """The store was moved to another place, and takes no write any more."""

    code = "storage-moved"
    hint = "use the store at the place that it was moved to; this one can still be read"


class OutcomeUnknownError(StorageError):
    """The commit's answer was lost: it may have happened. Read before you repeat it."""

    code = "storage-outcome-unknown"
    hint = "read the lease or the checkpoint again: its token and sequence tell"


def schema_version_error(component: str, found: int, supported: int) -> SchemaVersionError:
    """The error for tables of another version than this package writes."""
    facts: dict[str, Any] = {"component": component, "found": found, "supported": supported}
    if found > supported:
        return NewerSchemaError(
            f"the store has version {found} of the {component} tables, this package knows up to {supported}", **facts
        )
    return SchemaVersionError(
        f"the store has version {found} of the {component} tables, this package writes version {supported}",
        hint="end what still runs an older version, then run 'agent-checkpoint init' once (store.initialize())",
        **facts,
    )
