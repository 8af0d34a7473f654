"""Effects where a process, a fork or an interrupt comes between (what holds on every database: tests/contract)."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint import (
    EffectRunningError,
    EffectUnknownError,
    Fence,
    InvalidInputError,
    StaleLeaseError,
    StateStore,
)
from agent_checkpoint.records import EffectRow, Moment
from agent_checkpoint.rules import effect as rule
from agent_checkpoint.testing import FakeProcesses

MINE, THEIRS = Fence("release", "worker-a", 1), Fence("release", "worker-b", 2)
NOW = Moment(2_000, 2_000, "boot-1", True)


def row(state: str = "begun", **changes: object) -> EffectRow:
    made = EffectRow("publish", *MINE, "begun", None, None, 1_000, None, 0, "me")
    return made._replace(state=state, **changes)  # type: ignore[arg-type]


def begin(known: EffectRow | None, fence: Fence, *, running: bool) -> str:
    found = rule.begin(known, "publish", None, fence, running, NOW, "me")
    return found.state if isinstance(found, EffectRow) else type(found).__name__


@pytest.mark.parametrize("fence", [MINE, THEIRS])
@pytest.mark.parametrize(
    ("state", "running", "answer"),
    [
        ("begun", True, "EffectRunningError"),
        ("begun", False, "EffectUnknownError"),
        ("unknown", True, "EffectUnknownError"),
        ("unknown", False, "EffectUnknownError"),
        ("done", False, "done"),
        ("failed", True, "begun"),
    ],
)
def test_who_may_begin_goes_by_the_state_alone_not_by_who_asks(
    fence: Fence, state: str, running: bool, answer: str
) -> None:
    assert begin(row(state), fence, running=running) == answer


def test_a_new_try_forgets_the_times_of_the_last_one() -> None:
    known = row("failed", ended_at=1_500, late=1)

    assert rule.begin(known, "publish", "digest", THEIRS, False, NOW, "other") == EffectRow(
        "publish", *THEIRS, "begun", "digest", None, 2_000, None, 0, "other"
    )


@pytest.mark.parametrize(
    "other", [{"token": 2}, {"owner": "worker-b"}, {"scope": "s"}, {"begun_at": 1_001}, {"process": "you"}], ids=str
)
def test_a_word_is_about_the_try_that_was_begun_and_no_other(other: dict[str, object]) -> None:
    begun = row()

    assert isinstance(rule.end(row("unknown"), begun, "done", "7", True, NOW), EffectRow)
    assert isinstance(rule.end(row(**other), begun, "done", "7", True, NOW), StaleLeaseError)
    assert isinstance(rule.resolve(row("unknown"), begun, False, "done", "7", NOW), EffectRow)
    assert isinstance(rule.resolve(row(**other), begun, False, "done", "7", NOW), EffectRunningError)


@pytest.mark.parametrize("state", ["done", "failed"])
def test_what_is_known_is_told_by_nobody_any_more(state: str) -> None:
    assert isinstance(rule.end(row(state), row(), "done", None, False, NOW), StaleLeaseError)
    assert isinstance(rule.end(None, row(), "done", None, False, NOW), StaleLeaseError)
    assert isinstance(rule.resolve(row(state), row(), False, "done", None, NOW), InvalidInputError)


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("refund-42", "agent-checkpoint effect resolve --done refund-42 (or --retry)"),
        ("-x", "agent-checkpoint effect resolve --done -- -x (or --retry)"),
        ("a $(rm -r .)'s", """agent-checkpoint effect resolve --done 'a $(rm -r .)'"'"'s' (or --retry)"""),
    ],
)
def test_the_hint_can_be_pasted_into_a_shell(key: str, command: str) -> None:
    assert rule.unknown(row(key=key)).hint.endswith(command)


def test_an_effect_is_never_deleted(store: StateStore, path: Path) -> None:
    with store.effect("publish", lease=store.acquire("release", "worker-a")) as effect:
        effect.done()

    with closing(sqlite3.connect(path)) as raw, pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        raw.execute("DELETE FROM effects")
    assert store.get_effect("publish") is not None


def test_what_a_dead_process_began_is_unknown_though_its_lease_is_live(path: Path) -> None:
    processes = FakeProcesses()
    with StateStore(path, processes=processes) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a")
        processes.start(101)
        processes.pid = 101
        store.effect("publish", lease=lease).__enter__()
        processes.start(102)
        processes.pid = 102
        with pytest.raises(EffectRunningError):
            store.effect("publish", lease=lease).__enter__()

        processes.kill(101)

        with pytest.raises(EffectUnknownError):
            store.effect("publish", lease=lease).__enter__()
        with pytest.raises(EffectRunningError):  # what it started may be at it still
            store.resolve_effect("publish", retry=True)


def test_a_held_lease_begins_effects_and_tells_of_them_when_it_is_over(store: StateStore) -> None:
    with store.hold("release", "worker-a") as held:
        effect = held.effect("publish", request={"version": 1})
        assert effect.fence == held.fence
        began = effect.__enter__()
    began.done(7)

    found = store.get_effect("publish")
    assert found is not None
    assert (found.state, found.result, found.late) == ("done", 7, True)


def test_of_many_threads_under_one_lease_one_may_act(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a")
    together = threading.Barrier(8)
    answers: list[str] = []

    def act() -> None:
        together.wait()
        try:
            with store.effect("publish", lease=lease) as effect:
                answers.append("fresh" if effect.fresh else "done")
                if effect.fresh:
                    effect.done()
        except EffectRunningError:
            answers.append("running")

    threads = [threading.Thread(target=act) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert answers.count("fresh") == 1


def program(source: str, path: Path) -> str:
    """What a program of its own prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", source, str(path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FORKED = """
import os, sys
from agent_checkpoint import StateStore
store = StateStore(sys.argv[1])
store.initialize()
lease = store.acquire("release", "worker-a")
try:
    with store.effect("publish", lease=lease) as effect:
        child = os.fork()
        if child == 0:
            raise SystemExit
        os.waitpid(child, 0)
        print(store.get_effect("publish").state)
        effect.done()
except SystemExit:
    os._exit(0)
print(store.get_effect("publish").state)
"""


def test_a_forked_child_that_leaves_the_block_says_nothing_for_its_parent(path: Path) -> None:
    assert program(FORKED, path).split() == ["begun", "done"]


# An alarm strikes at any line of the block, of what it calls, and between; the list is the world outside.
STRUCK = """
import random, signal, sys
from agent_checkpoint import EffectRunningError, EffectUnknownError, StateStore

def strike(*_):
    raise KeyboardInterrupt

sys.unraisablehook = lambda _: None  # one that strikes in a finalizer is reported, not raised
store = StateStore(sys.argv[1], synchronous="normal")
store.initialize()
lease = store.acquire("release", "worker-a", 600)
choose = random.Random(7)
signal.signal(signal.SIGALRM, strike)
outside, interrupted, states = [], 0, set()
for turn in range(400):
    key = f"key-{turn}"
    for attempt in range(3):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, 0.0012))
                with store.effect(key, lease=lease) as effect:
                    if effect.fresh:
                        outside.append(key)
                        effect.done(turn)
            except (EffectRunningError, EffectUnknownError):
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
    found = store.get_effect(key)
    states.add(found and found.state)
    assert found is None or found.state != "done" or key in outside
    assert key not in outside or found is not None, key
assert len(outside) == len(set(outside)), "something was done twice"
assert interrupted > 50, interrupted
assert "done" in states and len(states) > 1, states
"""


def test_an_interrupt_at_any_line_does_nothing_twice_and_hides_nothing(path: Path) -> None:
    assert program(STRUCK, path) == ""


def test_an_interrupt_in_the_block_leaves_it_unknown(store: StateStore) -> None:
    lease = store.acquire("release", "worker-a")
    with pytest.raises(KeyboardInterrupt), store.effect("publish", lease=lease):
        signal.raise_signal(signal.SIGINT)

    found = store.get_effect("publish")
    assert found is not None
    assert found.state == "unknown"


def test_the_error_of_the_block_is_raised_even_where_nothing_can_be_recorded(path: Path) -> None:
    with StateStore(path, busy_timeout_seconds=0) as store, closing(sqlite3.connect(path)) as other:
        store.initialize()
        lease = store.acquire("release", "worker-a")
        with pytest.raises(ZeroDivisionError), store.effect("publish", lease=lease):
            other.execute("BEGIN IMMEDIATE")
            raise ZeroDivisionError
        other.rollback()

        with pytest.raises(EffectRunningError):
            store.effect("publish", lease=lease).__enter__()
        store.release(*lease.fence)
        assert [effect.state for effect in store.list_effects()] == ["unknown"]
