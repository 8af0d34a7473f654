"""The power is cut between any two calls of the workload that change a file; then somebody opens what is left.

All that was answered must be there, of a call that was not answered all or
nothing. Heartbeats in the background and tickets in a queue may be gone: they
leave no events, so that nobody asks for them here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from tests.faults.disks.drive import Change, Drive
from tests.faults.disks.staging import Stage, come_later, new_folder, placed
from tests.faults.disks.truth import Broken, Truth
from tests.faults.disks.vfs import LAYER, Call
from tests.faults.disks.workload import Step
from tests.faults.disks.world import World
from tests.faults.engine import Budget, Report


class Moment(NamedTuple):
    """Just before a call: how much was asked for and answered, which archives there were, the time, the step."""

    change: Change
    calls: int
    answered: frozenset[int]
    archives: tuple[str, ...]
    ticks_ns: int
    step: str


class Tape(NamedTuple):
    """One play of the workload: its moments, all that was asked for, and the files beside the store."""

    path: str
    moments: list[Moment]
    truth: Truth
    number: int
    files: dict[str, bytes]

    def left(self, place: int, drive: Drive, how: str, choice: random.Random) -> Stage:
        """What is left when the power is cut before the moment; ``drive`` is as it is then."""
        moment = self.moments[place]
        files = {name: self.files[name] for name in moment.archives}
        truth = self.truth.until(moment.calls, moment.answered)
        return Stage(0, drive.cut(how, choice) | files, truth, self.number, moment.ticks_ns)


def record(steps: Sequence[Step]) -> Tape:
    """Play these steps, and remember every call."""
    moments: list[Moment] = []
    step = ""

    def note(call: Call) -> None:
        if call.path.startswith(str(world.path)):
            moments.append(_moment(world, Change.of(call), step))

    with new_folder() as folder:
        world = World(folder)
        with LAYER.between(note):
            for each in steps:
                step = each.__name__
                for _ in each(world):
                    pass
            end = Change("end", 0, "", 0, b"", 0)
            moments.append(_moment(world, end, "the end"))
            world.check()
            world.store.close()
        files = {name: (folder / name).read_bytes() for name in world.files(".jsonl")}
    return Tape(str(world.path), moments, world.truth, world.number, files)


def _moment(world: World, change: Change, step: str) -> Moment:
    calls = world.truth.calls
    answered = frozenset(number for number, call in enumerate(calls) if call.state == "done")
    return Moment(change, len(calls), answered, world.files(".jsonl"), world.clock.now_ticks_ns, step)


def cut(tape: Tape, places: set[int], cuts: Sequence[str], budget: Budget, report: Report) -> None:
    """Cut the power before each of these moments, in each of these ways."""
    drive = Drive(tape.path)
    for place, moment in enumerate(tape.moments):
        for how in cuts if place in places and budget.goes_on(report) else ():
            _open(tape.left(place, drive, how, budget.random), f"{moment.step}, before call {place}", how, report)
        drive.apply(moment.change)


def _open(left: Stage, where: str, how: str, report: Report) -> None:
    with placed(left) as world:
        try:
            come_later(world)
        except Exception as wrong:  # whatever it is: here nothing but an answer may come
            kind = "" if isinstance(wrong, Broken) else f"{type(wrong).__name__}: "
            report.violations.append(f"power cut in {where}, {how} of what was not synced is there: {kind}{wrong}")
        report.operations += world.operations
    report.faults["power-cut"] += 1
