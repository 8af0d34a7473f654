"""The main job on real processes: a worker freezes, is superseded, wakes up, and is refused.

The workers are processes of their own that share nothing but the store. Where
a process cannot be stopped from outside, the worker pauses itself and says so.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from agent_checkpoint.cli import output, status
from agent_checkpoint.errors import AgentCheckpointError, InvalidInputError, StaleLeaseError
from agent_checkpoint.store import StateStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.records import Lease

SCOPE, WORKFLOW = "release", "deploy-v2"
TTL_SECONDS = {"worker-a": 1.0, "worker-b": 30.0}
# What A takes for its last step: longer than its lease, so that it is late even
# when the signal that freezes it comes late. Where nothing can freeze it, it
# pauses until B must have finished.
STEP_SECONDS = 1.2
PAUSE_SECONDS = 4.0
CAN_FREEZE = hasattr(signal, "SIGSTOP")


def play(keep: str | None) -> int:
    """Tell the story; 0 only if the late write did not land."""
    folder = os.path.abspath(keep) if keep else tempfile.mkdtemp(prefix="agent-checkpoint-demo-")
    path = os.path.join(folder, "agents.db")
    # A worker that is frozen when we are told to end would stay frozen for ever.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if os.path.exists(path):
        raise InvalidInputError(f"keep: {path} exists already; name another directory", field="keep")
    try:
        with StateStore(path) as store:
            store.initialize()
            refused = _story(store)
            _epilogue(store)
        say("The late write was refused." if refused else "THE LATE WRITE LANDED. This is a bug.")
        if keep:
            say(f"The store is kept: agent-checkpoint --db {path} status")
        return 0 if refused else 1
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def say(line: str) -> None:
    """One line of the story, as it happens."""
    output.write(line + "\n")


def _story(store: StateStore) -> bool:
    workers = []
    try:
        say(f"A and B are processes that share only {store.database}\n")
        first = _start(store.address, "worker-a")
        workers.append(first)
        _hear(first, "half-way")
        _freeze(first)
        _until_expired(store)
        second = _start(store.address, "worker-b")
        workers.append(second)
        _hear(second, "finished")
        before = store.get_checkpoint(WORKFLOW)
        say("A      wakes up (SIGCONT)" if CAN_FREEZE else "A      wakes up by itself")
        if CAN_FREEZE:
            first.send_signal(signal.SIGCONT)
        verdict = _hear(first, "refused", "landed")
        return verdict == "refused" and store.get_checkpoint(WORKFLOW) == before
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def _freeze(worker: subprocess.Popen[str]) -> None:
    if not CAN_FREEZE:
        say(f"A      cannot be frozen on this system: it pauses itself for {PAUSE_SECONDS:g} s")
        return
    worker.send_signal(signal.SIGSTOP)
    say("A      is frozen (SIGSTOP) before its last step, like a laptop lid or a long GC pause")


def _until_expired(store: StateStore) -> None:
    say(f"       its lease of {TTL_SECONDS['worker-a']:g} s runs out …")
    while store.get_lease(SCOPE) is not None:
        time.sleep(0.02)


def _epilogue(store: StateStore) -> None:
    say("\nThe audit trail, oldest first:")
    rows = [
        [str(event.id), event.kind, output.shown(event.owner), output.shown(event.token), output.shown(event.detail)]
        for event in store.events()
    ]
    say("".join(f"  {line}\n" for line in output.table(rows).splitlines()))
    say("The four questions (agent-checkpoint status):\n")
    say(status.describe(store.status()))


def _start(database: str, owner: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agent_checkpoint.demo", database, owner]
    return subprocess.Popen(  # noqa: S603 -- our own interpreter and module
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the demo, which ends its workers
    )


def _hear(worker: subprocess.Popen[str], *words: str) -> str:
    """Repeat what a worker says until it says one of the words (as ``=word``)."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith("=") and line[1:].strip() in words:
            return line[1:].strip()
        say(line.rstrip("\n"))
    raise AgentCheckpointError(f"a worker ended before it said {' or '.join(words)}")


def work(database: str, owner: str) -> None:
    """What each worker does: take the scope, go on from the last checkpoint, finish."""
    name = owner[-1].upper()
    with StateStore(database) as store:
        lease = store.acquire(SCOPE, owner, TTL_SECONDS[owner])
        say(f"{name}      is granted {SCOPE!r} with token {lease.token}")
        latest = store.get_checkpoint(WORKFLOW)
        if latest is None:
            _first_half(store, lease, name)
        else:
            say(f"{name}      finds checkpoint {latest.sequence}: {latest.data['stage']!r}, goes on from there")
        _last_step(store, lease, name)


def _first_half(store: StateStore, lease: Lease, name: str) -> None:
    for stage in ("built", "tests-passed"):
        saved = store.put_checkpoint(WORKFLOW, {"stage": stage}, lease=lease)
        say(f"{name}      saves checkpoint {saved.sequence}: {stage!r}")
    say("=half-way")
    time.sleep(STEP_SECONDS if CAN_FREEZE else PAUSE_SECONDS)


def _last_step(store: StateStore, lease: Lease, name: str) -> None:
    try:
        saved = store.put_checkpoint(WORKFLOW, {"stage": "published", "by": name}, lease=lease)
    except StaleLeaseError as stale:
        say(f"{name}      wants to save 'published' and is refused ({stale.reason}): {stale}")
        say("=refused")
    else:
        say(f"{name}      saves checkpoint {saved.sequence}: 'published'")
        say("=finished\n=landed")


if __name__ == "__main__":
    work(*sys.argv[1:3])
