"""The rule is pure: every test gives it the time and the settings."""

from __future__ import annotations

from datetime import datetime

import pytest
from agent_checkpoint_business_hours.hours import Hours, closed_until, read


def hours(window: str | None = None, days: str | None = None, zone: str | None = None) -> Hours:
    settings = {
        "AGENT_CHECKPOINT_HOURS": window,
        "AGENT_CHECKPOINT_DAYS": days,
        "AGENT_CHECKPOINT_HOURS_TZ": zone,
    }
    found = read({name: text for name, text in settings.items() if text is not None})
    assert found is not None
    return found


def until(now: str, allowed: Hours) -> str | None:
    """Also checks that what the rule says is true: closed just before it opens, open when it does."""
    opens_at = closed_until(datetime.fromisoformat(now), allowed)
    if opens_at is None:
        return None
    assert closed_until(opens_at, allowed) is None
    return opens_at.isoformat()


def test_no_settings_are_no_hours() -> None:
    assert read({"HOME": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("now", "opens_at"),
    [
        # 2031-05-05 is a Monday.
        ("2031-05-05T08:59:59.999999+00:00", "2031-05-05T09:00:00+00:00"),
        ("2031-05-05T09:00:00+00:00", None),
        ("2031-05-05T16:59:59.999999+00:00", None),
        ("2031-05-05T17:00:00+00:00", "2031-05-06T09:00:00+00:00"),
        ("2031-05-09T17:00:00+00:00", "2031-05-12T09:00:00+00:00"),
        ("2031-05-10T12:00:00+00:00", "2031-05-12T09:00:00+00:00"),
        # The same moment is judged the same, whatever zone it is given in.
        ("2031-05-05T18:30:00+09:30", None),
        ("2031-05-05T18:29:00+09:30", "2031-05-05T09:00:00+00:00"),
    ],
)
def test_a_window_has_its_start_and_not_its_end(now: str, opens_at: str | None) -> None:
    assert until(now, hours("09:00-17:00", "mon-fri")) == opens_at


@pytest.mark.parametrize(
    ("now", "opens_at"),
    [
        ("2031-05-09T21:59:00+00:00", "2031-05-09T22:00:00+00:00"),
        ("2031-05-09T22:00:00+00:00", None),
        ("2031-05-10T05:59:00+00:00", None),  # Saturday morning belongs to Friday
        ("2031-05-10T06:00:00+00:00", "2031-05-12T22:00:00+00:00"),
        ("2031-05-12T05:00:00+00:00", "2031-05-12T22:00:00+00:00"),  # Monday morning belongs to Sunday
    ],
)
def test_a_window_over_midnight_belongs_to_the_day_on_which_it_opens(now: str, opens_at: str | None) -> None:
    assert until(now, hours("22:00-06:00", "mon-fri")) == opens_at


def test_hours_without_days_are_every_day_s() -> None:
    assert until("2031-05-10T12:00:00+00:00", hours("09:00-17:00")) is None


def test_days_without_hours_are_whole_days() -> None:
    saturday = hours(days="sat")

    assert until("2031-05-10T00:00:00+00:00", saturday) is None
    assert until("2031-05-10T23:59:59+00:00", saturday) is None
    assert until("2031-05-11T00:00:00+00:00", saturday) == "2031-05-17T00:00:00+00:00"


def test_a_time_zone_alone_closes_nothing() -> None:
    assert until("2031-05-10T00:00:00+00:00", hours(zone="Europe/Berlin")) is None


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("mon-fri", {0, 1, 2, 3, 4}),
        ("Mon,WED", {0, 2}),
        ("sat-mon", {5, 6, 0}),
        ("tue-tue", {1}),
        ("mon-sun", set(range(7))),
        ("mon,thu-sat", {0, 3, 4, 5}),
    ],
)
def test_days_are_names_and_ranges_that_may_run_over_the_weekend(text: str, days: set[int]) -> None:
    assert hours(days=text).days == days


def test_the_hours_follow_the_time_zone_through_the_year() -> None:
    berlin = hours("09:00-17:00", zone="Europe/Berlin")

    assert until("2031-01-15T07:30:00+00:00", berlin) == "2031-01-15T09:00:00+01:00"
    assert until("2031-07-15T07:30:00+00:00", berlin) is None


def test_a_window_that_opens_in_a_skipped_hour_opens_as_if_the_clock_had_not_changed() -> None:
    # In Berlin on 2031-03-30 the clock goes from 02:00 to 03:00.
    berlin = hours("02:30-05:00", zone="Europe/Berlin")

    assert until("2031-03-30T01:29:00+00:00", berlin) == "2031-03-30T03:30:00+02:00"
    assert until("2031-03-30T02:59:00+00:00", berlin) is None
    assert until("2031-03-30T03:00:00+00:00", berlin) == "2031-03-31T02:30:00+02:00"


def test_a_weekly_window_that_a_clock_change_swallows_opens_a_week_later() -> None:
    sunday = hours("02:30-03:00", "sun", "Europe/Berlin")

    assert until("2031-03-29T12:00:00+00:00", sunday) == "2031-04-06T02:30:00+02:00"


def test_an_hour_that_comes_twice_means_its_first_time() -> None:
    # In Berlin on 2031-10-26 the clock goes from 03:00 back to 02:00.
    berlin = hours("01:00-02:30", zone="Europe/Berlin")

    assert until("2031-10-26T00:29:00+00:00", berlin) is None
    assert until("2031-10-26T00:30:00+00:00", berlin) == "2031-10-27T01:00:00+01:00"


MALFORMED_HOURS = [
    *("", "lunch", "09:00", "9-17", "9:00-17:00", "09:00–17:00", "\u0660\u0669:00-17:00"),
    *("09:00-17:00 ", "09:00-17:00\n", "09:60-17:00", "24:00-06:00", "25:00-26:00", "09:00-24:01", "09:00-09:00"),
]


@pytest.mark.parametrize("window", MALFORMED_HOURS)
def test_hours_that_are_not_understood_are_an_error(window: str) -> None:
    with pytest.raises(ValueError, match=r"^AGENT_CHECKPOINT_HOURS='.*' (must be HH:MM-HH:MM|opens and closes)"):
        hours(window)


@pytest.mark.parametrize("days", ["", "mon-", "-fri", "mon--fri", "mon-wed-fri", "mon,", "mon, tue", "monday", "0-4"])
def test_days_that_are_not_understood_are_an_error(days: str) -> None:
    with pytest.raises(ValueError, match=r"^AGENT_CHECKPOINT_DAYS='.*' must be days"):
        hours(days=days)


@pytest.mark.parametrize("zone", ["", "utc+2", "Europe/Atlantis", "../localtime", "/etc/localtime", "Europe", "\udcff"])
def test_a_time_zone_that_is_not_known_is_an_error(zone: str) -> None:
    with pytest.raises(ValueError, match=r"^AGENT_CHECKPOINT_HOURS_TZ='.*' is no time zone"):
        hours(zone=zone)
