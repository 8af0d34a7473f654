"""Core, LangGraph and Prefect in one file for long: memory, descriptors, threads, log and file stay as they are.

Nothing is broken on purpose here but time.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import IO

from tests.faults.endurance import samples
from tests.faults.endurance.work import KINDS
from tests.faults.engine import Budget, Report, Tell

from agent_checkpoint import StateStore

ROOT = Path(__file__).resolve().parents[3]
# Longer than the slowest of them takes to import what it needs.
PATIENCE_SECONDS = 120


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """Let the three of them work until the time is over; what grew is a violation."""
    assert variant is None, "nothing here is broken on purpose"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agents.db"
        with StateStore(path) as store:
            store.initialize()
        workers = {kind: _start(kind, path) for kind in KINDS}
        try:
            seen, report = _watch(budget, tell, workers, path)
        finally:
            ends = {kind: _end(worker) for kind, worker in workers.items()}
        report.violations += [
            f"{kind} ended with {status}: {errors}" for kind, (status, errors) in ends.items() if status
        ]
        for (whose, what), figures in sorted(seen.items()):
            report.notes.append(f"{whose}: {samples.course(what, figures)}")
            if samples.has_grown(what, figures):
                report.violations.append(f"{whose}: {report.notes[-1]}: that is growth")
        report.violations += _unsound(path)
    return report


def _start(kind: str, path: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AGENT_", "PREFECT_"))}
    environment |= {"PREFECT_HOME": str(path.parent / "prefect"), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.endurance.work", kind, str(path)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _watch(
    budget: Budget, tell: Tell, workers: dict[str, subprocess.Popen[str]], path: Path
) -> tuple[dict[tuple[str, str], list[float]], Report]:
    """What they told until the time was over; it counts from when all of them work."""
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    done: dict[str, int] = {}
    report = Report()
    with selectors.DefaultSelector() as selector:
        for worker in workers.values():
            assert worker.stdout is not None
            selector.register(worker.stdout, selectors.EVENT_READ)
        while budget.goes_on(report) and not any(worker.poll() for worker in workers.values()):
            for key, _ in selector.select(timeout=1.0):
                _note(key.fileobj, seen, done)  # type: ignore[arg-type]
            if len(done) == len(workers):
                seen["the store", "file"].append(path.stat().st_size)
                seen["the store", "log"].append(_size(path.with_name(path.name + "-wal")))
            report.operations = sum(done.values())
            tell(report)
    return seen, report


def _note(source: IO[str], seen: dict[tuple[str, str], list[float]], done: dict[str, int]) -> None:
    line = source.readline()
    if line:
        said = json.loads(line)
        kind = said.pop("kind")
        done[kind] = said.pop("operations")
        for what, figure in said.items():
            seen[kind, what].append(figure)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end(worker: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = worker.communicate(timeout=PATIENCE_SECONDS)  # which closes its stdin
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait(), "it did not end"
    return worker.returncode, errors[-2_000:]


def _unsound(path: Path) -> list[str]:
    with StateStore(path) as store:
        return [
            f"doctor: {check.check} is broken: {check.message}" for check in store.doctor() if check.verdict == "broken"
        ]
