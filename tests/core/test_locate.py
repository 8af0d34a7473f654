"""Which store a command means when it is told, half told, or not told at all."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main
from agent_checkpoint.errors import ForeignStoreError
from agent_checkpoint.locate import locate

NOBODY = 65534
RELATIVE = Path(".agent-checkpoint", "state.db")

needs_chown = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another user")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    def value(self) -> Any:
        """The JSON value on stdout of a command that did it."""
        assert (self.status, self.err) == (0, "")
        return json.loads(self.out)

    def error(self) -> dict[str, Any]:
        """The one JSON error on stderr of a command that did not."""
        assert self.out == ""
        (name,) = whole = json.loads(self.err)
        assert name == "error"
        return dict(whole[name])


Cli = Callable[..., Answer]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command in this process, told nothing."""
    for name in [name for name in os.environ if name.startswith("AGENT_CHECKPOINT_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Answer:
        status = main(list(arguments))
        return Answer(status, *capsys.readouterr())

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder three levels down, the working directory, in a tree without any store."""
    folder = tmp_path / "project" / "src" / "deep"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def make_store(folder: Path) -> Path:
    path = folder / RELATIVE
    with StateStore(path) as store:
        store.initialize()
    return path


def test_without_any_store_upwards_it_is_the_one_here(here: Path) -> None:
    assert locate(None, {}) == str(here / RELATIVE)


def test_init_without_any_store_upwards_makes_one_here_that_git_ignores(cli: Cli, here: Path) -> None:
    value = cli("init").value()

    assert value["database"] == str(here / RELATIVE)
    assert "*" in (here / ".agent-checkpoint" / ".gitignore").read_text().splitlines()
    assert stat.S_IMODE((here / ".agent-checkpoint").stat().st_mode) == 0o700
    assert cli("lease", "acquire", "s", "--owner", "a").value()["token"] == 1


def test_a_command_without_any_store_upwards_exits_66_and_makes_nothing(cli: Cli, here: Path) -> None:
    answer = cli("lease", "acquire", "s", "--owner", "a")

    assert answer.status == 66
    assert answer.error()["database"] == str(here / RELATIVE)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_the_nearest_store_upwards_is_found(cli: Cli, here: Path, levels: int) -> None:
    found = make_store([here, *here.parents][levels])
    make_store([here, *here.parents][3])

    assert locate(None, {}) == str(found)
    assert cli("status", "--format", "json").value()["database"] == str(found)


def test_init_below_a_store_makes_no_second_one(cli: Cli, here: Path) -> None:
    found = make_store(here.parents[1])

    value = cli("init").value()

    assert (value["database"], value["created"]) == (str(found), False)
    assert list(here.iterdir()) == []


def test_a_folder_without_a_database_in_it_is_passed_by(here: Path) -> None:
    (here / ".agent-checkpoint").mkdir()
    found = make_store(here.parents[1])

    assert locate(None, {}) == str(found)


def test_the_variable_wins_over_the_search_and_the_option_over_both(cli: Cli, here: Path, tmp_path: Path) -> None:
    make_store(here)
    named, told = str(tmp_path / "named.db"), str(tmp_path / "told.db")

    assert locate(None, {"AGENT_CHECKPOINT_DB": named}) == named
    assert locate(told, {"AGENT_CHECKPOINT_DB": named}) == told
    assert locate(told, {}) == told


def test_an_empty_variable_is_none(here: Path) -> None:
    assert locate(None, {"AGENT_CHECKPOINT_DB": ""}) == str(here / RELATIVE)


# Another user's


@pytest.fixture
def foreign(here: Path) -> Path:
    """A store upwards that belongs to another user."""
    path = make_store(here.parents[1])
    os.chown(path, NOBODY, NOBODY)
    return path


@needs_chown
@pytest.mark.parametrize(
    "words",
    [
        ("init",),
        ("lease", "list"),
        ("lease", "acquire", "s", "--owner", "a"),
        ("checkpoint", "put", "w", "--data", "1"),
        ("events",),
        ("status",),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_a_store_of_another_user_found_upwards_is_refused(cli: Cli, foreign: Path, words: tuple[str, ...]) -> None:
    before = foreign.read_bytes()

    answer = cli(*words)
    error = answer.error()

    assert answer.status == 74
    assert error["code"] == "storage-foreign-owner"
    assert (error["database"], error["owner_uid"]) == (str(foreign), NOBODY)
    assert "--db" in error["hint"]
    assert foreign.read_bytes() == before


@needs_chown
def test_a_store_of_another_user_here_is_refused_too(here: Path) -> None:
    os.chown(make_store(here), NOBODY, NOBODY)

    with pytest.raises(ForeignStoreError):
        locate(None, {})


@needs_chown
def test_an_own_store_that_is_nearer_hides_the_foreign_one(here: Path, foreign: Path) -> None:
    nearer = make_store(here.parent)

    assert locate(None, {}) == str(nearer)


@needs_chown
def test_a_foreign_store_is_not_passed_by_for_one_further_up(here: Path, foreign: Path, tmp_path: Path) -> None:
    make_store(tmp_path)

    with pytest.raises(ForeignStoreError):
        locate(None, {})


@needs_chown
def test_a_foreign_store_that_is_named_is_accepted(cli: Cli, foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("--db", str(foreign), "lease", "acquire", "s", "--owner", "a").value()["token"] == 1

    monkeypatch.setenv("AGENT_CHECKPOINT_DB", str(foreign))
    assert cli("lease", "show", "s").value()["owner"] == "a"


# Git


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *identity, *words], cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A main checkout with one commit."""
    folder = tmp_path / "main"
    folder.mkdir()
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    return folder


@needs_git
def test_a_worktree_finds_the_store_of_its_main_checkout(
    cli: Cli, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(checkout)
    git(checkout, "worktree", "add", "--quiet", str(tmp_path / "beside" / "tree"))
    below = tmp_path / "beside" / "tree" / "src"
    below.mkdir()

    for folder in (below.parent, below):
        monkeypatch.chdir(folder)
        assert locate(None, {}) == str(store)
    assert cli("lease", "acquire", "s", "--owner", "a").value()["token"] == 1


@needs_git
def test_a_worktree_has_its_own_store_first(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(checkout)
    git(checkout, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    own = make_store(tmp_path / "tree")
    monkeypatch.chdir(tmp_path / "tree")

    assert locate(None, {}) == str(own)


@needs_git
@needs_chown
def test_a_store_of_another_user_in_the_main_checkout_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(make_store(checkout), NOBODY, NOBODY)
    git(checkout, "worktree", "add", "--quiet", str(tmp_path / "tree"))
    monkeypatch.chdir(tmp_path / "tree")

    with pytest.raises(ForeignStoreError):
        locate(None, {})


@needs_git
def test_a_submodule_is_no_worktree_but_lies_below_its_project(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init", "--quiet")
    git(project, "submodule", "--quiet", "add", str(checkout), "library")
    make_store(checkout)
    monkeypatch.chdir(project / "library")
    assert locate(None, {}) == str(project / "library" / RELATIVE)

    store = make_store(project)
    assert locate(None, {}) == str(store)


def test_a_worktree_may_name_its_repository_by_a_relative_path(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = tmp_path / "main" / ".git" / "worktrees" / "tree"
    private.mkdir(parents=True)
    (private / "commondir").write_text("../..\n")
    (here / ".git").write_text("gitdir: " + os.path.relpath(private, here) + "\n")
    store = make_store(tmp_path / "main")

    assert locate(None, {}) == str(store)


@pytest.mark.parametrize(
    "content",
    [b"", b"gitdir:", b"gitdir: /nowhere\n", b"no git file\n", b"\xff\xfe", b"gitdir: \0\n", b"gitdir: " + b"x" * 5000],
    ids=["nothing", "no path", "nowhere", "other text", "not UTF-8", "a null byte", "a long name"],
)
def test_a_git_file_that_makes_no_sense_is_passed_by(here: Path, content: bytes) -> None:
    (here / ".git").write_bytes(content)
    store = make_store(here.parents[1])

    assert locate(None, {}) == str(store)


def test_a_working_directory_that_is_gone_is_no_bug(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}

    def run(*words: str) -> Answer:
        command = ["sh", "-c", script, str(gone), sys.executable, "-m", "agent_checkpoint", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        gone.mkdir(exist_ok=True)
        return Answer(done.returncode, done.stdout, done.stderr)

    assert run("--db", str(store), "lease", "list").value() == []
    answer = run("lease", "list")
    assert answer.status in (66, 74)
    assert answer.error()["code"] in ("not-found", "storage-unreachable")
