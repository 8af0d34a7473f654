"""Flows for processes of their own: ``python flows_worker.py FLOW``, with ``agents.db`` in the working directory.

What happens is told by files: ``journal.txt`` has a line for each time that a
body ran, ``holding-<id>`` says that a process holds the lease.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import INPUTS
from prefect.transactions import IsolationLevel

from agent_checkpoint_prefect import FencedLock, LeaseStore, current_fencing_token

HERE = Path.cwd()
TTL_SECONDS = 60.0  # longer than any test: who takes over sooner does not owe it to the ttl
lock = FencedLock(store=LeaseStore(path=HERE / "agents.db"), ttl_seconds=TTL_SECONDS)
once = INPUTS.configure(lock_manager=lock, isolation_level=IsolationLevel.SERIALIZABLE)


def journal(line: object) -> None:
    """Add a line, whole, as processes that share the file must."""
    with (HERE / "journal.txt").open("a") as lines:
        lines.write(f"{line}\n")


@task(cache_policy=once, persist_result=True)
def charge(order: str) -> str:
    """Charge a customer; the result says with which token."""
    journal(f"charged {order} with token {current_fencing_token()}")
    return f"{order}: {current_fencing_token()}"


@flow
def serializable() -> None:
    """Charge one order, together with the others that do."""
    (HERE / f"ready-{os.getpid()}").touch()
    while not (HERE / "go-on").exists():
        time.sleep(0.01)
    print(charge("order-42"))


@flow
@lock.fenced("orders")
def freeze() -> None:
    """Hold the name until the process is killed."""
    journal(f"frozen with token {current_fencing_token()}")
    (HERE / f"holding-{os.getpid()}").touch()
    while True:
        time.sleep(0.01)


@flow
@lock.fenced("orders")
def take_over() -> None:
    """Do what the holder of the name has to do."""
    journal(f"taken over with token {current_fencing_token()}")


@flow
def hold_in_task() -> None:
    """Take the name in a task, and keep it until the process is killed."""
    keep()


@task
def keep() -> None:
    """See ``hold_in_task``."""
    kept = lock.acquire("orders")
    (HERE / f"holding-{os.getpid()}").touch()
    while not kept.released:
        time.sleep(0.01)


FLOWS = {each.fn.__name__: each for each in (serializable, freeze, take_over, hold_in_task)}

if __name__ == "__main__":
    FLOWS[sys.argv[1]]()
