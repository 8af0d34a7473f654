"""The recipes as they stand: killed, repeated and raced, and the action at their end happens once."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint import Effect, StateStore

RECIPES = Path(__file__).parents[2] / "examples/recipes"
# Longer than anything here takes: only a hang reaches it.
LONG = 120.0
UNKNOWN = 76


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT")}
    return {**kept, "PATH": os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))}


def start(folder: Path, recipe: str, *arguments: str) -> subprocess.Popen[str]:
    program = "sh" if recipe.endswith(".sh") else sys.executable
    return subprocess.Popen(
        [program, str(RECIPES / recipe), *arguments],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def run(folder: Path, recipe: str, *arguments: str) -> tuple[int, str, str]:
    return finish(start(folder, recipe, *arguments))


def kill_at_any_moment(process: subprocess.Popen[str], longest: float) -> None:
    """As a machine does that has no memory left: it, and what it started in its session."""
    time.sleep(random.uniform(0, longest))
    os.killpg(process.pid, signal.SIGKILL)
    finish(process)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def a_person_looks(folder: Path, key: str, happened: bool) -> None:
    """What the message of exit status 76 asks for."""
    words = ["effect", "resolve", "--done" if happened else "--retry", "--by", "ada", "--", key]
    subprocess.run(["agent-checkpoint", *words], cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)


def one_effect(store: StateStore, key: str) -> Effect:
    (effect,) = (each for each in store.list_effects() if each.key == key)
    return effect


def test_every_recipe_is_tested_here_and_named_in_the_docs() -> None:
    page = (RECIPES.parents[1] / "docs/recipes.md").read_text()
    for recipe in RECIPES.glob("*.*"):
        assert recipe.name in Path(__file__).read_text()
        assert f"(../examples/recipes/{recipe.name})" in page


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.long)])
def test_a_release_is_published_once_however_often_it_is_killed(tmp_path: Path, kills: int) -> None:
    for _ in range(kills):
        kill_at_any_moment(start(tmp_path, "release.sh", "1.0"), longest=1.5)
    status, out, err = run(tmp_path, "release.sh", "1.0")
    if status == UNKNOWN:
        assert json.loads(err)["error"]["code"] == "effect-unknown"
        a_person_looks(tmp_path, "publish 1.0", happened=bool(lines(tmp_path / "published.txt")))
        status, out, err = run(tmp_path, "release.sh", "1.0")

    assert (status, err) == (0, "")
    assert lines(tmp_path / "published.txt") == ["published 1.0"]
    assert out in ("https://example.org/1.0\n", "null\n", "")


def test_releases_go_one_after_the_other_and_each_prints_what_was_published(tmp_path: Path) -> None:
    started = [start(tmp_path, "release.sh", version) for version in ("1.0", "1.0", "1.1")]

    assert [finish(process) for process in started] == [
        (0, f"https://example.org/{version}\n", "") for version in ("1.0", "1.0", "1.1")
    ]
    assert sorted(lines(tmp_path / "published.txt")) == ["published 1.0", "published 1.1"]
    assert sorted(lines(tmp_path / "builds.txt")) == ["built 1.0", "built 1.1"]


def test_a_cron_job_sends_one_report_a_day(tmp_path: Path) -> None:
    for day in ("2030-01-01", "2030-01-02"):
        started = [start(tmp_path, "cron.sh", day) for _ in range(4)]
        assert {finish(process)[0] for process in started} == {0}
        assert run(tmp_path, "cron.sh", day)[0] == 0

    assert lines(tmp_path / "mails.txt") == ["report of 2030-01-01", "report of 2030-01-02"]


def test_a_migration_copies_every_row_and_switches_once(tmp_path: Path) -> None:
    rows = [(number, f"note {number}") for number in range(1, 5_001)]
    with closing(sqlite3.connect(tmp_path / "old.db")) as old, old:
        old.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
        old.executemany("INSERT INTO notes VALUES (?, ?)", rows)
    for _ in range(4):
        kill_at_any_moment(start(tmp_path, "migration.py", "old.db", "new.db"), longest=0.8)
    together = [start(tmp_path, "migration.py", "old.db", "new.db") for _ in range(2)]

    assert [finish(process) for process in together] == [(0, "", "")] * 2
    with closing(sqlite3.connect(tmp_path / "new.db")) as new:
        assert new.execute("SELECT * FROM notes ORDER BY id").fetchall() == rows
        assert new.execute("SELECT COUNT(*) FROM switched").fetchone() == (1,)
    with StateStore(tmp_path / "agents.db") as store:
        assert one_effect(store, "migration/notes: switch").state == "done"
        copied = [info.sequence for info in store.checkpoint_history("migration/notes")]
        assert copied[0] >= len(rows) // 100


def test_a_browser_agent_orders_once(tmp_path: Path) -> None:
    for _ in range(6):
        kill_at_any_moment(start(tmp_path, "browser_agent.py", "order-1"), longest=0.4)
    together = [start(tmp_path, "browser_agent.py", "order-1") for _ in range(3)]
    answers = [finish(process) for process in together]

    (order,) = map(json.loads, lines(tmp_path / "orders.jsonl"))
    assert answers == [(0, f"ticket {order['reference'][:8]}\n", "")] * 3
    with StateStore(tmp_path / "agents.db") as store:
        history = store.checkpoint_history("browser/order-1")
        assert [info.sequence for info in history] == [3, 2, 1], "a page was filled in twice"


def test_a_content_pipeline_publishes_each_article_once(tmp_path: Path) -> None:
    articles = [f"article-{number}" for number in range(6)]
    first = [start(tmp_path, "content_pipeline.py", *articles) for _ in range(2)]
    for process in first:
        kill_at_any_moment(process, longest=0.4)
    statuses = all_of(start(tmp_path, "content_pipeline.py", *articles) for _ in range(3))

    assert statuses == [(0, "", "")] * 3
    assert sorted(lines(tmp_path / "site.txt")) == articles
    with StateStore(tmp_path / "agents.db") as store:
        for article in articles:
            found = store.get_checkpoint(f"article/{article}")
            assert found is not None
            assert sorted(found.data) == ["drafted", "edited", "outlined"]
            assert found.sequence == 3


def all_of(started: Iterable[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [finish(process) for process in list(started)]
