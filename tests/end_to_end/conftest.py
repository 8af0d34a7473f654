"""What all tests of whole programs have in common: the processes' coverage nobody measures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def all_unmeasured() -> Iterator[None]:
    """They run what is measured elsewhere, and measuring would take most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield
