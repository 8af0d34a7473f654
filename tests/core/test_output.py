"""How answers look: JSON for programs, lines for pipes, one bare value, aligned text for people."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from agent_checkpoint.cli import main

from .conftest import Cli


@pytest.fixture
def filled(cli: Cli) -> Cli:
    """The same, on a store with two leases and two workflows."""
    cli("lease", "acquire", "release", "--owner", "worker-a", "--metadata", '{"host": "h1", "b": [1, 2.5]}')
    cli("lease", "acquire", "docs", "--owner", "worker-b")
    fence = ("--lease-scope", "release", "--owner", "worker-a", "--token", "1")
    cli("checkpoint", "put", "deploy-v2", "--data", '{"stage": "begun"}', *fence)
    cli("checkpoint", "put", "deploy-v2", "--data", '{"stage": "built", "a": {"b": {"c": [10, null]}}}', *fence)
    cli("checkpoint", "put", "notes", "--data", '"plain"')
    return cli


READS = {
    "lease show": ("lease", "show", "release"),
    "lease list": ("lease", "list"),
    "lease check": ("lease", "check", "release", "--owner", "worker-a", "--token", "1"),
    "checkpoint get": ("checkpoint", "get", "deploy-v2"),
    "checkpoint list": ("checkpoint", "list"),
    "checkpoint history": ("checkpoint", "history", "deploy-v2"),
    "checkpoint diff": ("checkpoint", "diff", "deploy-v2"),
    "events": ("events",),
    "status": ("status", "--format", "json"),
    "doctor": ("doctor",),
}


@pytest.mark.parametrize("words", READS.values(), ids=READS.keys())
def test_an_answer_is_one_json_value_with_sorted_keys_and_two_spaces(filled: Cli, words: tuple[str, ...]) -> None:
    answer = filled(*words)

    assert answer.out == json.dumps(answer.value(), indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("words", READS.values(), ids=READS.keys())
def test_stdout_is_plain_ascii_when_it_is_json(filled: Cli, words: tuple[str, ...]) -> None:
    assert filled(*words).out.isascii()


@pytest.mark.parametrize("words", [("lease", "list"), ("checkpoint", "list"), ("events", "--kind", "lease.acquired")])
def test_an_empty_list_is_two_brackets(cli: Cli, words: tuple[str, ...]) -> None:
    assert cli(*words) == (0, "[]\n", "")


@pytest.mark.parametrize("form", ["jsonl", "text"])
@pytest.mark.parametrize("words", [("lease", "list"), ("checkpoint", "list"), ("events", "--kind", "lease.acquired")])
def test_an_empty_list_has_no_lines(cli: Cli, words: tuple[str, ...], form: str) -> None:
    assert cli(*words, "--format", form) == (0, "", "")


def test_nothing_pruned_is_an_empty_list(filled: Cli) -> None:
    assert filled("checkpoint", "prune", "--keep-last", "5") == (0, "[]\n", "")


def test_jsonl_is_a_line_for_each_part_of_a_list(filled: Cli) -> None:
    whole = filled("events").value()
    lines = filled("events", "--format", "jsonl").out.splitlines()

    assert lines == [json.dumps(event, sort_keys=True) for event in whole]


def test_jsonl_of_one_answer_is_one_line(filled: Cli) -> None:
    answer = filled("checkpoint", "get", "deploy-v2", "--format", "jsonl")

    assert answer.out.count("\n") == 1
    assert answer.value() == filled("checkpoint", "get", "deploy-v2").value()


def test_text_of_a_list_is_a_table_with_aligned_columns(filled: Cli) -> None:
    header, *rows = filled("lease", "list", "--format", "text").out.splitlines()

    place = header.index("owner")
    assert [row[place:].split()[0] for row in rows] == ["worker-b", "worker-a"]


def test_text_of_one_answer_is_a_line_for_each_field(filled: Cli) -> None:
    lines = filled("checkpoint", "get", "deploy-v2", "--format", "text").out.splitlines()

    assert {line.split()[0] for line in lines} == filled("checkpoint", "get", "deploy-v2").value().keys()
    assert ["sequence", "2"] in [line.split() for line in lines]


def test_text_shows_control_characters_instead_of_sending_them(cli: Cli) -> None:
    cli("checkpoint", "put", "w", "--data", json.dumps("\x1b[2Jcleared\n\u202eright to left"))

    out = cli("checkpoint", "get", "w", "--format", "text").out

    assert "\x1b" not in out
    assert "\u202e" not in out
    assert r"\x1b[2Jcleared\n\u202e" in out


@pytest.mark.parametrize(
    ("field", "printed"),
    [
        ("sequence", "2"),
        ("scope", "release"),
        ("data.stage", "built"),
        ("data.a.b.c", "[10, null]"),
        ("data.a.b.c.0", "10"),
        ("data.a", '{"b": {"c": [10, null]}}'),
    ],
)
def test_field_prints_one_value_bare(filled: Cli, field: str, printed: str) -> None:
    assert filled("checkpoint", "get", "deploy-v2", "--field", field) == (0, printed + "\n", "")


@pytest.mark.parametrize("data", ["true", "false", "0", "-0.0", "1.0", '""', "[]", "{}"])
def test_field_prints_what_is_there_even_when_it_is_empty_or_false(cli: Cli, data: str) -> None:
    cli("checkpoint", "put", "w", "--data", data)

    printed = cli("checkpoint", "get", "w", "--field", "data", "--default", "absent").out

    assert printed == (data if data != '""' else "") + "\n"


def test_field_looks_into_lists_by_place(filled: Cli) -> None:
    assert filled("lease", "list", "--field", "1.owner").out == "worker-a\n"


@pytest.mark.parametrize(
    "field",
    ["nope", "data.nope", "data.stage.nope", "data.a.b.c.2", "data.a.b.c.-1", "data.a.b.c.１", "", ".", "data."],
)
def test_a_field_that_is_absent_is_not_found(filled: Cli, field: str) -> None:
    answer = filled("checkpoint", "get", "deploy-v2", "--field", field)

    assert answer.status == 66
    assert answer.error()["code"] == "not-found"
    assert repr(field) in answer.error()["message"]


@pytest.mark.parametrize("default", ["none", "", "-1", "0"])
def test_default_stands_in_for_a_field_that_is_absent(filled: Cli, default: str) -> None:
    answer = filled("checkpoint", "get", "deploy-v2", "--field", "data.nope", f"--default={default}")

    assert answer == (0, default + "\n", "")


def test_default_does_not_stand_in_for_a_workflow_that_is_absent(filled: Cli) -> None:
    answer = filled("checkpoint", "get", "nope", "--field", "data", "--default", "none")

    assert answer.status == 66
    assert answer.error()["workflow"] == "nope"


def test_field_wins_over_format(filled: Cli) -> None:
    assert filled("lease", "show", "release", "--format", "text", "--field", "token").out == "1\n"


def test_a_lone_surrogate_in_a_value_is_printed_in_some_form(cli: Cli) -> None:
    cli("checkpoint", "put", "w", "--data", r'"\ud800"')

    assert cli("checkpoint", "get", "w").value()["data"] == "\ud800"
    assert cli("checkpoint", "get", "w", "--field", "data") == (0, "\\ud800\n", "")
    assert cli("checkpoint", "get", "w", "--format", "text").status == 0


def test_a_program_that_calls_the_command_may_collect_its_answer_as_text(filled: Cli, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as collected:
        assert main(["--db", str(path), "checkpoint", "get", "notes", "--field", "data"]) == 0

    assert collected.getvalue() == "plain\n"


def test_an_error_is_json_whatever_the_format(cli: Cli) -> None:
    for form in ("json", "jsonl", "text"):
        answer = cli("lease", "show", "nope", "--format", form)

        assert answer.status == 66
        assert answer.error()["scope"] == "nope"


def test_an_error_carries_code_message_hint_retryable_and_facts_with_sorted_keys(filled: Cli) -> None:
    answer = filled("lease", "acquire", "release", "--owner", "worker-b")
    error = answer.error()

    assert answer.status == 75
    assert answer.err == json.dumps({"error": error}, indent=2, sort_keys=True) + "\n"
    assert (error["code"], error["retryable"]) == ("lease-held", True)
    assert (error["scope"], error["owner"], error["token"]) == ("release", "worker-a", 1)
    assert 0 < error["retry_after"] <= 60
    assert error["expires_at"] == filled("lease", "show", "release").value()["expires_at"]
    assert error["message"]
    assert error["hint"]


def test_times_are_rfc_3339_in_utc(filled: Cli) -> None:
    lease = filled("lease", "show", "release").value()

    for name in ("acquired_at", "heartbeat_at", "expires_at"):
        date, _, clock = lease[name].partition("T")
        assert (len(date.split("-")), len(clock.split(":")), clock[-1]) == (3, 3, "Z")
