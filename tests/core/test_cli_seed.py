"""The seed scenario as a shell plays it: one process a step, one store between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import COMMAND, Answer, process

STORE = ".state/agents.db"


class Story(dict[str, Answer]):
    """Answers by the name of their step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def play(self, name: str, line: str) -> None:
        self[name] = process(*COMMAND, "--db", STORE, *line.split(), cwd=self.folder)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """The whole scenario, played once."""
    story = Story(tmp_path_factory.mktemp("seed"))
    worker_a, worker_b = "--owner worker-a --token 1", "--owner worker-b --token 2"
    story.play("init", "init")
    story.play("acquire", "lease acquire release --owner worker-a --ttl 60")
    story.play("put", f'checkpoint put deploy-v2 --data {{"stage":"tests-passed"}} --lease-scope release {worker_a}')
    story.play("get", "checkpoint get deploy-v2")
    story.play("heartbeat", f"lease heartbeat release {worker_a}")
    story.play("release", f"lease release release {worker_a}")
    story.play("acquire again", "lease acquire release --owner worker-b --ttl 60")
    story.play("stale put", f'checkpoint put deploy-v2 --data {{"stage":"late"}} --lease-scope release {worker_a}')
    story.play("get after stale put", "checkpoint get deploy-v2")
    story.play("events after stale put", "events")
    story.play("unprotected put", 'checkpoint put deploy-v2 --data {"stage":"unprotected"}')
    story.play("acquire other", "lease acquire other --owner worker-c --ttl 60")
    other = "--lease-scope other --owner worker-c --token 1"
    story.play("put under other", f'checkpoint put deploy-v2 --data {{"stage":"other"}} {other}')
    story.play("get after refusals", "checkpoint get deploy-v2")
    story.play("rebind", f'checkpoint put deploy-v2 --data {{"stage":"moved"}} {other} --rebind')
    story.play("put under old scope", f"checkpoint put deploy-v2 --data 1 --lease-scope release {worker_b}")
    story.play("rebind to nobody", 'checkpoint put deploy-v2 --data {"stage":"freed"} --rebind')
    story.play("history", "checkpoint history deploy-v2")
    story.play("events", "events")
    story.play("status", "status")
    return story


def of_kind(answer: Answer, kind: str) -> list[dict[str, Any]]:
    return [event for event in answer.value() if event["kind"] == kind]


def test_init_creates_the_store_and_says_where(story: Story) -> None:
    value = story["init"].value()

    assert value["created"] is True
    assert value["database"] == str(story.folder / STORE)


def test_the_first_grant_carries_token_1(story: Story) -> None:
    lease = story["acquire"].value()

    assert (lease["scope"], lease["owner"], lease["token"], lease["state"]) == ("release", "worker-a", 1, "live")
    assert (lease["ttl_seconds"], lease["remaining_seconds"], lease["slot"]) == (60.0, 60.0, 0)


def test_a_protected_put_is_checkpoint_1_under_its_lease(story: Story) -> None:
    saved = story["put"].value()

    assert (saved["workflow"], saved["sequence"], saved["data"]) == ("deploy-v2", 1, {"stage": "tests-passed"})
    assert (saved["scope"], saved["owner"], saved["token"]) == ("release", "worker-a", 1)


def test_get_gives_back_what_put_saved(story: Story) -> None:
    assert story["get"].value() == story["put"].value()


def test_a_heartbeat_keeps_the_token(story: Story) -> None:
    lease = story["heartbeat"].value()

    assert (lease["token"], lease["state"], lease["remaining_seconds"]) == (1, "live", 60.0)
    assert lease["expires_at"] > story["acquire"].value()["expires_at"]


def test_release_ends_the_lease(story: Story) -> None:
    lease = story["release"].value()

    assert (lease["token"], lease["state"], lease["remaining_seconds"]) == (1, "released", 0.0)


def test_the_next_grant_carries_token_2(story: Story) -> None:
    lease = story["acquire again"].value()

    assert (lease["owner"], lease["token"]) == ("worker-b", 2)


def test_a_put_with_the_old_token_exits_76_with_one_json_error_and_nothing_on_stdout(story: Story) -> None:
    answer = story["stale put"]
    error = answer.error()

    assert answer.status == 76
    assert (error["code"], error["reason"], error["retryable"]) == ("stale-lease", "superseded", False)
    assert (error["scope"], error["owner"], error["token"]) == ("release", "worker-a", 1)
    assert (error["current_owner"], error["current_token"]) == ("worker-b", 2)
    assert error["message"]
    assert error["hint"]


def test_the_stale_put_leaves_the_checkpoint_as_it_was(story: Story) -> None:
    assert story["get after stale put"].value() == story["put"].value()


def test_the_stale_put_is_in_the_events_as_write_refused(story: Story) -> None:
    (refused,) = of_kind(story["events after stale put"], "write.refused")

    assert (refused["scope"], refused["owner"], refused["token"]) == ("release", "worker-a", 1)
    assert refused["workflow"] == "deploy-v2"
    assert refused["detail"]["action"] == "checkpoint.put"
    assert refused["detail"]["reason"] == "superseded"


def test_an_unprotected_put_on_a_protected_workflow_exits_76(story: Story) -> None:
    answer = story["unprotected put"]
    error = answer.error()

    assert answer.status == 76
    assert (error["code"], error["reason"], error["protected_by"]) == ("stale-lease", "protected", "release")


def test_a_put_under_a_live_lease_of_another_scope_exits_76(story: Story) -> None:
    answer = story["put under other"]
    error = answer.error()

    assert answer.status == 76
    assert (error["code"], error["reason"]) == ("stale-lease", "scope-mismatch")
    assert (error["scope"], error["protected_by"]) == ("other", "release")


def test_none_of_the_refused_puts_changed_the_checkpoint(story: Story) -> None:
    assert story["get after refusals"].value() == story["put"].value()


def test_each_kind_of_refusal_is_in_the_events(story: Story) -> None:
    reasons = [refused["detail"]["reason"] for refused in of_kind(story["events"], "write.refused")]

    assert reasons == ["superseded", "protected", "scope-mismatch", "scope-mismatch"]


def test_rebind_is_accepted_and_moves_the_workflow_to_the_other_scope(story: Story) -> None:
    saved = story["rebind"].value()

    assert (saved["sequence"], saved["scope"], saved["token"]) == (2, "other", 1)


def test_after_rebind_the_old_scope_is_the_wrong_one(story: Story) -> None:
    answer = story["put under old scope"]

    assert answer.status == 76
    assert answer.error()["protected_by"] == "other"


def test_rebind_without_a_lease_frees_the_workflow(story: Story) -> None:
    saved = story["rebind to nobody"].value()

    assert (saved["sequence"], saved["scope"], saved["owner"], saved["token"]) == (3, None, None, None)


def test_every_rebind_is_on_record(story: Story) -> None:
    moves = [(event["sequence"], event["detail"]) for event in of_kind(story["events"], "checkpoint.rebound")]

    assert moves == [
        (2, {"from_scope": "release", "to_scope": "other"}),
        (3, {"from_scope": "other", "to_scope": None}),
    ]


def test_every_change_has_exactly_one_event_in_order(story: Story) -> None:
    changes = [event["kind"] for event in story["events"].value() if event["kind"] != "write.refused"]

    assert changes == [
        "store.initialized",
        "lease.acquired",
        "checkpoint.saved",
        "lease.heartbeat",
        "lease.released",
        "lease.acquired",
        "lease.acquired",
        "checkpoint.rebound",
        "checkpoint.saved",
        "checkpoint.rebound",
        "checkpoint.saved",
    ]


def test_the_history_has_only_the_accepted_checkpoints_newest_first(story: Story) -> None:
    history = story["history"].value()

    assert [(saved["sequence"], saved["scope"]) for saved in history] == [(3, None), (2, "other"), (1, "release")]
    assert all("data" not in saved and saved["size_bytes"] > 0 for saved in history)


def test_status_answers_the_four_questions_in_words(story: Story) -> None:
    answer = story["status"]

    assert (answer.status, answer.err) == (0, "")
    for fact in ("release", "worker-b", "other", "worker-c", "checkpoint.put", "deploy-v2"):
        assert fact in answer.out
