"""Whether what a process has, or a file takes, is flat once it has warmed up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

# The first part of the run fills caches and pools; of the rest, the second half is compared with the first.
WARM_UP = 3
FEWEST = 12


class Flat(NamedTuple):
    """By how much something may grow, and still be noise: a share, or so much, whichever is more."""

    share: float
    amount: float


LIMITS: Mapping[str, Flat] = {
    "memory": Flat(0.03, 3e6),
    "descriptors": Flat(0.0, 2),
    "threads": Flat(0.0, 2),
    # A log that a reader keeps from being reset is longer for a while.
    "log": Flat(0.5, 4e6),
    "file": Flat(0.1, 1e6),
}


def course(what: str, figures: Sequence[float]) -> str:
    """How it went, for people: the first figure, and the medians of both halves after the warm-up."""
    before, after = _halves(figures)
    return f"{what} {figures[0]:,.0f} at first, then {before:,.0f} and {after:,.0f}"


def has_grown(what: str, figures: Sequence[float]) -> bool:
    """Whether it has grown by more than noise after the warm-up; False where there is too little to tell."""
    if len(figures) < FEWEST:
        return False
    before, after = _halves(figures)
    limit = LIMITS[what]
    return after - before > max(limit.share * before, limit.amount)


def _halves(figures: Sequence[float]) -> tuple[float, float]:
    warm = figures[len(figures) // WARM_UP :]
    middle = len(warm) // 2
    return median(warm[:middle] or warm), median(warm[middle:])
