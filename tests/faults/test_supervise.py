"""Killed or frozen supervisors: the command's whole tree is gone in time, and the lease is given up only then.

Each run is a program of its own (``tests/supervised.py``) whose lease is played:
to expire it is to tell who is still alive. The tree that it runs writes a line
20 times a second from each of its corners.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
# The promise: from the fault, or from waking, until nothing of the command is left.
GONE_SECONDS = 1.0

PROGRAM = str(Path(__file__).parents[1] / "supervised.py")

# Ignores what can be ignored, and sits in every corner: the group, the background,
# other sessions, orphaned twice over, without any descriptor.
TREE = """
trap '' TERM HUP INT QUIT
beat() { while :; do echo "$1 $EPOCHREALTIME" >> "$0"; sleep 0.05; done; }
export -f beat
beat background &
setsid bash -c 'beat session' "$0" &
( ( exec 0<&- 1>&- 2>&-; beat orphan ) & ) &
setsid bash -c '( ( exec 0<&- 1>&- 2>&-; beat stray ) & ) & exit' "$0" &
( setsid bash -c 'setsid bash -c "beat deep" "$0" & beat middle' "$0" & ) &
beat foreground
"""
CORNERS = {"background", "session", "orphan", "stray", "deep", "middle", "foreground"}


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        wait_until(lambda: state(pid) == "T")


class Run:
    """A supervised command, what it told, and who of it is alive."""

    def __init__(self, where: Path, *argv: str, **options: Any) -> None:
        self.told_at, self.lines = where / f"told-{uuid.uuid4().hex}", where / f"lines-{uuid.uuid4().hex}"
        self.lines.touch()
        argv = argv or ("bash", "-c", TREE, str(self.lines))
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, str(self.told_at), json.dumps({"beats": True, "grace": 0.1, **options}), *argv],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: self.told("group") or self.process.poll() is not None)
        (ready,) = self.told("group")
        self.wrapper, self.guard, self.group = ready["wrapper"], ready["guard"], ready["group"]

    def told(self, what: str) -> list[dict[str, Any]]:
        """All lines that have such a fact."""
        text = self.told_at.read_text() if self.told_at.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if what in line]

    def ended(self) -> dict[str, Any]:
        (line,) = self.told("ended")
        assert line["alive"] == []
        ended: dict[str, Any] = line["ended"]
        return ended

    def corners(self) -> set[str]:
        return {line.split()[0] for line in self.lines.read_text().splitlines()}

    def alive(self) -> list[int]:
        """Everybody that has the command's environment; a zombie has none."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if self.told_at.name.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def grown(self) -> Run:
        """Wait until it writes from every corner."""
        wait_until(lambda: self.corners() == CORNERS)
        return self

    def gone_after(self) -> float:
        """How long it takes from now until nobody is left."""
        began = time.monotonic()
        wait_until(lambda: not self.alive())
        return time.monotonic() - began

    def end(self) -> str:
        _, errors = self.process.communicate(timeout=LONG)
        wait_until(lambda: state(self.guard) in ("gone", "Z"))
        return errors

    def cleanup(self) -> None:
        self.process.kill()
        for pid in (self.guard, *self.alive()):
            with suppress(OSError):
                if pid != self.guard or "lease-guard" in Path(f"/proc/{pid}/comm").read_text():
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*argv: str, **options: Any) -> Run:
        runs.append(Run(tmp_path, *argv, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.cleanup()


def check_expired_once_by(run: Run, who: int) -> None:
    (expired,) = run.told("expired")
    assert (expired["expired"], expired["alive"], expired["by"]) == ("token-1", [], who)
    last = max(float(line.split()[1]) for line in run.lines.read_text().splitlines() if line.count(" ") == 1)
    assert last < expired["at"]


TIMES = [5, pytest.param(50, marks=pytest.mark.long)]


@pytest.mark.parametrize("times", TIMES)
def test_when_the_wrapper_is_killed_the_guard_ends_the_tree_and_then_the_lease(
    start: Callable[..., Run], times: int
) -> None:
    took = []
    for _ in range(times):
        run = start().grown()
        send(run.wrapper, signal.SIGKILL)
        took.append(run.gone_after())
        assert run.end() == ""
        check_expired_once_by(run, run.guard)
    print(took)
    assert max(took) < GONE_SECONDS, took


@pytest.mark.parametrize("times", TIMES)
def test_when_the_guard_is_killed_the_wrapper_ends_the_tree_and_then_the_lease(
    start: Callable[..., Run], times: int
) -> None:
    took = []
    for _ in range(times):
        run = start().grown()
        send(run.guard, signal.SIGKILL)
        took.append(run.gone_after())
        assert run.end() == ""
        check_expired_once_by(run, run.wrapper)
        ended = run.ended()
        assert (ended["why"], ended["status"], ended["expired"]) == ("guard-died", 137, True)
    print(took)
    assert max(took) < GONE_SECONDS, took


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("whom", ["wrapper", "guard"])
def test_a_kill_at_any_moment_leaves_nothing(start: Callable[..., Run], times: int, whom: str) -> None:
    for _ in range(times):
        run = start()
        time.sleep(random.uniform(0, 0.05))  # the moment is meant to be any: the tree is just growing
        send(getattr(run, whom), signal.SIGKILL)
        took = run.gone_after()
        run.end()
        assert took < GONE_SECONDS
        assert [expired["alive"] for expired in run.told("expired")] == [[]]


def test_when_both_are_killed_at_once_the_command_itself_dies_with_the_guard(start: Callable[..., Run]) -> None:
    # What it had started lives on: this is what escapes.
    run = start().grown()
    for pid in (run.wrapper, run.guard):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state(run.group) in ("gone", "Z"), GONE_SECONDS)
    assert run.alive()


def test_a_wrapper_killed_after_the_end_and_before_the_release_has_its_lease_expired(
    start: Callable[..., Run],
) -> None:
    body = """
supervisor = make()
prepare(supervisor)
supervisor.run()
os.kill(os.getpid(), 9)
"""
    run = start("true", body=body)
    run.process.wait(LONG)
    wait_until(lambda: run.told("expired"))
    (expired,) = run.told("expired")
    assert (expired["expired"], expired["alive"], expired["by"]) == ("token-1", [], run.guard)


def test_past_the_deadline_of_a_frozen_wrapper_the_guard_ends_the_tree_and_then_the_lease(
    start: Callable[..., Run],
) -> None:
    run = start(ttl=2).grown()
    send(run.wrapper, signal.SIGSTOP)
    frozen = time.time()
    wait_until(lambda: run.told("expired"))
    check_expired_once_by(run, run.guard)
    assert run.told("expired")[0]["at"] - frozen < 2 + 1.0 + GONE_SECONDS  # the guard waits 1 s for an answer
    last = max(float(line.split()[1]) for line in run.lines.read_text().splitlines())
    assert last - frozen < 2 + GONE_SECONDS

    wait_until(lambda: state(run.guard) in ("gone", "Z"))
    send(run.wrapper, signal.SIGCONT)
    assert run.end() == ""
    ended = run.ended()
    assert (ended["why"], ended["status"], ended["expired"]) == ("lost", 137, True)


def test_past_the_deadline_of_a_frozen_guard_the_wrapper_ends_the_tree_and_then_the_lease(
    start: Callable[..., Run],
) -> None:
    run = start(ttl=2, beats=False).grown()
    send(run.guard, signal.SIGSTOP)
    assert run.gone_after() < 2 + GONE_SECONDS
    assert run.end() == ""
    check_expired_once_by(run, run.wrapper)
    ended = run.ended()
    assert (ended["why"], ended["status"], ended["expired"]) == ("lost", 137, True)


def test_a_guard_that_was_frozen_while_heartbeats_went_on_does_no_harm(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    run = start("sh", "-c", 'read line < "$0"', str(pipe), ttl=0.5)
    send(run.guard, signal.SIGSTOP)
    time.sleep(1.5)  # three times what it would have had without heartbeats
    send(run.guard, signal.SIGCONT)
    pipe.write_text("go on\n")
    assert run.end() == ""
    ended = run.ended()
    assert (ended["why"], ended["status"], ended["expired"]) == ("exited", 0, False)
    assert run.told("expired") == []


@pytest.mark.parametrize("first", ["wrapper", "guard", "both"])
def test_supervisors_that_wake_past_the_deadline_end_the_tree_at_once(start: Callable[..., Run], first: str) -> None:
    run = start(ttl=0.7, grace=0.1).grown()
    for pid in (run.wrapper, run.guard):
        send(pid, signal.SIGSTOP)
    time.sleep(1)
    assert run.alive()
    for pid in {"wrapper": [run.wrapper], "guard": [run.guard], "both": [run.wrapper, run.guard]}[first]:
        send(pid, signal.SIGCONT)
    assert run.gone_after() < GONE_SECONDS
    if first == "guard":
        wait_until(lambda: run.told("expired"))
        send(run.wrapper, signal.SIGCONT)
    assert run.end() == ""
    assert run.ended()["why"] == "lost"
    assert all(expired["alive"] == [] for expired in run.told("expired"))
