"""Eight processes on one store, killed, stopped anywhere, their wall clock set: what they did can be explained."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from tests import postgres
from tests.faults.engine import Budget, Report
from tests.faults.histories.engine import run, run_on
from tests.faults.histories.nursery import Nursery

SHORT, LONG = 20.0, 600.0
SHORT_ON_A_SERVER, LONG_ON_A_SERVER = 10.0, 300.0
# A broken store is caught within seconds; only one that is not takes so long.
UNTIL_CAUGHT = 90.0
FAULTS = {"kill", "stop", "stop-in-the-lock", "stop-before-a-write", "clock-step"}
# What would be seen of each broken store, whatever else goes wrong with it.
SEEN = {
    "no-fence-check": "accepted after its lease was",
    "check-in-another-transaction": "written under a lease that was over",
    "token-reset-on-release": "came twice",
    "the-contenders-ttl": "earlier leases were live",
    "wall-clock": "earlier leases were live",
    "refusal-before-its-commit": "a refusal is not on record",
}


class Until(Budget):
    """Goes on until a violation with these words was seen."""

    def __init__(self, words: str) -> None:
        super().__init__(UNTIL_CAUGHT, random.randrange(2**32), stop_early=True)
        self._words = words

    def saw(self, report: Report) -> bool:
        return any(self._words in violation for violation in report.violations)

    def goes_on(self, report: Report) -> bool:
        return self.left() > 0 and not self.saw(report)


def budget(seconds: float) -> Budget:
    return Budget(seconds, random.randrange(2**32))


def ignore(_: Report) -> None:
    pass


@pytest.mark.parametrize("seconds", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_whatever_befalls_them_what_eight_processes_did_can_be_explained(seconds: float) -> None:
    report = run(budget(seconds), ignore)
    while not report.faults.keys() >= FAULTS and not report.violations:  # on a busy machine the rarest takes a while
        report.add(run(budget(SHORT / 4), ignore))

    assert report.violations == []
    assert report.operations > 0


@pytest.mark.long
def test_so_can_it_be_with_the_files_on_a_disk() -> None:
    assert run_on(budget(LONG), ignore, folder=Path(tempfile.gettempdir())).violations == []


@pytest.mark.parametrize("seconds", [SHORT_ON_A_SERVER, pytest.param(LONG_ON_A_SERVER, marks=pytest.mark.long)])
def test_so_can_it_be_on_postgresql(seconds: float) -> None:
    if not postgres.is_installed():
        pytest.skip("agent-checkpoint-postgres is not installed")
    report = run_on(budget(seconds), ignore, server=postgres.url)

    assert report.violations == []
    assert {"kill", "stop"} <= report.faults.keys()
    assert report.operations > 0


@pytest.mark.parametrize("variant", SEEN)
def test_a_broken_store_is_caught(variant: str) -> None:
    until = Until(SEEN[variant])
    report = run(until, ignore, variant)

    assert until.saw(report), report.violations


@pytest.mark.parametrize(("kind", "variant"), [("bare-lock-set", None), ("lock-set", "no-fence-check")])
def test_without_the_fence_updates_are_lost(kind: str, variant: str | None) -> None:
    until = Until("an acknowledged number is in no set")
    report = run_on(until, ignore, variant, kinds=[kind])

    assert until.saw(report), report.violations
    if variant is None:  # and nothing else is wrong: the store did as it was told
        assert all("an acknowledged number is in no set" in violation for violation in report.violations)


def test_the_nursery_ends_its_workers_stopped_ones_too_when_nobody_listens(tmp_path: Path) -> None:
    with Nursery(None, tmp_path / "errors.txt") as nursery:
        pids = [nursery.start("mixed", str(tmp_path / "no.db"), tmp_path, f"worker-{number}", 0) for number in range(3)]
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
