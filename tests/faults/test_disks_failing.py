"""I/O errors: each call of SQLite and each system call of a command fails in turn; what was answered is there."""

from __future__ import annotations

import os
import random
import sqlite3
import sys
from itertools import islice
from pathlib import Path

import pytest
from tests.faults.disks import commands, engine, failing, staging, tracing
from tests.faults.disks.vfs import ILL, LAYER, Call, Fault
from tests.faults.engine import Budget, Report

SEED = 8
# Enough for each kind of call of each step to fail in a way or two.
SHORT = 250
SHORT_COMMANDS = 36


def cannot(why: str) -> None:
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0 else pytest.skip)(why)


@pytest.fixture(scope="module")
def stages() -> list[staging.Stage]:
    return failing.stages()


def test_the_layer_is_in_the_way_of_pythons_own_sqlite(tmp_path: Path) -> None:
    LAYER.prove(str(tmp_path))

    def ill(call: Call) -> Fault | None:
        return Fault(ILL["sync"]) if call.kind == "sync" else None

    with LAYER.between(ill), pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        sqlite3.connect(tmp_path / "ill.db").execute("CREATE TABLE t (x)")


def test_each_step_of_the_workload_makes_calls_that_can_fail(stages: list[staging.Stage]) -> None:
    assert [stage.name for stage in stages if not stage.calls] == []
    assert {call for stage in stages for call in stage.calls} == set(ILL)


def test_after_any_failed_call_the_store_is_what_was_answered_and_goes_on(stages: list[staging.Stage]) -> None:
    report = Report()

    for point in islice(engine.points(stages, random.Random(SEED)), SHORT):
        failing.play(stages[point.stage], point, report)

    assert report.violations == []
    assert min(report.faults["io-error"], report.faults["disk-full"]) > SHORT / 5, report.faults


@pytest.mark.long
def test_after_every_failed_call_the_store_is_what_was_answered_and_goes_on(stages: list[staging.Stage]) -> None:
    report = Report()
    for number, stage in enumerate(stages):
        points = failing.points(number, stage.calls)
        # A large write does the same a thousand times.
        for point in points if len(points) < 1_000 else random.Random(SEED).sample(points, 300):
            failing.play(stage, point, report)

    assert report.violations == []
    assert report.faults.total() > 4_000


@pytest.fixture(scope="module")
def runs() -> list[commands.Runs]:
    why = tracing.cannot()
    if why is not None:
        cannot(why)
    return commands.prepare()


def test_each_command_makes_the_system_calls_that_are_to_fail(runs: list[commands.Runs]) -> None:
    made = {run.command.name: {call.name for call in run.calls} for run in runs}

    assert all(
        "pwrite64" in calls and calls & {"fsync", "fdatasync"} for name, calls in made.items() if name != "export"
    )
    assert made["backup"] >= {"rename", "fsync", "openat"}
    assert made["archive"] >= {"link", "unlink", "write", "fsync", "openat"}
    assert made["init"] >= {"mkdir", "fsync"}
    assert "write" in made["export"]


def test_whichever_system_call_of_a_command_fails_it_says_so_and_leaves_all_whole(runs: list[commands.Runs]) -> None:
    points = [point for run in runs for point in run.points()]
    # Those that give a file its name, and of the rest some.
    named = [point for point in points if point.failing.name in ("rename", "link", "mkdir") and not point.stays]
    chosen = [*named, *random.Random(SEED).sample(points, SHORT_COMMANDS - len(named))]
    report = Report()

    for point in chosen:
        commands.play(point, report)

    assert report.violations == []
    assert report.faults.total() > SHORT_COMMANDS / 2


@pytest.mark.long
def test_whichever_of_all_system_calls_of_a_command_fails_it_says_so(runs: list[commands.Runs]) -> None:
    report = Report()
    for point in (point for run in runs for point in run.points()):
        commands.play(point, report)

    assert report.violations == []
    assert report.faults.total() > 2_500


@pytest.mark.parametrize("variant", ["commit-errors-swallowed", "lost-answers-are-failures"])
def test_a_broken_store_is_caught(variant: str) -> None:
    report = engine.run(Budget(60, SEED, stop_early=True), lambda report: None, variant)

    assert report.violations
