"""Nothing grows, and a thing that grows is seen."""

from __future__ import annotations

import pytest
from tests.faults.endurance import engine, samples
from tests.faults.engine import Budget


@pytest.mark.parametrize("what", samples.LIMITS)
def test_what_grows_for_ever_is_seen_and_what_only_warms_up_is_not(what: str) -> None:
    start, step = 5e6, 1e6
    leaking = [start + number * step for number in range(90)]
    warming = [*leaking[:20], *[leaking[20]] * 70]
    noisy = [start + (number % 3) for number in range(90)]
    assert samples.has_grown(what, leaking)
    assert not samples.has_grown(what, warming)
    assert not samples.has_grown(what, noisy)
    assert not samples.has_grown(what, leaking[: samples.FEWEST - 1])


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_a_few_descriptors_and_threads_that_stay_are_seen(what: str) -> None:
    assert samples.has_grown(what, [*[12.0] * 60, *[15.0] * 40])
    assert not samples.has_grown(what, [*[12.0] * 60, *[14.0] * 40])


@pytest.mark.parametrize("seconds", [12, pytest.param(1800, marks=pytest.mark.long)])
def test_core_langgraph_and_prefect_in_one_file_take_no_more_and_more(seconds: int) -> None:
    pytest.importorskip("agent_checkpoint_langgraph")
    pytest.importorskip("agent_checkpoint_prefect")
    report = engine.run(Budget(seconds, seed=1), lambda _: None)
    assert report.violations == []
    assert report.operations > 0
    # Each of the three worked, and was looked at.
    assert {note.split(":")[0] for note in report.notes} == {"core", "langgraph", "prefect", "the store"}
