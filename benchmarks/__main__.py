"""``python -m benchmarks``: run the named benchmarks, all of them by default."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from agent_checkpoint.mounts import filesystem_of
from benchmarks import (
    archive,
    backup,
    cli,
    failover,
    growth,
    holding,
    imports,
    langgraph_plots,
    lease,
    report,
    waiting,
    writers,
)
from benchmarks.harness import Plan, Row

Benchmarks = dict[str, Callable[[Plan], Iterator[Row]]]


def _langgraph(plan: Plan, plots: Path | None = None) -> Iterator[Row]:
    # LangGraph takes a second to import, and each process that another benchmark spawns would import it.
    from benchmarks import langgraph

    return langgraph.measure(plan, plots)


def _prefect(plan: Plan) -> Iterator[Row]:
    # The same: Prefect takes seconds.
    from benchmarks import prefect

    return prefect.measure(plan)


def _postgres(plan: Plan) -> Iterator[Row]:
    # And psycopg, and a server, are optional.
    from benchmarks import postgres

    return postgres.measure(plan)


BENCHMARKS: Benchmarks = {
    "lease": lease.measure,
    "writers": writers.measure,
    "queue": waiting.measure,
    "failover": failover.measure,
    "holding": holding.measure,
    "cli": cli.measure,
    "growth": growth.measure,
    "archive": archive.measure,
    "backup": backup.measure,
    "import": imports.measure,
    "langgraph": _langgraph,
    "prefect": _prefect,
    "postgres": _postgres,
}
MEMORY = Path("/dev/shm")


def main() -> int:
    """Measure, print each row as it comes, write the JSON; 1 when ``--check`` finds a target missed."""
    options = _arguments()
    # So that the temporary folders go when the run is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as folders:
        plan = Plan(_places(options.disk, folders), options.quick)
        machine = report.machine(plan)
        print(report.headline(machine), flush=True)
        benchmarks: Benchmarks = {**BENCHMARKS, "langgraph": partial(_langgraph, plots=options.plots)}
        rows = []
        for name in options.names or benchmarks:
            for row in benchmarks[name](plan):
                print(report.line(row), flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(report.document(machine, rows), indent=2, ensure_ascii=False) + "\n")
    return int(options.check and any(row.reached is False for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Agent Checkpoint beside its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast is it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round to FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the curves of langgraph in DIR, as PNG")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to measure")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}")
    if options.plots and (missing := langgraph_plots.missing()):
        parser.error(missing)
    return options


def _places(disk: Path, folders: ExitStack) -> dict[str, Path]:
    """A temporary folder at each place; tmpfs only where the system has one."""
    parents = {"disk": disk}
    if filesystem_of(str(MEMORY)) == "tmpfs":
        parents["tmpfs"] = MEMORY
    return {
        place: Path(folders.enter_context(tempfile.TemporaryDirectory(prefix=".benchmark-", dir=parent))).absolute()
        for place, parent in parents.items()
    }


if __name__ == "__main__":
    sys.exit(main())
