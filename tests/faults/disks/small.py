"""Disks that are small or cannot be written, as the kernel makes them: the workload's steps on them.

``python -m tests.faults.disks.small FOLDER SECONDS SEED`` mounts a small disk
at the folder, in a mount namespace of its own (see ``in_a_namespace``), and
prints what it found.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

from tests.faults.disks import staging
from tests.faults.disks.staging import Stage
from tests.faults.disks.world import World
from tests.faults.engine import Budget, Report

ROOT = Path(__file__).parents[3]
SIZE = "size=12m"
# Bytes that are left on a full disk, or that the log and the database may grow.
SPARE = (0, 4096, 8192, 16384, 20480, 32768, 49152, 65536, 131072)
# Longer than a run takes beyond its seconds: only a hang reaches it.
LONG = 120.0


class Full:
    """Somebody has filled the disk but for so many bytes; they go away at the end."""

    def __init__(self, disk: Path, spare: int) -> None:
        self.name = f"a disk with {spare} bytes left"
        self._filling = disk / "filling"
        self._spare = spare

    def begin(self, world: World) -> None:
        """Fill it to the last byte, then give back the spare ones."""
        with self._filling.open("wb", buffering=0) as filling:
            try:
                while filling.write(bytes(4096)):
                    pass
            except OSError:
                pass
            filling.truncate(max(0, filling.tell() - self._spare))

    def end(self) -> None:
        """Make room."""
        self._filling.unlink(missing_ok=True)


class Limited:
    """No file may grow beyond the database's or the log's size and so many bytes (RLIMIT_FSIZE)."""

    def __init__(self, suffix: str, spare: int) -> None:
        self.name = f"no file above that of agents.db{suffix} and {spare} bytes"
        self._suffix, self._spare = suffix, spare
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin(self, world: World) -> None:
        """Set the limit; Python ignores the signal, so that the write fails."""
        file = Path(f"{world.path}{self._suffix}")
        size = file.stat().st_size if file.exists() else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + self._spare, self._before[1]))

    def end(self) -> None:
        """Lift it."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


class ReadOnly:
    """The disk is made read-only, and writable again at the end; the store's user stays."""

    name = "a read-only disk"

    def __init__(self, disk: Path) -> None:
        self._disk = disk

    def begin(self, world: World) -> None:
        """Files that are open for writing would forbid it: the store is opened anew."""
        world.store.close()
        world.store = world.opened()
        self._remount("ro")

    def end(self) -> None:
        """Let it be written again."""
        self._remount("rw")

    def _remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how},{SIZE}", str(self._disk)], check=True)


def on_small_disks(disk: Path, budget: Budget) -> Report:
    """Take the steps on a full and on a read-only disk; ``disk`` is a small one."""
    stages, report = staging.stages(), Report()
    tries: list[tuple[Stage, int | None]] = list(product(stages, (*SPARE, None)))
    budget.random.shuffle(tries)
    for stage, spare in tries:
        if not budget.goes_on(report):
            break
        illness = ReadOnly(disk) if spare is None else Full(disk, spare)
        error = staging.play(stage, illness, report, within=disk)
        if error is not None:
            report.faults["read-only" if spare is None else "disk-full"] += 1
    return report


def under_limits(stages: list[Stage], choice: random.Random, tries: int, report: Report) -> None:
    """Take steps of the workload under limits on the size of files."""
    every = list(product(stages, ("", "-wal"), SPARE))
    for stage, suffix, spare in choice.sample(every, min(tries, len(every))):
        if staging.play(stage, Limited(suffix, spare), report) is not None:
            report.faults["file-size-limit"] += 1


def cannot_mount() -> str | None:
    """Why no small disk can be mounted here; None where one can."""
    if shutil.which("unshare") is None:
        return "no unshare here"
    with tempfile.TemporaryDirectory() as folder:
        shell = f'mount -t tmpfs -o {SIZE} tmpfs "$0"'
        tried = subprocess.run([*_namespace(), "sh", "-c", shell, folder], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"this kernel does not allow it: {tried.stderr.strip()}"


def in_a_namespace(seconds: float, seed: int) -> Report:
    """Do ``on_small_disks`` in a process with mounts of its own, which end with it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tests.faults.disks.small", folder, str(seconds), str(seed)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [*_namespace(), *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds + LONG
        )
    assert ended.returncode == 0, ended.stderr
    operations, faults, violations = json.loads(ended.stdout)
    return Report(operations, Counter(faults), violations)


def _namespace() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--mount", "--fork"]


def main() -> None:
    """Mount, play, print, unmount."""
    disk, seconds, seed = Path(sys.argv[1]).resolve(), float(sys.argv[2]), int(sys.argv[3])
    subprocess.run(["mount", "-t", "tmpfs", "-o", SIZE, "tmpfs", str(disk)], check=True)
    try:
        report = on_small_disks(disk, Budget(seconds, seed))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    print(json.dumps([report.operations, report.faults, report.violations]))


if __name__ == "__main__":
    main()
