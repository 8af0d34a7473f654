"""Power cuts between any two writes: what was answered is there, and what was not is there whole or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.faults.disks import engine, losing, power
from tests.faults.disks.drive import CUTS, Change, Content, Drive
from tests.faults.disks.vfs import LAYER
from tests.faults.disks.workload import STEPS, put_huge
from tests.faults.disks.world import World
from tests.faults.engine import Budget, Report

SEED = 8
SHORT = 60
EVER = 1e9


@pytest.fixture(scope="module")
def tape() -> power.Tape:
    return power.record([step for step in STEPS if step is not put_huge])


def test_the_drive_has_what_the_disk_has(tmp_path: Path) -> None:
    world = World(tmp_path)
    drive = Drive(str(world.path))
    with LAYER.between(lambda call: drive.apply(Change.of(call))):
        for step in STEPS:
            for _ in step(world):
                pass
        files = drive.cut("all", random.Random(SEED))

        assert set(files) == {"agents.db", "agents.db-wal"}
        for name, content in files.items():
            assert content == (tmp_path / name).read_bytes(), name
        world.store.close()


def test_what_was_not_synced_may_be_gone_in_every_part() -> None:
    content = Content(bytearray(b"a" * 2048), [(0, b"b" * 1024), (2048, b"c" * 512), (1024, None)])
    seen = {how: {content.cut(how, random.Random(seed)) for seed in range(200)} for how in CUTS}

    assert seen["nothing"] == {b"a" * 2048}
    assert seen["all"] == {b"b" * 1024}
    assert seen["the first writes"] == {
        b"a" * 2048,
        b"b" * 1024 + b"a" * 1024,
        b"b" * 1024 + b"a" * 1024 + b"c" * 512,
        b"b" * 1024,
    }
    assert b"a" * 2048 + b"c" * 512 in seen["some writes"]
    assert b"a" * 512 + b"b" * 512 + b"a" * 1024 in seen["some sectors"]


def test_after_a_power_cut_all_that_was_answered_is_there(tape: power.Tape) -> None:
    choice, report = random.Random(SEED), Report()
    syncs = [place for place, moment in enumerate(tape.moments) if moment.change.kind == "sync"]
    # Before and after as many syncs, and elsewhere.
    places = {place + after for place in choice.sample(syncs, SHORT // 4) for after in (0, 1)}
    places |= set(choice.sample(range(len(tape.moments)), SHORT // 2))

    power.cut(tape, places, CUTS, Budget(EVER, SEED), report)

    assert report.violations == []
    assert report.faults["power-cut"] == len(places) * len(CUTS)


@pytest.mark.long
def test_after_a_power_cut_at_any_moment_all_that_was_answered_is_there(tape: power.Tape) -> None:
    report = Report()
    for seed in range(4):
        power.cut(tape, set(range(len(tape.moments))), CUTS, Budget(EVER, seed), report)

    assert report.violations == []


@pytest.mark.long
def test_after_a_power_cut_while_the_log_is_copied_back_all_that_was_answered_is_there() -> None:
    tape = power.record(STEPS)
    huge = [place for place, moment in enumerate(tape.moments) if moment.step == "put_huge"]
    report = Report()

    places = {*huge[-60:], *random.Random(SEED).sample(huge, 100)}
    power.cut(tape, places, CUTS, Budget(EVER, SEED), report)

    assert report.violations == []


def test_a_sync_that_lost_its_data_takes_nothing_with_it_that_is_synced_later() -> None:
    report = Report()
    for number in random.Random(SEED).sample(range(1, 41), 5):
        assert losing.play(number, report)

    assert report.violations == []


@pytest.mark.long
def test_whichever_sync_loses_its_data_it_takes_nothing_with_it_that_is_synced_later() -> None:
    report, number = Report(), 1
    while losing.play(number, report):
        number += 1

    assert report.violations == []
    assert number > 40


@pytest.mark.parametrize("variant", ["unsynced-grants"])
def test_a_broken_store_is_caught(variant: str) -> None:
    report = engine.run(Budget(60, SEED, stop_early=True), lambda report: None, variant)

    assert report.faults["power-cut"]
    assert report.violations


def test_a_store_that_is_not_broken_is_not_caught() -> None:
    report = engine.run(Budget(3, SEED), lambda report: None)

    assert report.violations == []
    assert report.faults
    assert report.operations
