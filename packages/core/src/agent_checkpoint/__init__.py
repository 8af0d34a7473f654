"""Agent Checkpoint: leases, fencing tokens, durable checkpoints and audit events in one store.

>>> from agent_checkpoint import StateStore
>>> store = StateStore(".state/agents.db")
>>> created = store.initialize()
>>> lease = store.acquire("release", "worker-a", ttl_seconds=60)
>>> store.put_checkpoint("deploy-v2", {"stage": "tests-passed"}, lease=lease).sequence
1
"""

from __future__ import annotations

from agent_checkpoint.change import Outcome
from agent_checkpoint.errors import (
    AgentCheckpointError,
    EffectMismatchError,
    EffectRunningError,
    EffectUnknownError,
    FenceRefusedError,
    ForeignStoreError,
    InvalidInputError,
    LeaseHeldError,
    NewerSchemaError,
    NotAStoreError,
    NotFoundError,
    OutcomeUnknownError,
    ReentrancyError,
    SchemaVersionError,
    SequenceConflictError,
    StaleLeaseError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    StorageUnreachableError,
    StoreMovedError,
    UnsupportedFilesystemError,
    WaitTimeoutError,
)
from agent_checkpoint.records import (
    Check,
    Checkpoint,
    CheckpointInfo,
    Effect,
    Event,
    Fence,
    Lease,
    Limit,
    Pruned,
    Refusals,
    Status,
    Waiting,
    Write,
)
from agent_checkpoint.store import StateStore
from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.acting import Resolution
    from agent_checkpoint.fenced import FencedWrite, Part
    from agent_checkpoint.holding import HeldLease
    from agent_checkpoint.hookspecs import hookimpl

__all__ = [
    "AgentCheckpointError",
    "Check",
    "Checkpoint",
    "CheckpointInfo",
    "Effect",
    "EffectMismatchError",
    "EffectRunningError",
    "EffectUnknownError",
    "Event",
    "Fence",
    "FenceRefusedError",
    "FencedWrite",
    "ForeignStoreError",
    "HeldLease",
    "InvalidInputError",
    "Lease",
    "LeaseHeldError",
    "Limit",
    "NewerSchemaError",
    "NotAStoreError",
    "NotFoundError",
    "Outcome",
    "OutcomeUnknownError",
    "Part",
    "Pruned",
    "ReentrancyError",
    "Refusals",
    "Resolution",
    "SchemaVersionError",
    "SequenceConflictError",
    "StaleLeaseError",
    "StateStore",
    "Status",
    "StorageBusyError",
    "StorageCorruptError",
    "StorageError",
    "StorageFullError",
    "StorageReadOnlyError",
    "StorageUnreachableError",
    "StoreMovedError",
    "UnsupportedFilesystemError",
    "WaitTimeoutError",
    "Waiting",
    "Write",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> object:
    # pluggy is imported only by those who write a plugin, or have one.
    if name == "hookimpl":
        from agent_checkpoint.hookspecs import hookimpl

        return hookimpl
    if name == "Resolution":
        from agent_checkpoint.acting import Resolution

        return Resolution
    if name in ("FencedWrite", "Part"):
        from agent_checkpoint import fenced

        return getattr(fenced, name)
    # Threads are loaded only where a lease is held.
    if name == "HeldLease":
        from agent_checkpoint.holding import HeldLease

        return HeldLease
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
