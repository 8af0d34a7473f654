"""How a row reads on the terminal, and how its figures are written everywhere."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.document import Machine
from benchmarks.harness import Row


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
    reached = "" if row.reached is None else f"to reach {limit(row)}: {'reached' if row.reached else 'NOT REACHED'}"
    return (
        f"{row.benchmark:<9} {row.case:<43} ours {ours(row):>9}  {row.peer:>21} {theirs(row):>9}  "
        f"{figure(row):>9}  {f'({spread(row)})':<21} {reached}"
    ).rstrip()


def ours(row: Row) -> str:
    """The median of our side."""
    return in_unit(row.unit)(median(row.ours))


def theirs(row: Row) -> str:
    """The median of the peer's."""
    return in_unit(row.unit)(median(row.theirs))


def figure(row: Row) -> str:
    """What is judged."""
    return _show(row)(row.figure)


def spread(row: Row) -> str:
    """The lowest and the highest of it, without the outer tenths of the rounds."""
    low, high = row.spread
    return f"{_show(row)(low)} to {_show(row)(high)}"


def limit(row: Row) -> str:
    """What is to be reached; nothing where nothing is."""
    if row.target is None:
        return ""
    value = f"{row.target.value:g} ×" if row.judged == "ratio" else in_unit(row.unit)(row.target.value)
    return f"{row.target.sign} {value}"


def in_unit(unit: str) -> Callable[[float], str]:
    """How a figure of this unit is written."""
    return _UNITS.get(unit, lambda share: f"{share:.2f}")


def _show(row: Row) -> Callable[[float], str]:
    return _times if row.judged == "ratio" else in_unit(row.unit)


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f} µs"


def _rate(a_second: float) -> str:
    return f"{a_second:,.0f}/s" if a_second >= 100 else f"{a_second:.1f}/s"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} ×" if ratio >= 10 else f"{ratio:.2f} ×" if ratio >= 0.1 else f"{ratio:.3f} ×"


_UNITS: dict[str, Callable[[float], str]] = {
    "s": _duration,
    "operations/s": _rate,
    "holds/s": _rate,
    "bytes": lambda count: f"{count / 1e6:.2f} MB",
    "events": lambda count: f"{count:,.0f}",
    "of a core": lambda share: f"{share:.2%}",
}
