"""What the kernel says of processes and their files, and waiting until it says so."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

# Longer than anything here takes: only a hang reaches it.
LONG = 120.0


def wait_until(true: Callable[[], object], seconds: float | None = None) -> None:
    """Ask again and again, until it is so."""
    deadline = time.monotonic() + (LONG if seconds is None else seconds)
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def states(pid: int) -> set[str]:
    """Those of all threads of a process."""
    return {
        (thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in Path(f"/proc/{pid}/task").iterdir()
    }


def has_ended(pid: int) -> bool:
    """Whether it runs nothing any more, reaped or not."""
    try:
        return states(pid) <= {"Z", "X"}
    except OSError:
        return True


def open_files(database: Path) -> list[str]:
    """The files of a database that this process has open; its gate is left to whoever comes next."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(str(database)) and "-gate" not in target:
            found.append(target)
    return found
