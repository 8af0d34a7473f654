"""Runs the clauses of a capability, and says what came of each: the shape is that of the published suite."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

OnTestResult = Callable[[str, str, bool, "str | None"], None]
"""Told of each clause: capability, name, whether it passed, and how it failed."""


async def run_clauses(
    capability: str,
    clauses: Sequence[Callable[..., Awaitable[None]]],
    *arguments: Any,
    on_test_result: OnTestResult | None = None,
) -> tuple[int, int, list[str]]:
    """Run all of them; how many passed, how many failed, and which those were."""
    failures: list[str] = []
    for clause in clauses:
        failed: str | None = None
        try:
            await clause(*arguments)
        except Exception as error:
            failures.append(f"{clause.__name__}: {error}")
            failed = traceback.format_exc()
        if on_test_result is not None:
            on_test_result(capability, clause.__name__, failed is None, failed)
    return len(clauses) - len(failures), len(failures), failures
