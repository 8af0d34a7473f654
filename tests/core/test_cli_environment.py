"""Leases in the environment: what ``--export`` puts there, and who takes them from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

from .conftest import CLEAN, WATCHDOG_SECONDS, Answer, Cli


@pytest.fixture
def cli(bare_cli: Cli) -> Cli:
    """The command in this process, in an environment that carries nothing yet."""
    return bare_cli


@pytest.fixture
def db(path: Path) -> str:
    """An initialized store."""
    with StateStore(path) as store:
        store.initialize()
    return str(path)


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], dict[str, str]]:
    """Let a real sh evaluate export lines, and take over what it then exports."""

    def evaluate(answer: Answer) -> dict[str, str]:
        assert (answer.status, answer.err) == (0, "")
        printed = subprocess.run(["sh", "-euc", 'eval "$0"; env -0', answer.out], stdout=subprocess.PIPE, check=True)
        exported = dict(line.split("=", 1) for line in os.fsdecode(printed.stdout).split("\0") if line)
        ours = {name: value for name, value in exported.items() if name.startswith("AGENT_CHECKPOINT_")}
        for name, value in ours.items():
            monkeypatch.setenv(name, value)
        return ours

    return evaluate


Evaluate = Callable[[Answer], dict[str, str]]


def carry(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"AGENT_CHECKPOINT_{name}", value)


def test_a_shell_works_from_the_environment_from_acquire_to_release(tmp_path: Path) -> None:
    script = """
    cd "$0"
    command() { "$PYTHON" -m agent_checkpoint "$@"; }
    command --db state/agents.db init --field created
    eval "$(command --db state/agents.db lease acquire release --owner worker-a --export)"
    cd /
    command lease check release --field token
    command lease heartbeat release --field state
    command checkpoint put deploy-v2 --data '{"stage": "built"}' --field scope
    command checkpoint get deploy-v2 --field data.stage
    command lease release release --field state
    status=0
    command lease check release || status=$?
    echo "$status"
    """
    done = subprocess.run(
        ["sh", "-euc", script, tmp_path],
        env={**CLEAN, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=True,
    )

    assert done.stdout.split() == ["true", "1", "live", "release", "built", "released", "76"]
    assert json.loads(done.stderr)["error"]["reason"] == "released"


def test_export_names_the_store_by_its_absolute_path_and_the_lease(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, evaluate: Evaluate
) -> None:
    monkeypatch.chdir(Path(db).parent)

    exported = evaluate(cli("--db", Path(db).name, "lease", "acquire", "release", "--owner", "worker-a", "--export"))

    leases = json.loads(exported.pop("AGENT_CHECKPOINT_LEASES"))
    assert leases == [{"scope": "release", "owner": "worker-a", "token": 1}]
    assert exported == {
        "AGENT_CHECKPOINT_DB": db,
        "AGENT_CHECKPOINT_SCOPE": "release",
        "AGENT_CHECKPOINT_OWNER": "worker-a",
        "AGENT_CHECKPOINT_TOKEN": "1",
    }


@pytest.mark.parametrize(
    "name", ["it's", '"quoted"', "$(touch pwned)", "`touch pwned`", "a b", "a;b", "$HOME", "\\", "é/ü", "*", "#", "-e"]
)
def test_export_lines_carry_every_name_through_a_real_shell(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, evaluate: Evaluate, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)

    exported = evaluate(cli("--db", db, "lease", "acquire", f"--owner={name}", "--export", "--", name))

    assert (exported["AGENT_CHECKPOINT_SCOPE"], exported["AGENT_CHECKPOINT_OWNER"]) == (name, name)
    assert not (tmp_path / "pwned").exists()
    assert cli("lease", "check", "--", name).value()["owner"] == name


def test_export_wins_over_format(cli: Cli, db: str) -> None:
    answer = cli("--db", db, "lease", "acquire", "s", "--owner", "a", "--export", "--format", "json")

    assert answer.out.startswith("export ")


def test_a_refused_acquire_exports_nothing(cli: Cli, db: str) -> None:
    cli("--db", db, "lease", "acquire", "s", "--owner", "a")

    answer = cli("--db", db, "lease", "acquire", "s", "--owner", "b", "--export")

    assert answer.status == 75
    assert answer.error()["code"] == "lease-held"


@pytest.fixture
def nested(cli: Cli, db: str, evaluate: Evaluate) -> dict[str, str]:
    """The environment inside two acquires: ``outer`` first, then ``inner``."""
    evaluate(cli("--db", db, "lease", "acquire", "outer", "--owner", "o", "--export"))
    return evaluate(cli("lease", "acquire", "inner", "--owner", "i", "--export"))


def test_a_second_acquire_keeps_both_leases_and_is_the_innermost(nested: dict[str, str]) -> None:
    scopes = [lease["scope"] for lease in json.loads(nested["AGENT_CHECKPOINT_LEASES"])]

    assert scopes == ["outer", "inner"]
    assert nested["AGENT_CHECKPOINT_SCOPE"] == "inner"
    assert (nested["AGENT_CHECKPOINT_OWNER"], nested["AGENT_CHECKPOINT_TOKEN"]) == ("i", "1")


def test_put_takes_the_lease_of_the_workflows_scope(cli: Cli, db: str, nested: dict[str, str]) -> None:
    fence = ("--lease-scope", "outer", "--owner", "o", "--token", "1")
    cli("checkpoint", "put", "bound", "--data", "1", *fence)

    saved = cli("checkpoint", "put", "bound", "--data", "2").value()

    assert (saved["sequence"], saved["scope"], saved["owner"], saved["token"]) == (2, "outer", "o", 1)


def test_put_takes_the_innermost_lease_for_a_new_workflow(cli: Cli, nested: dict[str, str]) -> None:
    assert cli("checkpoint", "put", "new", "--data", "1").value()["scope"] == "inner"


def test_put_takes_the_innermost_lease_for_an_unprotected_workflow(cli: Cli, nested: dict[str, str], db: str) -> None:
    with StateStore(db) as store:
        store.put_checkpoint("free", 1)

    assert cli("checkpoint", "put", "free", "--data", "2").value()["scope"] == "inner"


def test_put_under_none_of_the_scopes_is_refused(cli: Cli, nested: dict[str, str], db: str) -> None:
    with StateStore(db) as store:
        third = store.acquire("third", "t")
        store.put_checkpoint("theirs", 1, lease=third)

    answer = cli("checkpoint", "put", "theirs", "--data", "2")

    assert answer.status == 76
    assert (answer.error()["reason"], answer.error()["scope"]) == ("scope-mismatch", "inner")


def test_each_lease_is_found_by_its_scope(cli: Cli, nested: dict[str, str]) -> None:
    assert cli("lease", "check", "outer").value()["owner"] == "o"
    assert cli("lease", "heartbeat", "inner").value()["owner"] == "i"
    assert cli("lease", "release", "outer").value()["state"] == "released"
    assert cli("lease", "check", "inner").value()["owner"] == "i"


def test_a_scope_acquired_again_stands_once(cli: Cli, nested: dict[str, str], evaluate: Evaluate) -> None:
    cli("lease", "release", "outer")

    exported = evaluate(cli("lease", "acquire", "outer", "--owner", "again", "--export"))

    leases = [(lease["scope"], lease["token"]) for lease in json.loads(exported["AGENT_CHECKPOINT_LEASES"])]
    assert leases == [("inner", 1), ("outer", 2)]
    assert cli("lease", "check", "outer").value()["owner"] == "again"


def test_options_win_over_the_environment(cli: Cli, nested: dict[str, str]) -> None:
    assert cli("lease", "check", "inner", "--owner", "o", "--token", "1").error()["reason"] == "wrong-owner"
    assert cli("checkpoint", "put", "w", "--data", "1", "--lease-scope", "outer").error()["field"] == "owner"
    fence = ("--lease-scope", "outer", "--owner", "o", "--token", "1")
    assert cli("checkpoint", "put", "w", "--data", "1", *fence).value()["scope"] == "outer"


def test_a_lease_that_ended_makes_put_stale_not_unprotected(cli: Cli, nested: dict[str, str]) -> None:
    cli("lease", "release", "inner")

    answer = cli("checkpoint", "put", "new", "--data", "1")

    assert answer.status == 76
    assert answer.error()["reason"] == "released"
    assert cli("checkpoint", "list").value() == []


def test_the_three_single_variables_are_enough(cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with StateStore(db) as store:
        store.acquire("release", "worker-a")
    carry(monkeypatch, DB=db, SCOPE="release", OWNER="worker-a", TOKEN="1")

    assert cli("checkpoint", "put", "w", "--data", "1").value()["scope"] == "release"
    assert cli("lease", "release", "release").value()["state"] == "released"


def test_a_scope_that_the_environment_does_not_hold_wants_owner_and_token(cli: Cli, nested: dict[str, str]) -> None:
    for word in ("check", "heartbeat", "release"):
        answer = cli("lease", word, "third")

        assert answer.status == 2
        assert answer.error()["field"] == "owner"


@pytest.mark.parametrize("elsewhere", ["other.db", "postgresql://localhost/agents"])
def test_leases_of_another_store_are_ignored(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: str
) -> None:
    database = elsewhere if "://" in elsewhere else str(tmp_path / elsewhere)
    lease = {"scope": "release", "owner": "worker-a", "token": 1}
    carry(monkeypatch, DB=database, SCOPE="release", OWNER="worker-a", TOKEN="1", LEASES=json.dumps([lease]))

    saved = cli("--db", db, "checkpoint", "put", "w", "--data", "1")
    checked = cli("--db", db, "lease", "check", "release")
    exported = cli("--db", db, "lease", "acquire", "mine", "--owner", "a", "--export")

    assert saved.value()["scope"] is None
    assert (checked.status, checked.error()["field"]) == (2, "owner")
    assert "release" not in exported.out


def test_the_same_store_under_another_name_is_the_same_store(
    cli: Cli, db: str, nested: dict[str, str], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(Path(db).parent, target_is_directory=True)

    saved = cli("--db", str(link / Path(db).name), "checkpoint", "put", "w", "--data", "1").value()

    assert saved["scope"] == "inner", "a write that its caller believes to be protected went in unprotected"


MALFORMED = {
    "LEASES is not JSON": ("LEASES", {"LEASES": "{"}),
    "LEASES is no array": ("LEASES", {"LEASES": '{"scope": "s", "owner": "o", "token": 1}'}),
    "LEASES is a number": ("LEASES", {"LEASES": "1"}),
    "LEASES has no objects": ("LEASES", {"LEASES": "[1]"}),
    "LEASES has nulls": ("LEASES", {"LEASES": "[null]"}),
    "LEASES lacks the token": ("LEASES", {"LEASES": '[{"scope": "release", "owner": "o"}]'}),
    "LEASES repeats a key": ("LEASES", {"LEASES": '[{"scope": "s", "scope": "t", "owner": "o", "token": 1}]'}),
    "TOKEN is no number": ("TOKEN", {"SCOPE": "release", "OWNER": "o", "TOKEN": "x"}),
    "TOKEN has other digits": ("TOKEN", {"SCOPE": "release", "OWNER": "o", "TOKEN": "１"}),
    "TOKEN is negative": ("TOKEN", {"SCOPE": "release", "OWNER": "o", "TOKEN": "-1"}),
    "TOKEN is missing": ("TOKEN", {"SCOPE": "release", "OWNER": "o"}),
    "OWNER is missing": ("TOKEN", {"SCOPE": "release", "TOKEN": "1"}),
    "SCOPE is missing": ("TOKEN", {"OWNER": "o", "TOKEN": "1"}),
    "only the SCOPE is there": ("TOKEN", {"SCOPE": "release"}),
}


@pytest.mark.parametrize(("variable", "values"), MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize(
    "words",
    [
        ("checkpoint", "put", "w", "--data", "1"),
        ("lease", "check", "release"),
        ("lease", "heartbeat", "release"),
        ("lease", "release", "release"),
        ("lease", "acquire", "new", "--owner", "a", "--export"),
    ],
    ids=lambda words: words[1],
)
def test_a_malformed_environment_exits_2_and_nothing_is_written(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], variable: str, values: dict[str, str]
) -> None:
    carry(monkeypatch, DB=db, **values)
    before = cli("--db", db, "events").value()

    answer = cli(*words)
    error = answer.error()

    assert (answer.status, error["code"]) == (2, "invalid-input")
    assert error["field"] == f"AGENT_CHECKPOINT_{variable}"
    assert cli("--db", db, "events").value() == before


@pytest.mark.parametrize(
    "lease",
    [
        {"scope": "release", "owner": "o", "token": "1"},
        {"scope": "release", "owner": "o", "token": True},
        {"scope": "release", "owner": "o", "token": 0},
        {"scope": "release", "owner": None, "token": 1},
        {"scope": "", "owner": "o", "token": 1},
        {"scope": 1, "owner": "o", "token": 1},
    ],
    ids=str,
)
def test_values_in_the_environment_follow_the_rules_of_values(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, lease: dict[str, Any]
) -> None:
    carry(monkeypatch, DB=db, LEASES=json.dumps([lease]))

    answer = cli("checkpoint", "put", "w", "--data", "1")

    assert answer.status == 2
    assert answer.error()["code"] == "invalid-input"
    assert cli("checkpoint", "list").value() == []


def test_commands_that_need_no_lease_do_not_mind_a_malformed_environment(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry(monkeypatch, DB=db, LEASES="{")

    assert cli("lease", "list").value() == []
    assert cli("lease", "acquire", "release", "--owner", "a").value()["token"] == 1
    assert cli("lease", "check", "release", "--owner", "a", "--token", "1").value()["token"] == 1


@pytest.mark.parametrize(
    "values",
    [{"SCOPE": "release", "OWNER": "o", "TOKEN": "1"}, {"LEASES": '[{"scope": "s", "owner": "o", "token": 1}]'}],
)
def test_a_lease_without_its_store_is_malformed_and_no_reason_to_write_unprotected(
    cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch, values: dict[str, str]
) -> None:
    carry(monkeypatch, **values)

    answer = cli("--db", db, "checkpoint", "put", "w", "--data", "1")

    assert answer.status == 2
    assert answer.error()["field"] == "AGENT_CHECKPOINT_DB"
    assert cli("--db", db, "checkpoint", "list").value() == []


def test_an_empty_list_of_leases_holds_nothing(cli: Cli, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carry(monkeypatch, DB=db, LEASES="[]")

    assert cli("checkpoint", "put", "w", "--data", "1").value()["scope"] is None
    assert cli("lease", "check", "release").status == 2
