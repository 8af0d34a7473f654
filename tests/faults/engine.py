"""What every engine of the proof offers: so many seconds of work, and what became of it.

An engine runs a store, the right one or one that is broken on purpose, under
its faults, checks what it promises and counts. ``python -m tests.faults`` runs
them all; a test of each runs a short form.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Report:
    """What one engine did, and what it found.

    ``operations`` are calls of the store (or rules decided) whose outcome was
    checked; ``faults`` counts what was done to it, by kind (``kill``, ``stop``,
    ``io-error``, ``power-cut``, ``clock-step``, ``flipped-byte``, …). Each
    violation is one sentence with what is needed to see it again. ``notes`` are
    worth a line below the table.
    """

    operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take in what another run found."""
        self.operations += other.operations
        self.faults += other.faults
        self.violations += other.violations
        self.notes += other.notes


class Budget:
    """How long an engine may go on, and by which seed; it stops at the first round that begins too late."""

    def __init__(self, seconds: float, seed: int, *, stop_early: bool = False) -> None:
        self.seconds = seconds
        self.seed = seed
        self.random = random.Random(seed)
        self.stop_early = stop_early
        """Whether the first violation is enough: a broken variant needs to be caught once."""
        self._until = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._until - time.monotonic())

    def goes_on(self, report: Report) -> bool:
        """Whether there is reason to go on."""
        return self.left() > 0 and not (self.stop_early and report.violations)


Tell = Callable[[Report], object]
"""Hears of the report now and then, for a progress line; cheap to call."""


class Engine(Protocol):
    """One kind of proof."""

    def __call__(self, budget: Budget, tell: Tell, variant: str | None = None) -> Report:
        """Run for as long as the budget says, on the right store or on a broken ``variant`` (see ``variants``)."""
        ...
