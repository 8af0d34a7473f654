"""``events archive``, ``events verify``, ``retention`` and ``prune`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cli, kinds


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "archive.jsonl"


def test_a_log_goes_into_a_file_and_the_file_is_verified(cli: Cli, file: Path) -> None:
    cli("checkpoint", "put", "deploy", "--data", "1")
    archived = cli("events", "archive", "--before", "2100-01-01", "--to", file).value()

    assert archived["events"] == 1
    assert cli("events", "verify", file).value() == archived
    assert kinds(cli) == ["checkpoint.saved", "events.archived"]


@pytest.mark.parametrize(
    "date", ["2031-05-04", "2031-05-04T10:20", "2031-05-04T10:20:30.5+02:00", "2031-05-04T10:20:30Z"]
)
def test_a_date_is_a_day_or_a_time(cli: Cli, file: Path, date: str) -> None:
    assert cli("events", "archive", "--before", date, "--to", file).status == 0


@pytest.mark.parametrize("date", ["yesterday", "", "2031-13-01", "5"])
def test_another_date_is_refused(cli: Cli, file: Path, date: str) -> None:
    refused = cli("events", "archive", "--before", date, "--to", file)
    assert (refused.status, refused.error()["field"]) == (2, "before")
    assert not file.exists()


def test_a_damaged_file_exits_74_and_one_that_is_not_there_66(cli: Cli, file: Path) -> None:
    cli("checkpoint", "put", "deploy", "--data", "1")
    cli("events", "archive", "--before", "2100-01-01", "--to", file)
    file.write_bytes(file.read_bytes().replace(b"store", b"stare", 1))

    damaged = cli("events", "verify", file)
    assert (damaged.status, damaged.error()["code"], damaged.error()["line"]) == (74, "storage-corrupt", 1)
    assert cli("events", "verify", f"{file}.not").status == 66


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--scope", "release"), ["lease.acquired"]),
        (("--workflow", "deploy"), ["checkpoint.saved"]),
        (("--kind", "store.initialized"), ["store.initialized"]),
        (("--limit", "1"), ["checkpoint.saved"]),
        (("--after", "start", "--limit", "1"), ["store.initialized"]),
    ],
)
def test_events_takes_its_own_options_beside_its_commands(cli: Cli, options: tuple[str, ...], found: list[str]) -> None:
    cli("lease", "acquire", "release", "--owner", "worker-a")
    cli("checkpoint", "put", "deploy", "--data", "1")

    assert [event["kind"] for event in cli("events", *options).value()] == found


def test_a_policy_is_set_shown_applied_and_forgotten(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "archive").mkdir()
    for number in range(3):
        cli("checkpoint", "put", "deploy", "--data", number)
    cli("retention", "set", "checkpoints.keep_last", "1")
    cli("retention", "set", "events.archive_to", "archive")
    cli("retention", "set", "holders", "true")
    rules = {"checkpoints.keep_last": 1, "events.archive_to": str(tmp_path / "archive"), "holders": True}
    assert cli("retention", "show").value() == rules

    would = [{"archive": None, "removed": 2, "rule": "checkpoints.keep_last"}]
    assert cli("prune", "--apply-policy", "--dry-run").value() == would
    assert cli("prune", "--apply-policy").value() == would
    assert cli("retention", "unset", "holders").value() == {name: rules[name] for name in rules if name != "holders"}


@pytest.mark.parametrize(
    "words", [("nonsense", "1"), ("checkpoints.keep_last", "many"), ("events.days", "-1"), ("holders", "yes")]
)
def test_a_rule_that_is_none_exits_2(cli: Cli, words: tuple[str, str]) -> None:
    assert cli("retention", "set", "--", *words).status == 2


def test_a_rule_that_is_none_is_not_forgotten_either(cli: Cli) -> None:
    assert cli("retention", "unset", "checkpoint.keep_last").error()["field"] == "rule"


@pytest.mark.parametrize("word", ["yes", "True"])
def test_what_is_no_truth_value_is_told_what_one_looks_like(cli: Cli, word: str) -> None:
    assert cli("retention", "set", "holders", word).error()["message"] == "holders: must be true or false"


def test_prune_without_a_policy_asks_for_the_word(cli: Cli) -> None:
    assert cli("prune").status == 2
    assert cli("prune", "--apply-policy").value() == []
