"""The fencing token of the calling code: of its lease, or of Prefect's transaction around it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agent_checkpoint_prefect.blocks import FencedLock
from agent_checkpoint_prefect.context import current_lease

if TYPE_CHECKING:
    from agent_checkpoint import Fence


def current_fencing_token() -> int | None:
    """The token to pass to what can refuse a lower one; None where nothing is held.

    That of the lease that was taken last; else, in a task whose cache policy
    locks its result record (SERIALIZABLE), that of the record's lease.
    """
    lease = current_lease()
    if lease is not None:
        return lease.token
    fence = transaction_fence()
    return None if fence is None else fence.token


def transaction_fence() -> Fence | None:
    """The fence of the result record's lease of Prefect's transaction around the call."""
    if "prefect.transactions" not in sys.modules:
        return None
    from prefect.transactions import get_transaction

    transaction = get_transaction()
    store = None if transaction is None else transaction.store
    if transaction is None or store is None or transaction.key is None:
        return None
    lock = store.lock_manager
    return lock._records().fence(transaction.key, transaction._holder) if isinstance(lock, FencedLock) else None
