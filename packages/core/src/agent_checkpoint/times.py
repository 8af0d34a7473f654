"""Wall time as people see it: aware UTC datetimes, and RFC 3339 text."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_at = datetime.fromtimestamp
_UTC = timezone.utc
_EPOCH = datetime(1970, 1, 1, tzinfo=_UTC)
# The latest that is stored, in nanoseconds since 1970: 64 bits.
_LATEST = 2**63 - 1


def utc(ns: int) -> datetime:
    """Wall time, cut to microseconds (whole ones: a double holds them exactly until the year 2255)."""
    return _at(ns // 1000 / 1e6, _UTC)


def rfc3339(when: int | datetime) -> str:
    """A wall time as text: ``2031-05-04T10:20:30.000400Z``."""
    if not isinstance(when, datetime):
        when = utc(when)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def wall_ns(when: datetime) -> int:
    """An aware time in nanoseconds since 1970, exactly; what lies beyond the year 2262 or before 1970, at that end."""
    return min(max(0, (when - _EPOCH) // timedelta(microseconds=1) * 1000), _LATEST)
