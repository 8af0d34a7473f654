"""Whatever is typed or called: an answer or one of our errors, and a store that is whole.

Hypothesis makes the examples and makes them small. Each begins with a copy of
the same store, so that what it shows can be seen again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.faults.engine import Budget, Report, Tell
from tests.faults.fuzz import calls, words
from tests.faults.fuzz.place import Rows, place, rows, unsound
from tests.faults.variants import broken

EXAMPLES = 100
MOST = 4
INVALID = 2
SMALLEST = (Phase.generate, Phase.shrink)
ANY = (Phase.generate,)


def type_lines(root: Path, report: Report, lines: list[words.Line]) -> None:
    """Type these lines one after the other, and look at what they said and left."""
    with place(root) as folder:
        for line in lines:
            before = _rows(folder)
            said = words.call(line)
            report.operations += 1
            wrong = words.wrong_answer(line, said)
            assert wrong is None, f"{line}: {wrong}"
            # Behind ``--`` is a command whose status is passed on.
            if said.status == INVALID and "--" not in line.words:
                assert _rows(folder) == before, f"{line} is invalid, and has written"
            assert not words.left_behind(folder), f"{line} left {words.left_behind(folder)}"
        _look(folder)


def make_calls(root: Path, report: Report, made: list[calls.Call]) -> None:
    """Make these calls one after the other, and look at how they failed and what they left."""
    with place(root) as folder:
        with calls.opened(folder) as store:
            for call in made:
                wrong = calls.make(store, call)
                report.operations += 1
                assert wrong is None, f"{call}: {wrong}"
                assert not words.left_behind(folder), f"{call} left {words.left_behind(folder)}"
        _look(folder)


def _rows(folder: Path) -> Rows | None:
    return rows(folder / "agents.db") if (folder / "agents.db").exists() else None


def _look(folder: Path) -> None:
    if (folder / "agents.db").exists():
        assert not unsound(folder / "agents.db"), unsound(folder / "agents.db")


KINDS: dict[str, tuple[Callable[[Path, Report, Any], None], st.SearchStrategy[Any]]] = {
    "words": (type_lines, words.lines()),
    "calls": (make_calls, calls.calls()),
}


def search(
    kind: str, number: int, report: Report, root: Path, examples: int = EXAMPLES, phases: tuple[Phase, ...] = SMALLEST
) -> None:
    """Try so many examples of a kind; AssertionError with the smallest that shows something wrong, or with any."""
    check, strategy = KINDS[kind]
    quiet = settings(
        max_examples=examples,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )

    @seed(number)
    @quiet
    @given(st.lists(strategy, min_size=1, max_size=MOST))
    def example(found: list[Any]) -> None:
        check(root, report, found)

    example()


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """Type and call for as long as the budget says."""
    report = Report()
    number = budget.seed
    with tempfile.TemporaryDirectory() as root, broken(variant):
        while budget.goes_on(report):
            for kind in KINDS:
                try:
                    search(kind, number, report, Path(root), phases=ANY if budget.stop_early else SMALLEST)
                except AssertionError as error:
                    report.violations.append(f"{kind}, seed {number}: {error}")
                tell(report)
            number += 1
    return report
