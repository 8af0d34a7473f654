"""What a run of the proofs says at its end."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.faults.engine import Report

WIDTH = 30
# Characters of what gave a broken store away.
SHOWN = 100
SIMULATED = ("model",)
# What these do to a store are words, calls and time.
FAULTLESS = ("fuzz", "endurance")


class Ran(NamedTuple):
    """What one engine did with the right store, or with one that is broken on purpose."""

    engine: str
    variant: str | None
    report: Report
    seconds: float

    @property
    def held(self) -> bool:
        """Whether that is as it must be: nothing found on the right store, something on a broken one.

        Nothing is found where nothing was done, and no fault is survived where there was none.
        """
        found, did = bool(self.report.violations), self.report.operations > 0
        if self.variant is not None:
            return did and found
        return did and not found and (bool(self.report.faults) or self.engine in FAULTLESS)


def of(ran: list[Ran]) -> str:
    """The table, and below it what was violated, to be seen again."""
    right = [each for each in ran if each.variant is None]
    broken = [each for each in ran if each.variant is not None]
    lines = ["", _line("the right store", "operations", "faults", "violations", "seconds")]
    lines += [_row(each.engine, each.report, each.seconds) for each in right]
    total = Report()
    for each in right:
        total.add(each.report)
    if len(right) > 1:
        lines.append(_row("together", total, sum(each.seconds for each in right)))
    lines += ["", *(_faults(each) for each in right if each.report.faults)]
    if broken:
        caught = sum(each.held for each in broken)
        lines += ["", f"broken on purpose, {caught} of {len(broken)} caught"]
        lines += [_catch(each) for each in broken]
    lines += [f"{each.engine}: {note}" for each in right for note in each.report.notes]
    for each in right:
        lines += [f"\nVIOLATED ({each.engine}): {violation}" for violation in each.report.violations]
    return "\n".join(lines)


def counted(report: Report) -> str:
    """How far it is, in a line."""
    violated = f", {len(report.violations)} VIOLATIONS" if report.violations else ""
    return f"{report.operations:,} operations, {report.faults.total():,} faults{violated}"


def document(seed: int, ran: list[Ran]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "seed": seed,
        "held": all(each.held for each in ran),
        "runs": [
            {
                "engine": each.engine,
                "variant": each.variant,
                "seconds": round(each.seconds, 1),
                "operations": each.report.operations,
                "faults": dict(each.report.faults),
                "violations": each.report.violations,
                "notes": each.report.notes,
                "held": each.held,
            }
            for each in ran
        ],
    }


def _line(title: str, *cells: str) -> str:
    return f"{title:<{WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)


def _row(title: str, report: Report, seconds: float) -> str:
    found = len(report.violations)
    return _line(title, f"{report.operations:,}", f"{report.faults.total():,}", f"{found:,}", f"{seconds:.0f}")


def _faults(each: Ran) -> str:
    told = ", ".join(f"{count:,} × {kind}" for kind, count in each.report.faults.most_common())
    # In the model nobody dies: it has a clock and processes of its own.
    return f"{each.engine}{' (simulated)' if each.engine in SIMULATED else ''}: {told}"


def _catch(each: Ran) -> str:
    verdict = f"caught after {each.seconds:.1f} s: {each.report.violations[0]:.{SHOWN}}" if each.held else "NOT CAUGHT"
    return f"{each.variant:<{WIDTH}} {each.engine:<10} {verdict}"
