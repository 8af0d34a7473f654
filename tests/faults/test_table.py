"""What the one command says: it cannot pass where something was violated, not caught, or not done."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.faults import __main__ as proofs
from tests.faults import table
from tests.faults.engine import Budget, Report
from tests.faults.table import Ran
from tests.faults.variants import VARIANTS

ROOT = Path(__file__).parents[2]
GOOD = Report(1_000, Counter(kill=3, stop=2))
BAD = Report(1_000, Counter(kill=3), ["token 7 was granted twice, seed 5"])


@pytest.mark.parametrize(
    ("variant", "report", "held"),
    [
        (None, GOOD, True),
        (None, BAD, False),
        (None, Report(), False),
        (None, Report(1_000), False),
        ("no-fence-check", BAD, True),
        ("no-fence-check", Report(5, Counter(), ["caught before any fault"]), True),
        ("no-fence-check", GOOD, False),
        ("no-fence-check", Report(), False),
    ],
)
def test_a_run_holds_where_the_right_store_does_and_the_broken_one_does_not(
    variant: str | None, report: Report, held: bool
) -> None:
    assert Ran("model", variant, report, 1.0).held is held


def test_the_table_has_what_was_done_what_was_found_and_what_was_not_caught() -> None:
    ran = [
        Ran("model", None, GOOD, 10.0),
        Ran("disks", None, BAD, 5.0),
        Ran("model", "wall-clock", BAD, 1.2),
        Ran("model", "pid-alone", GOOD, 60.0),
    ]
    text = table.of(ran)
    assert "2,000" in text
    assert "model (simulated): 3 × kill" in text
    assert "disks: 3 × kill" in text
    assert "1 of 2 caught" in text
    assert "NOT CAUGHT" in text
    assert "VIOLATED (disks): token 7 was granted twice, seed 5" in text
    document = table.document(5, ran)
    assert (document["held"], [each["held"] for each in document["runs"]]) == (False, [True, False, True, False])


def test_every_store_that_is_broken_on_purpose_has_an_engine_that_must_catch_it() -> None:
    assert {variant for caught in proofs.CATCHES.values() for variant in caught} == set(VARIANTS)
    assert set(proofs.CATCHES) <= set(proofs.SHARES)
    assert all(find_spec(f"tests.faults.{name}.engine") for name in (*proofs.SHARES, "endurance"))


def test_a_budget_ends_by_its_time_or_by_the_first_catch() -> None:
    assert Budget(60, 1).goes_on(BAD)
    assert not Budget(0, 1).goes_on(GOOD)
    assert not Budget(60, 1, stop_early=True).goes_on(BAD)
    assert Budget(60, 1, stop_early=True).goes_on(GOOD)


@pytest.mark.parametrize("words", [["--minutes", "0"], ["--minutes", "nan"], ["--minutes", "x"], ["--only", "nothing"]])
def test_what_the_command_cannot_run_it_refuses(words: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-m", "tests.faults", *words], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "error: argument" in ran.stderr
