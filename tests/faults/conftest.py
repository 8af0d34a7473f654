"""What tests of faults have in common: a disk, and processes whose coverage nobody measures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def all_unmeasured(unmeasured: None) -> None:
    """They are killed and frozen; who is, tells no coverage."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On the disk, where the files of a process that is killed are, too."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()
