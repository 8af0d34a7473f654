"""``lease …``: who is granted a scope, who is refused, and with which exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import LEASE_FIELDS, Cli, acquire, expire, kinds


def test_a_lease_has_exactly_the_fields_of_a_lease(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")

    for answer in (cli("lease", "show", "release"), cli("lease", "check", "release", *fence)):
        assert answer.value().keys() == LEASE_FIELDS


def test_a_ttl_is_60_seconds_unless_told(cli: Cli) -> None:
    acquire(cli, "minute", "a")
    acquire(cli, "short", "a", "--ttl", "2.5")

    assert cli("lease", "show", "minute", "--field", "ttl_seconds").out == "60.0\n"
    assert cli("lease", "show", "short", "--field", "ttl_seconds").out == "2.5\n"


@pytest.mark.parametrize("owner", ["b", "a"])
def test_a_live_lease_refuses_everybody_its_own_owner_included(cli: Cli, owner: str) -> None:
    acquire(cli, "release", "a")

    answer = cli("lease", "acquire", "release", "--owner", owner)

    assert answer.status == 75
    assert (answer.error()["code"], answer.error()["owner"]) == ("lease-held", "a")


def test_reclaim_takes_back_the_own_lease_with_a_new_token(cli: Cli) -> None:
    earlier = acquire(cli, "release", "a")

    assert cli("lease", "acquire", "release", "--owner", "b", "--reclaim").status == 75
    assert cli("lease", "acquire", "release", "--owner", "a", "--reclaim").value()["token"] == 2
    assert cli("lease", "heartbeat", "release", *earlier).error()["reason"] == "superseded"
    assert "lease.reclaimed" in kinds(cli)


def test_metadata_comes_back_as_it_went_in(cli: Cli) -> None:
    metadata = {"host": "h1", "pid": 12, "nested": [1, 2.5, None, {"é": "\u0000"}]}
    acquire(cli, "release", "a", "--metadata", json.dumps(metadata))

    assert cli("lease", "show", "release").value()["metadata"] == metadata


def test_a_heartbeat_may_change_the_ttl(cli: Cli) -> None:
    fence = acquire(cli, "release", "a", "--ttl", "5")

    assert cli("lease", "heartbeat", "release", *fence).value()["ttl_seconds"] == 5.0
    assert cli("lease", "heartbeat", "release", *fence, "--ttl", "30").value()["ttl_seconds"] == 30.0
    assert cli("lease", "heartbeat", "release", *fence).value()["ttl_seconds"] == 30.0


def test_show_without_a_live_lease_exits_66_and_with_include_expired_shows_the_last(cli: Cli) -> None:
    assert cli("lease", "show", "release").status == 66
    assert cli("lease", "show", "release", "--include-expired").status == 66
    fence = acquire(cli, "release", "a")
    cli("lease", "release", "release", *fence)

    answer = cli("lease", "show", "release")
    assert (answer.status, answer.error()["code"]) == (66, "not-found")
    last = cli("lease", "show", "release", "--include-expired").value()
    assert (last["state"], last["remaining_seconds"]) == ("released", 0.0)


def test_a_lease_that_ran_out_is_expired_for_everybody(cli: Cli, path: Path) -> None:
    fence = acquire(cli, "release", "a")
    expire(path, "release")

    assert cli("lease", "show", "release").status == 66
    assert cli("lease", "list").value() == []
    assert cli("lease", "show", "release", "--include-expired").value()["state"] == "expired"
    for word in ("check", "heartbeat", "release"):
        answer = cli("lease", word, "release", *fence)
        assert answer.status == 76
        assert (answer.error()["code"], answer.error()["reason"]) == ("stale-lease", "expired")
    assert cli("lease", "acquire", "release", "--owner", "b").value()["token"] == 2
    assert "lease.expired" in kinds(cli)


def test_the_list_is_newest_first_and_live_only_unless_told(cli: Cli) -> None:
    acquire(cli, "first", "a")
    ended = acquire(cli, "second", "a")
    acquire(cli, "third", "a")
    cli("lease", "release", "second", *ended)

    assert [lease["scope"] for lease in cli("lease", "list").value()] == ["third", "first"]
    everyone = cli("lease", "list", "--include-expired").value()
    assert [(lease["scope"], lease["state"]) for lease in everyone] == [
        ("third", "live"),
        ("second", "released"),
        ("first", "live"),
    ]


@pytest.mark.parametrize("word", ["heartbeat", "release", "check"])
def test_a_command_that_carries_a_token_exits_76_for_an_unknown_lease(cli: Cli, word: str) -> None:
    answer = cli("lease", word, "never", "--owner", "a", "--token", "1")

    assert answer.status == 76
    assert (answer.error()["code"], answer.error()["reason"]) == ("stale-lease", "unknown")


@pytest.mark.parametrize(
    ("owner", "token", "reason"),
    [("a", 1, "superseded"), ("a", 2, "wrong-owner"), ("b", 3, "unknown"), ("b", 2**63 - 1, "unknown")],
)
def test_a_fence_that_matches_no_lease_is_stale_for_a_reason(cli: Cli, owner: str, token: int, reason: str) -> None:
    cli("lease", "release", "release", *acquire(cli, "release", "a"))
    acquire(cli, "release", "b")

    for words in (
        ("lease", "heartbeat", "release"),
        ("lease", "check", "release"),
        ("checkpoint", "put", "w", "--data", "1", "--lease-scope", "release"),
    ):
        answer = cli(*words, "--owner", owner, "--token", token)
        assert answer.status == 76
        assert answer.error()["reason"] == reason


def test_a_second_release_is_stale(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")

    assert cli("lease", "release", "release", *fence).value()["state"] == "released"
    assert cli("lease", "release", "release", *fence).error()["reason"] == "released"


def test_force_release_ends_the_live_lease_on_record(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")

    ended = cli("lease", "force-release", "release", "--reason", "host is gone").value()

    assert (ended["state"], ended["token"]) == ("force-released", 1)
    assert cli("lease", "check", "release", *fence).status == 76
    (event,) = cli("events", "--kind", "lease.force-released").value()
    assert (event["owner"], event["detail"]["reason"]) == ("a", "host is gone")


def test_force_release_with_a_token_never_hits_the_successor(cli: Cli) -> None:
    cli("lease", "release", "release", *acquire(cli, "release", "a"))
    healthy = acquire(cli, "release", "b")

    answer = cli("lease", "force-release", "release", "--reason", "late", "--token", "1")

    assert answer.status == 76
    assert answer.error()["reason"] == "superseded"
    assert cli("lease", "check", "release", *healthy).status == 0
    assert cli("lease", "force-release", "release", "--reason", "now", "--token", "2").status == 0


def test_force_release_of_nothing_is_not_found(cli: Cli) -> None:
    assert cli("lease", "force-release", "never", "--reason", "gone").status == 66
    cli("lease", "release", "release", *acquire(cli, "release", "a"))
    assert cli("lease", "force-release", "release", "--reason", "gone").status == 66


def test_check_writes_nothing(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")
    before = kinds(cli)

    cli("lease", "check", "release", *fence)
    cli("lease", "check", "release", "--owner", "b", "--token", "1")

    assert kinds(cli) == before
