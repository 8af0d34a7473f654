"""The tables: what LangGraph's suite says of the saver, and what our own clauses say."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import ProgressCallbacks

from agent_checkpoint.cli.output import write
from agent_checkpoint_langgraph.conformance.delta_history import run_delta_history_tests
from agent_checkpoint_langgraph.conformance.leases import StoreLeases
from agent_checkpoint_langgraph.conformance.write_ownership import run_write_ownership_tests
from agent_checkpoint_langgraph.saver import AgentCheckpointSaver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from langgraph.checkpoint.conformance.report import CapabilityReport

    from agent_checkpoint_langgraph.conformance.runner import OnTestResult

Makes = Callable[[], Any]
"""Makes a saver, for ``async with``."""
WIDTH = 52


class ClauseResult(NamedTuple):
    """What came of the clauses of a capability."""

    capability: str
    passed: int
    failed: int
    failures: list[str]


def run(url: str | None = None) -> bool:
    """Run everything on a database, a temporary one if none is named, and print the tables; whether all passed."""
    with tempfile.TemporaryDirectory(prefix="agent-checkpoint-") as folder:
        return asyncio.run(check(maker(url, Path(folder))))


def maker(url: str | None, folder: Path) -> Makes:
    """Savers on one database; each on a file of its own where none is named."""
    numbers = count(1)

    def make() -> AgentCheckpointSaver:
        where = folder / f"{next(numbers)}.db" if url is None else url
        return AgentCheckpointSaver.from_conn_string(where)

    return make


async def check(make: Makes) -> bool:
    """Run everything on savers of that making, and print the tables; whether all passed."""
    published = await published_suite(make, _tell_failure)
    published.print_report()
    own = await own_clauses(make, _tell_failure)
    write(_table(own))
    return all_passed(published) and not any(result.failed for result in own)


async def published_suite(make: Makes, on_test_result: OnTestResult | None = None) -> CapabilityReport:
    """What LangGraph's suite says, every capability with a saver of its own."""

    async def savers() -> AsyncGenerator[AgentCheckpointSaver, None]:
        async with make() as saver:
            yield saver

    registered = checkpointer_test("AgentCheckpointSaver")(savers)
    return await validate(registered, progress=ProgressCallbacks(on_test_result=on_test_result))


def all_passed(report: CapabilityReport) -> bool:
    """Whether every capability was found, and passed; the report itself forgives those that were not found."""
    return bool(report.results) and all(each.detected and each.passed is True for each in report.results.values())


async def own_clauses(make: Makes, on_test_result: OnTestResult | None = None) -> list[ClauseResult]:
    """What our own clauses say."""
    async with _opened(make) as (saver, _):
        delta = ClauseResult("delta_history", *await run_delta_history_tests(saver, on_test_result))
    async with _opened(make) as (saver, leases):
        owned = ClauseResult("write_ownership", *await run_write_ownership_tests(saver, leases, on_test_result))
    return [delta, owned]


@asynccontextmanager
async def _opened(make: Makes) -> AsyncIterator[tuple[AgentCheckpointSaver, StoreLeases]]:
    async with make() as saver:
        yield saver, StoreLeases(saver)


def _tell_failure(capability: str, name: str, passed: bool, error: str | None) -> None:
    if not passed:
        sys.stderr.write(f"{capability}: {name} failed\n{error}\n")


def _table(results: list[ClauseResult]) -> str:
    border = "  " + "=" * WIDTH
    lines = [border, "    Clauses of agent-checkpoint-langgraph", border]
    for result in results:
        mark, more = ("✅", "") if not result.failed else ("❌", f", {result.failed} failed")
        lines.append(f"      {mark} {result.capability:20s} ({result.passed} passed{more})")
    return "\n".join([*lines, border, ""])
