"""The published suite and our own clauses: what the saver keeps, and that the clauses find who does not keep it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import writes_sort_key
from langgraph.checkpoint.conformance.capabilities import ALL_CAPABILITIES, EXTENDED_CAPABILITIES
from langgraph.checkpoint.conformance.report import CapabilityReport, CapabilityResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from agent_checkpoint_langgraph import AgentCheckpointSaver
from agent_checkpoint_langgraph.conformance.delta_history import ALL_DELTA_HISTORY_TESTS, run_delta_history_tests
from agent_checkpoint_langgraph.conformance.leases import StoreLeases
from agent_checkpoint_langgraph.conformance.report import all_passed, check, maker, published_suite
from agent_checkpoint_langgraph.conformance.write_ownership import (
    ALL_WRITE_OWNERSHIP_TESTS,
    run_write_ownership_tests,
)

from .conftest import DATABASES, WATCHDOG_SECONDS, fresh_url, rows

Clause = Callable[..., Awaitable[None]]
# What a thread may do with or without a lease: an unguarded saver keeps these.
KEPT_WITHOUT_GUARD = {
    "test_ownership_holder_writes",
    "test_ownership_is_not_asked_without_leases",
    "test_ownership_holder_deletes",
    "test_ownership_reading_needs_no_lease",
}


def command(*words: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """``python -m agent_checkpoint_langgraph …``, after some code of the test."""
    start = f"{code}\nimport sys\nfrom agent_checkpoint_langgraph.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    call = ["-c", start] if code else ["-m", "agent_checkpoint_langgraph"]
    return subprocess.run(
        [sys.executable, *call, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )


def failing(clauses: Iterable[str]) -> set[str]:
    """The names in what a ``run_…`` function says failed."""
    return {each.partition(":")[0] for each in clauses}


@pytest.fixture(scope="module", params=DATABASES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CapabilityReport:
    url = None if request.param == "sqlite" else fresh_url()
    return asyncio.run(published_suite(maker(url, tmp_path_factory.mktemp("published"))))


@pytest.mark.parametrize("capability", sorted(each.value for each in ALL_CAPABILITIES))
def test_every_capability_of_the_published_suite_is_found_and_passes(
    published: CapabilityReport, capability: str
) -> None:
    result = published.results[capability]

    assert result.detected
    assert result.failures == []
    assert result.passed is True
    assert result.tests_passed > 0


def test_the_saver_passes_as_a_whole_and_nothing_is_skipped(published: CapabilityReport) -> None:
    assert all_passed(published)
    assert published.conformance_level() == "FULL"
    assert set(published.results) >= {each.value for each in EXTENDED_CAPABILITIES}


@pytest.mark.parametrize("missing", [CapabilityResult(), CapabilityResult(detected=True, passed=False)])
def test_a_capability_that_is_missing_or_fails_fails_the_whole(
    published: CapabilityReport, missing: CapabilityResult
) -> None:
    report = CapabilityReport("another saver", {**published.results, "prune": missing})

    assert not all_passed(report)


@pytest.mark.parametrize("clause", ALL_DELTA_HISTORY_TESTS, ids=lambda clause: clause.__name__[5:])
def test_the_saver_keeps_each_clause_of_delta_history(saver: AgentCheckpointSaver, clause: Clause) -> None:
    asyncio.run(clause(saver))


@pytest.mark.parametrize("clause", ALL_WRITE_OWNERSHIP_TESTS, ids=lambda clause: clause.__name__[5:])
def test_the_saver_keeps_each_clause_of_write_ownership(saver: AgentCheckpointSaver, clause: Clause) -> None:
    asyncio.run(clause(saver, StoreLeases(saver)))


def test_the_saver_keeps_write_ownership_where_leases_are_required(url_or_path: Path | str) -> None:
    async def clauses() -> tuple[int, int, list[str]]:
        async with AgentCheckpointSaver.from_conn_string(
            url_or_path, fencing="required", synchronous="normal"
        ) as saver:
            return await run_write_ownership_tests(saver, StoreLeases(saver))

    _, _, failures = asyncio.run(clauses())

    # Those begin with a thread, or with neighbours, that have no lease.
    assert failing(failures) == {
        "test_ownership_is_not_asked_without_leases",
        "test_ownership_superseded_copy",
        "test_ownership_first_grant_ends_unleased_writes",
        "test_ownership_neighbours_go_on",
    }


def test_langgraphs_memory_saver_keeps_every_clause_of_delta_history() -> None:
    assert asyncio.run(run_delta_history_tests(InMemorySaver())) == (len(ALL_DELTA_HISTORY_TESTS), 0, [])


def test_langgraphs_sqlite_saver_keeps_every_clause_of_delta_history(path: Path) -> None:
    async def clauses() -> tuple[int, int, list[str]]:
        async with AsyncSqliteSaver.from_conn_string(str(path)) as stock:
            return await run_delta_history_tests(stock)

    assert asyncio.run(clauses()) == (len(ALL_DELTA_HISTORY_TESTS), 0, [])


class Mistaken(InMemorySaver):
    """Gives the history, changed by what a test says."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._change = change

    async def aget_delta_channel_history(self, *, config: Any, channels: Any) -> Any:
        found = self.get_delta_channel_history(config=config, channels=channels)
        target = await self.aget_tuple(config)
        return {channel: self._change(entry, target) for channel, entry in found.items()}


def without_seed(entry: Any, target: Any) -> Any:
    return {"writes": entry["writes"]}


def newest_first(entry: Any, target: Any) -> Any:
    return {**entry, "writes": entry["writes"][::-1]}


def with_the_future(entry: Any, target: Any) -> Any:
    pending = [write for write in (target.pending_writes if target else ()) if write[1] == "log"]
    return {**entry, "writes": [*entry["writes"], *pending]}


def without_false_seeds(entry: Any, target: Any) -> Any:
    return entry if entry.get("seed", True) else without_seed(entry, target)


def by_task(entry: Any, target: Any) -> Any:
    return {**entry, "writes": sorted(entry["writes"], key=lambda write: writes_sort_key("", write[0]))}


@pytest.mark.parametrize(
    ("wrong", "found_by"),
    [
        (without_seed, "test_delta_history_seed_is_nearest"),
        (newest_first, "test_delta_history_oldest_first"),
        (with_the_future, "test_delta_history_excludes_target"),
        (without_false_seeds, "test_delta_history_seed_may_be_empty"),
        (by_task, "test_delta_history_order_within_checkpoint"),
    ],
)
def test_a_saver_that_gives_a_wrong_history_is_found_out(wrong: Callable[[Any, Any], Any], found_by: str) -> None:
    _, _, failures = asyncio.run(run_delta_history_tests(Mistaken(wrong)))

    assert found_by in failing(failures)


def test_a_saver_that_asks_for_no_lease_breaks_every_clause_that_refuses(path: Path) -> None:
    async def clauses() -> tuple[int, int, list[str]]:
        async with AgentCheckpointSaver.from_conn_string(path, fencing="off", synchronous="normal") as saver:
            return await run_write_ownership_tests(saver, StoreLeases(saver))

    passed, failed, failures = asyncio.run(clauses())

    assert passed == len(KEPT_WITHOUT_GUARD)
    assert failing(failures) == {each.__name__ for each in ALL_WRITE_OWNERSHIP_TESTS} - KEPT_WITHOUT_GUARD
    assert failed == len(failures)


def test_a_failed_clause_fails_the_whole_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def unguarded() -> AgentCheckpointSaver:
        return AgentCheckpointSaver.from_conn_string(tmp_path / "unguarded.db", fencing="off", synchronous="normal")

    assert asyncio.run(check(unguarded)) is False
    printed = capsys.readouterr()
    assert "❌ write_ownership" in printed.out
    assert "✅ delta_history" in printed.out
    assert "write_ownership: test_ownership_superseded_put failed" in printed.err


def test_the_command_prints_both_tables(path: Path) -> None:
    done = command("conformance", "--db", path)

    assert done.returncode == 0, done.stderr
    assert "Result: FULL (8/8)" in done.stdout
    assert "✅ delta_history" in done.stdout
    assert "✅ write_ownership" in done.stdout
    assert "❌" not in done.stdout
    assert done.stderr == ""
    assert rows(path, "SELECT COUNT(*) FROM langgraph_checkpoints")[0][0] > 0


def test_without_the_suite_the_command_says_what_to_install() -> None:
    done = command("conformance", code="import sys; sys.modules['langgraph.checkpoint.conformance'] = None")

    assert done.returncode == 66
    assert "pip install langgraph-checkpoint-conformance" in done.stderr
    assert done.stdout == ""
