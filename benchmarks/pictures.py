"""Plots, made from what a run found: small, on white, one picture a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.document import Document
from benchmarks.harness import Curve, Row
from benchmarks.results import FIGURES

INCHES_A_PLACE = 4.6
INCHES_HIGH = 3.6
INCHES_A_BAR = 0.3
INCHES_AROUND = 1.1
DOTS_AN_INCH = 100
OURS, THEIRS, BARE = "#1f6f8b", "#b9bec4", "#d9a441"
# Curves: who is awaited has the colour of who is not, and a broken line.
STYLES = {
    "ours": (OURS, "-"),
    "ours, awaited": (OURS, "--"),
    "SqliteSaver": (BARE, "-"),
    "AsyncSqliteSaver": (BARE, "--"),
    "PostgresSaver": ("#a23b3b", "-"),
    "InMemorySaver": ("#777777", ":"),
}
# Those without a style of their own, in the order in which their names come.
CYCLE = (OURS, BARE, "#a23b3b", "#5b8c5a")
# Colours in a file: enough for lines and letters, and a third of its size.
COLOURS = 64
# What is written at a logarithmic axis.
LABELLED = (1.0, 2.0, 5.0)
# Rows of the lease benchmark that are drawn: a cycle beside each lock, as it comes and on disk.
LOCKS_CASES = ("NORMAL, disk", "FULL, disk")


def missing() -> str | None:
    """What has to be installed to draw; None where nothing is missing."""
    if find_spec("matplotlib") is not None:
        return None
    return "--plot needs matplotlib: uv run --group benchmarks python -m benchmarks"


def draw(folder: Path, document: Document) -> list[Path]:
    """Write a PNG for each question that the run has figures for; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_curves(folder, plot, document.curves) for plot in dict.fromkeys(curve.plot for curve in document.curves)]
    three = [row for benchmark, case, *_ in FIGURES if (row := document.row(benchmark, case)) is not None]
    if len(three) == len(FIGURES):
        drawn.append(_three(folder / "figures.png", three))
    locks = [row for row in document.of("lease") if row.unit == "s" and row.case.endswith(LOCKS_CASES)]
    if locks:
        title = "A lease and other locks, a cycle, on disk"
        drawn.append(_bars(folder / "locks.png", title, [(f"{row.peer}: {row.case}", row) for row in locks]))
    waits = [row for row in document.of("failover") if row.case.startswith("beside")]
    if waits:
        title = "kill -9 of the owner, to the next grant"
        drawn.append(_bars(folder / "failover.png", title, [(row.peer, row) for row in waits]))
    parts = document.of("parts")
    if parts:
        drawn.append(_parts(folder / "parts.png", parts))
    return drawn


def _three(path: Path, rows: Sequence[Row]) -> Path:
    pyplot = _pyplot()
    labels = ("kill -9 to the next grant", "longest wait of 8 writers", "a lease operation, synced")
    figure, axes = pyplot.subplots(1, len(rows), figsize=(9.0, 2.3), layout="constrained")
    for axis, row, label, (*_, peer) in zip(axes, rows, labels, FIGURES, strict=True):
        values = [1e3 * _as_seconds(row, median(side)) for side in (row.ours, row.theirs)]
        bars = axis.barh(["Agent\nCheckpoint", peer.replace(", ", ",\n").replace(" with ", "\nwith ")], values)
        for bar, colour in zip(bars, (OURS, THEIRS), strict=True):
            bar.set_color(colour)
        axis.bar_label(bars, [report.in_unit("s")(value / 1e3) for value in values], padding=3, fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.margins(x=0.3)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8, bottom=False, labelbottom=False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    return _saved(figure, path)


def _as_seconds(row: Row, value: float) -> float:
    return 1 / value if row.unit == "operations/s" else value


def _parts(path: Path, rows: Sequence[Row]) -> Path:
    """A panel for each whole: its bar, and below it those of its parts."""
    wholes: dict[str, list[Row]] = {}
    for row in rows:
        what, _, place = row.case.rpartition(", ")
        wholes.setdefault(f"{row.peer}, {place}", []).append(replace(row, case=what))
    pyplot = _pyplot()
    high = INCHES_AROUND + INCHES_A_BAR * sum(len(parts) + 3 for parts in wholes.values())
    ratios = [len(parts) + 2 for parts in wholes.values()]
    figure, axes = pyplot.subplots(
        len(wholes), 1, figsize=(7.0, high), layout="constrained", squeeze=False, height_ratios=ratios
    )
    for axis, (whole, parts) in zip(axes[:, 0], wholes.items(), strict=True):
        values = [median(parts[0].theirs), *(median(part.ours) for part in parts)]
        bars = axis.barh([whole, *(part.case for part in parts)], [value * 1e3 for value in values], 0.7, color=BARE)
        bars[0].set_color(OURS)
        axis.bar_label(bars, [report.in_unit("s")(value) for value in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.tick_params(labelsize=8, bottom=False, labelbottom=False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    return _saved(figure, path)


def _bars(path: Path, title: str, rows: Sequence[tuple[str, Row]]) -> Path:
    """Two bars a row on a logarithmic axis of seconds, ours above."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8.0, INCHES_AROUND + INCHES_A_BAR * 2 * len(rows)), layout="constrained")
    places = range(len(rows))
    for shift, colour, name, values in (
        (-0.2, OURS, "Agent Checkpoint", [row.ours for _, row in rows]),
        (0.2, THEIRS, "the other one", [row.theirs for _, row in rows]),
    ):
        heights = [median(each) * 1e3 for each in values]
        bars = axis.barh([place + shift for place in places], heights, 0.38, color=colour, label=name)
        axis.bar_label(bars, [report.in_unit("s")(height / 1e3) for height in heights], padding=3, fontsize=7)
    axis.set_yticks(list(places), [name for name, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="ms (logarithmic)")
    axis.set_title(title, fontsize=10)
    axis.margins(x=0.15)
    axis.grid(visible=True, axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path)


def _curves(folder: Path, plot: str, curves: Sequence[Curve]) -> Path:
    """One axis a place, one line a name."""
    mine = [curve for curve in curves if curve.plot == plot]
    places = list(dict.fromkeys(curve.place for curve in mine))
    names = list(dict.fromkeys(curve.name for curve in mine))
    pyplot, ticker = _pyplot(), import_module("matplotlib.ticker")
    size = (INCHES_A_PLACE * len(places), INCHES_HIGH)
    figure, axes = pyplot.subplots(1, len(places), figsize=size, squeeze=False, sharey=True, layout="constrained")
    figure.suptitle(f"{mine[0].title} (logarithmic)", fontsize=10)
    for axis, place in zip(axes[0], places, strict=True):
        for curve in mine:
            if curve.place == place:
                colour, dashes = STYLES.get(curve.name) or (CYCLE[names.index(curve.name) % len(CYCLE)], "-")
                along = zip(*curve.points, strict=True)
                axis.plot(*along, color=colour, linestyle=dashes, label=curve.name, linewidth=1.4)
        axis.set(xlabel=mine[0].along, yscale="log", xscale="log" if _spans(mine) else "linear")
        axis.set_title(place, fontsize=9)
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=LABELLED))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.tick_params(labelsize=8)
    axes[0][0].legend(fontsize=7)
    axes[0][0].set_ylabel(mine[0].unit)
    return _saved(figure, folder / f"{plot}.png")


def _spans(curves: Sequence[Curve]) -> bool:
    """Whether the places of the points are of every size, so that the axis has to be logarithmic."""
    along = [at for curve in curves for at, _ in curve.points]
    return min(along) > 0 and max(along) / min(along) > 10_000


def _pyplot() -> Any:
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")


def _saved(figure: Any, path: Path) -> Path:
    drawn = BytesIO()
    figure.savefig(drawn, dpi=DOTS_AN_INCH, facecolor="white", metadata={"Software": None})
    _pyplot().close(figure)
    pillow: Any = import_module("PIL.Image")  # matplotlib brings it
    pillow.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    return path
