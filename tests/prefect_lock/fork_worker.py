"""The workers of the process tests: importing Prefect takes seconds, so they are forked from one that has.

It reads jobs, a JSON object a line, forks a worker for each and prints its pid.
A worker appends what it does to the file ``notes`` of its folder, a line of
JSON each, with the monotonic time. When the input ends, all that are left are
killed, frozen ones too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.filesystems import LocalFileSystem
from prefect.results import ResultStore
from prefect.transactions import IsolationLevel, transaction

from agent_checkpoint_prefect import FencedLock, LeaseLostError, LeaseStore, current_fencing_token

NAME = "orders"
# Longer than anything here takes: only a hang reaches it.
WATCHDOG_SECONDS = 60


class Worker:
    """One process and what it does; the folder has the store, the notes and the results."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = Path(job["folder"])
        self.job = job
        store = LeaseStore(path=self.folder / "agents.db")
        self.lock = FencedLock(store=store, **job.get("options", {}))

    def note(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "worker": self.job["worker"], "at": time.monotonic_ns(), **more})
        file = os.open(self.folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{line}\n".encode())
        os.close(file)

    def wait_for(self, name: str) -> None:
        """Wait until a file is there."""
        until = time.monotonic() + WATCHDOG_SECONDS
        while not (self.folder / name).exists():
            if time.monotonic() > until:
                os._exit(3)
            time.sleep(0.001)

    def rounds(self) -> None:
        """Take the name again and again."""
        self.note("ready")
        self.wait_for("go")
        for _ in range(self.job["rounds"]):
            asked = time.monotonic_ns()
            with self.lock.lease(NAME) as lease:
                self.note("enter", token=lease.token, waited=time.monotonic_ns() - asked)
                lease.check()
                self.note("leave", token=lease.token)

    def hold(self) -> None:
        """Take the name and keep it until told otherwise; how it ended."""
        try:
            with self.lock.lease(NAME) as lease:
                self.note("held", token=lease.token)
                self.wait_for("go")
                lease.check()
                self.note("checked", token=lease.token)
        except LeaseLostError as lost:
            self.note("lost", token=lost.facts.get("token"), reason=lost.reason)

    def want(self) -> None:
        """Wait for the name; take it and keep it."""
        self.note("wants")
        lease = self.lock.acquire(NAME)
        self.note("held", token=lease.token)
        self.wait_for("never")

    def compute(self) -> None:
        """Compute a result in a transaction, told when to commit."""
        results = ResultStore(
            result_storage=LocalFileSystem(basepath=str(self.folder / "results")), lock_manager=self.lock
        )
        try:
            with transaction(key="key", store=results, isolation_level=IsolationLevel.SERIALIZABLE) as current:
                if not current.is_committed():
                    self.note("runs", token=current_fencing_token())
                    current.stage(self.job["worker"])
                    self.wait_for(self.job["until"])
        finally:
            self.note("over", state=current.state.name)

    def lock_record(self) -> None:
        """Take a record's lock for a holder, once, and keep the process."""
        granted = self.lock.acquire_lock("key", self.job["holder"], acquire_timeout=0)
        self.note("asked", granted=granted, holds=self.lock.is_lock_holder("key", self.job["holder"]))
        self.wait_for("never")


def work(job: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    worker = Worker(job)
    try:
        getattr(worker, job["does"])()
        worker.note("done")
    except BaseException as error:
        worker.note("failed", error=repr(error))
        raise


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(0)
            try:
                work(json.loads(line))
            finally:
                os._exit(0)
        children.append(child)
        print(child, flush=True)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
