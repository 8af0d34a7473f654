"""The example of docs/testing.md: it is printed there as it is, and passes (the page itself is run by test_docs.py)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/testing"
SECONDS = 60


@pytest.mark.parametrize("name", ["my_agent.py", "test_my_agent.py"])
def test_the_page_prints_the_example(name: str) -> None:
    page = (ROOT / "docs/testing.md").read_text("utf-8")
    assert f"cat > {name} <<'END'\n{(EXAMPLE / name).read_text('utf-8')}END\n" in page


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("without", ["", "held.check()"])
def test_the_example_passes_and_fails_without_its_check(tmp_path: Path, without: str) -> None:
    folder = tmp_path / "testing"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    agent = folder / "my_agent.py"
    if without:
        agent.write_text(agent.read_text().replace(without, "pass"))
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:langsmith_plugin"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.returncode == bool(without), ran.stdout
    assert ("  - acted outside\n" in ran.stdout) == bool(without)
