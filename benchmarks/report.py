"""How results are shown: the machine first, then a line a row, and the same as JSON.

A figure without its machine and its spread says nothing, so neither is optional.
"""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import agent_checkpoint
from agent_checkpoint.mounts import filesystem_of
from benchmarks.harness import Plan, Row

Machine = dict[str, Any]


def machine(plan: Plan) -> Machine:
    """What the figures were measured on."""
    return {
        "agent_checkpoint": agent_checkpoint.__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "filesystems": {place: filesystem_of(str(folder)) or "unknown" for place, folder in plan.places.items()},
        "synchronous": "FULL unless a row says NORMAL",
        "quick": plan.quick,
    }


def headline(found: Machine) -> str:
    """The machine in a line or two."""
    places = ", ".join(f"{place} is {kind}" for place, kind in found["filesystems"].items())
    return (
        f"agent-checkpoint {found['agent_checkpoint']}, Python {found['python']}, SQLite {found['sqlite']}, "
        f"{found['system']}, {found['cores']} cores, load {found['load']}\n"
        f"{places}; synchronous {found['synchronous']}"
        + ("; quick: too few rounds for a verdict" if found["quick"] else "")
    )


def line(row: Row) -> str:
    """A row as people read it: both sides' medians, the figure with its spread, the verdict."""
    show = _times if row.judged == "ratio" else _in_unit(row.unit)
    side = _in_unit(row.unit)
    low, high = row.spread
    ours, theirs = side(median(row.ours)), side(median(row.theirs))
    return (
        f"{row.benchmark:<9} {row.case:<43} ours {ours:>9}  {row.peer:>16} {theirs:>9}  "
        f"{show(row.figure):>9}  {f'({show(low)} to {show(high)})':<21} {_verdict(row)}"
    ).rstrip()


def document(found: Machine, rows: list[Row]) -> dict[str, Any]:
    """Everything for ``--json``, each round included."""
    return {"machine": found, "rows": [_record(row) for row in rows]}


def _record(row: Row) -> dict[str, Any]:
    return {**asdict(row), "figure": row.figure, "spread": row.spread, "reached": row.reached}


def _verdict(row: Row) -> str:
    if row.target is None:
        return ""
    limit = f"{row.target.value:g}" if row.judged == "ratio" else _in_unit(row.unit)(row.target.value)
    return f"to reach {row.target.sign} {limit}: {'reached' if row.reached else 'NOT REACHED'}"


def _in_unit(unit: str) -> Callable[[float], str]:
    return _UNITS.get(unit, lambda share: f"{share:.2f}")


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f} µs"


def _rate(a_second: float) -> str:
    return f"{a_second:,.0f}/s" if a_second >= 100 else f"{a_second:.1f}/s"


def _times(ratio: float) -> str:
    return f"{ratio:.3f} ×"


_UNITS: dict[str, Callable[[float], str]] = {
    "s": _duration,
    "operations/s": _rate,
    "holds/s": _rate,
    "bytes": lambda count: f"{count / 1e6:.2f} MB",
    "events": lambda count: f"{count:,.0f}",
    "of a core": lambda share: f"{share:.2%}",
}
