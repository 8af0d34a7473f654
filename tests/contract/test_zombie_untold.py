"""Stories of zombies that cannot be told: the message says why, and what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import InvalidInputError, StateStore
from agent_checkpoint.testing import ZombieOutcome, pause_here

pytestmark = pytest.mark.usefixtures("unmeasured")

Zombie = Callable[..., ZombieOutcome]


def failure(call: Callable[[], object]) -> str:
    with pytest.raises(AssertionError) as failed:
        call()
    return str(failed.value)


def test_an_agent_that_never_acquires_is_told_which_scope_and_store(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("other", "worker-a")
            raise ValueError("no luck")

    said = failure(lambda: zombie(agent, db=path, scope="release"))
    assert said.startswith("the agent ended with status 1, before it held a lease on 'release': it must acquire")
    assert "AGENT_CHECKPOINT_DB too; scopes that were granted there: 'other'\n" in said
    assert "ValueError: no luck" in said


def test_an_agent_that_is_too_quick_is_told_to_pause(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.release(*store.acquire("release", "worker-a").fence)

    def never(store: StateStore) -> bool:
        return False

    assert "freeze_when(store) was never true" in failure(
        lambda: zombie(agent, db=path, scope="release", freeze_when=never)
    )
    assert "it never called pause_here()" in failure(
        lambda: zombie(agent, db=path, scope="release", freeze_when="paused")
    )


def test_an_agent_that_stays_away_is_not_waited_for(zombie: Zombie, path: Path | str) -> None:
    said = failure(lambda: zombie(lambda: time.sleep(600), db=path, scope="release", timeout_seconds=0.5))
    assert said.startswith("the agent was not frozen within timeout_seconds=0.5, before it held a lease on 'release'")


def test_an_agent_that_does_not_end_is_ended(zombie: Zombie, path: Path | str, tmp_path: Path) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("release", "worker-a")
            (tmp_path / "pid").write_text(str(os.getpid()))
            pause_here()
            time.sleep(600)

    said = failure(lambda: zombie(agent, db=path, scope="release", freeze_when="paused", timeout_seconds=3))
    assert said == "the agent did not end within timeout_seconds=3, after it was woken with token 1"
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_ttl_that_is_too_long_is_named(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("release", "worker-a", ttl_seconds=600)
            pause_here()

    said = failure(
        lambda: zombie(agent, db=path, scope="release", freeze_when="paused", take_over="ttl", timeout_seconds=3)
    )
    assert "of 600 s, did not run out within timeout_seconds=3" in said


def test_a_successor_that_fails_is_shown(zombie: Zombie, path: Path | str) -> None:
    def agent() -> None:
        with StateStore(path) as store:
            store.acquire("release", "worker-a")
            pause_here()

    words = ["sh", "-c", "echo broken >&2; exit 3"]
    said = failure(lambda: zombie(agent, db=path, scope="release", freeze_when="paused", successor=words))
    assert said == (
        "the successor ended with status 3; it must be granted 'release' and exit with 0\nIts stderr:\nbroken\n"
    )


def test_a_scope_that_somebody_holds_is_refused(zombie: Zombie, path: Path | str) -> None:
    with StateStore(path) as store:
        store.initialize()
        store.acquire("release", "somebody")
        assert "'release' is held by 'somebody'" in failure(lambda: zombie(print, db=path, scope="release"))


@pytest.mark.parametrize(
    ("field", "given"),
    [("agent", "sh -c true"), ("agent", []), ("freeze_when", "soon"), ("take_over", "gently")],
)
def test_a_value_that_breaks_its_rule_is_named(zombie: Zombie, path: Path | str, field: str, given: Any) -> None:
    values = {"agent": print, "freeze_when": "granted", "take_over": "force", field: given}
    agent = values.pop("agent")
    with pytest.raises(InvalidInputError, match=f"^{field}: "):
        zombie(agent, db=path, scope="release", **values)
