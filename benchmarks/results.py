"""``RESULTS.md`` and the tables in the documents: written by the program, read by people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.document import Document, Machine
from benchmarks.harness import Row

# What each benchmark asks, in the order in which they are shown.
QUESTIONS = {
    "lease": "What does a lease cost, beside bare sqlite3 and beside other locks?",
    "writers": "8 processes write as fast as they can for 8 seconds: who waits how long?",
    "queue": "8 processes want one scope: how much of the time is it held, and how fair is the turn?",
    "failover": "The owner is killed with `kill -9`: when does the next one have the scope?",
    "holding": "What does it cost to hold 100 leases, and to wait for one?",
    "cli": "What does a command cost, beside the least that a Python command with a database needs?",
    "import": "What does the import add to a program that uses SQLite and JSON anyway?",
    "growth": "Is a store with a year of events as fast as an empty one?",
    "effects": "What does it cost to have an action done once?",
    "archive": "The older part of the audit log is archived: how long does it take, how long does a writer wait?",
    "backup": "A backup beside 8 writers: how long does it take, how long do they wait?",
    "langgraph": "The LangGraph saver beside LangGraph's own.",
    "prefect": "The Prefect lock beside Prefect's own.",
    "postgres": "The store on PostgreSQL, beside the same statements in bare psycopg, and LangGraph's saver there.",
    "parts": "What are the figures made of? Each row is a part beside its whole.",
}
HEAD = ("what", "ours", "beside", "its figure", "ratio, or what is judged", "spread", "to reach", "")
PARTS_HEAD = ("a part", "takes", "of", "which takes", "ratio", "spread", "", "")
# Columns that are left out where no row has a figure to reach.
VERDICTS = 2
NO_SERVERS = "none"

# The three figures that matter most to a user: the row, what it tells, and what stands beside it.
FIGURES = (
    (
        "failover",
        "disk",
        "the owner is killed (`kill -9`): the next one has the scope after",
        "a lease with a ttl of 1 s",
    ),
    (
        "writers",
        "longest wait, disk",
        "8 processes write as fast as they can: the longest wait",
        "SQLite's busy timeout",
    ),
    ("lease", "FULL, disk", "a lease is taken, extended or given back, synced to disk", "bare sqlite3, the same rows"),
)


def results(document: Document) -> str:
    """The whole of RESULTS.md."""
    parts = ["# Benchmark results", *_about(document), "## Not reached", *_missed(document)]
    parts += ["## The machine", *_machine(document.machine)]
    for benchmark, question in QUESTIONS.items():
        rows = document.of(benchmark)
        notes = [f"- {note.text}" for note in document.notes if note.benchmark == benchmark]
        if rows or notes:
            parts += [f"## `{benchmark}`", question]
        if rows:
            parts.append(table(rows))
        if notes:
            parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def figures(document: Document) -> str | None:
    """The table of the three figures; None where one of them was not measured."""
    lines = []
    for benchmark, case, tells, peer in FIGURES:
        row = document.row(benchmark, case)
        if row is None:
            return None
        ours, theirs = (_seconds(row, side) for side in (report.ours(row), report.theirs(row)))
        lines.append((tells, f"**{ours}**", f"{theirs} ({peer})"))
    return _markdown(("", "Agent Checkpoint", "instead"), lines)


def table(rows: Sequence[Row]) -> str:
    """The rows of a benchmark."""
    head = PARTS_HEAD if rows[0].benchmark == "parts" else HEAD
    shown = len(head) if any(row.target for row in rows) else len(head) - VERDICTS
    return _markdown(head[:shown], [_cells(row)[:shown] for row in rows])


def fill(path: Path, tables: dict[str, str]) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` in a document, for each table there is."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = between.sub(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)  # noqa: B023 -- called at once
    path.write_text(text, encoding="utf-8")


def tables(document: Document) -> dict[str, str]:
    """What documents may show: the three figures, what was missed, and a table for each benchmark that was run."""
    found = {benchmark: table(rows) for benchmark in QUESTIONS if (rows := document.of(benchmark))}
    found["missed"] = "\n\n".join(_missed(document))
    three = figures(document)
    return found if three is None else {"figures": three, **found}


def _about(document: Document) -> Iterator[str]:
    yield (
        "Written by `python -m benchmarks --results`, not by hand. [docs/performance.md](../docs/performance.md) says "
        "how to run it and how to read it: both sides take turns within one run, a ratio is the median of the rounds, "
        "a limit must hold in every round, and the spread leaves out the outer tenths."
    )
    if document.machine["quick"]:
        yield "**A quick run: it shows that the benchmarks run. There are too few rounds for a verdict.**"
    three = figures(document)
    if three is not None:
        yield three


def _missed(document: Document) -> Iterator[str]:
    missed = [row for row in document.rows if row.reached is False]
    judged = sum(row.reached is not None for row in document.rows)
    if not missed:
        yield f"Nothing: all {judged} figures that have one to reach reached it."
        return
    yield f"{len(missed)} of {judged} figures that have one to reach:"
    yield "\n".join(
        f"- `{row.benchmark}`, {row.case}, beside {row.peer}: {report.figure(row)} ({report.spread(row)}), "
        f"to reach {report.limit(row)}"
        for row in missed
    )


def _machine(machine: Machine) -> Iterator[str]:
    places = ", ".join(f"{place} is {kind}" for place, kind in machine["filesystems"].items())
    optimized = "" if machine["python_optimized"] else ", built without profile-guided optimisation"
    facts = [
        ("agent-checkpoint", machine["agent_checkpoint"]),
        ("Python", f"{machine['python']}{optimized}"),
        ("SQLite", f"{machine['sqlite']}; synchronous {machine['synchronous']}"),
        ("system", machine["system"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} at the start"),
        ("places", places),
        ("peers", ", ".join(f"{name} {version}" for name, version in machine["peers"].items()) or "none installed"),
        ("servers", ", ".join(machine["servers"]) or NO_SERVERS),
    ]
    yield _markdown(("", ""), facts)
    took = machine["benchmarks"]
    if took:
        each = ", ".join(f"{name} {run['seconds']:.0f} ({run['load']})" for name, run in took.items())
        minutes = sum(run["seconds"] for run in took.values()) / 60
        yield f"{minutes:.0f} minutes; seconds that each benchmark took, and the load before it: {each}."


def _cells(row: Row) -> tuple[str, ...]:
    verdict = "" if row.reached is None else "reached" if row.reached else "**not reached**"
    figure, spread = report.figure(row), report.spread(row)
    return (row.case, report.ours(row), row.peer, report.theirs(row), figure, spread, report.limit(row), verdict)


def _seconds(row: Row, shown: str) -> str:
    """A rate of operations as the time of one."""
    if row.unit != "operations/s":
        return shown
    return report.in_unit("s")(1 / float(shown.removesuffix("/s").replace(",", "")))


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    shown = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in cells) + " |" for cells in shown)
