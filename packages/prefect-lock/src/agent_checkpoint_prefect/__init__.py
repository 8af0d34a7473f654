"""A Prefect lock and concurrency block with fenced leases.

>>> from agent_checkpoint_prefect import FencedLock
>>> lock = FencedLock()
>>> with lock.lease("orders") as lease:
...     print(lease.token)
1
"""

from __future__ import annotations

from agent_checkpoint_prefect.blocks import FencedLock, LeaseStore
from agent_checkpoint_prefect.context import current_lease
from agent_checkpoint_prefect.errors import LeaseLostError, LeaseReentrancyError
from agent_checkpoint_prefect.leases import FencedLease
from agent_checkpoint_prefect.transactions import current_fencing_token

__all__ = [
    "FencedLease",
    "FencedLock",
    "LeaseLostError",
    "LeaseReentrancyError",
    "LeaseStore",
    "current_fencing_token",
    "current_lease",
]
