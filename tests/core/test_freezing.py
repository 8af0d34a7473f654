"""Real processes, stopped and killed: those that were given, with all that they started or without, and no others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watching import has_ended, states, wait_until

from agent_checkpoint import InvalidInputError
from agent_checkpoint.testing import freeze, kill
from agent_checkpoint.testing.freezing import _processes_of_ps, family, processes

THREADS = """
import threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
"""
TREE = "sleep 600 & setsid sleep 601 & echo ready; wait"


@pytest.fixture
def started(unmeasured: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        kill(process, tree=True)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def tree(started: Callable[..., subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], list[int]]:
    """A shell, and the two that it started, one of them in a session of its own."""
    shell = started("sh", "-c", TREE)
    wait_until(lambda: len(family(shell.pid)) == 3)
    wait_until(lambda: any(each.session == each.pid != shell.pid for each in processes() if each.parent == shell.pid))
    return shell, family(shell.pid)[1:]


# freeze


def test_a_frozen_process_has_stopped_every_thread_and_goes_on_at_the_end_of_the_block(
    started: Callable[..., subprocess.Popen[str]],
) -> None:
    process = started(sys.executable, "-c", THREADS)
    with freeze(process) as frozen:
        assert frozen.pids == [process.pid]
        assert states(process.pid) == {"T"}
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 4
    wait_until(lambda: "T" not in states(process.pid))


def test_it_can_be_thawed_by_a_word_and_twice(started: Callable[..., subprocess.Popen[str]]) -> None:
    process = started(sys.executable, "-c", THREADS)
    frozen = freeze(process.pid)
    frozen.thaw()
    wait_until(lambda: "T" not in states(process.pid))
    with freeze(process):
        frozen.thaw()
        assert states(process.pid) == {"T"}


def test_of_a_shell_alone_what_it_started_goes_on(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    shell, below = tree
    with freeze(shell):
        assert states(shell.pid) == {"T"}
        assert all("T" not in states(pid) for pid in below)


def test_a_tree_is_stopped_with_sessions_of_its_own_from_the_top_down(
    tree: tuple[subprocess.Popen[str], list[int]],
) -> None:
    shell, below = tree
    with freeze(shell, tree=True) as frozen:
        assert frozen.pids[0] == shell.pid
        assert sorted(frozen.pids) == sorted([shell.pid, *below])
        assert all(states(pid) == {"T"} for pid in frozen.pids)
    wait_until(lambda: all("T" not in states(pid) for pid in below))


def test_a_session_is_found_when_its_leader_has_ended(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    shell, below = tree
    kill(shell)
    (left,) = family(shell.pid)
    assert left in below
    for pid in below:
        kill(pid)
    assert family(shell.pid) == []


def test_who_has_ended_cannot_be_frozen(started: Callable[..., subprocess.Popen[str]]) -> None:
    process = started("sh", "-c", "echo ready")
    wait_until(lambda: has_ended(process.pid))
    with pytest.raises(ProcessLookupError):
        freeze(process)  # nobody has waited for it yet
    process.wait()
    with pytest.raises(ProcessLookupError):
        freeze(process)


@pytest.mark.parametrize("end", [freeze, kill])
@pytest.mark.parametrize("pid", [0, -1, 1, True, None])
def test_groups_of_processes_and_those_above_the_caller_are_refused(end: Callable[..., Any], pid: Any) -> None:
    process = pid if pid is not None else multiprocessing.get_context("spawn").Process(target=print)
    with pytest.raises(InvalidInputError, match="process: "):
        end(process)
    for own in (os.getpid(), os.getppid()):
        with pytest.raises(InvalidInputError, match="process: "):
            end(own)


# kill


def test_a_killed_process_is_reaped_and_may_be_killed_again(started: Callable[..., subprocess.Popen[str]]) -> None:
    process = started(sys.executable, "-c", THREADS)
    kill(process)
    assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()
    kill(process)
    kill(process.pid)


def test_a_frozen_process_can_be_killed(started: Callable[..., subprocess.Popen[str]]) -> None:
    process = started(sys.executable, "-c", THREADS)
    with freeze(process):
        kill(process)
        assert process.returncode == -signal.SIGKILL


def test_a_process_of_multiprocessing_is_taken_as_well() -> None:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    with freeze(process):
        assert process.pid is not None
        assert states(process.pid) == {"T"}
    kill(process)
    assert process.exitcode == -signal.SIGKILL
    process.close()


def test_killing_a_tree_leaves_nobody_and_hits_no_one_else(
    started: Callable[..., subprocess.Popen[str]], tree: tuple[subprocess.Popen[str], list[int]]
) -> None:
    other = started(sys.executable, "-c", THREADS)
    shell, below = tree
    kill(shell, tree=True)
    assert shell.returncode == -signal.SIGKILL
    assert all(has_ended(pid) for pid in below)
    assert other.poll() is None


def test_a_grandchild_is_waited_for_though_it_is_not_ours(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    shell, below = tree
    kill(below[0])
    assert has_ended(below[0])
    assert shell.poll() is None


def test_without_a_proc_ps_tells_the_same(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    shell, below = tree
    told = {each.pid: each for each in _processes_of_ps()}
    shown = {each.pid: each for each in processes()}
    for pid in (shell.pid, *below):
        assert told[pid][:3] == shown[pid][:3]
    with freeze(below[0]):
        assert {each.pid: each.state for each in _processes_of_ps()}[below[0]] == "T"
