"""``run`` when its own processes are killed or frozen, or the store fails: nothing acts beside a successor."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

from agent_checkpoint import StateStore

AGENT = [sys.executable, "-m", "agent_checkpoint"]
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
TIMES = [pytest.param(2, id="2"), pytest.param(50, id="50", marks=pytest.mark.long)]

# The side effect, 20 times a second: when it happened, and by whom.
ACT = """
import os, sys, time
signs = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
if sys.argv[2:] == ["closed"]:
    os.closerange(0, signs)
while True:
    os.write(signs, f"{time.monotonic_ns()} {os.getpid()}\\n".encode())
    time.sleep(0.05)
"""
# Children of every kind: in the group, in a session of their own, without a parent, with closed descriptors.
# With -S: they need no packages, and start at once.
TREE = """
act() { "$PYTHON" -S "$ACT" "$SIGNS" "$@"; }
act & setsid "$PYTHON" -S "$ACT" "$SIGNS" &
( act & ) ; ( setsid "$PYTHON" -S "$ACT" "$SIGNS" closed & )
setsid sh -c '( "$PYTHON" -S "$ACT" "$SIGNS" closed & ) ; exec "$PYTHON" -S "$ACT" "$SIGNS"' &
act
"""
ACTORS = 7


class Tree:
    """A ``run`` of a tree of processes that act, and what they did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.signs = path.with_name("signs.txt")
        (path.with_name("act.py")).write_text(ACT)
        self.mark = f"MARK={path}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
        names = {
            "MARK": str(path),
            "PYTHON": sys.executable,
            "SIGNS": str(self.signs),
            "ACT": str(path.with_name("act.py")),
        }
        self.environ = {**clean, **names, "AGENT_CHECKPOINT_DB": str(path)}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*AGENT, "run", "release", *arguments],
            env=self.environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def grow(self, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start one, until all of its processes act; and the process on record."""
        self.signs.unlink(missing_ok=True)
        wrapper = self.start(*arguments, "--", "bash", "-c", TREE)
        wait_until(lambda: len({pid for _, pid in self.acts()}) == ACTORS)
        with StateStore(self.path) as store:
            lease = store.get_lease("release")
            assert lease is not None
            assert lease.process is not None
            return wrapper, lease.process

    def acts(self) -> list[tuple[int, int]]:
        """(when, who), for every act so far."""
        lines = self.signs.read_text().splitlines() if self.signs.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]

    def follow(self) -> subprocess.Popen[str]:
        """A successor in the queue, which says when it starts."""
        told = "import time; print(time.monotonic_ns())"
        successor = self.start("--wait", "forever", "--", sys.executable, "-S", "-c", told)
        with StateStore(self.path) as store:
            wait_until(lambda: store.status().queues)
        return successor

    def left(self) -> set[int]:
        """The processes of the tree that live."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                marked = entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if marked and str(self.signs).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        for process in self.started:
            process.kill()
        wait_until(self._ended)  # those who live on hold the pipes open
        for process in self.started:
            process.communicate()

    def _ended(self) -> bool:
        left = self.left()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return not left


@pytest.fixture
def tree(path: Path) -> Iterator[Tree]:
    with StateStore(path) as store:
        store.initialize()
    grown = Tree(path)
    yield grown
    grown.end()


def started_at(successor: subprocess.Popen[str]) -> int:
    out, err = successor.communicate(timeout=LONG)
    assert successor.returncode == 0, err
    return int(out)


def last_expiry(path: Path) -> str:
    with StateStore(path) as store:
        return str(next(event.detail["reason"] for event in store.events()[::-1] if event.kind == "lease.expired"))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("victim", ["wrapper", "guard"])
def test_with_its_wrapper_or_guard_killed_all_are_gone_before_a_successor_starts(
    tree: Tree, victim: str, times: int
) -> None:
    for _ in range(times):
        wrapper, process = tree.grow("--ttl", "300")
        successor = tree.follow()
        killed_at = time.monotonic_ns()
        os.kill(process["pid"] if victim == "wrapper" else process["guard"], signal.SIGKILL)
        begun = started_at(successor)
        acted = max(when for when, _ in tree.acts())
        assert acted < begun
        # Far more than it takes (some 10 ms), far less than the ttl.
        assert acted - killed_at < 1e9
        assert begun - killed_at < 20e9
        assert tree.left() == set()
        _, err = wrapper.communicate(timeout=LONG)
        if victim == "guard":
            assert (wrapper.returncode, json.loads(err)["error"]["reason"]) == (76, "guard-died")
        assert last_expiry(tree.path) == "owner-dead"


def test_with_both_killed_at_once_no_successor_starts_before_the_ttl(tree: Tree) -> None:
    _, process = tree.grow("--ttl", "3")
    with StateStore(tree.path) as store:
        successor = tree.follow()
        for pid in (process["guard"], process["pid"]):
            os.kill(pid, signal.SIGKILL)
        # Unreaped or gone, it is not proven dead: what it supervised may live.
        wait_until(lambda: [lease.owner_alive for lease in store.list_leases()] == [None])
        begun = started_at(successor)
        with store.read() as reader:
            now = reader.moment.ticks_ns
    assert begun < now
    assert last_expiry(tree.path) == "ttl"
    # Documented: who was not the guard's own child survives both.
    assert process["group"] not in tree.left()


@pytest.mark.parametrize("frozen", ["wrapper", "guard", "both"])
def test_frozen_past_its_ttl_the_command_is_gone_soon_after_waking(tree: Tree, frozen: str) -> None:
    wrapper, process = tree.grow("--ttl", "3")
    pids = {"wrapper": [process["pid"]], "guard": [process["guard"]], "both": [process["pid"], process["guard"]]}[
        frozen
    ]
    successor = tree.follow()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    if frozen == "guard":  # the wrapper goes on: it holds the lease until it is told to end
        os.kill(process["pid"], signal.SIGTERM)
        time.sleep(0.2)  # two at once would be one
        os.kill(process["pid"], signal.SIGTERM)
    begun = started_at(successor)
    if frozen != "both":  # whoever was awake ended it in time
        assert max(when for when, _ in tree.acts()) < begun
    woken_at = time.monotonic_ns()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)
    _, err = wrapper.communicate(timeout=LONG)
    assert max(when for when, _ in tree.acts()) - woken_at < 1e9
    assert tree.left() == set()
    # With the guard frozen it was killed because it was told to end, not because of its lease.
    assert wrapper.returncode == (137 if frozen == "guard" else 76), err


@pytest.mark.parametrize("fault", ["locked", "deleted"])
def test_with_the_store_out_of_reach_the_command_is_ended_by_the_deadline(tree: Tree, fault: str) -> None:
    wrapper, _ = tree.grow("--ttl", "2", "--busy-timeout", "0.2")
    with StateStore(tree.path) as store:
        lease = store.get_lease("release")
        assert lease is not None
    raw = sqlite3.connect(tree.path, isolation_level=None)
    started = time.monotonic_ns()
    if fault == "locked":
        raw.execute("BEGIN IMMEDIATE")
    else:
        tree.path.rename(tree.path.with_name("gone.db"))
    _, err = wrapper.communicate(timeout=LONG)
    acted = max(when for when, _ in tree.acts())
    raw.close()
    # No act after the lease could have been granted to somebody else.
    assert acted - started < 2e9
    assert tree.left() == set()
    assert wrapper.returncode == 76, err
