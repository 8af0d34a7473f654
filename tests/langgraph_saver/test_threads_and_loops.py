"""Every method and its awaited twin, from any thread, event loop and process; nothing hangs."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver

from agent_checkpoint import StateStore
from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import WATCHDOG_SECONDS, Line, T, at, checkpoint, ids, rows, values


def finished(awaited: Awaitable[T]) -> T:
    """The result of what must come to an end by itself."""

    async def go() -> T:
        return await asyncio.wait_for(awaited, WATCHDOG_SECONDS)

    return asyncio.run(go())


# Twins


def methods() -> list[str]:
    """The names of the sync methods that have to be awaitable too."""
    mine = vars(AgentCheckpointSaver)
    inherited = [name for name in vars(BaseCheckpointSaver) if f"a{name}" in vars(BaseCheckpointSaver)]
    return sorted({name for name in mine if f"a{name}" in mine} | set(inherited))


def parameters(name: str) -> list[Any]:
    signature = inspect.signature(getattr(AgentCheckpointSaver, name))
    return [(each.name, each.kind, each.default, each.annotation) for each in signature.parameters.values()]


@pytest.mark.parametrize("name", methods())
def test_a_method_and_its_twin_take_the_same(name: str) -> None:
    assert parameters(name) == parameters(f"a{name}")


def test_every_method_that_touches_the_file_has_a_twin() -> None:
    # These take no time, or are themselves for both.
    of_both = {
        "from_conn_string",
        "lease",
        "bind",
        "unbind",
        "find_lease",
        "get_next_version",
        "store",
        "with_allowlist",
    }
    public = {name for name in vars(AgentCheckpointSaver) if not name.startswith("_")} - of_both

    assert {name for name in public if f"a{name}" not in public and name[0] != "a"} == set()


@pytest.mark.parametrize("name", [name for name in vars(BaseCheckpointSaver) if not name.startswith("_")])
def test_every_method_of_the_interface_is_there_and_takes_what_it_takes(name: str) -> None:
    theirs, ours = getattr(BaseCheckpointSaver, name), getattr(AgentCheckpointSaver, name)
    if inspect.isfunction(theirs) and inspect.isfunction(ours):
        expected = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(expected)] == expected


# Fresh files

FIRST: dict[str, Callable[[Any], Any]] = {
    "delete_thread": lambda saver: saver.delete_thread("t"),
    "delete_for_runs": lambda saver: saver.delete_for_runs(["r"]),
    "prune": lambda saver: saver.prune(["t"]),
    "prune by deleting": lambda saver: saver.prune(["t"], strategy="delete"),
    "copy_thread": lambda saver: saver.copy_thread("t", "u"),
    "get": lambda saver: saver.get(at()),
    "get_tuple": lambda saver: saver.get_tuple(at()),
    "list": lambda saver: list(saver.list(None)),
    "list before": lambda saver: list(saver.list(None, before=at(checkpoint_id="x"), filter={"a": 1})),
    "list_threads": lambda saver: saver.list_threads(),
    "get_delta_channel_history": lambda saver: saver.get_delta_channel_history(config=at(), channels=["a"]),
    "put": lambda saver: Line(saver).put({"n": 1}),
    "put_writes": lambda saver: saver.put_writes(at(checkpoint_id="x"), [("n", 1)], "task"),
    "setup": lambda saver: saver.setup(),
    "close": lambda saver: saver.close(),
}


async def everything(items: Any) -> list[Any]:
    return [item async for item in items]


AWAITED_FIRST: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "adelete_thread": lambda saver: saver.adelete_thread("t"),
    "adelete_for_runs": lambda saver: saver.adelete_for_runs(["r"]),
    "aprune": lambda saver: saver.aprune(["t"]),
    "acopy_thread": lambda saver: saver.acopy_thread("t", "u"),
    "aget": lambda saver: saver.aget(at()),
    "aget_tuple": lambda saver: saver.aget_tuple(at()),
    "alist": lambda saver: everything(saver.alist(None)),
    "alist before": lambda saver: everything(saver.alist(None, before=at(checkpoint_id="x"))),
    "alist_threads": lambda saver: saver.alist_threads(),
    "aget_delta_channel_history": lambda saver: saver.aget_delta_channel_history(config=at(), channels=["a"]),
    "aput": lambda saver: saver.aput(at(), checkpoint("id-1", {"n": 1}, "1.x"), {"step": 1}, {"n": "1.x"}),
    "aput_writes": lambda saver: saver.aput_writes(at(checkpoint_id="x"), [("n", 1)], "task"),
    "asetup": lambda saver: saver.asetup(),
    "aclose": lambda saver: saver.aclose(),
}


@pytest.mark.parametrize("name", FIRST)
def test_any_method_may_be_the_first_on_a_file(saver: AgentCheckpointSaver, name: str) -> None:
    assert FIRST[name](saver) or True


@pytest.mark.parametrize("name", AWAITED_FIRST)
def test_any_awaited_method_may_be_the_first_on_a_file(saver: AgentCheckpointSaver, name: str) -> None:
    finished(AWAITED_FIRST[name](saver))


@pytest.mark.parametrize("name", FIRST)
def test_a_sync_method_may_be_called_on_the_thread_of_a_loop(saver: AgentCheckpointSaver, name: str) -> None:
    async def go() -> None:
        await saver.aput_writes(at("other", "x"), [("n", 1)], "task")
        if name != "close":
            FIRST[name](saver)
        await saver.aput_writes(at("other", "x"), [("n", 1)], "task-2")

    finished(go())


def test_setup_is_idempotent_and_may_be_done_by_many(path: Path) -> None:
    def set_up(_: int) -> None:
        with AgentCheckpointSaver.from_conn_string(path) as saver:
            saver.setup()
            saver.setup()
            finished(saver.asetup())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(set_up, range(8)))

    assert rows(path, "SELECT count(*) FROM langgraph_checkpoints") == [(0,)]


def test_a_saver_is_entered_by_either_kind_of_with(path: Path) -> None:
    with AgentCheckpointSaver.from_conn_string(path) as saver:
        Line(saver).put({"n": 1})

    async def go() -> Any:
        async with AgentCheckpointSaver.from_conn_string(path) as saver:
            return await saver.aget_tuple(at())

    assert values(finished(go())) == {"n": 1}


def test_a_store_that_was_given_is_left_open(path: Path) -> None:
    with StateStore(path) as store:
        saver = AgentCheckpointSaver(store)
        Line(saver).put({"n": 1})
        saver.close()

        assert store.list_leases() == []
        assert values(saver.get_tuple(at())) == {"n": 1}


# Threads and loops


async def line(saver: AgentCheckpointSaver, thread_id: str, count: int) -> list[str]:
    """Save a line of checkpoints, each read back; what is there in the end."""
    config = at(thread_id)
    for number in range(1, count + 1):
        made = checkpoint(f"id-{number:04}", {"n": [thread_id] * number}, f"{number}.x")
        config = await saver.aput(config, made, {"source": "loop", "step": number}, made["channel_versions"])
        await saver.aput_writes(config, [("n", number)], "task")
        assert values(await saver.aget_tuple(at(thread_id))) == made["channel_values"]
    return ids([each async for each in saver.alist(at(thread_id))])


def test_two_loops_in_two_threads_use_one_saver(saver: AgentCheckpointSaver) -> None:
    async def several(loop: int) -> list[list[str]]:
        return await asyncio.gather(*(line(saver, f"{loop}-{number}", 12) for number in range(4)))

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda loop: finished(several(loop)), range(2)))

    assert found == [[[f"id-{number:04}" for number in range(12, 0, -1)]] * 4] * 2
    assert len(saver.list_threads()) == 8


def test_one_loop_after_another_uses_one_saver(saver: AgentCheckpointSaver) -> None:
    for number in range(3):
        assert len(finished(line(saver, str(number), 3))) == 3


def test_many_threads_use_one_saver(saver: AgentCheckpointSaver) -> None:
    def work(number: int) -> list[Any]:
        mine = Line(saver, number % 4, namespace=str(number))
        for step in range(10):
            config = mine.put({"n": [number] * step})
            saver.put_writes(config, [("n", step)], "task")
            assert values(saver.get_tuple(config)) == {"n": [number] * step}
        return [values(each)["n"] for each in saver.list(at(number % 4, namespace=str(number)))]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, range(8)))

    assert found == [[[number] * step for step in range(9, -1, -1)] for number in range(8)]


def test_two_savers_write_one_namespace_at_once(saver: AgentCheckpointSaver, path: Path) -> None:
    def work(number: int, mine: AgentCheckpointSaver) -> None:
        writer = Line(mine)
        for step in range(30):
            writer.put({"n": [number] * (step + 1)}, f"{number}-{step:03}")

    with AgentCheckpointSaver.from_conn_string(path, synchronous="normal") as other, ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2), (saver, other)))

    found = {each.config["configurable"]["checkpoint_id"]: values(each)["n"] for each in saver.list(at())}
    assert found == {f"{number}-{step:03}": [number] * (step + 1) for number in range(2) for step in range(30)}


# Whoever waits


def test_a_cancelled_save_leaves_nothing_open(saver: AgentCheckpointSaver, path: Path) -> None:
    saver.setup()

    async def go() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            saves = [asyncio.ensure_future(line(saver, str(number), 2)) for number in range(5)]
            await asyncio.sleep(0)
            for save in saves:
                save.cancel()
            results = await asyncio.gather(*saves, return_exceptions=True)
            assert [type(each) for each in results] == [asyncio.CancelledError] * 5
            other.execute("ROLLBACK")
        assert len(await line(saver, "after", 3)) == 3

    finished(go())
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody has the lock any more
        other.execute("ROLLBACK")
    Line(saver, "sync").put({"n": 1})


def test_a_save_that_is_cancelled_before_its_turn_is_not_made(saver: AgentCheckpointSaver, path: Path) -> None:
    saver.setup()

    async def go() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # A commit's worth of others is before it.
            before = [saver.aput_writes(at("other", "x"), [("n", 1)], str(number)) for number in range(64)]
            waiting = asyncio.gather(*before)
            late = asyncio.ensure_future(saver.aput(at(), checkpoint("id-1", {}, "1.x"), {"step": 1}, {}))
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            other.execute("ROLLBACK")
            await waiting

    finished(go())
    assert saver.get_tuple(at()) is None


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
connection.execute("ROLLBACK")
"""


@pytest.mark.parametrize("awaited", [False, True], ids=["sync", "async"])
def test_somebody_elses_lock_only_delays(saver: AgentCheckpointSaver, path: Path, awaited: bool) -> None:
    Line(saver).put({"n": 1})
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        done = threading.Event()

        def save() -> None:
            if awaited:
                finished(line(saver, "thread-2", 2))
            else:
                Line(saver, "thread-2").put_many(2)
            done.set()

        with ThreadPoolExecutor(1) as threads:
            saving = threads.submit(save)
            for _ in range(20):
                assert values(saver.get_tuple(at())) == {"n": 1}  # who reads need not wait
            assert not done.is_set()
            other.communicate("", timeout=WATCHDOG_SECONDS)
            saving.result(WATCHDOG_SECONDS)

    assert len(list(saver.list(at("thread-2")))) == 2


# Processes


FORK = """
import asyncio, os, sys, warnings
from agent_checkpoint_langgraph import AgentCheckpointSaver
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def put(who, number):
    versions = {"n": f"{number}.x"}
    made = {"v": 4, "id": f"{who}-{number}", "ts": "t", "channel_versions": versions, "versions_seen": {}}
    return at(who), {**made, "channel_values": {"n": [who] * 50}}, {"source": "loop", "step": number}, versions

def at(who):
    return {"configurable": {"thread_id": who, "checkpoint_ns": ""}}

async def go(who, first):
    await asyncio.gather(*(saver.aput(*put(who, number)) for number in range(first, first + 5)))
    assert (await saver.aget(at(who)))["channel_values"]["n"] == [who] * 50

saver = AgentCheckpointSaver.from_conn_string(sys.argv[1], synchronous="normal")
if "before" in sys.argv:
    saver.put(*put("parent", 100))
    asyncio.run(go("parent", 200))
child = os.fork()
who = "parent" if child else "child"
saver.put(*put(who, 0))
asyncio.run(go(who, 1))
saver.delete_thread("nobody")
if not child:
    saver.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
saver.put(*put("parent", 300))
for name in ("parent", "child"):
    print(len(list(saver.list(at(name)))))
saver.close()
"""


@pytest.mark.parametrize(("when", "count"), [("before", 13), ("never", 7)])
def test_a_child_of_fork_uses_its_parents_saver(path: Path, when: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, path, when], capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False
    )

    assert (done.stdout, done.stderr) == (f"{count}\n6\n", "")
