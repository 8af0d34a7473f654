"""Whatever is typed and called, there is an answer or one of our errors, and the store is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.engine import Budget, Report
from tests.faults.fuzz import engine
from tests.faults.fuzz.calls import Call, make, opened
from tests.faults.fuzz.place import place, unsound
from tests.faults.fuzz.words import Line, Said, call, wrong_answer
from tests.faults.variants import broken

EXAMPLES = 150


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is to survive a power cut."""
    monkeypatch.delenv("AGENT_CHECKPOINT_DB", raising=False)


@pytest.mark.parametrize("kind", engine.KINDS)
@pytest.mark.parametrize("number", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 100))])
def test_anything_gets_an_answer_or_one_of_our_errors(kind: str, number: int, tmp_path: Path) -> None:
    report = Report()
    engine.search(kind, number, report, tmp_path, EXAMPLES)
    assert report.operations >= EXAMPLES


def test_a_store_that_takes_any_number_is_caught() -> None:
    budget = Budget(120, seed=1, stop_early=True)
    report = engine.run(budget, lambda _: None, "unchecked-values")
    assert any("is none of our errors" in violation for violation in report.violations)


def test_a_store_that_grants_a_token_twice_is_seen(tmp_path: Path) -> None:
    with place(tmp_path) as folder, broken("token-reset-on-release"), opened(folder) as store:
        store.force_release("release", reason="test")
        assert store.acquire("release", "worker-b").token == 1
        assert "do not grow" in str(unsound(folder / "agents.db"))


@pytest.mark.parametrize(
    "said",
    [
        Said(1, "", '{"error": {"code": "unexpected", "hint": "", "message": "", "retryable": false}}'),
        Said(2, "", "usage: agent-checkpoint"),
        Said(2, "", '{"error": {"code": "invalid-input", "message": ""}}'),
        Said(2, "", '{"error": {}} {"error": {}}'),
        Said(75, "{}", '{"error": {"code": "lease-held", "hint": "", "message": "", "retryable": true}}'),
        Said(2, "", "Traceback (most recent call last):"),
        Said(3, "", ""),
    ],
    ids=["unexpected", "usage", "half an error", "two", "beside an answer", "traceback", "no status of ours"],
)
def test_what_no_command_may_say_is_seen(said: Said) -> None:
    assert wrong_answer(Line(["lease", "list"], b""), said) is not None


def test_what_a_command_says_is_let_pass(tmp_path: Path) -> None:
    with place(tmp_path):
        for words in (["lease", "list"], ["lease", "show", "nowhere"], ["lease"], ["doctor", "--db", "text.txt"]):
            line = Line(words, b"")
            assert wrong_answer(line, call(line)) is None


def test_an_error_that_is_none_of_ours_is_seen(tmp_path: Path) -> None:
    with place(tmp_path) as folder, opened(folder) as store:
        assert make(store, Call("get_lease", {"scope": 1})) is None
        assert "TypeError is none of our errors" in str(make(store, Call("get_lease", {})))
        assert unsound(folder / "agents.db") == []
