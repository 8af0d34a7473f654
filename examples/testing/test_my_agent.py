"""That the agent does nothing any more once another one has taken over."""

from pathlib import Path

import my_agent
import pytest

from agent_checkpoint.testing import pause_here


def test_a_zombie_publishes_nothing(zombie, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, page = tmp_path / "agents.db", tmp_path / "page.html"
    # Here it is frozen, and woken.
    monkeypatch.setattr(my_agent, "prepare", lambda: pause_here() or "late\n")

    outcome = zombie(
        lambda: my_agent.run(db, page),
        db=db,
        scope="release",
        freeze_when="paused",
        acts=page.exists,
    )

    outcome.assert_refused()
