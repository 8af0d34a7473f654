"""The hooks, called as pluggy calls them: with an environment and a clock of the test's own."""

from __future__ import annotations

import errno
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

import pytest
from agent_checkpoint_business_hours import EVENT_LOG, BusinessHours, event_log

from agent_checkpoint import Event, FenceRefusedError

NOON = datetime(2031, 5, 5, 12, tzinfo=timezone.utc)
EVENT = Event("0-0-7", 7, NOON, "lease.acquired", "größe", "a", 3, None, None, {"ttl_seconds": 60.0})


def plugin(**environ: str) -> BusinessHours:
    return BusinessHours(environ, lambda: NOON)


def test_without_settings_every_write_passes() -> None:
    plugin().check_fence()


def test_inside_the_hours_a_write_passes() -> None:
    plugin(AGENT_CHECKPOINT_HOURS="09:00-17:00").check_fence()


def test_outside_the_hours_a_write_is_refused_with_the_time_when_it_may_come_back() -> None:
    closed = plugin(
        AGENT_CHECKPOINT_HOURS="15:00-17:00",
        AGENT_CHECKPOINT_DAYS="mon-fri",
        AGENT_CHECKPOINT_HOURS_TZ="Europe/Berlin",
    )

    with pytest.raises(FenceRefusedError) as refused:
        closed.check_fence()

    expected = "writes are closed until 2031-05-05T15:00:00+02:00 (15:00-17:00 mon-fri Europe/Berlin)"
    assert str(refused.value) == expected


def test_settings_that_are_not_understood_refuse_every_write() -> None:
    with pytest.raises(FenceRefusedError, match="AGENT_CHECKPOINT_HOURS='lunch' must be"):
        plugin(AGENT_CHECKPOINT_HOURS="lunch").check_fence()


def test_an_event_is_one_line_of_json_with_its_time_in_rfc_3339(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    listener = plugin(**{EVENT_LOG: str(log)})

    listener.event_recorded(EVENT)
    listener.event_recorded(EVENT._replace(id=8))

    first, second = log.read_text("ascii").splitlines()
    assert json.loads(first) == {**EVENT._asdict(), "at": "2031-05-05T12:00:00.000000Z"}
    assert json.loads(second)["id"] == 8


def test_lines_of_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"

    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda number: event_log.append(str(log), EVENT._replace(id=number)), range(2000)))

    assert sorted(json.loads(line)["id"] for line in log.read_text("ascii").splitlines()) == list(range(2000))


def test_a_new_log_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    before = os.umask(0)
    try:
        event_log.append(str(log), EVENT)
    finally:
        os.umask(before)

    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("environ", [{}, {EVENT_LOG: ""}])
def test_without_a_log_file_events_go_nowhere(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    plugin(**environ).event_recorded(EVENT)

    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_full_disk_is_an_error_and_not_half_a_line_in_silence() -> None:
    with pytest.raises(OSError, match="No space") as failed:
        event_log.append("/dev/full", EVENT)

    assert failed.value.errno == errno.ENOSPC


def test_a_line_that_was_cut_short_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.raises(OSError, match=r"only 50 of \d+ bytes were written"):
            event_log.append(str(log), EVENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
