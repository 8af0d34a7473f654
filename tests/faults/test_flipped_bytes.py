"""What a disk has changed is noticed: ``flips/engine.py``, for a short time, and stores that do not look."""

from __future__ import annotations

import pytest
from tests.faults.engine import Budget, Report
from tests.faults.flips import engine as flips

SEED = 20_260_801
# With it an early bit leads the reader of a whole table back to where it was.
ROUND_AND_ROUND = 219_442_317


def ignore(report: Report) -> None:
    """Nobody watches."""


def flipped(report: Report) -> int:
    return report.faults["flipped-bit"] + report.faults["flipped-byte"]


@pytest.mark.parametrize("seed", [SEED, ROUND_AND_ROUND])
def test_a_flipped_byte_never_changes_an_answer(seed: int) -> None:
    report = flips.run(Budget(10, seed), ignore)
    assert report.violations == []
    assert flipped(report) > 0


def test_a_store_that_does_not_look_at_its_sums_is_caught() -> None:
    report = flips.run(Budget(20, SEED, stop_early=True), ignore, "unverified-sums")
    assert report.violations


@pytest.mark.long
def test_no_flipped_byte_of_thousands_changes_an_answer() -> None:
    report = flips.run(Budget(900, SEED + 1), ignore)
    assert report.violations == []
    assert flipped(report) >= 1_000
