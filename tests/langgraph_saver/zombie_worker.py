"""The workers of the zombie tests, as real processes: importing takes seconds, so they are forked from one that has.

It reads jobs, a JSON object a line, forks a worker for each and prints its pid.
When its input ends it kills the workers that are left, frozen ones too.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import operator
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import StateGraph
from langgraph.types import StateSnapshot
from typing_extensions import TypedDict

from agent_checkpoint_langgraph import AgentCheckpointSaver, current_lease, leased

THREAD = "trip"
CONFIG: RunnableConfig = {"configurable": {"thread_id": THREAD}}
STEPS = ["plan", "book", "pay", "report"]
# The steps that act on the world.
EFFECTS = ("book", "pay")
# A place in an entrypoint that is in no task.
BETWEEN = "between"
# Longer than anything here takes: only a hang reaches it.
WATCHDOG_SECONDS = 100


class Trip(TypedDict):
    log: Annotated[list[str], operator.add]


@dataclass(frozen=True)
class Job:
    """What a worker does, and how."""

    folder: str
    store: str  # path or URL
    worker: str
    saver: str  # "ours" or "stock"
    kind: str  # "graph" or "tasks"
    mode: str  # "sync" or "async"
    durability: str
    form: str  # "lease", "leased" or "unleased"
    ttl_seconds: float
    wait_seconds: float = 0
    place: str | None = None  # the step in which it waits until it is told to go on
    step_seconds: float = 0

    def file(self, name: str) -> Path:
        return Path(self.folder, name)

    def note(self, what: str, detail: object = None) -> None:
        """One line on what happens now, in one write."""
        line = json.dumps(
            {"worker": self.worker, "what": what, "detail": detail, "at": time.monotonic_ns()}, ensure_ascii=True
        )
        file = os.open(self.file("notes.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{line}\n".encode())
        os.close(file)

    def waits(self, place: str) -> bool:
        """Whether it has to wait here still."""
        return self.place == place and not self.file("go-on").exists()


def pause(job: Job, place: str) -> None:
    time.sleep(job.step_seconds)
    if job.waits(place):
        job.note("inside", place)
    while job.waits(place):
        time.sleep(0.002)


async def apause(job: Job, place: str) -> None:
    await asyncio.sleep(job.step_seconds)
    if job.waits(place):
        job.note("inside", place)
    while job.waits(place):
        await asyncio.sleep(0.002)


def step(job: Job, name: str) -> Any:
    """A node or task: it may be frozen at its beginning, and acts on the world only while its lease is held."""

    def act() -> dict[str, list[str]]:
        if name in EFFECTS:
            job.note("effect", name)
        return {"log": [f"{job.worker}:{name}"]}

    def run(state: Trip, config: RunnableConfig) -> dict[str, list[str]]:
        job.note("started", name)
        pause(job, name)
        lease = current_lease(config)
        if lease is not None and name in EFFECTS:
            lease.check()
        return act()

    async def arun(state: Trip, config: RunnableConfig) -> dict[str, list[str]]:
        job.note("started", name)
        await apause(job, name)
        lease = current_lease(config)
        if lease is not None and name in EFFECTS:
            await lease.acheck()
        return act()

    return run if job.mode == "sync" else arun


def state_graph(job: Job, saver: Any) -> Any:
    builder = StateGraph(Trip)
    for name in STEPS:
        builder.add_node(name, step(job, name))
    builder.set_entry_point(STEPS[0])
    for before, after in pairwise(STEPS):
        builder.add_edge(before, after)
    return builder.compile(checkpointer=saver)


def functional(job: Job, saver: Any) -> Any:
    tasks = {name: task(step(job, name), name=name) for name in STEPS}

    def trip(state: Trip, config: RunnableConfig) -> Trip:
        done: Trip = {"log": []}
        for name in STEPS:
            done["log"] += tasks[name](done).result()["log"]
            if name == "plan" and job.place == BETWEEN:
                pause(job, BETWEEN)
                current_lease(config).check()  # type: ignore[union-attr]  # it is told to with a lease only
                job.note("started", BETWEEN)
        return done

    async def atrip(state: Trip, config: RunnableConfig) -> Trip:
        done: Trip = {"log": []}
        for name in STEPS:
            done["log"] += (await tasks[name](done))["log"]
            if name == "plan" and job.place == BETWEEN:
                await apause(job, BETWEEN)
                await current_lease(config).acheck()  # type: ignore[union-attr]  # as above
                job.note("started", BETWEEN)
        return done

    return entrypoint(checkpointer=saver)(trip if job.mode == "sync" else atrip)


def opened(job: Job) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
    if job.saver == "ours":
        # A file's is short: a worker frozen at the gate of writers is gone around after half of it. A server
        # ends the transaction of one that was frozen in it, after a while.
        busy = WATCHDOG_SECONDS if "://" in job.store else 2
        return AgentCheckpointSaver.from_conn_string(job.store, busy_timeout_seconds=busy)
    return (SqliteSaver if job.mode == "sync" else AsyncSqliteSaver).from_conn_string(job.store)


def built(job: Job, saver: Any) -> Any:
    graph = (state_graph if job.kind == "graph" else functional)(job, saver)
    if job.form == "leased":
        return leased(graph, owner=job.worker, ttl_seconds=job.ttl_seconds, wait_seconds=job.wait_seconds)
    return graph


def lease_of(job: Job, saver: AgentCheckpointSaver) -> Any:
    return saver.lease(THREAD, owner=job.worker, ttl_seconds=job.ttl_seconds, wait_seconds=job.wait_seconds)


def is_done(found: StateSnapshot) -> bool:
    return len((found.values or {}).get("log", ())) == len(STEPS)


def work(job: Job) -> None:
    """Go on with the thread where it is, or begin it; nothing when it is done."""
    with ExitStack() as stack:
        saver = stack.enter_context(opened(job))  # type: ignore[arg-type]  # which is given by the mode
        graph, config = built(job, saver), CONFIG
        if job.form == "lease":
            lease = stack.enter_context(lease_of(job, saver))
            job.note("granted", lease.token)
            config = lease.config(config)
        found = graph.get_state(CONFIG)
        if not is_done(found):
            graph.invoke(None if found.created_at else {"log": []}, config, durability=job.durability)


async def awork(job: Job) -> None:
    """The same in asyncio."""
    async with AsyncExitStack() as stack:
        saver = await stack.enter_async_context(opened(job))  # type: ignore[arg-type]  # as above
        graph, config = built(job, saver), CONFIG
        if job.form == "lease":
            lease = await stack.enter_async_context(lease_of(job, saver))
            job.note("granted", lease.token)
            config = lease.config(config)
        found = await graph.aget_state(CONFIG)
        if not is_done(found):
            await graph.ainvoke(None if found.created_at else {"log": []}, config, durability=job.durability)


def do(job: Job) -> None:
    """Work, and say how it ended."""
    signal.alarm(WATCHDOG_SECONDS)
    # It ends like any program, its threads first; but to take down all that was imported would take long.
    atexit.register(os._exit, 0)
    try:
        if job.mode == "sync":
            work(job)
        else:
            asyncio.run(awork(job))
    except Exception as error:
        job.note("ended", type(error).__name__)
        job.note("error", repr(error))
    else:
        job.note("ended", "finished")


def main() -> None:
    gc.freeze()  # what is imported stays shared with the workers
    workers = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            do(Job(**json.loads(line)))
            return
        workers.append(pid)
        print(pid, flush=True)
    for pid in workers:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):  # it is alive
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class Workers:
    """For the tests: the process that forks workers."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors.open("w")
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def start(self, **job: Any) -> int:
        """A worker at this job; its pid."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())

    def end(self) -> None:
        with self._process, self._errors:
            assert self._process.stdin is not None
            self._process.stdin.close()
            assert self._process.wait(WATCHDOG_SECONDS) == 0


if __name__ == "__main__":
    main()
