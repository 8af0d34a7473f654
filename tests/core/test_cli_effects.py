"""``effect list``, ``show``, ``resolve``: what was done outside, and what somebody found who looked."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from agent_checkpoint import StateStore

from .conftest import Cli


@pytest.fixture
def db(cli: Cli, path: Path) -> Path:
    """A store that knows an effect of each kind: done, failed, begun, unknown."""
    with StateStore(path) as store:
        lease, gone = store.acquire("release", "worker-a"), store.acquire("gone", "worker-b")
        with store.effect("sent", lease=lease) as effect:
            effect.done({"id": 7})
        with store.effect("refused", lease=lease) as effect:
            effect.failed()
        store.effect("under way", lease=lease).__enter__()
        store.effect("lost", lease=gone, request="all of it").__enter__()
        store.release(*gone.fence)
    return path


def test_the_list_has_every_effect_with_its_state_latest_first_and_no_results(cli: Cli, db: Path) -> None:
    listed = cli("effect", "list").value()

    assert [(each["key"], each["state"]) for each in listed] == [
        ("lost", "unknown"),
        ("under way", "begun"),
        ("refused", "failed"),
        ("sent", "done"),
    ]
    assert all("result" not in each for each in listed)
    assert cli("effect", "list", "--limit", "1").value() == listed[:1]


def test_an_empty_list_is_one(cli: Cli) -> None:
    assert cli("effect", "list").value() == []


def test_one_effect_is_shown_with_its_result(cli: Cli, db: Path) -> None:
    shown = cli("effect", "show", "sent").value()

    assert (shown["state"], shown["result"], shown["late"]) == ("done", {"id": 7}, False)
    assert (shown["scope"], shown["owner"], shown["token"]) == ("release", "worker-a", 1)
    assert shown["begun_at"] <= shown["done_at"]
    assert len(shown["idempotency_key"]) == 32
    assert cli("effect", "show", "sent", "--field", "result.id").out == "7\n"


@pytest.mark.parametrize("command", [("show", "never"), ("resolve", "never", "--retry")])
def test_what_was_never_begun_is_not_found(cli: Cli, db: Path, command: tuple[str, ...]) -> None:
    answer = cli("effect", *command)

    assert (answer.status, answer.error()["code"]) == (66, "not-found")


def test_a_person_says_what_became_of_it(cli: Cli, db: Path) -> None:
    resolved = cli("effect", "resolve", "lost", "--done", "--result", '{"id": 8}', "--by", "ada").value()

    assert (resolved["state"], resolved["result"]) == ("done", {"id": 8})
    (event,) = cli("events", "--kind", "effect.resolved").value()
    assert event["detail"] == {"by": "ada", "decision": "done", "key": "lost"}


def test_a_person_says_which_try_they_looked_at(cli: Cli, db: Path) -> None:
    seen = cli("effect", "show", "lost").value()["begun_at"]
    assert cli("effect", "resolve", "lost", "--retry", "--begun-at", seen).value()["state"] == "failed"


def test_without_a_name_it_is_the_user_who_found_out(cli: Cli, db: Path) -> None:
    assert cli("effect", "resolve", "lost", "--retry").value()["state"] == "failed"

    (event,) = cli("events", "--kind", "effect.resolved").value()
    assert event["detail"]["by"] == pwd.getpwuid(os.getuid()).pw_name


def test_what_may_be_under_way_is_not_resolved(cli: Cli, db: Path) -> None:
    answer = cli("effect", "resolve", "under way", "--retry")

    assert (answer.status, answer.error()["code"], answer.error()["retryable"]) == (75, "effect-running", True)
    assert answer.error()["token"] == 1


@pytest.mark.parametrize(
    "options",
    [
        ("lost",),
        ("lost", "--done", "--retry"),
        ("lost", "--retry", "--result", "1"),
        ("lost", "--done", "--result", "{"),
        ("lost", "--done", "--by", ""),
        ("sent", "--retry"),
        ("refused", "--done"),
        ("a\nb", "--done"),
        ("lost", "--retry", "--begun-at", "2031-05-04T10:20:30Z"),
        ("lost", "--retry", "--begun-at", "yesterday"),
    ],
)
def test_a_decision_that_is_none_is_a_usage_error(cli: Cli, db: Path, options: tuple[str, ...]) -> None:
    answer = cli("effect", "resolve", *options)

    assert (answer.status, answer.error()["code"]) == (2, "invalid-input")
    assert cli("effect", "show", "lost").value()["state"] == "unknown"


def test_a_key_that_begins_with_a_dash_is_resolved_behind_two_dashes(cli: Cli, path: Path) -> None:
    with StateStore(path) as store, store.hold("release", "worker-a") as held:
        held.effect("-x").__enter__()

    assert cli("effect", "resolve", "--done", "--", "-x").value()["key"] == "-x"
