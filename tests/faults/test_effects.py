"""Effects whose process is killed at any moment: what happens outside happens at most once, and the state says which.

The world outside is a file to which the action adds a line.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.watching import wait_until

from agent_checkpoint import StateStore

AGENT = [sys.executable, "-m", "agent_checkpoint"]
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}

# Does it in steps; at the one that it is told, it says so and waits to be killed.
PRELUDE = """
import os, random, sys, time
from agent_checkpoint import AgentCheckpointError, EffectUnknownError, StateStore

path, outside, stop = sys.argv[1:]
world = os.open(outside, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
store = StateStore(path)

def reach(step):
    if step == stop:
        print("here", flush=True)
        sys.stdin.read()

def act(key):
    os.write(world, key.encode())
    reach("during")
    os.write(world, b"\\n")
"""
RIGHT = """
with store.hold("release", "worker", wait_seconds=60) as held:
    reach("before begun")
    try:
        with held.effect("publish") as effect:
            reach("after begun")
            if effect.fresh:
                act("publish")
                reach("after the action")
                effect.done("published")
                reach("after done")
            print("fresh" if effect.fresh else f"known: {effect.result}")
    except EffectUnknownError:
        print("unknown")
"""
# Acts, and only then says that it begins.
BEGUN_TOO_LATE = """
with store.hold("release", "worker", wait_seconds=60) as held:
    reach("before begun")
    found = store.get_effect("publish")
    if found is None or found.state != "done":
        act("publish")
        reach("after the action")
        with held.effect("publish") as effect:
            effect.done("published")
    print("fresh" if found is None else "known: published")
"""
# Takes what nobody can tell of for what surely did not happen.
RETRY_IS_FRESH = RIGHT.replace('        print("unknown")', '        act("publish")\n        print("fresh")')


class Case(NamedTuple):
    """What a kill at a step leaves: the state, what a successor is answered, how often the action was begun."""

    state: str | None
    answer: str
    acts: int


CASES = {
    "before begun": Case(None, "fresh", 1),
    "after begun": Case("unknown", "unknown", 0),
    "during": Case("unknown", "unknown", 1),
    "after the action": Case("unknown", "unknown", 1),
    "after done": Case("done", "known: published", 1),
}


def worker(source: str, path: Path, stop: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + source, str(path), str(path.with_name("outside")), stop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def state_of(store: StateStore, key: str = "publish") -> str | None:
    found = store.get_effect(key)
    return None if found is None else found.state


def kill_and_take_over(source: str, path: Path, step: str) -> Case:
    """Kill a worker at a step, and let another do its work."""
    with StateStore(path) as store:
        store.initialize()
        with worker(source, path, step) as killed:
            assert killed.stdout is not None
            try:
                assert killed.stdout.readline() == "here\n"
            finally:
                killed.kill()
        state = state_of(store)
        with worker(source, path) as successor:
            answer, _ = successor.communicate(timeout=LONG)
    return Case(state, answer.strip(), path.with_name("outside").read_text().count("publish"))


@pytest.mark.parametrize("step", CASES)
def test_a_kill_at_any_step_leaves_it_done_at_most_once_and_says_which(tmp_path: Path, step: str) -> None:
    assert kill_and_take_over(RIGHT, tmp_path / "agents.db", step) == CASES[step]


@pytest.mark.parametrize("broken", [BEGUN_TOO_LATE, RETRY_IS_FRESH], ids=["begun too late", "retry is fresh"])
def test_a_kill_after_the_action_shows_who_does_it_wrong(tmp_path: Path, broken: str) -> None:
    assert broken != RIGHT
    assert kill_and_take_over(broken, tmp_path / "agents.db", "after the action").acts == 2


# Everybody goes for the same few keys at the same time.
CROWD = """
while True:
    key = f"key-{int(time.monotonic() * 25)}-{random.randrange(2)}"
    try:
        with store.hold(f"effect/{key}", f"worker-{os.getpid()}", 0.5) as held, held.effect(key) as effect:
            if effect.fresh:
                time.sleep(random.uniform(0, 0.01))
                act(key)
                time.sleep(random.uniform(0, 0.01))
                effect.done(key)
    except AgentCheckpointError:
        time.sleep(random.uniform(0, 0.002))
"""


def outlive(source: str, path: Path, kills: int, workers: int = 3) -> list[str]:
    """What is outside after so many kills of some of the workers."""
    outside = path.with_name("outside")
    running = [worker(source, path) for _ in range(workers)]
    try:
        for _ in range(kills):
            so_far = outside.stat().st_size if outside.exists() else 0
            wait_until(lambda so_far=so_far: outside.exists() and outside.stat().st_size > so_far)
            time.sleep(random.uniform(0, 0.1))
            place = random.randrange(workers)
            end(running[place])
            running[place] = worker(source, path)
    finally:
        for each in running:
            end(each)
    # Not by lines: whoever was killed in the midst of one has not ended it.
    return re.findall(r"key-[0-9]+-[0-9]", outside.read_text())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "a worker ended by itself"


@pytest.mark.parametrize("kills", [15, pytest.param(200, marks=pytest.mark.long)])
def test_of_workers_killed_at_any_moment_none_does_what_was_done(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
        outside = Counter(outlive(CROWD, path, kills))
        states = {effect.key: effect.state for effect in store.list_effects(limit=100_000)}

    assert len(outside) > kills
    assert set(outside.values()) == {1}, "something was done twice"
    assert set(outside) <= set(states), "something was done that is not on record"
    done = {key for key, state in states.items() if state == "done"}
    assert done <= set(outside), "something is on record that was not done"
    assert set(states.values()) <= {"done", "unknown", "begun"}


# The command


class Once:
    """``once`` in a folder, of a command that adds a line to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "agents.db"
        with StateStore(self.path) as store:
            store.initialize()

    def start(self, *options: str, sh: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*AGENT, "once", "refund", *options, "--", "sh", "-c", f"echo x >>outside; {sh}"],
            cwd=self.folder,
            env={**CLEAN, "AGENT_CHECKPOINT_DB": str(self.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def answers(self, processes: list[subprocess.Popen[str]]) -> list[tuple[Any, ...]]:
        return [(process.communicate(timeout=LONG)[0], process.returncode) for process in processes]

    @property
    def acts(self) -> int:
        outside = self.folder / "outside"
        return len(outside.read_text().splitlines()) if outside.exists() else 0

    def state(self) -> str | None:
        with StateStore(self.path) as store:
            return state_of(store, "refund")


@pytest.fixture
def once(tmp_path: Path) -> Once:
    return Once(tmp_path)


def test_of_eight_at_once_one_runs_it_and_seven_print_its_result(once: Once) -> None:
    answers = once.answers([once.start(sh="sleep 0.2; echo paid by $$") for _ in range(8)])

    assert len(set(answers)) == 1
    (output, status) = answers[0]
    assert output.startswith("paid by ")
    assert status == 0
    assert once.acts == 1


def test_of_eight_that_do_not_wait_one_runs_it_and_seven_are_told_to_come_back(once: Once) -> None:
    processes = [once.start("--no-wait", sh="while ! [ -e go ]; do sleep 0.05; done; echo paid") for _ in range(8)]
    wait_until(lambda: sum(process.poll() is not None for process in processes) == 7)
    (once.folder / "go").touch()

    assert Counter(once.answers(processes)) == {("paid\n", 0): 1, ("", 75): 7}
    assert once.acts == 1


@pytest.mark.parametrize("whom", ["the wrapper", "once itself"])
def test_after_a_kill_in_the_midst_of_it_nobody_runs_it_again(once: Once, whom: str) -> None:
    killed = once.start(sh="echo $PPID >pid.new; mv pid.new pid; sleep 60")
    wait_until((once.folder / "pid").exists)
    os.kill(killed.pid if whom == "the wrapper" else int((once.folder / "pid").read_text()), signal.SIGKILL)
    killed.communicate(timeout=LONG)

    (_, status), *_ = once.answers([once.start(sh="echo again")])
    assert status == 76
    assert (once.state(), once.acts) == ("unknown", 1)


@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.long)])
def test_a_once_that_is_killed_at_any_moment_is_run_at_most_once(tmp_path: Path, kills: int) -> None:
    for number in range(kills):
        once = Once(tmp_path / str(number))
        killed = once.start(sh="sleep 0.05; echo paid")
        time.sleep(random.uniform(0.05, 0.6))
        killed.kill()
        killed.communicate(timeout=LONG)

        ((output, status),) = once.answers([once.start(sh="echo paid")])
        assert (output, status, once.state()) in (("paid\n", 0, "done"), ("", 76, "unknown"))
        assert once.acts <= 1
        assert status == 76 or once.acts == 1
