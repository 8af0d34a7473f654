"""What a zombie is judged by, and the pytest plugin (whole stories: tests/contract/test_zombie.py)."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.watching import LONG, has_ended, states, wait_until

from agent_checkpoint import Event, StaleLeaseError, StateStore, plugins, testing
from agent_checkpoint.testing import Ended, FakeClock, ZombieOutcome, kill, pause_here
from agent_checkpoint.testing.outcome import judged

pytest_plugins = ["pytester"]

QUIET = ("-p", "no:langsmith_plugin", "-p", "no:cacheprovider")


# The verdict

ACQUIRED = ("lease.acquired", "release", 1)
MARKED = {"scope": "release", "token": 1}
FROZEN = ("zombie.frozen", None, None, MARKED)
SUCCEEDED = [
    ("lease.force-released", "release", 1),
    ("lease.acquired", "release", 2),
    ("checkpoint.saved", "release", 2),
]
WOKEN = ("zombie.woken", None, None, MARKED)
ENDED = ("zombie.ended", None, None, MARKED)


def event(kind: str, scope: str | None, token: int | None, detail: dict[str, Any] | None = None) -> Event:
    at = datetime(2030, 1, 1, tzinfo=timezone.utc)
    return Event("1", 1, at, kind, scope, None if token is None else "worker", token, "deploy", None, detail or {})


def verdict(*after: tuple[Any, ...], before: tuple[Any, ...] = ("checkpoint.saved", "release", 1)) -> tuple[Any, Any]:
    """The refusals and the late writes of what came after the agent woke."""
    story = [ACQUIRED, before, FROZEN, *SUCCEEDED, WOKEN, *after, ENDED]
    return judged([event(*each) for each in story], "release", 1, 2)


def test_what_was_written_before_the_successor_came_is_not_late() -> None:
    assert verdict() == ([], [])
    assert verdict(before=("checkpoint.saved", None, None)) == ([], [])
    earlier = ("zombie.woken", None, None, {"scope": "release", "token": 0})
    story = [event(*each) for each in (earlier, ACQUIRED, ("checkpoint.saved", None, None), FROZEN, *SUCCEEDED, WOKEN)]
    assert judged(story, "release", 1, 2) == ([], [])


def test_a_write_with_the_stale_token_or_without_one_is_late() -> None:
    late = [("checkpoint.saved", "release", 1), ("checkpoint.saved", None, None), ("thread.saved", None, None)]
    assert [(found.kind, found.scope, found.token) for found in verdict(*late)[1]] == late


def test_refusals_are_not_late() -> None:
    refusals = [("write.refused", "release", 1), ("write.refused", "release", None)]
    refused, late = verdict(*refusals)
    assert ([(found.kind, found.scope, found.token) for found in refused], late) == (refusals, [])


def test_what_others_and_the_store_itself_do_is_not_late() -> None:
    others = [("checkpoint.saved", "release", 2), ("checkpoint.saved", "release", 3), ("checkpoint.saved", "other", 1)]
    house = [("store.migrated", None, None), ("events.archived", None, None), ("lease.limit-set", "release", None)]
    assert verdict(*others, *house) == ([], [])


def test_that_an_effect_was_done_may_be_told_late() -> None:
    assert verdict(("effect.done", "release", 1, {"key": "refund-42", "late": True})) == ([], [])
    assert len(verdict(("effect.done", "release", 1, {"key": "refund-42"}))[1]) == 1


def outcome(**parts: Any) -> ZombieOutcome:
    ended = Ended(parts.pop("returncode", 0), parts.pop("exception", None), "its words", parts.pop("stderr", ""))
    facts = {"refused": [], "late_writes": [], "late_acts": 0, **parts}
    return ZombieOutcome("release", 1, 2, **facts, ended=ended, successor=None)


@pytest.mark.parametrize(
    "told",
    [
        {"refused": [event("write.refused", "release", 1)]},
        {"returncode": 1, "exception": StaleLeaseError("late", reason="superseded")},
        {"returncode": 76},
        {"returncode": 1, "stderr": "agent_checkpoint.errors.StaleLeaseError: late"},
    ],
)
def test_an_agent_that_was_told_and_left_nothing_behind_is_refused(told: dict[str, Any]) -> None:
    outcome(**told).assert_refused()


def test_an_agent_that_stumbles_over_something_else_proves_nothing() -> None:
    stumbled = outcome(refused=[event("write.refused", "release", 1)], returncode=1, exception=TypeError("no text"))
    stumbled.assert_nothing_late()
    with pytest.raises(AssertionError, match="ended with TypeError, which may be all that kept it"):
        stumbled.assert_refused()


def test_an_agent_may_wrap_the_refusal_in_an_error_of_its_own() -> None:
    traceback = "agent_checkpoint.errors.StaleLeaseError: late\n\nThe above exception was the direct cause"
    outcome(returncode=1, exception=RuntimeError("deploy failed"), stderr=traceback).assert_refused()


@pytest.mark.parametrize("told", [{}, {"returncode": 1, "stderr": "NameError"}, {"stderr": "StaleLeaseError"}])
def test_an_agent_that_nobody_told_proves_nothing(told: dict[str, Any]) -> None:
    outcome(**told).assert_nothing_late()
    with pytest.raises(AssertionError, match="nothing that it did was refused") as failed:
        outcome(**told).assert_refused()
    assert "pause_here()" in str(failed.value)
    assert "its words" in str(failed.value)


def test_the_message_names_each_late_write_and_what_to_do() -> None:
    late = [event("checkpoint.saved", None, None), event("checkpoint.saved", "release", 1)._replace(sequence=7)]
    with pytest.raises(AssertionError) as failed:
        outcome(late_writes=late, returncode=76).assert_refused()
    assert "  - wrote checkpoint.saved to 'deploy', without a lease\n" in str(failed.value)
    assert "  - wrote checkpoint.saved to 'deploy', sequence 7, with the stale token 1\n" in str(failed.value)
    assert "store.put_checkpoint(…, lease=lease)" in str(failed.value)
    assert "check()" not in str(failed.value)


def test_the_message_names_late_acts_and_what_to_do() -> None:
    with pytest.raises(AssertionError) as failed:
        outcome(late_acts=2, returncode=76).assert_nothing_late()
    assert "  - acted 2 times outside\n" in str(failed.value)
    assert "lease.check()" in str(failed.value)
    assert "store.put_checkpoint" not in str(failed.value)


# The plugin

AGENTS = """
from agent_checkpoint import StateStore
from agent_checkpoint.testing import pause_here

def work(db, lease_for):
    with StateStore(db) as store:
        lease = store.acquire("release", "worker-a")
        store.put_checkpoint("deploy", {"step": 1}, **lease_for(lease))
        pause_here()
        store.put_checkpoint("deploy", {"step": 2}, **lease_for(lease))

def test_right(zombie, tmp_path):
    db = tmp_path / "agents.db"
    work_rightly = lambda: work(db, lambda lease: {"lease": lease})
    zombie(work_rightly, db=db, scope="release", freeze_when="paused").assert_refused()

def test_broken(zombie, tmp_path):
    db = tmp_path / "agents.db"
    work_without_a_fence = lambda: work(db, lambda lease: {})
    zombie(work_without_a_fence, db=db, scope="release", freeze_when="paused").assert_refused()

def test_idle(zombie, tmp_path):
    zombie(lambda: print("idle"), db=tmp_path / "agents.db", scope="release").assert_refused()

def test_time(agent_checkpoint_store, agent_checkpoint_clock):
    agent_checkpoint_store.acquire("release", "worker-a", ttl_seconds=30)
    agent_checkpoint_clock.advance(30)
    assert agent_checkpoint_store.acquire("release", "worker-b").token == 2
"""


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_right_agent_passes_and_a_broken_one_fails_with_what_to_do(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makepyfile(AGENTS)
    ran = pytester.runpytest_subprocess(*QUIET, *options, "-W", "error", timeout=LONG)
    ran.assert_outcomes(passed=2, failed=2)
    ran.stdout.fnmatch_lines_random(
        [
            "E *AssertionError: the agent woke with token 1 of 'release', which token 2 had superseded.",
            "E *- wrote checkpoint.saved to 'deploy', sequence 2, without a lease",
            "E *Let each write present the lease it was made under: store.put_checkpoint(*, lease=lease)*",
            "E *the agent ended with status 0, before it held a lease on 'release': it must acquire that scope in *",
            "E *idle",
        ]
    )


HANGS = """
import os, signal, time
from pathlib import Path
from agent_checkpoint import StateStore

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started by

def test_hang(zombie):
    def agent():
        with StateStore("agents.db") as store, store.hold("release", "worker-a"):
            time.sleep(600)

    def successor():
        Path("pids").write_text(f"{StateStore('agents.db').get_lease('release', True).process['pid']} {os.getpid()}")
        time.sleep(600)

    zombie(agent, db="agents.db", scope="release", successor=successor, timeout_seconds=600)
"""


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_nobody_is_left_frozen_when_the_tests_end_in_the_middle(
    pytester: pytest.Pytester, number: signal.Signals
) -> None:
    pytester.makepyfile(HANGS)
    words = [sys.executable, "-m", "pytest", *QUIET]
    tests = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: Path("pids").exists() and len(Path("pids").read_text().split()) == 2)
        pids = [int(pid) for pid in Path("pids").read_text().split()]
        assert states(pids[0]) == {"T"}
        while tests.poll() is None:  # Python may lose an interrupt in what it calls at a fork
            tests.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                tests.wait(5)
        wait_until(lambda: all(has_ended(pid) for pid in pids))
    finally:
        kill(tests)


def answer(code: str) -> str:
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=LONG)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_plugin_imports_nothing_of_the_package_before_a_test_asks() -> None:
    code = "import sys, pytest, agent_checkpoint_pytest; print([name for name in sys.modules if 'checkpoint' in name])"
    assert answer(code) == "['agent_checkpoint_pytest']"


def test_the_tools_need_no_pytest_and_a_store_needs_no_tools() -> None:
    assert answer("import sys, agent_checkpoint.testing; print('pytest' in sys.modules)") == "False"
    code = "import sys, agent_checkpoint.store; print([name for name in sys.modules if 'testing' in name])"
    assert answer(code) == "[]"


def test_a_plugin_of_pytest_is_none_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "some_package-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[pytest11]\nagent_checkpoint = some.module\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert plugins.installed() == {}
    (info / "entry_points.txt").write_text("[pytest11]\nours = a\n\n[agent_checkpoint]\ntheirs = b\n[other]\nx = c\n")
    assert plugins.installed() == {"theirs": {"some_package"}}


def test_outside_of_a_story_a_pause_is_none() -> None:
    pause_here()


def test_every_public_name_has_a_docstring_and_is_sorted() -> None:
    assert testing.__all__ == sorted(testing.__all__)
    for name in set(testing.__all__) - {"EPOCH_NS"}:
        assert getattr(testing, name).__doc__, name


def test_the_fixtures_are_a_store_and_its_clock(
    agent_checkpoint_store: StateStore, agent_checkpoint_clock: FakeClock
) -> None:
    agent_checkpoint_store.acquire("release", "worker-a", ttl_seconds=30)
    agent_checkpoint_clock.advance(30)
    assert agent_checkpoint_store.get_lease("release") is None
