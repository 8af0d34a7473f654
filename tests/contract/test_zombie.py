"""Whole stories of zombies: agents that are right and agents that are broken, frozen, superseded and woken."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StaleLeaseError, StateStore
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint.testing import ZombieOutcome, pause_here

pytestmark = pytest.mark.usefixtures("unmeasured")

Zombie = Callable[..., ZombieOutcome]
COMMAND = [sys.executable, "-m", "agent_checkpoint"]
SCRIPT = """
command() { "$PYTHON" -m agent_checkpoint "$@"; }
command checkpoint put deploy --data '{"by": "agent"}' --field token
"$PYTHON" -c 'from agent_checkpoint.testing import pause_here; pause_here()'
command checkpoint put deploy --data '{"by": "zombie"}'
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHON", sys.executable)
    file = tmp_path / "agent.sh"
    file.write_text(SCRIPT)
    return file


def kinds(path: Path | str) -> list[str]:
    with StateStore(path) as store:
        return [event.kind for event in store.events(1_000)]


def latest(path: Path | str, workflow: str = "deploy") -> Any:
    with StateStore(path) as store:
        found = store.get_checkpoint(workflow)
        return None if found is None else found.data


# Agents that are right


def test_an_agent_that_holds_its_lease_is_refused_and_leaves_nothing(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a") as held:
            store.put_checkpoint("deploy", {"step": 1}, lease=held)
            pause_here()
            print("awake")
            store.put_checkpoint("deploy", {"step": 2}, lease=held)

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused")

    outcome.assert_refused()
    assert (outcome.scope, outcome.token, outcome.successor_token) == ("release", 1, 2)
    assert (outcome.returncode, outcome.stdout, outcome.late_writes, outcome.late_acts) == (1, "awake\n", [], 0)
    assert isinstance(outcome.exception, StaleLeaseError)
    assert "StaleLeaseError" in outcome.stderr
    assert [event.detail["action"] for event in outcome.refused][:1] == ["checkpoint.put"]
    assert latest(path) == {"step": 1}
    story = ["zombie.frozen", "lease.force-released", "lease.acquired", "lease.released", "zombie.woken"]
    assert [kind for kind in kinds(path) if kind in story] == ["lease.acquired", *story]


def test_so_is_one_that_sends_its_heartbeats_itself(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            lease = store.acquire("release", "worker-a")
            pause_here()
            store.heartbeat(*lease.fence)

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused")
    outcome.assert_refused()
    assert [event.detail["action"] for event in outcome.refused] == ["lease.heartbeat"]


def test_so_is_one_in_asyncio(zombie: Zombie, path: Path | str) -> None:
    async def agent() -> None:
        async with AsyncStateStore(path) as store, store.hold("release", "worker-a") as held:
            pause_here()
            await store.put_checkpoint("deploy", {"step": 2}, lease=held)

    zombie(agent, db=path, scope="release", freeze_when="paused").assert_refused()


def test_so_is_a_script_under_run_with_all_its_processes(zombie: Zombie, path: Path | str, script: Path) -> None:
    run = [*COMMAND, "run", "release", "--owner", "worker-a", "--", "sh", script]
    outcome = zombie(run, db=path, scope="release", freeze_when="paused")

    outcome.assert_refused()
    assert (outcome.returncode, outcome.stdout, outcome.exception) == (76, "1\n", None)
    assert latest(path) == {"by": "agent"}


def test_the_successor_may_be_the_agent_itself_that_goes_on_from_the_checkpoint(
    zombie: Zombie, path: Path | str
) -> None:
    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker") as held:
            found = store.get_checkpoint("deploy")
            step = found.data if found else 0
            store.put_checkpoint("deploy", step + 1, lease=held)
            pause_here()
            store.put_checkpoint("deploy", step + 2, lease=held)
            print("done")

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused", successor=agent)
    outcome.assert_refused()
    assert outcome.successor is not None
    assert (outcome.successor.returncode, outcome.successor.stdout, outcome.stdout) == (0, "done\n", "")
    assert latest(path) == 3


def test_the_successor_may_be_a_command(zombie: Zombie, path: Path | str, script: Path) -> None:
    run = [*COMMAND, "run", "release", "--", "sh", str(script)]
    outcome = zombie(run, db=path, scope="release", freeze_when="paused", successor=run)
    outcome.assert_refused()
    assert latest(path) == {"by": "zombie"}  # the other one's
    assert outcome.successor is not None
    assert outcome.successor.stdout.startswith("2\n")


def test_a_lease_may_run_out_by_itself(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a", ttl_seconds=1) as held:
            pause_here()
            held.check()

    zombie(agent, db=path, scope="release", freeze_when="paused", take_over="ttl").assert_refused()
    assert {"lease.expired", "zombie.woken"} <= set(kinds(path))
    assert "lease.force-released" not in kinds(path)


@pytest.mark.parametrize("how", ["granted", "function"])
def test_an_agent_that_works_on_is_frozen_without_a_word_in_it(zombie: Zombie, path: Path | str, how: str) -> None:
    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a") as held:
            while True:
                store.put_checkpoint("deploy", {}, lease=held)
                time.sleep(0.01)

    def has_saved_three(store: StateStore) -> bool:
        return len(store.checkpoint_history("deploy")) >= 3

    moment: Any = has_saved_three if how == "function" else "granted"
    zombie(agent, db=path, scope="release", freeze_when=moment).assert_refused()
    if how == "function":
        with StateStore(path) as store:
            assert len(store.checkpoint_history("deploy")) >= 3


def test_an_agent_is_not_frozen_while_it_sits_on_what_its_successor_needs(
    zombie: Zombie, path: Path | str, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"

    def agent() -> None:
        with StateStore(path) as store:
            lease = store.acquire("release", "worker-a")
            with store.transaction(component="tests", action="test.write", fence=lease) as part:
                part.event("test.happened")
                inside.touch()
                time.sleep(0.2)
            while True:
                time.sleep(0.1)
                store.put_checkpoint("deploy", {}, lease=lease)

    outcome = zombie(agent, db=path, scope="release", freeze_when=lambda store: inside.exists())
    outcome.assert_refused()
    found = kinds(path)
    assert found.index("test.happened") < found.index("zombie.frozen")


def test_a_scope_that_has_a_history_goes_on_with_it(zombie: Zombie, path: Path | str) -> None:
    with StateStore(path) as store:
        store.initialize()
        store.release(*store.acquire("release", "somebody").fence)

    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a") as held:
            pause_here()
            held.check()

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused")
    outcome.assert_refused()
    assert (outcome.token, outcome.successor_token) == (2, 3)


# Agents that are broken


def test_an_agent_that_writes_without_its_lease_is_caught(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("release", "worker-a")
            pause_here()
            store.put_checkpoint("deploy", {"step": 2})

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused")
    with pytest.raises(AssertionError, match=r"wrote checkpoint.saved to 'deploy', sequence 1, without a lease"):
        outcome.assert_refused()
    assert outcome.returncode == 0


def test_an_agent_that_acts_outside_without_a_check_is_caught(zombie: Zombie, path: Path | str, tmp_path: Path) -> None:
    published = tmp_path / "published.txt"

    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a"):
            pause_here()
            published.touch()

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused", acts=published.exists)
    with pytest.raises(AssertionError, match=r"acted outside"):
        outcome.assert_refused()
    assert outcome.noticed  # too late, at the end of the block


def test_an_agent_that_takes_its_lease_for_granted_is_caught(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("release", "worker-a")
            pause_here()

    outcome = zombie(agent, db=path, scope="release", freeze_when="paused")
    outcome.assert_nothing_late()
    with pytest.raises(AssertionError, match="nothing that it did was refused"):
        outcome.assert_refused()


def test_a_second_story_in_one_store_is_judged_by_itself(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store, store.hold("release", "worker-a") as held:
            store.put_checkpoint("notes", {})
            pause_here()
            held.check()

    for token in (1, 3):
        outcome = zombie(agent, db=path, scope="release", freeze_when="paused")
        outcome.assert_refused()
        assert outcome.token == token
