"""What pip and uv make of this tree, in an environment that has nothing of the one that runs the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "packages/core"
# The quick start: every block of the README that runs.
SNIPPET = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 300

Result = subprocess.CompletedProcess[str]


def succeeded(result: Result) -> Result:
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def outside() -> dict[str, str]:
    """The environment variables of somebody who has nothing to do with these tests."""
    foreign = ("AGENT_CHECKPOINT_", "PYTHON", "VIRTUAL_ENV", "COVERAGE_", "UV_PROJECT", "UV_RUN")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Machine(NamedTuple):
    """A copy of the tree, and a virtual environment beside it."""

    tree: Path
    venv: Path

    def run(self, *words: str, folder: Path | None = None) -> Result:
        path = os.pathsep.join((str(self.venv / "bin"), os.environ["PATH"]))
        return subprocess.run(
            words,
            cwd=folder or self.tree,
            env={**outside(), "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def pip(self, *words: str) -> Result:
        return succeeded(self.run("python", "-m", "pip", *words))

    def installed(self, name: str) -> Path:
        """The folder in which pip noted what it installed."""
        (found,) = self.venv.glob(f"lib/python*/site-packages/{name}-*.dist-info")
        return found

    def metadata(self, name: str) -> Message:
        return Parser().parsestr((self.installed(name) / "METADATA").read_text("utf-8"))


def copy_source(source: Path, copy: Path) -> Path:
    """Copy what git would keep of a tree.

    The rest comes and goes while tests run: coverage gives every process a file in the root and renames it when
    that process ends.
    """
    lines = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    ignored = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    return Path(shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git", *ignored)))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(ROOT, tmp_path_factory.mktemp("checkout") / "agent-checkpoint")


def test_a_file_of_coverage_that_goes_away_does_not_matter_to_the_copy(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "packages").mkdir(parents=True)
    (source / "packages" / "kept.py").touch()
    # As one that was listed and then renamed: what is listed, and cannot be read.
    for name in (".coverage.vm.pid7.XqyrumEx", ".benchmark-7", "agents.db-wal", ".coverage"):
        (source / name).symlink_to(tmp_path / "gone")

    copy = copy_source(source, tmp_path / "copy")

    assert [str(each.relative_to(copy)) for each in copy.rglob("*")] == ["packages", "packages/kept.py"]


@pytest.fixture(scope="module")
def machine(tree: Path) -> Machine:
    """A fresh environment after ``pip install .`` in a copy of the tree."""
    venv = tree.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, capture_output=True)
    fresh = Machine(tree, venv)
    fresh.pip("install", ".")
    return fresh


def test_the_root_has_the_version_of_core() -> None:
    root = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    core = re.search(r'^__version__ = "(.+)"$', (CORE / "src/agent_checkpoint/version.py").read_text(), re.MULTILINE)

    assert root is not None
    assert core is not None
    assert root[1] == core[1]
    assert f"## [{root[1]}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_core_carries_the_licence_of_the_root() -> None:
    assert (CORE / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_pip_install_in_the_root_gives_the_command(machine: Machine, tmp_path: Path) -> None:
    assert shutil.which("agent-checkpoint", path=machine.venv / "bin")
    version = machine.metadata("agent_checkpoint_core")["Version"]

    assert succeeded(machine.run("agent-checkpoint", "--version", folder=tmp_path)).stdout == (
        f"agent-checkpoint {version}\n"
    )


@pytest.mark.parametrize("language", ["sh", "python"])
def test_the_installed_command_and_package_pass_the_quick_start(
    machine: Machine, tmp_path: Path, language: str
) -> None:
    snippets = [code for each, code in SNIPPET.findall((ROOT / "README.md").read_text("utf-8")) if each == language]
    words = {"sh": ("sh", "-e", "-c"), "python": ("python", "-W", "error", "-c")}[language]

    assert len(snippets) >= 3
    for code in snippets:
        succeeded(machine.run(*words, code, folder=tmp_path))
    assert (tmp_path / ".state/agents.db").exists()


def test_the_wheel_of_core_has_its_types_its_migrations_and_its_licence(machine: Machine) -> None:
    folder = machine.installed("agent_checkpoint_core")
    record = {line.split(",")[0] for line in (folder / "RECORD").read_text("utf-8").splitlines()}
    migrations = (CORE / "src/agent_checkpoint").rglob("*.sql")

    assert record >= {"agent_checkpoint/py.typed", f"{folder.name}/licenses/LICENSE"}
    assert record >= {str(each.relative_to(CORE / "src")) for each in migrations}
    assert any(name.endswith(".sql") for name in record)


def test_core_needs_nothing_but_pluggy_between_two_bounds(machine: Machine) -> None:
    metadata = machine.metadata("agent_checkpoint_core")
    (required,) = metadata.get_all("Requires-Dist", [])

    assert re.fullmatch(r"pluggy<[0-9]+,>=[0-9.]+", required)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"


def test_the_root_has_no_code_and_needs_core(machine: Machine) -> None:
    record = (machine.installed("agent_checkpoint") / "RECORD").read_text("utf-8").splitlines()
    requirements = machine.metadata("agent_checkpoint").get_all("Requires-Dist", [])
    (required,) = (each for each in requirements if "extra ==" not in each)

    assert all(line.startswith("agent_checkpoint-") for line in record)
    assert required.startswith("agent-checkpoint-core @ file:")


def test_pip_finds_nothing_amiss(machine: Machine) -> None:
    machine.pip("check")


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on the path")
def test_the_command_of_try_it_plays_the_demo_in_a_fresh_checkout(tree: Path) -> None:
    install, _, play = "pip install uv && uv run --no-dev agent-checkpoint demo".partition(" && ")
    assert f"```sh no-run\n{install} && {play}\n```" in (ROOT / "README.md").read_text("utf-8")

    words = play.split()
    ran = subprocess.run(words, cwd=tree, env=outside(), capture_output=True, text=True, timeout=SECONDS)

    assert succeeded(ran).stdout.endswith("The late write was refused.\n")


# The last one, since it installs into the same environment.


def test_an_editable_install_of_core_and_root_uses_the_tree_itself(machine: Machine, tmp_path: Path) -> None:
    install = "pip install -e packages/core -e ."
    assert f"\n{install}\n" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    machine.pip("uninstall", "--yes", "agent-checkpoint", "agent-checkpoint-core")

    machine.pip(*install.split()[1:])

    where = machine.run("python", "-c", "import agent_checkpoint; print(agent_checkpoint.__file__)", folder=tmp_path)
    assert Path(succeeded(where).stdout.strip()).is_relative_to(machine.tree / "packages/core/src")
    succeeded(machine.run("agent-checkpoint", "init", folder=tmp_path))
    machine.pip("check")
