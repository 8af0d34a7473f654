"""``checkpoint …``: values that come back as they went in, histories, differences, prunes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

from .conftest import COMMAND, WATCHDOG_SECONDS, Cli, kinds

CHECKPOINT_FIELDS = {"workflow", "sequence", "data", "saved_at", "scope", "owner", "token"}

VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus zero": "-0.0",
    "a real that is whole": "1.0",
    "the largest double": "1.7976931348623157e+308",
    "1e308": "1e+308",
    "the smallest double": "5e-324",
    "4,000 digits": "-" + "9" * 4000,
    "an empty text": '""',
    "unicode": json.dumps("héllo ✓ 𝄞 \u200b\u2028"),
    "control characters": json.dumps("\u0000\u0001\x1b\x7f\n"),
    "a lone surrogate": r'"\ud800"',
    "an empty object": "{}",
    "odd keys": json.dumps({"": 1, "a.b": {"~/": 2}, "\u0000": 3, "0": 4}),
    "depth 200": "[" * 200 + "]" * 200,
    "an array of everything": json.dumps([None, True, 0, 1.5, "x", [], {}]),
}


def as_json(value: Any) -> str:
    """The text of a value: true is not 1, 1 is not 1.0, and the order of keys means nothing."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("text", VALUES.values(), ids=VALUES.keys())
def test_a_value_comes_back_as_it_went_in(cli: Cli, text: str) -> None:
    saved = cli("checkpoint", "put", "w", f"--data={text}").value()
    found = cli("checkpoint", "get", "w").value()

    assert as_json(saved["data"]) == as_json(found["data"]) == as_json(json.loads(text))
    assert cli("checkpoint", "get", "w", "--field", "data.x", "--default", "-").status == 0


def test_unicode_is_taken_as_it_is_typed(cli: Cli) -> None:
    cli("checkpoint", "put", "étape/✓", "--data", '{"ключ": "値"}')

    assert cli("checkpoint", "get", "étape/✓", "--field", "data.ключ").out == "値\n"


def test_a_checkpoint_has_exactly_the_fields_of_a_checkpoint(cli: Cli) -> None:
    assert cli("checkpoint", "put", "w", "--data", "1").value().keys() == CHECKPOINT_FIELDS
    assert cli("checkpoint", "get", "w").value().keys() == CHECKPOINT_FIELDS


def test_data_may_come_from_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(' {\n "stage": "built"\n}\n')

    assert cli("checkpoint", "put", "w", "--data", f"@{file}").value()["data"] == {"stage": "built"}


def test_data_may_come_from_stdin(cli: Cli, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'"in this process"')))
    assert cli("checkpoint", "put", "w", "--data", "-").value()["data"] == "in this process"

    words = ("--db", str(path), "checkpoint", "put", "w", "--data", "-", "--field", "data")
    done = subprocess.run(
        [*COMMAND, *words], input='"é"'.encode(), capture_output=True, timeout=WATCHDOG_SECONDS, check=False
    )
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "é\n", b"")


def test_get_finds_the_latest_or_the_one_that_is_named(cli: Cli) -> None:
    for number in (1, 2, 3):
        cli("checkpoint", "put", "w", "--data", number)

    assert cli("checkpoint", "get", "w").value()["data"] == 3
    assert cli("checkpoint", "get", "w", "--sequence", "2").value()["data"] == 2


@pytest.mark.parametrize(
    "words",
    [
        ("get", "nope"),
        ("get", "w", "--sequence", "2"),
        ("history", "nope"),
        ("diff", "nope"),
        ("diff", "w", "2"),
    ],
)
def test_looking_up_what_is_not_there_exits_66(cli: Cli, words: tuple[str, ...]) -> None:
    cli("checkpoint", "put", "w", "--data", "1")

    answer = cli("checkpoint", *words)

    assert answer.status == 66
    assert (answer.error()["code"], answer.error()["workflow"]) == ("not-found", words[1])


def test_if_sequence_saves_only_on_top_of_that_one(cli: Cli) -> None:
    assert cli("checkpoint", "put", "w", "--data", "1", "--if-sequence", "0").value()["sequence"] == 1
    for expected in (0, 2):
        answer = cli("checkpoint", "put", "w", "--data", "2", "--if-sequence", expected)
        error = answer.error()
        assert answer.status == 76
        assert (error["code"], error["expected"], error["found"]) == ("sequence-conflict", expected, 1)
    assert cli("checkpoint", "put", "w", "--data", "2", "--if-sequence", "1").value()["sequence"] == 2


def test_lists_are_newest_first_with_size_in_place_of_data(cli: Cli) -> None:
    for workflow, data in (("a", "1"), ("b", '"four"'), ("a", '{"x": 10}')):
        cli("checkpoint", "put", workflow, "--data", data)

    history = cli("checkpoint", "history", "a").value()
    latest = cli("checkpoint", "list").value()

    assert [(each["sequence"], each["size_bytes"]) for each in history] == [(2, 8), (1, 1)]
    assert [(each["workflow"], each["sequence"], each["size_bytes"]) for each in latest] == [("a", 2, 8), ("b", 1, 6)]
    fields = CHECKPOINT_FIELDS - {"data"} | {"size_bytes"}
    assert all(each.keys() == fields for each in (*history, *latest))


def test_diff_is_previous_against_latest_unless_told(cli: Cli) -> None:
    for data in ('{"a": 1, "b/c": [1, 2]}', '{"a": 1.0, "b/c": [1]}', '{"a": true}'):
        cli("checkpoint", "put", "w", "--data", data)

    replaced = {"op": "replace", "path": "/a", "old": 1.0, "new": True}
    assert cli("checkpoint", "diff", "w").value() == [
        replaced,
        {"op": "remove", "path": "/b~1c", "old": [1]},
    ]
    assert cli("checkpoint", "diff", "w", "2").value() == cli("checkpoint", "diff", "w").value()
    assert cli("checkpoint", "diff", "w", "1", "2").value() == [
        {"op": "replace", "path": "/a", "old": 1, "new": 1.0},
        {"op": "remove", "path": "/b~1c/1", "old": 2},
    ]
    assert cli("checkpoint", "diff", "w", "3", "2").value() == [
        {"op": "replace", "path": "/a", "old": True, "new": 1.0},
        {"op": "add", "path": "/b~1c", "new": [1]},
    ]
    assert cli("checkpoint", "diff", "w", "2", "2").value() == []


def test_diff_of_the_first_checkpoint_adds_the_whole(cli: Cli) -> None:
    cli("checkpoint", "put", "w", "--data", '{"a": 1}')

    assert cli("checkpoint", "diff", "w").value() == [{"op": "add", "path": "", "new": {"a": 1}}]


def test_diff_against_a_checkpoint_that_was_pruned_exits_66(cli: Cli) -> None:
    for number in (1, 2):
        cli("checkpoint", "put", "w", "--data", number)
    cli("checkpoint", "prune", "w", "--keep-last", "1")

    assert cli("checkpoint", "diff", "w").error()["sequence"] == 1


def test_diff_after_a_restore_is_with_the_one_before_the_gap(cli: Cli, tmp_path: Path) -> None:
    cli("checkpoint", "put", "w", "--data", "1")
    cli("backup", tmp_path / "backup.db")
    cli("checkpoint", "put", "w", "--data", "2")
    cli("restore", tmp_path / "backup.db")
    cli("checkpoint", "put", "w", "--data", "3")

    latest, previous = cli("checkpoint", "history", "w").value()
    assert latest["sequence"] > previous["sequence"] + 1
    assert cli("checkpoint", "diff", "w").value() == [{"op": "replace", "path": "", "old": 1, "new": 3}]


def test_diff_tells_true_from_1_and_1_from_a_real(cli: Cli) -> None:
    for data in ("1", "true", "1.0"):
        cli("checkpoint", "put", "w", "--data", data)

    assert '"old": 1,' in cli("checkpoint", "diff", "w", "1", "2").out
    assert '"new": true,' in cli("checkpoint", "diff", "w", "1", "2").out
    assert '"new": 1.0,' in cli("checkpoint", "diff", "w", "1", "3").out


def test_prune_keeps_the_last_ones_and_says_what_went(cli: Cli) -> None:
    for number in range(5):
        cli("checkpoint", "put", "a", "--data", number)
        cli("checkpoint", "put", "b", "--data", number)
    gone = {"removed": 3, "from_sequence": 1, "to_sequence": 3}

    planned = cli("checkpoint", "prune", "a", "--keep-last", "2", "--dry-run").value()
    assert planned == [{"workflow": "a", **gone}]
    assert len(cli("checkpoint", "history", "a").value()) == 5

    assert cli("checkpoint", "prune", "a", "--keep-last", "2").value() == planned
    assert [each["sequence"] for each in cli("checkpoint", "history", "a").value()] == [5, 4]
    assert cli("checkpoint", "prune", "--keep-last", "2").value() == [{"workflow": "b", **gone}]
    assert cli("checkpoint", "put", "a", "--data", "5").value()["sequence"] == 6
    assert kinds(cli).count("checkpoint.pruned") == 2


def test_the_command_and_python_see_the_same_store(cli: Cli, path: Path) -> None:
    with StateStore(path) as store:
        lease = store.acquire("release", "worker-a")
        store.put_checkpoint("w", {"from": "python"}, lease=lease)
    fence = ("--lease-scope", "release", "--owner", "worker-a", "--token", lease.token)

    assert cli("checkpoint", "get", "w", "--field", "data.from").out == "python\n"
    cli("checkpoint", "put", "w", "--data", '{"from": "shell"}', *fence)
    with StateStore(path) as store:
        found = store.get_checkpoint("w")
    assert found is not None
    assert (found.sequence, found.data, found.token) == (2, {"from": "shell"}, 1)
