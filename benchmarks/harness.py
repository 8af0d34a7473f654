"""How everything here is measured: two sides, interleaved, one figure of each a round.

No machine is quiet, so the sides alternate within one run and what counts is
their ratio. A ratio is judged by its median over the rounds; a limit, which has
no peer in it, must hold in every round.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# A spread leaves out this share of the rounds at either end.
OUTER = 10
# What --quick does of the rounds: enough to see that it runs, too few for a verdict.
QUICK_SHARE = 5
FEWEST_ROUNDS = 3
# On a slow disk fewer rounds are as good: no more begin after so long, once there are enough.
LONGEST_SECONDS = 45.0
ENOUGH_ROUNDS = 10

Figures = tuple[float, ...]
Side = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to measure, ``{"disk": folder, "tmpfs": folder}`` (tmpfs only where there is one), and how thoroughly."""

    places: Mapping[str, Path]
    quick: bool = False

    def rounds(self, thorough: int) -> int:
        """How many rounds to run when a thorough measurement takes so many."""
        return max(FEWEST_ROUNDS, thorough // QUICK_SHARE) if self.quick else thorough

    def steps(self, thorough: int) -> int:
        """How many steps a round has, likewise."""
        return max(1, thorough // QUICK_SHARE) if self.quick else thorough


@dataclass(frozen=True, slots=True)
class Target:
    """The figure to reach."""

    sign: Literal["≥", "≤"]
    value: float

    def holds(self, figure: float) -> bool:
        """Whether a figure reaches it."""
        return figure >= self.value if self.sign == "≥" else figure <= self.value

    def worst(self, figures: Figures) -> float:
        """The figure that is farthest on the wrong side."""
        return min(figures) if self.sign == "≥" else max(figures)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the results: a figure of ours and the same of the peer, both round by round.

    ``judged`` is what the target is about: the ratio ours/theirs, or ours
    alone. Without a target a row only informs.
    """

    benchmark: str
    case: str
    unit: str
    peer: str
    ours: Figures
    theirs: Figures
    target: Target | None = None
    judged: Literal["ratio", "ours"] = "ratio"

    @property
    def figures(self) -> Figures:
        """What is judged, round by round."""
        if self.judged == "ours":
            return self.ours
        return tuple(mine / their for mine, their in zip(self.ours, self.theirs, strict=True))

    @property
    def figure(self) -> float:
        """The verdict's figure: the median of the ratios, or of the limits the worst."""
        if self.judged == "ours" and self.target is not None:
            return self.target.worst(self.ours)
        return statistics.median(self.figures)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest figure, without the outer tenths of the rounds."""
        ordered = sorted(self.figures)
        cut = len(ordered) // OUTER
        return ordered[cut], ordered[-1 - cut]

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None when there is none."""
        return None if self.target is None else self.target.holds(self.figure)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot: how a figure of one side at one place changes with something else.

    The curves of one ``plot`` are drawn together, a picture a place.
    """

    benchmark: str
    plot: str
    title: str
    place: str
    name: str
    along: str
    unit: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Note:
    """What a reader must know to read the rows: who is missing and why, what a peer does not do."""

    benchmark: str
    text: str


Finding = Row | Curve | Note


def timed(work: Callable[[], object]) -> Side:
    """The work as a side to interleave: what it returns is the seconds it took."""

    def seconds() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return seconds


def interleave(ours: Side, peer: Side, rounds: int, steps: int = 1) -> tuple[Figures, Figures]:
    """The figures of both sides, round by round, after a step of each that does not count.

    A round is so many steps of each side in turn, its figure their mean. Steps
    of a few milliseconds give both sides their share of every disturbance.
    """
    ours()
    peer()
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < rounds and (len(pairs) < ENOUGH_ROUNDS or time.perf_counter() - started < LONGEST_SECONDS):
        mine = theirs = 0.0
        for step in range(steps):
            # Whoever goes second may profit, or suffer, from what the first one left behind.
            if (len(pairs) + step) % 2:
                theirs += peer()
                mine += ours()
            else:
                mine += ours()
                theirs += peer()
        pairs.append((mine / steps, theirs / steps))
    return tuple(mine for mine, _ in pairs), tuple(theirs for _, theirs in pairs)


def in_turn(sides: Mapping[str, Side], rounds: int) -> dict[str, Figures]:
    """The figures of several sides round by round, after a step of each that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, rounds):
        for name in shuffled(sides, turn):
            figure = sides[name]()
            if turn >= 0:
                found[name].append(figure)
    return {name: tuple(figures) for name, figures in found.items()}


def shuffled(names: Iterable[str], turn: int) -> list[str]:
    """The names in an order of this turn's own, the same in each run: nobody always suffers from the same neighbour."""
    order = list(names)
    random.Random(turn).shuffle(order)
    return order


def process(command: Sequence[str], bytecode: Path) -> Side:
    """A process as a side to interleave: the seconds from its start to its end.

    Its modules are compiled into ``bytecode`` at the first run, as installing
    does, whatever the caller's environment says; our own variables are left out.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    return timed(lambda: subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True))
