"""``python -m benchmarks``: run the named benchmarks, all of them by default, or show an earlier run."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from agent_checkpoint.mounts import filesystem_of
from benchmarks import document, pictures, report, results
from benchmarks.document import Document, Machine
from benchmarks.harness import Finding, Note, Plan, Row

# Each in a module of its own, imported when it runs: LangGraph and Prefect take seconds to import, and each process
# that another benchmark spawns would import them too.
BENCHMARKS = {
    "lease": "lease",
    "writers": "writers",
    "queue": "waiting",
    "failover": "failover",
    "holding": "holding",
    "cli": "cli",
    "import": "imports",
    "growth": "growth",
    "effects": "effects",
    "archive": "archive",
    "backup": "backup",
    "langgraph": "langgraph",
    "prefect": "prefect",
    "postgres": "postgres",
    "parts": "parts",
}
MEMORY = Path("/dev/shm")
# Documents with tables that a run fills in.
DOCUMENTS = ("README.md", "docs/performance.md")


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, print each row as it comes, write what is asked for; 1 when ``--check`` finds a target missed."""
    options = _arguments(arguments)
    # So that the temporary folders go when the run is told to stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    earlier = options.earlier and document.from_json(json.loads(options.earlier.read_text(encoding="utf-8")))
    names = options.names or ([] if earlier else list(BENCHMARKS))
    if not names:
        _show(earlier)
    found = earlier
    for measured in _measure(names, options.disk, options.quick):
        found = document.merged(earlier, measured) if earlier else measured
        _write_json(found, options.json)  # after each benchmark: a run that is stopped is not lost
    _write(found, options)
    return int(options.check and any(row.reached is False for row in found.rows))


def _measure(names: list[str], disk: Path, quick: bool) -> Iterator[Document]:
    """What was found so far, after each benchmark."""
    with ExitStack() as folders:
        plan = Plan(_places(disk, folders), quick)
        machine = document.machine(plan)
        if names:
            print(report.headline(machine), flush=True)
        findings: list[Finding] = []
        for name in names:
            findings += _run(name, plan, machine)
            yield document.gathered(machine, findings)


def _run(name: str, plan: Plan, machine: Machine) -> Iterator[Finding]:
    """One benchmark, printed as it goes; how long it took is noted with the machine."""
    started, load = time.monotonic(), round(os.getloadavg()[0], 2)
    benchmark = import_module(f"benchmarks.{BENCHMARKS[name]}")
    measure: Callable[[Plan], Iterator[Finding]] = benchmark.measure
    for finding in measure(plan):
        _print(finding)
        yield finding
    servers: Callable[[Plan], Iterator[str]] = getattr(benchmark, "servers", lambda _: iter(()))
    machine["servers"] += servers(plan)
    machine["benchmarks"][name] = {"seconds": round(time.monotonic() - started, 1), "load": load}


def _print(finding: Finding) -> None:
    if isinstance(finding, Row):
        print(report.line(finding), flush=True)
    elif isinstance(finding, Note):
        print(f"{finding.benchmark:<9} {finding.text}", flush=True)


def _show(found: Document) -> None:
    print(report.headline(found.machine))
    for row in found.rows:
        _print(row)
    for note in found.notes:
        _print(note)


def _write_json(found: Document, path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document.to_json(found), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write(found: Document, options: argparse.Namespace) -> None:
    _write_json(found, options.json)
    if options.results:
        options.results.write_text(results.results(found), encoding="utf-8")
    if options.plot:
        pictures.draw(options.plot, found)
    if options.docs:
        for path in DOCUMENTS:
            results.fill(Path(path), results.tables(found))


def _arguments(arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Agent Checkpoint beside its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, not how fast is it")
    parser.add_argument("--check", action="store_true", help="exit 1 when a figure is not reached")
    parser.add_argument("--disk", type=Path, default=Path(), metavar="DIR", help="a folder on the disk to measure")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        metavar="FILE",
        help="take what --json wrote to FILE, and measure only each NAME again, or nothing",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine and the figures of every round")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the tables, as benchmarks/RESULTS.md")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the plots in DIR, as PNG")
    parser.add_argument("--docs", action="store_true", help=f"fill in the tables of {' and '.join(DOCUMENTS)}")
    options = parser.parse_args(None if arguments is None else list(arguments))
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for option in ("json", "results"):
        path = getattr(options, option)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"argument --{option}: there is no folder {path.parent}")
    if not options.disk.is_dir():
        parser.error(f"argument --disk: there is no folder {options.disk}")
    if options.earlier and not options.earlier.is_file():
        parser.error(f"argument --from: there is no file {options.earlier}")
    if options.plot and (missing := pictures.missing()):
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
