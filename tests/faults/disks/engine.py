"""The disks: I/O errors at every call, power cuts between any two, disks that are full, until the time is over.

Round by round some of each: the points of failure of all steps in turn, the
moments of plays in one order after the other, commands under strace, small
disks in a mount namespace of their own. Where the kernel allows no such disk
or no strace these are left out here; the tests say so, and in CI they fail.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice

from tests.faults import variants
from tests.faults.disks import commands, failing, losing, power, small, staging, tracing
from tests.faults.disks.drive import CUTS
from tests.faults.disks.failing import Point
from tests.faults.disks.staging import Stage
from tests.faults.disks.truth import Broken
from tests.faults.disks.vfs import LAYER
from tests.faults.disks.workload import STEPS, Step, initialize, migrate, put_huge
from tests.faults.engine import Budget, Report, Tell

# What is done of each kind in one round.
FAILURES, CUT_MOMENTS, LIMITED, TRACED = 60, 12, 5, 8
# Seconds on small disks: all of their tries, or a part of the time that is left.
ON_SMALL_DISKS, PART = 20.0, 0.15
# Of a kind of call in a step, the points in one round of all: what a large write does a thousand times is alike.
MOST, MOST_IF_LARGE = 200, 3
LARGE_BYTES = 2_000_000
# Moments of a tape before a new one is recorded.
OF_A_TAPE = 120


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """Let the disk fail, fill up and lose power for as long as the budget says.

    A broken variant is broken in this process, so that commands and small
    disks, which are others, are for the right store alone.
    """
    report = Report()
    with variants.broken(variant), staging.new_folder() as folder:
        LAYER.prove(str(folder))
        try:
            for _ in _rounds(budget, variant is None, report):
                tell(report)
        except Broken as wrong:  # with nothing wrong with the disk
            report.violations.append(f"the workload: {wrong}")
    return report


def _rounds(budget: Budget, apart: bool, report: Report) -> Iterator[None]:
    stages = failing.stages()
    parts = [_cutting(budget, report), _failing(budget, stages, report), _losing(budget, report)]
    if apart:
        parts += [_limiting(budget, stages, report), *_apart(budget, report)]
    while budget.goes_on(report):
        for part in parts:
            next(part, None)
            yield
            if not budget.goes_on(report):
                return


def points(stages: list[Stage], choice: random.Random) -> Iterator[Point]:
    """Every point of failure, again and again: each kind of call of each step in its turn."""
    while True:
        kinds: dict[tuple[int, str], list[Point]] = defaultdict(list)
        for number, stage in enumerate(stages):
            for point in failing.points(number, stage.calls):
                kinds[number, stage.calls[point.call - 1]].append(point)
        for (number, _), kind in kinds.items():
            choice.shuffle(kind)
            del kind[MOST_IF_LARGE if is_large(stages[number]) else MOST :]
        while kinds:
            for key in list(kinds):
                yield kinds[key].pop()
                if not kinds[key]:
                    del kinds[key]


def is_large(stage: Stage) -> bool:
    """Whether each try of it takes a tenth of a second."""
    return stage.name == put_huge.__name__ or sum(map(len, stage.files.values())) > LARGE_BYTES


def shuffled(choice: random.Random) -> list[Step]:
    """The steps in another order, the first two apart; most often without the one that takes most time."""
    rest = [step for step in STEPS if step not in (initialize, migrate, put_huge)]
    huge = [put_huge] * (choice.random() < 0.1)
    choice.shuffle(rest)
    rest += huge  # at the end: a prune behind it would take two transactions, and leave two events
    return [initialize, migrate, *rest]


def _failing(budget: Budget, stages: list[Stage], report: Report) -> Iterator[None]:
    every = points(stages, budget.random)
    while True:
        for point in islice(every, FAILURES):
            if budget.goes_on(report):
                failing.play(stages[point.stage], point, report)
        yield


def _cutting(budget: Budget, report: Report) -> Iterator[None]:
    """Some moments of a play, all over it; then of another one."""
    while True:
        tape = power.record(shuffled(budget.random))
        places = budget.random.sample(range(len(tape.moments)), min(OF_A_TAPE, len(tape.moments)))
        for start in range(0, len(places), CUT_MOMENTS):
            power.cut(tape, set(places[start : start + CUT_MOMENTS]), CUTS, budget, report)
            yield


def _losing(budget: Budget, report: Report) -> Iterator[None]:
    while True:
        # The first syncs are those of its making; past the last one nothing is lost.
        losing.play(budget.random.randrange(1, 45), report)
        yield


def _limiting(budget: Budget, stages: list[Stage], report: Report) -> Iterator[None]:
    while True:
        small.under_limits(stages, budget.random, LIMITED, report)
        yield


def _apart(budget: Budget, report: Report) -> list[Iterator[None]]:
    """What is done in other processes, where that is possible."""
    ways: list[tuple[Callable[[], str | None], Callable[[Budget, Report], Iterator[None]]]] = [
        (tracing.cannot, _tracing),
        (small.cannot_mount, _on_small_disks),
    ]
    return [way(budget, report) for cannot, way in ways if cannot() is None]


def _tracing(budget: Budget, report: Report) -> Iterator[None]:
    runs = commands.prepare()
    while True:
        every = [point for each in runs for point in each.points()]
        budget.random.shuffle(every)
        while every:
            for _ in range(min(TRACED, len(every))):
                if budget.goes_on(report):
                    commands.play(every.pop(), report)
            yield


def _on_small_disks(budget: Budget, report: Report) -> Iterator[None]:
    """Now and then: another seed is another order of the same tries."""
    while True:
        seconds = min(ON_SMALL_DISKS, PART * budget.left())
        report.add(small.in_a_namespace(seconds, budget.random.randrange(1 << 30)))
        for _ in range(50):
            yield
