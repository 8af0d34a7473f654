"""What a run found, as JSON and back: everything that is shown or drawn is made from it.

A figure without its machine and its spread says nothing, so neither is optional.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import agent_checkpoint
from agent_checkpoint.mounts import filesystem_of
from benchmarks.harness import Curve, Finding, Note, Plan, Row, Target

Machine = dict[str, Any]

# Whom we are compared with, and what the figures of the adapters depend on.
DISTRIBUTIONS = (
    "filelock",
    "portalocker",
    "python-redis-lock",
    "redis",
    "prefect",
    "langgraph",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
    "psycopg",
)
# What two runs have in common that may be shown as one.
SAME = ("agent_checkpoint", "python", "sqlite", "system", "processor", "cores", "filesystems", "quick")


@dataclass(frozen=True, slots=True)
class Document:
    """A run: the machine, and what was found on it."""

    machine: Machine
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...] = ()
    notes: tuple[Note, ...] = ()

    def of(self, benchmark: str) -> list[Row]:
        """The rows of one benchmark."""
        return [row for row in self.rows if row.benchmark == benchmark]

    def row(self, benchmark: str, case: str, peer: str | None = None) -> Row | None:
        """One row by its names; None where it was not measured."""
        found = (row for row in self.of(benchmark) if row.case == case and peer in (None, row.peer))
        return next(found, None)


def gathered(machine: Machine, findings: Sequence[Finding]) -> Document:
    """What was found, by its kind."""
    return Document(
        machine,
        tuple(each for each in findings if isinstance(each, Row)),
        tuple(each for each in findings if isinstance(each, Curve)),
        tuple(each for each in findings if isinstance(each, Note)),
    )


def merged(earlier: Document, later: Document) -> Document:
    """Both runs as one: what was measured again counts.

    Raises:
        ValueError: they were made on different machines, or not as thoroughly.
    """
    if differing := [name for name in SAME if earlier.machine[name] != later.machine[name]]:
        raise ValueError(f"the earlier run differs in {', '.join(differing)}")
    again = later.machine["benchmarks"].keys()
    servers = dict.fromkeys([*earlier.machine["servers"], *later.machine["servers"]])
    both = {**earlier.machine["benchmarks"], **later.machine["benchmarks"]}
    return Document(
        {**later.machine, "servers": list(servers), "benchmarks": both},
        (*(row for row in earlier.rows if row.benchmark not in again), *later.rows),
        (*(curve for curve in earlier.curves if curve.benchmark not in again), *later.curves),
        (*(note for note in earlier.notes if note.benchmark not in again), *later.notes),
    )


def machine(plan: Plan) -> Machine:
    """What the figures are measured on."""
    return {
        "agent_checkpoint": agent_checkpoint.__version__,
        "python": platform.python_version(),
        "python_optimized": "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {_major(platform.release())} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "filesystems": {place: filesystem_of(str(folder)) or "unknown" for place, folder in plan.places.items()},
        "synchronous": "FULL unless a row says NORMAL",
        "quick": plan.quick,
        "peers": {name: found for name in DISTRIBUTIONS if (found := _version(name)) is not None},
        "servers": [],
        "benchmarks": {},
    }


def _major(release: str) -> str:
    """The version of a kernel, without whose build it is."""
    return ".".join(release.split("-")[0].split(".")[:2])


def to_json(document: Document) -> dict[str, Any]:
    """Everything for ``--json``, each round included."""
    return {
        "machine": document.machine,
        "rows": [
            {**asdict(row), "figure": row.figure, "spread": row.spread, "reached": row.reached} for row in document.rows
        ],
        "curves": [asdict(curve) for curve in document.curves],
        "notes": [asdict(note) for note in document.notes],
    }


def from_json(read: dict[str, Any]) -> Document:
    """What ``to_json`` made."""
    return Document(
        read["machine"],
        tuple(map(_row, read["rows"])),
        tuple(Curve(**{**each, "points": tuple(map(tuple, each["points"]))}) for each in read["curves"]),
        tuple(Note(**each) for each in read["notes"]),
    )


def _row(read: dict[str, Any]) -> Row:
    own = {name: value for name, value in read.items() if name not in ("figure", "spread", "reached")}
    target = None if read["target"] is None else Target(**read["target"])
    return Row(**{**own, "ours": tuple(read["ours"]), "theirs": tuple(read["theirs"]), "target": target})


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(models, "unknown")
    except OSError:
        return platform.processor() or "unknown"
