"""``events`` and ``status``: the audit log and the overview."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import LEASE_FIELDS, Cli, acquire, expire, kinds

EVENT_FIELDS = {"cursor", "id", "at", "kind", "scope", "owner", "token", "workflow", "sequence", "detail"}


@pytest.mark.parametrize("word", ["archive", "verify"])
def test_a_value_that_is_a_command_too_is_a_value(cli: Cli, word: str) -> None:
    assert cli("events", "--scope", word).value() == []


def test_an_event_has_exactly_the_fields_of_an_event(cli: Cli) -> None:
    acquire(cli, "release", "a")

    assert all(event.keys() == EVENT_FIELDS for event in cli("events").value())


def test_events_are_the_last_ones_oldest_first(cli: Cli) -> None:
    for number in range(120):
        cli("checkpoint", "put", "w", "--data", number)

    sequences = [event["sequence"] for event in cli("events").value()]
    assert sequences == list(range(21, 121))
    assert [event["sequence"] for event in cli("events", "--limit", "3").value()] == [118, 119, 120]


def test_events_after_a_cursor_are_the_next_ones(cli: Cli) -> None:
    for number in range(5):
        cli("checkpoint", "put", "w", "--data", number)
    whole = cli("events").value()

    read, cursor = [whole[0]], whole[0]["cursor"]
    while part := cli("events", "--after", cursor, "--limit", "2").value():
        read += part
        cursor = part[-1]["cursor"]

    assert read == whole


def test_events_are_filtered_by_scope_workflow_and_kind_together(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")
    acquire(cli, "docs", "a")
    for workflow in ("w", "v"):
        cli("checkpoint", "put", workflow, "--data", "1", "--lease-scope", "release", *fence)

    assert {event["scope"] for event in cli("events", "--scope", "release").value()} == {"release"}
    assert len(cli("events", "--scope", "release").value()) == 3
    assert [event["workflow"] for event in cli("events", "--workflow", "w").value()] == ["w"]
    assert [event["scope"] for event in cli("events", "--kind", "lease.acquired").value()] == ["release", "docs"]
    both = cli("events", "--scope", "release", "--workflow", "v", "--kind", "checkpoint.saved").value()
    assert [(event["scope"], event["workflow"]) for event in both] == [("release", "v")]
    assert cli("events", "--scope", "docs", "--workflow", "v").value() == []


def test_only_the_first_refusal_of_its_kind_is_an_event_and_status_counts_them(cli: Cli) -> None:
    fence = acquire(cli, "release", "a")
    cli("lease", "release", "release", *fence)
    for _ in range(3):
        assert cli("checkpoint", "put", "w", "--data", "1", "--lease-scope", "release", *fence).status == 76

    assert kinds(cli).count("write.refused") == 1
    (refusals,) = cli("status", "--format", "json").value()["refusals"]
    assert (refusals["scope"], refusals["token"], refusals["action"], refusals["times"]) == (
        *("release", 1, "checkpoint.put", 3),
    )


def test_status_of_an_empty_store_says_nothing_yet_to_each_question(cli: Cli, path: Path) -> None:
    answer = cli("status")

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"{path} at ")
    assert answer.out.count("nothing yet") == 3


def test_status_is_aligned_text_for_a_person(cli: Cli) -> None:
    fence = acquire(cli, "release", "worker-a")
    acquire(cli, "a-much-longer-scope", "b")
    cli("checkpoint", "put", "deploy-v2", "--data", "1", "--lease-scope", "release", *fence)
    cli("checkpoint", "put", "deploy-v2", "--data", "2")

    lines = cli("status").out.splitlines()
    questions = ("Who owns it, and is the owner alive?", "Is a resumed worker stale?", "Where does the work continue?")
    leases, refused, workflows = (
        next(at for at, line in enumerate(lines) if line.startswith(question)) for question in questions
    )

    assert leases < refused < workflows
    header, *rows = lines[leases + 1 : refused - 1]
    place = header.index("OWNER")
    assert {row[place:].split()[0] for row in rows} == {"worker-a", "b"}
    assert "checkpoint.put" in "".join(lines[refused:workflows])
    assert "release, token 1" in "".join(lines[workflows:])


def test_status_as_json_has_leases_checkpoints_and_refusals(cli: Cli, path: Path) -> None:
    fence = acquire(cli, "release", "worker-a")
    cli("checkpoint", "put", "w", "--data", "1", "--lease-scope", "release", *fence)

    value = cli("status", "--format", "json").value()

    assert value.keys() == {"database", "at", "leases", "queues", "checkpoints", "refusals"}
    assert value["database"] == str(path)
    assert [lease.keys() for lease in value["leases"]] == [LEASE_FIELDS]
    assert [(each["workflow"], each["size_bytes"]) for each in value["checkpoints"]] == [("w", 1)]


def test_status_shows_ended_leases_too(cli: Cli, path: Path) -> None:
    acquire(cli, "overdue", "a")
    cli("lease", "release", "ended", *acquire(cli, "ended", "b"))
    expire(path, "overdue")

    states = {lease["scope"]: lease["state"] for lease in cli("status", "--format", "json").value()["leases"]}

    assert states == {"overdue": "expired", "ended": "released"}
