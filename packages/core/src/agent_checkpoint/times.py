"""Wall time as people see it: aware UTC datetimes, and RFC 3339 text."""

from __future__ import annotations

from datetime import datetime, timezone

_at = datetime.fromtimestamp
_UTC = timezone.utc


def utc(ns: int) -> datetime:
    """Wall time, cut to microseconds (whole ones: a double holds them exactly until the year 2255)."""
    return _at(ns // 1000 / 1e6, _UTC)


def rfc3339(when: int | datetime) -> str:
    """A wall time as text: ``2031-05-04T10:20:30.000400Z``."""
    if not isinstance(when, datetime):
        when = utc(when)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")
