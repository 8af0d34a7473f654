"""Pictures of how a growing thread costs more and more, or does not: size and put time against steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

# Points of the curve of put times, each the median of its steps.
POINTS = 40
# What is written at a logarithmic axis.
LABELLED = (1.0, 2.0, 5.0)
# In this order: a saver that is awaited has the colour of the one that is not, and a broken line.
STYLES = {
    "ours": "C0-",
    "ours, awaited": "C0--",
    "SqliteSaver": "C1-",
    "AsyncSqliteSaver": "C1--",
    "PostgresSaver": "C3-",
    "InMemorySaver": "C2-",
}
INCHES_A_PLACE = 7.0
INCHES_HIGH = 4.5
DOTS_AN_INCH = 120
MEGABYTE = 1e6
MILLISECOND = 1e-3


@dataclass(slots=True)
class Curve:
    """One saver on one thread: the seconds of each put, and the bytes after some of the steps."""

    put: list[float] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=dict)


# For each place the curve of each saver.
Curves = Mapping[str, Mapping[str, Curve]]


def missing() -> str | None:
    """What has to be installed to draw; None where nothing is missing."""
    return "--plots: install matplotlib" if find_spec("matplotlib") is None else None


def draw(folder: Path, curves: Curves) -> None:
    """Write ``langgraph-size.png`` and ``langgraph-put.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {place: {name: _size(curve) for name, curve in found.items()} for place, found in curves.items()}
    puts = {place: {name: _put(curve) for name, curve in found.items()} for place, found in curves.items()}
    _picture(folder / "langgraph-size.png", "Size of a thread that grows by 1 KB a step", "MB", sizes)
    _picture(folder / "langgraph-put.png", "A put, medians", "ms", puts)


Points = tuple[Sequence[float], Sequence[float]]


def _size(curve: Curve) -> Points:
    return list(curve.size), [size / MEGABYTE for size in curve.size.values()]


def _put(curve: Curve) -> Points:
    width = max(1, len(curve.put) // POINTS)
    starts = range(0, len(curve.put) - width + 1, width)
    medians = [median(curve.put[start : start + width]) / MILLISECOND for start in starts]
    return [start + width / 2 for start in starts], medians


def _picture(path: Path, title: str, unit: str, places: Mapping[str, Mapping[str, Points]]) -> None:
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    ticker: Any = import_module("matplotlib.ticker")
    figure, axes = pyplot.subplots(
        1, len(places), figsize=(INCHES_A_PLACE * len(places), INCHES_HIGH), squeeze=False, layout="constrained"
    )
    figure.suptitle(f"{title} (logarithmic)")
    for axis, (place, curves) in zip(axes[0], places.items(), strict=True):
        for name in [name for name in STYLES if name in curves and curves[name][0]]:
            axis.plot(*curves[name], STYLES[name], label=name)
        axis.set(title=place, xlabel="steps", ylabel=unit, yscale="log")
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=LABELLED))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(visible=True, which="both", alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=DOTS_AN_INCH)
    pyplot.close(figure)
