"""One process of the endurance run: does its work over and over, and tells what it takes.

    python -m tests.faults.endurance.work KIND PATH

It goes on until its stdin ends. Now and then a line of JSON says how much was
done, and how much memory and how many descriptors and threads it has.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agent_checkpoint import NotFoundError, StateStore
from agent_checkpoint.errors import AgentCheckpointError

Work = Iterator[int]
"""Each step does something, and yields how many calls of the store it made."""

TELL_SECONDS = 0.5
SCOPES = 8
KEPT = 20
# After so many rounds what has piled up is removed.
CLEAN = 50


def core(path: Path) -> Work:
    """Leases held in the background, checkpoints, effects, stale writes; and the cleaning up for all of them."""
    with StateStore(path) as store:
        for number in _for_ever():
            scope = f"core-{number % SCOPES}"
            with store.hold(scope, "core", ttl_seconds=5, wait_seconds=30) as held:
                store.put_checkpoint(scope, {"number": number, "filling": "x" * (number % 4_000)}, lease=held)
                # One that did not happen may begin again, so that the same few rows do for all of them.
                with store.effect(f"effect-{number % SCOPES}", lease=held) as effect:
                    effect.failed()
                stale = held.fence
            with suppress(AgentCheckpointError):
                store.put_checkpoint(scope, {"late": True}, lease=stale)
            store.get_checkpoint(scope)
            store.events(limit=20)
            yield 8
            if number % CLEAN == 0:
                yield from _clean(store, path.with_name(f"events-{number}.jsonl"))


def _clean(store: StateStore, archive: Path) -> Work:
    """Keep what is there bounded: what grows after that is a leak."""
    store.prune_checkpoints(keep_last=KEPT)
    with suppress(NotFoundError):
        store.archive_events(datetime.now(timezone.utc), archive)
    archive.unlink(missing_ok=True)
    store.sweep()
    yield 3


def langgraph(path: Path) -> Work:
    """A leased graph on a few threads, pruned and deleted now and then."""
    from langgraph.graph import END, START, StateGraph
    from typing_extensions import TypedDict

    from agent_checkpoint_langgraph import AgentCheckpointSaver

    class State(TypedDict):
        count: int

    builder = StateGraph(State)
    builder.add_node("count", lambda state: {"count": state["count"] + 1})
    builder.add_edge(START, "count")
    builder.add_edge("count", END)
    with AgentCheckpointSaver.from_conn_string(str(path)) as saver:
        graph = builder.compile(checkpointer=saver)
        for number in _for_ever():
            thread = f"thread-{number % SCOPES}"
            config: Any = {"configurable": {"thread_id": thread}}
            with saver.lease(thread, owner="langgraph", ttl_seconds=5, wait_seconds=30) as lease:
                graph.invoke({"count": number}, lease.config(config))
                saver.prune([thread], strategy="keep_latest")
            list(saver.list(config))
            yield 8
            if number % CLEAN == 0:
                saver.delete_thread(thread)
                yield 1


def prefect(path: Path) -> Work:
    """Fenced leases of the block, and the lock manager's own calls."""
    from agent_checkpoint_prefect import FencedLock, LeaseStore

    lock = FencedLock(store=LeaseStore(path=path), ttl_seconds=5)
    for number in _for_ever():
        name = f"name-{number % SCOPES}"
        with lock.lease(name, timeout_seconds=30) as lease:
            lease.check()
        lock.acquire_lock(name, holder="prefect", acquire_timeout=30)
        lock.is_locked(name)
        lock.release_lock(name, holder="prefect")
        yield 6


def _for_ever() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


KINDS: dict[str, Callable[[Path], Work]] = {"core": core, "langgraph": langgraph, "prefect": prefect}


def takes() -> dict[str, int]:
    """What this process has: resident memory in bytes, descriptors, threads."""
    gc.collect()  # what is garbage only is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main(kind: str, path: str) -> None:
    """Work until stdin ends."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    done, told = 0, time.monotonic()
    for calls in KINDS[kind](Path(path)):
        done += calls
        if over.is_set():
            break
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            print(json.dumps({"kind": kind, "operations": done, **takes()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
