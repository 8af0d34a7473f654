"""Whole commands, one system call of which fails: by strace, in the kernel's place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

STRACE = shutil.which("strace")
# Longer than any command takes: only a hang reaches it.
LONG = 60.0
NAMES = ("rename", "renameat", "renameat2", "link", "linkat", "mkdir", "mkdirat")
REMOVALS = ("unlink", "unlinkat")
WRITES = ("write", "pwrite64")
SYNCS = ("fsync", "fdatasync", "ftruncate")
TRACED = (*NAMES, *REMOVALS, *WRITES, *SYNCS, "openat")
# What only the disk is asked for: all of it may fail while the program goes on.
OF_DISKS = (*NAMES, *REMOVALS, *SYNCS, "pwrite64")
LINE = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\(")


class Failing(NamedTuple):
    """The n-th call of that name of a command's first thread, what it was on, and how many of each came before."""

    name: str
    number: int
    line: str
    before: dict[str, int]

    def errors(self) -> tuple[str, ...]:
        """The ways in which it may fail."""
        makes = "O_CREAT" in self.line or self.name in (*NAMES, *WRITES)
        return ("EIO", "ENOSPC") if makes else ("EIO",)

    def injections(self, error: str, stays: bool) -> list[str]:
        """What strace has to be told: this call alone, or with it all that change a disk from then on."""
        if not stays:
            return [f"inject={self.name}:error={error}:when={self.number}"]
        return [f"inject=?{name}:error={error}:when={self.before[name] + 1}+" for name in OF_DISKS]


class Ended(NamedTuple):
    """A command that ended, and what strace saw of it."""

    status: int
    out: str
    err: str
    trace: list[str]

    def injected(self) -> str | None:
        """The call that failed on purpose."""
        return next((line for line in self.trace if line.endswith("(INJECTED)")), None)


def run(folder: Path, words: list[str], injections: Iterable[str] = ()) -> Ended:
    """Run a command on the files of a folder (``{}`` in its words), its stdout a file in there."""
    trace = folder.with_suffix(".trace")
    traced = ",".join(f"?{name}" for name in TRACED)
    inject = [word for each in injections for word in ("-e", each)]
    command = [
        str(STRACE),
        "-f",
        "-y",
        "--seccomp-bpf",
        "-s",
        "200",
        "-o",
        str(trace),
        "-e",
        f"trace={traced}",
        *inject,
    ]
    command += [sys.executable, "-m", "agent_checkpoint", *(word.replace("{}", str(folder)) for word in words)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT")}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "AGENT_CHECKPOINT_PLUGINS": "off"}
    with (folder / "stdout").open("w") as out:
        ended = subprocess.run(
            command, cwd="/", env=environment, stdout=out, stderr=subprocess.PIPE, text=True, timeout=LONG
        )
    found = trace.read_text(errors="replace").splitlines()
    trace.unlink()
    return Ended(ended.returncode, (folder / "stdout").read_text(), ended.stderr, found)


def calls(folder: Path, ended: Ended) -> list[Failing]:
    """The calls of a command on files of its folder; of its first thread, for strace counts for each."""
    found, counts, first = [], dict.fromkeys(TRACED, 0), None
    for line in ended.trace:
        match = LINE.match(line)
        if match is None:
            continue
        first = first or match["pid"]
        if match["pid"] == first:
            before = counts.copy()
            counts[match["name"]] += 1
            if is_in(folder, line):
                found.append(Failing(match["name"], counts[match["name"]], line, before))
    return found


def is_in(folder: Path, line: str) -> bool:
    """Whether a call is on the folder, or a file in it."""
    return any(f"{before}{folder}{after}" in line for before in '"<' for after in '/">')


def cannot() -> str | None:
    """Why this cannot be done here; None where it can."""
    if STRACE is None:
        return "no strace here"
    tried = subprocess.run(
        [STRACE, "-f", "--seccomp-bpf", "-o", os.devnull, "-e", "trace=fsync", "true"], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip()}"
