"""Disks that are full to the last byte, limited or made read-only in mid-work, as the kernel makes them."""

from __future__ import annotations

import os
import random
import sys

import pytest
from tests.faults.disks import small, staging
from tests.faults.engine import Report

SEED = 8
SHORT = 50


def cannot(why: str) -> None:
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0 else pytest.skip)(why)


def under_limits(tries: int) -> Report:
    report = Report()
    small.under_limits(staging.stages(), random.Random(SEED), tries, report)
    return report


def on_small_disks(seconds: float) -> Report:
    why = small.cannot_mount()
    if why is not None:
        cannot(why)
    return small.in_a_namespace(seconds, SEED)


def test_at_any_limit_on_the_size_of_files_a_step_is_done_or_refused_and_all_goes_on() -> None:
    report = under_limits(SHORT)

    assert report.violations == []
    assert report.faults["file-size-limit"] > SHORT / 3


@pytest.mark.long
def test_at_every_limit_on_the_size_of_files_a_step_is_done_or_refused_and_all_goes_on() -> None:
    assert under_limits(100_000).violations == []


def test_on_a_full_or_read_only_disk_a_step_is_done_or_refused_and_all_goes_on() -> None:
    report = on_small_disks(6)

    assert report.violations == []
    assert report.faults["disk-full"]
    assert report.faults["read-only"]


@pytest.mark.long
def test_on_a_full_or_read_only_disk_each_step_is_done_or_refused_and_all_goes_on() -> None:
    report = on_small_disks(600)

    assert report.violations == []
    assert report.faults["disk-full"] > 100
    assert report.faults["read-only"] > 20
