"""Each call of SQLite that changes a file fails in turn, in each step of the workload."""

from __future__ import annotations

from typing import NamedTuple

from tests.faults.disks import staging
from tests.faults.disks.staging import Stage, placed
from tests.faults.disks.vfs import ILL, LAYER, NO_SPACE, Call, Fault
from tests.faults.disks.world import World
from tests.faults.engine import Report

ERRORS = ("EIO", "ENOSPC", "EIO after half of it", "ENOSPC after half of it")


class Point(NamedTuple):
    """The call of a step that fails, how, and whether the disk stays ill until the step has ended."""

    stage: int
    call: int
    error: str
    stays: bool


class Failing:
    """Lets the n-th call of a step fail, and where the illness stays all after it."""

    def __init__(self, point: Point | None = None) -> None:
        self.point = point
        self.seen: list[str] = []
        self.fired = 0
        self._begun = False

    @property
    def name(self) -> str:
        """What fails, and how."""
        assert self.point is not None
        kind = self.seen[self.point.call - 1] if len(self.seen) >= self.point.call else "never reached"
        return f"{self.point.error} at call {self.point.call} ({kind}){', and all after it' * self.point.stays}"

    def begin(self, world: World) -> None:
        """Count from here on."""
        self._begun = True

    def end(self) -> None:
        """Let all calls pass."""
        self._begun = False

    def __call__(self, call: Call) -> Fault | None:
        """What becomes of a call."""
        if not self._begun:
            return None
        self.seen.append(call.kind)
        if self.point is None or len(self.seen) < self.point.call:
            return None
        if len(self.seen) > self.point.call and not self.point.stays:
            return None
        fault = _fault(call, self.point.error)
        self.fired += fault is not None
        return fault


def _fault(call: Call, error: str) -> Fault | None:
    """How this call fails by that error; None where it cannot."""
    codes = NO_SPACE if error.startswith("ENOSPC") else ILL
    if call.kind not in codes:
        return None
    return Fault(codes[call.kind], call.size // 2 if error in ERRORS[2:] else 0)


def _fits(kind: str, error: str) -> bool:
    """Whether a call of this kind can fail so, and not as it does by an error that is listed before."""
    if error in ERRORS[2:]:
        return kind == "write"
    return kind in ILL if error == "EIO" else NO_SPACE.get(kind) not in (None, ILL[kind])


def stages() -> list[Stage]:
    """The workload's stages, with the calls of each, made from a store that was just opened."""
    found = []
    for stage in staging.stages():
        failing = Failing()
        with placed(stage) as world, LAYER.between(failing):
            staging.take(world, stage.step, failing)
        found.append(stage._replace(calls=tuple(failing.seen)))
    return found


def points(stage: int, calls: tuple[str, ...]) -> list[Point]:
    """Every way in which the calls of a step may fail."""
    return [
        Point(stage, number, error, stays)
        for number, kind in enumerate(calls, start=1)
        for error in ERRORS
        if _fits(kind, error)
        for stays in (False, True)
    ]


def play(stage: Stage, point: Point, report: Report) -> None:
    """Let one call of a step fail, and note what is wrong then."""
    failing = Failing(point)
    with LAYER.between(failing):
        staging.play(stage, failing, report)
    if failing.fired:
        report.faults["disk-full" if point.error.startswith("ENOSPC") else "io-error"] += 1
