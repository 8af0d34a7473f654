"""What of the Prefect run around a call is put on record, and which leases it holds.

Ids and names of runs are metadata, never identity: Prefect can run one flow
run twice.
"""

from __future__ import annotations

import os
import sys
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent_checkpoint_prefect.leases import FencedLease

# By the store and the scope. Weak: a lease that its holder drops is renewed no more.
held: ContextVar[Mapping[tuple[str, str], weakref.ref[FencedLease]]] = ContextVar("agent_checkpoint_prefect_held")


def run_metadata() -> dict[str, Any]:
    """Ids and names of the flow run, task run and deployment around the call; empty outside of runs."""
    if "prefect.context" not in sys.modules:
        return {}
    from prefect.context import FlowRunContext, TaskRunContext

    found: dict[str, Any] = {}
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None:
        found["flow_run_id"] = str(flow.flow_run.id)
        found["flow_run_name"] = flow.flow_run.name
        found["flow_name"] = flow.flow.name if flow.flow is not None else None
        if flow.flow_run.deployment_id is not None:
            found["deployment_id"] = str(flow.flow_run.deployment_id)
            # As Prefect's runner and workers tell it; else only the API knows it, and a lock asks no API.
            found["deployment_name"] = os.environ.get("PREFECT__DEPLOYMENT_NAME") or None
    task = TaskRunContext.get()
    if task is not None:
        found["task_run_id"] = str(task.task_run.id)
        found["task_run_name"] = task.task_run.name
        found["task_name"] = task.task.name
        if task.task_run.flow_run_id is not None:
            found.setdefault("flow_run_id", str(task.task_run.flow_run_id))
    return {key: value for key, value in found.items() if value is not None}


class Attempt(NamedTuple):
    """One of the attempts that Prefect makes at a run, by its retries; they come one after the other."""

    run_id: str
    number: int

    def follows(self, earlier: Attempt | None) -> bool:
        """Whether another one was an attempt at the same run, and is over."""
        return earlier is not None and earlier.run_id == self.run_id and earlier.number < self.number


def attempt() -> Attempt | None:
    """The attempt at the task run, else flow run, around the call; None outside of runs."""
    if "prefect.context" not in sys.modules:
        return None
    from prefect.context import FlowRunContext, TaskRunContext

    task = TaskRunContext.get()
    if task is not None:
        return Attempt(str(task.task_run.id), task.task_run.run_count)
    flow = FlowRunContext.get()
    if flow is not None and flow.flow_run is not None:
        return Attempt(str(flow.flow_run.id), flow.flow_run.run_count)
    return None


def in_a_run() -> bool:
    """Whether the call is made inside of a flow run or task run."""
    if "prefect.context" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def current_lease() -> FencedLease | None:
    """The lease that the calling code holds, as in a flow or task: the one that was taken last; None without one."""
    leases = [lease for known in held.get({}).values() if (lease := known()) is not None and not lease.released]
    return leases[-1] if leases else None


def lease_at(database: str, scope: str) -> FencedLease | None:
    """The lease of a scope that the calling code holds, if it has it still."""
    known = held.get({}).get((database, scope))
    lease = None if known is None else known()
    return None if lease is None or lease.released or lease.lost else lease


def enter(lease: FencedLease) -> None:
    """Hold a lease in this context from now on."""
    held.set({**held.get({}), lease.key: weakref.ref(lease)})


def leave(lease: FencedLease) -> None:
    """Hold it no more."""
    known = held.get({})
    if lease.key in known and known[lease.key]() is lease:
        held.set({key: each for key, each in known.items() if key != lease.key})


# What the parent of a forked process holds, the child does not.
os.register_at_fork(after_in_child=lambda: held.set({}))
