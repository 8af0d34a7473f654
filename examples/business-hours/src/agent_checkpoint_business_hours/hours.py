"""When writes are allowed: pure, the settings and the time come in as arguments.

A window belongs to the day on which it opens: ``mon-fri 22:00-06:00`` is open
on Saturday at 05:00 and closed on Monday at 05:00. Windows are computed as
moments in UTC, so that a day with a clock change is right: a local time that
the change skips counts as if the clock had not been changed yet, one that comes
twice means its first time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

__all__ = ["DAYS", "HOURS", "TIME_ZONE", "Hours", "closed_until", "read"]

HOURS = "AGENT_CHECKPOINT_HOURS"
DAYS = "AGENT_CHECKPOINT_DAYS"
TIME_ZONE = "AGENT_CHECKPOINT_HOURS_TZ"

WEEK = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_A_DAY = 24 * 60
# From yesterday, whose window may still be open, to a week past the one in which
# a clock change may have swallowed the only window.
FIRST_DAY, LAST_DAY = -1, 14

_WINDOW = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Hours:
    """Windows from ``start`` to ``end`` minutes after the midnight of each of ``days`` (0 is Monday).

    ``end`` is not part of the window; beyond 1,440 it is on the next day.
    """

    start: int
    end: int
    days: frozenset[int]
    zone: tzinfo
    text: str

    def __str__(self) -> str:
        return self.text


def read(environ: Mapping[str, str]) -> Hours | None:
    """The hours that the environment sets, None when it sets none.

    Hours without days are every day's, days without hours are whole days. A
    variable that is set to nothing is an error, not unset.

    Raises:
        ValueError: a setting cannot be understood; the message names it and the rule.
    """
    window, days, zone = environ.get(HOURS), environ.get(DAYS), environ.get(TIME_ZONE)
    if window is None and days is None and zone is None:
        return None
    window, days, zone = (
        default if text is None else text
        for text, default in ((window, "00:00-24:00"), (days, "mon-sun"), (zone, "UTC"))
    )
    return Hours(*_window(window), _days(days), _zone(zone), f"{window} {days} {zone}")


def closed_until(now: datetime, hours: Hours) -> datetime | None:
    """None while a window is open at ``now`` (an aware time), else when the next one opens."""
    for opens, closes in _windows(now, hours):
        if now < closes:
            return None if opens <= now else opens.astimezone(hours.zone)
    raise AssertionError("a week has a window")


def _windows(now: datetime, hours: Hours) -> Iterator[tuple[datetime, datetime]]:
    today = now.astimezone(hours.zone).date()
    for day in (today + timedelta(days=distance) for distance in range(FIRST_DAY, LAST_DAY + 1)):
        if day.weekday() in hours.days:
            midnight = datetime.combine(day, time())
            opens, closes = (_utc(midnight + timedelta(minutes=each), hours.zone) for each in (hours.start, hours.end))
            if opens < closes:
                yield opens, closes


def _utc(local: datetime, zone: tzinfo) -> datetime:
    return local.replace(tzinfo=zone).astimezone(timezone.utc)


def _window(text: str) -> tuple[int, int]:
    match = _WINDOW.fullmatch(text)
    hour, minute, end_hour, end_minute = map(int, match.groups()) if match else (99, 99, 99, 99)
    start, end = hour * 60 + minute, end_hour * 60 + end_minute
    if max(minute, end_minute) > 59 or start >= MINUTES_A_DAY or end > MINUTES_A_DAY:
        raise _malformed(HOURS, text, "must be HH:MM-HH:MM, from 00:00 to 24:00, such as 09:00-17:00 or 22:00-06:00")
    if start == end:
        raise _malformed(HOURS, text, "opens and closes at the same time; a whole day is 00:00-24:00")
    return start, end if start < end else end + MINUTES_A_DAY


def _days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.partition("-")
        if first not in WEEK or (last or first) not in WEEK or part.endswith("-"):
            raise _malformed(DAYS, text, "must be days or ranges of days, such as mon-fri or mon,wed,fri-sun")
        start = WEEK.index(first)
        days.update((start + step) % 7 for step in range((WEEK.index(last or first) - start) % 7 + 1))
    return frozenset(days)


def _zone(text: str) -> tzinfo:
    if text == "UTC":
        return timezone.utc  # needs no time zone data on the machine
    try:
        return ZoneInfo(text)
    except (ValueError, LookupError, OSError):
        raise _malformed(TIME_ZONE, text, "is no time zone known here; one is Europe/Berlin") from None


def _malformed(variable: str, text: str, rule: str) -> ValueError:
    return ValueError(f"{variable}={text!r} {rule}")
