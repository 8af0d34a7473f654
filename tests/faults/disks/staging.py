"""A step of the workload taken while the disk is ill, and what must be true then.

Every try begins with a store as the workload left it before the step. After
it three must agree with what was answered: the store that met the illness,
another user of the same file, and the files as a process finds them that comes
after all others were killed. Then all goes on, here and there.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol
from unittest.mock import patch

from tests.faults.disks.truth import Broken, Truth, must
from tests.faults.disks.workload import STEPS
from tests.faults.disks.world import HOUR, World, go_on
from tests.faults.engine import Report

from agent_checkpoint.errors import NotFoundError, StorageError

# What a process that comes later does not find, and what it would not use.
GONE = ("-shm", "-gate")


class Stage(NamedTuple):
    """A store before a step of the workload, what is known of it, and which calls of SQLite the step makes."""

    step: int
    files: dict[str, bytes]
    truth: Truth
    number: int
    ticks_ns: int
    calls: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The step's."""
        return STEPS[self.step].__name__


class Illness(Protocol):
    """What is wrong with a disk, from ``begin`` to ``end``; ``name`` says it in a violation."""

    name: str

    def begin(self, world: World) -> None: ...

    def end(self) -> None: ...


class Health:
    """Nothing is wrong."""

    name = "nothing"

    def begin(self, world: World) -> None:
        """Change nothing."""

    def end(self) -> None:
        """Change nothing."""


HEALTHY = Health()


@contextmanager
def new_folder(within: Path | None = None) -> Iterator[Path]:
    """For one store without plugins; where files that nobody keeps are fastest, unless said otherwise."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    # To look for plugins each time would take longer than all else.
    off = patch.dict(os.environ, AGENT_CHECKPOINT_PLUGINS="off")
    with off, tempfile.TemporaryDirectory(dir=within or memory) as folder:
        yield Path(folder).resolve()


def files_of(folder: Path) -> dict[str, bytes]:
    """The files as they would be found after every process was killed."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith(GONE)}


def stages() -> list[Stage]:
    """Play the workload once, with nothing in its way."""
    found = []
    with new_folder() as folder:
        world = World(folder)
        for number, step in enumerate(STEPS):
            files, ticks = files_of(folder), world.clock.now_ticks_ns
            found.append(Stage(number, files, world.truth.copy(), world.number, ticks))
            for _ in step(world):
                pass
        world.check()
        world.store.close()
    return found


@contextmanager
def placed(stage: Stage, within: Path | None = None) -> Iterator[World]:
    """The store of a stage, to be played with."""
    with new_folder(within) as folder:
        for name, content in stage.files.items():
            (folder / name).write_bytes(content)
        world = World(folder, stage.truth.copy(), stage.number, stage.ticks_ns)
        try:
            yield world
        finally:
            world.store.close()


def take(world: World, number: int, illness: Illness = HEALTHY) -> StorageError | None:
    """Take a step, the disk being ill as soon as it has begun; our error, if it failed."""
    step = STEPS[number](world)
    next(step)
    try:
        illness.begin(world)
        next(step, None)
    except StorageError as error:
        must(error.exit_status in (74, 75), f"an error with exit {error.exit_status}")
        return error
    finally:
        illness.end()
    return None


def play(stage: Stage, illness: Illness, report: Report, within: Path | None = None) -> StorageError | None:
    """Take the step of a stage on an ill disk, and note what is wrong then; the error that its caller got."""
    error = None
    with placed(stage, within) as world:
        try:
            error = take(world, stage.step, illness)
            _look(stage, world, error)
        except Exception as wrong:  # whatever it is: here nothing but an answer may come
            kind = "" if isinstance(wrong, Broken) else f"{type(wrong).__name__}: "
            report.violations.append(f"{stage.name}, {illness.name}: {kind}{wrong}")
        report.operations += world.operations
    if kept := open_files(world.folder):
        report.violations.append(f"{stage.name}, {illness.name}: open still, though the store is closed: {kept}")
    return error


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open; [] where the system does not tell."""
    descriptors = Path("/proc/self/fd")
    found = []
    for number in os.listdir(descriptors) if descriptors.exists() else ():
        with suppress(OSError):  # the listing's own
            found.append(os.readlink(descriptors / number))
    return [name for name in found if name.startswith(f"{folder}/")]


def come_later(world: World) -> None:
    """What a process does that finds these files after a reboot."""
    answered = any(call.state == "done" for call in world.truth.calls)
    if _unreadable(world) is None:
        world.check()
    else:
        must(not answered, "the store cannot be read any more")
        world.store.initialize()
    world.clock.reboot(domain="boot-2")
    go_on(world)


def _look(stage: Stage, world: World, error: StorageError | None) -> None:
    left, known = files_of(world.folder), world.truth.copy()
    later = stage._replace(files=left, truth=known, number=world.number, ticks_ns=world.clock.now_ticks_ns)
    if stage.name == "initialize" and error is not None:
        _unreadable(world)
        take(world, stage.step)
    else:
        with closing(world.opened()) as other:
            world.check(other)
        world.settle()
        world.check()
        if error is not None and world.truth.calls[-1:] == known.calls[-1:]:
            must(take(world, stage.step) is None, "it fails again, on a disk that is well")
    world.check()
    world.clock.advance(2 * HOUR)
    go_on(world)
    with placed(later) as world_after:
        come_later(world_after)
        world.operations += world_after.operations


def _unreadable(world: World) -> Exception | None:
    """Why the store cannot be read, in our words; None where it can."""
    try:
        world.store.events(1)
    except (StorageError, NotFoundError) as error:
        return error
    return None
