"""Whatever strikes in the midst of a call, the store goes on: interrupts, other threads, stalls."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_checkpoint import (
    FencedWrite,
    FenceRefusedError,
    InvalidInputError,
    NewerSchemaError,
    ReentrancyError,
    StateStore,
    Write,
    hookimpl,
)
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint.testing import FakeClock


def strike_once(call: Callable[[], int]) -> Callable[[], int]:
    """The clock's function, interrupted the first time it is asked."""
    struck = []

    def asked() -> int:
        if not struck:
            struck.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return call()

    return asked


def others_can_write(path: Path) -> bool:
    raw = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        raw.execute("BEGIN IMMEDIATE")
        raw.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        raw.close()
    return True


@pytest.mark.parametrize("asked", ["wall_ns", "ticks_ns"])
def test_an_interrupt_inside_a_write_holds_no_lock(store: StateStore, path: Path, clock: FakeClock, asked: str) -> None:
    lease = store.acquire("release", "worker-a", 30)
    setattr(clock, asked, strike_once(getattr(clock, asked)))
    with pytest.raises(KeyboardInterrupt):
        store.put_checkpoint("deploy", 1, lease=lease)

    assert others_can_write(path)
    assert store.put_checkpoint("deploy", 2, lease=lease).sequence == 1


# In a process of its own: an alarm strikes whatever runs, the test's tools too.
STRUCK = """
import random, signal, sqlite3, sys
from agent_checkpoint import StateStore

def strike(*_):
    raise KeyboardInterrupt

sys.unraisablehook = lambda _: None  # one that strikes in a finalizer is reported, not raised
path = sys.argv[1]
store = StateStore(path, synchronous="normal", busy_timeout_seconds=2)
store.initialize()
choose = random.Random(11)
signal.signal(signal.SIGALRM, strike)
interrupted, tokens = 0, []
for turn in range(1500):
    try:
        signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, 0.0006))
        lease = store.acquire(f"scope-{turn}", "worker-a", 600)
        store.release(*lease.fence)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    if turn % 100 == 99:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raw = sqlite3.connect(path, timeout=0, isolation_level=None)
        raw.execute("BEGIN IMMEDIATE")
        raw.close()
        tokens.append(store.acquire("steady", "worker-a", 600, reclaim=True).token)
        signal.signal(signal.SIGALRM, strike)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert interrupted > 100, interrupted
assert tokens == list(range(1, 16)), tokens
store.close()
"""


def test_interrupts_at_random_moments_leave_the_store_usable(path: Path) -> None:
    # Not measured: an interrupt in the midst of the measuring tool leaves its lock held.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", STRUCK, str(path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_transaction_may_end_in_another_thread_than_it_began(store: StateStore, path: Path) -> None:
    block = store.transaction(component="tests", action="test.write")
    entering = threading.Thread(target=block.__enter__)
    entering.start()
    entering.join()
    leaving = threading.Thread(target=block.__exit__, args=(None, None, None))
    leaving.start()
    leaving.join()

    assert others_can_write(path)
    done = []
    for _ in range(20):  # one of these threads may get the identity of the one that began
        worker = threading.Thread(target=lambda: done.append(store.acquire("s", "w", 30, reclaim=True).token))
        worker.start()
        worker.join()
    assert done == list(range(1, 21))


def test_a_refused_inner_call_leaves_the_outer_transaction_its_turn(path: Path) -> None:
    with StateStore(path, busy_timeout_seconds=30) as store, StateStore(path, busy_timeout_seconds=30) as other:
        store.initialize()
        other.acquire("other", "worker-a", 30)
        with store.transaction(component="tests", action="test.write") as part:
            for _ in range(3):
                with pytest.raises(ReentrancyError):
                    other.acquire("release", "worker-a", 30)
            part.event("test.happened")
        assert len(store.events(kind="test.happened")) == 1


def test_a_reader_that_stalls_takes_no_live_lease_for_dead(path: Path) -> None:
    clock = FakeClock()
    holder = StateStore(path, clock=clock)
    holder.initialize()
    lease = holder.acquire("release", "worker-a", 30)
    late = FakeClock()
    late.now_wall_ns, late.now_ticks_ns = clock.now_wall_ns, clock.now_ticks_ns
    read = late.ticks_ns

    def stalled() -> int:
        then = read()
        clock.advance(2)
        holder.heartbeat(*lease.fence)
        return then

    late.ticks_ns = stalled
    with StateStore(path, clock=late) as reader:
        assert reader.check_lease(*lease.fence).token == 1
    holder.close()


FROZEN = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


def test_a_frozen_process_at_the_gate_does_not_outlast_a_short_lease(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", ttl_seconds=3)
        sitter = subprocess.Popen(
            [sys.executable, "-S", "-c", FROZEN, str(path) + "-gate"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert sitter.stdout is not None
            sitter.stdout.readline()
            os.kill(sitter.pid, signal.SIGSTOP)
            assert store.heartbeat(*lease.fence).token == 1
        finally:
            sitter.kill()
            sitter.communicate()


def test_a_prune_of_large_rows_goes_in_small_steps(store: StateStore) -> None:
    for _ in range(6):
        store.put_checkpoint("deploy", "x" * 1_500_000)
    store.put_checkpoint("deploy", "small")
    (pruned,) = store.prune_checkpoints(1)
    assert pruned.removed == 6
    assert [event.detail["count"] for event in store.events(kind="checkpoint.pruned")] == [1] * 6


def test_an_adapter_s_migration_is_refused_on_newer_tables_of_core(
    store: StateStore, path: Path, tmp_path: Path
) -> None:
    raw = sqlite3.connect(path)
    raw.execute("UPDATE components SET version = 99 WHERE component = 'core'")
    raw.commit()
    raw.close()
    file = tmp_path / "0001_notes.sql"
    file.write_text("CREATE TABLE notes (text TEXT);")
    with StateStore(path) as later, pytest.raises(NewerSchemaError):
        later.migrate("notes", {"sqlite": [file]})


def test_a_veto_whose_facts_are_no_json_is_a_veto_all_the_same(path: Path) -> None:
    class Veto:
        @hookimpl
        def check_fence(self, write: Write) -> None:
            if write.detail.get("bad"):
                raise FenceRefusedError("no", thing=object(), number=7)

    with StateStore(path, plugins=[Veto()]) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", 30)
        bad, good, invalid = store.write_all(
            [
                FencedWrite("tests", "test.write", None, lease, detail={"bad": True}),
                FencedWrite("tests", "test.write", lambda part: "done", lease),
                FencedWrite("", "test.write", None, lease),
            ]
        )
        assert isinstance(bad.error, FenceRefusedError)
        assert isinstance(invalid.error, InvalidInputError)
        assert good.answer == "done"
        (event,) = store.events(kind="write.refused")
        assert (event.detail["number"], "object" in event.detail["thing"]) == (7, True)


@pytest.mark.parametrize("value", ["\ud83d\ude00", {"\ud83d\ude00": 1}, ["a", {"b": "x\ud83d\ude00"}]])
def test_a_pair_of_surrogates_would_come_back_as_one_character_and_is_refused(store: StateStore, value: object) -> None:
    with pytest.raises(InvalidInputError):
        store.put_checkpoint("deploy", value)
    store.put_checkpoint("deploy", ["\ude00\ud83d", "\U0001f600"])


def test_each_reason_for_a_refusal_is_on_record(store: StateStore) -> None:
    store.put_checkpoint("deploy", 1, lease=store.acquire("release", "worker-a", 30))
    other = store.acquire("other", "worker-b", 30)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            store.put_checkpoint("deploy", 2, lease=other)
    store.release(*other.fence)
    with pytest.raises(RuntimeError):
        store.put_checkpoint("elsewhere", 1, lease=other)
    reasons = [event.detail["reason"] for event in store.events(kind="write.refused")]
    assert reasons == ["scope-mismatch", "released"]
    assert {(each.reason, each.times) for each in store.status().refusals} == {("scope-mismatch", 2), ("released", 1)}


def test_a_cursor_behind_the_last_event_is_of_another_store(store: StateStore) -> None:
    last = store.events()[-1]
    assert store.events(after=last.cursor) == []
    with pytest.raises(InvalidInputError):
        store.events(after="0-0-999999")


def test_closing_waits_for_the_calls_that_were_made_before_it(path: Path) -> None:
    async def scenario() -> None:
        store = AsyncStateStore(path)
        await store.initialize()
        calls = [asyncio.ensure_future(store.put_checkpoint("deploy", number)) for number in range(40)]
        await asyncio.sleep(0)
        await store.close()
        assert sorted(saved.sequence for saved in await asyncio.gather(*calls)) == list(range(1, 41))
        with pytest.raises(InvalidInputError):
            await store.get_lease("release")

    asyncio.run(scenario())


FORKED = """
import asyncio, os, sys
from agent_checkpoint.aio import AsyncStateStore
store = AsyncStateStore(sys.argv[1])
asyncio.run(store.initialize())
pid = os.fork()
if pid == 0:
    print(asyncio.run(store.acquire("release", "child")).token, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(asyncio.run(store.acquire("other", "parent")).token)
"""


def test_a_forked_child_has_threads_of_its_own(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1", "1"], "")


def test_the_default_folder_is_kept_out_of_git_when_it_was_there_before(tmp_path: Path) -> None:
    folder = tmp_path / ".agent-checkpoint"
    folder.mkdir()
    with StateStore(folder / "state.db") as store:
        store.initialize()
    assert (folder / ".gitignore").read_text().endswith("*\n")
    (folder / ".gitignore").write_text("mine\n")
    with StateStore(folder / "state.db") as store:
        store.initialize()
    assert (folder / ".gitignore").read_text() == "mine\n"


def test_a_stall_is_no_reason_to_wait_longer_than_the_busy_timeout(store: StateStore, path: Path) -> None:
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with StateStore(path, busy_timeout_seconds=0) as hasty, pytest.raises(RuntimeError, match="no lock"):
        try:
            hasty.acquire("release", "worker-a", 30)
        except Exception as error:
            raise RuntimeError(str(error)) from error
    assert time.monotonic() - started < 10  # not the default of 10 s: it gave up by itself
    raw.close()
