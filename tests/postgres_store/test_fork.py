"""After ``fork`` parent and child use the store, each by connections of its own.

Each test is a program of its own: what happens when a forked interpreter ends
is a part of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from agent_checkpoint import StateStore

PRELUDE = """
import json, os, sys, threading, time, warnings
from agent_checkpoint import AgentCheckpointError, LeaseHeldError, ReentrancyError, StateStore

# Python 3.12 and later warn of any fork beside threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
store = StateStore(sys.argv[1])

def say(*facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())  # one write: whole lines, also from children

def put(who):
    say(who, store.put_checkpoint("deploy", {"by": who}).sequence)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def play(url: str, program: str) -> list[list[Any]]:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", PRELUDE + program, url], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return [json.loads(line) for line in ended.stdout.splitlines()]


def saved(store: StateStore) -> list[list[Any]]:
    found = []
    for info in reversed(store.checkpoint_history("deploy")):
        checkpoint = store.get_checkpoint("deploy", sequence=info.sequence)
        assert checkpoint is not None
        found.append([checkpoint.data["by"], info.sequence])
    return found


def test_parent_and_child_and_grandchild_go_on_with_the_same_store(store: StateStore, url: str) -> None:
    said = play(
        url,
        """
put("parent")
first = os.fork()
second = os.fork()
for _ in range(10):
    put(f"{bool(first)} {bool(second)}")
if second:
    assert ended(second) == 0
    if first:
        assert ended(first) == 0
        put("parent")
""",
    )
    assert len(said) == 42
    assert saved(store) == sorted(said, key=lambda line: int(line[1]))


def test_a_child_that_ends_does_not_end_what_its_parent_has_open(store: StateStore, url: str) -> None:
    for way in ("store.close(); os._exit(0)", "sys.exit()", "import gc; del store; gc.collect(); os._exit(0)"):
        said = play(
            url,
            f"""
put("parent")
inside, go_on = threading.Event(), threading.Event()
def write():
    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened")
        inside.set()
        go_on.wait()
        part.event("test.happened")
thread = threading.Thread(target=write)
thread.start()
inside.wait()
if (pid := os.fork()) == 0:
    {way}
say(ended(pid))
go_on.set()
thread.join()
put("parent")
""",
        )
        assert said[1] == [0]
    assert len(store.events(kind="test.happened")) == 6


def test_a_transaction_is_its_parent_s_to_use_and_to_end(store: StateStore, url: str) -> None:
    said = play(
        url,
        """
try:
    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened", {"by": "parent"})
        pid = os.fork()
        if pid == 0:
            for use in (
                lambda: part.run("DELETE FROM tickets"),
                lambda: part.rows("SELECT 1"),
                lambda: part.executemany("DELETE FROM tickets WHERE number = ?", [(1,)]),
            ):
                try:
                    say("used", str(use()))
                except ReentrancyError:
                    say("refused")
        else:
            say(ended(pid))
except ReentrancyError as error:
    assert pid == 0
    say(str(error))
    put("child")
    sys.exit(7)
put("parent")
""",
    )
    assert said == [
        ["refused"],
        ["refused"],
        ["refused"],
        ["this process was forked inside a store transaction, which is its parent's to end"],
        ["child", 1],
        [7],
        ["parent", 2],
    ]
    assert [event.detail for event in store.events(kind="test.happened")] == [{"by": "parent"}]


def test_a_child_of_another_thread_than_the_writing_one_is_not_shut_out(store: StateStore, url: str) -> None:
    # Its threads may get the numbers that the parent's had.
    said = play(
        url,
        """
inside, go_on = threading.Event(), threading.Event()
def write():
    with store.transaction(component="tests", action="test.write"):
        inside.set()
        go_on.wait()
thread = threading.Thread(target=write)
thread.start()
inside.wait()
if (pid := os.fork()) == 0:
    threads = [threading.Thread(target=put, args=(f"child-{n}",)) for n in range(4)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    os._exit(0)
say(ended(pid))
go_on.set()
thread.join()
""",
    )
    assert [0] in said
    assert len(saved(store)) == 4


def test_a_read_is_its_parent_s_too(store: StateStore, url: str) -> None:
    said = play(
        url,
        """
put("parent")
try:
    with store.read() as reader:
        pid = os.fork()
        if pid == 0:
            try:
                reader.rows("SELECT COUNT(*) FROM checkpoints")
            except ReentrancyError:
                say("refused")
        else:
            say(ended(pid))
            say(*reader.rows("SELECT COUNT(*) FROM checkpoints")[0])
except ReentrancyError:
    assert pid == 0
    put("child")
    sys.exit(7)
put("parent")
""",
    )
    assert said == [["parent", 1], ["refused"], ["child", 2], [7], [1], ["parent", 3]]


def test_what_a_parent_holds_its_child_does_not_renew_or_give_back(store: StateStore, url: str) -> None:
    said = play(
        url,
        """
with store.hold("release", "worker-a", ttl_seconds=1) as held:
    if (pid := os.fork()) == 0:
        try:
            store.acquire("release", "child", wait_seconds=0.3)
        except LeaseHeldError as error:
            say(error.code)
        os._exit(0)
    say(ended(pid))
    time.sleep(1.2)
    say(held.check().token, held.lost.is_set())
""",
    )
    assert said == [["wait-timeout"], [0], [1, False]]
    assert [event.kind for event in store.events(scope="release")][-1] == "lease.released"
