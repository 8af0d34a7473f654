"""A sync fails, the kernel drops what it was for, the work goes on, and later the power is cut.

After a failed ``fsync`` Linux takes the pages for clean: they stay in memory
and never reach the disk, and the next sync succeeds. A log whose every commit
is synced survives that, for what is written next overwrites what was dropped.
Commits without a sync (heartbeats in the background, tickets, the removal of
archived events) that the failed sync was for as well are a hole before all that
follows: that is left out here, as nobody but SQLite could close it.
"""

from __future__ import annotations

import random
from contextlib import suppress

from tests.faults.disks.drive import Change, Drive
from tests.faults.disks.staging import Stage, come_later, new_folder, placed
from tests.faults.disks.truth import Broken
from tests.faults.disks.vfs import ILL, LAYER, Call, Fault
from tests.faults.disks.workload import STEPS, Step, archive, put_huge, quiet_heartbeat, wait_in_vain
from tests.faults.disks.world import World
from tests.faults.engine import Report

from agent_checkpoint.errors import NotFoundError, StorageError

SYNCED = [step for step in STEPS if step not in (quiet_heartbeat, wait_in_vain, archive, put_huge)]


class Losing:
    """Tells a drive what happens, but for the n-th sync of the store: that one fails, and its data are lost."""

    def __init__(self, drive: Drive, path: str, number: int) -> None:
        self.drive = drive
        self.left = number
        self._path = path

    def __call__(self, call: Call) -> Fault | None:
        """What becomes of a call."""
        change = Change.of(call)
        if call.kind == "sync" and call.path.startswith(self._path):
            self.left -= 1
            if self.left == 0:
                self.drive.apply(change._replace(kind="lose"))
                return Fault(ILL["sync"])
        self.drive.apply(change)
        return None


def play(number: int, report: Report) -> bool:
    """Lose the n-th sync of the workload, and cut the power after each step; False when it has fewer."""
    with new_folder() as folder:
        world = World(folder)
        losing = Losing(Drive(str(world.path)), str(world.path), number)
        with LAYER.between(losing):
            for step in SYNCED:
                try:
                    _take(world, step)
                    if losing.left <= 0:
                        _cut(world, losing.drive)
                except Exception as wrong:  # whatever it is: here nothing but an answer may come
                    kind = "" if isinstance(wrong, Broken) else f"{type(wrong).__name__}: "
                    report.violations.append(f"sync {number} was lost, power cut after {step.__name__}: {kind}{wrong}")
                    break
            world.store.close()
        report.operations += world.operations
    if losing.left <= 0:
        report.faults["io-error"] += 1
        report.faults["power-cut"] += 1
    return losing.left <= 0


def _take(world: World, step: Step) -> None:
    """Take a step, again where it failed and was not done all the same."""
    for _ in range(2):
        try:
            for _ in step(world):
                pass
            return
        except StorageError:
            with suppress(StorageError, NotFoundError):
                world.settle()


def _cut(world: World, drive: Drive) -> None:
    files = drive.cut("nothing", random.Random())
    with placed(Stage(0, files, world.truth.copy(), world.number, world.clock.now_ticks_ns)) as later:
        come_later(later)
        world.operations += later.operations
