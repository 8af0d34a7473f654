"""From words to a command: where options may stand, what help says, how mistakes are answered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_checkpoint import StateStore, __version__
from agent_checkpoint.cli import run

from .conftest import COMMAND, Answer, Cli, process


@pytest.fixture
def cli(bare_cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """The command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return bare_cli


@pytest.fixture
def db(path: Path) -> str:
    """An initialized store."""
    with StateStore(path) as store:
        store.initialize()
        store.acquire("release", "worker-a", ttl_seconds=3600)
    return str(path)


def assert_usage_error(answer: Answer) -> None:
    error = answer.error()
    assert (answer.status, error["code"], error["retryable"]) == (2, "invalid-input", False)
    assert error["field"]
    assert error["message"]


def test_global_options_may_stand_before_between_and_after_the_words(cli: Cli, db: str) -> None:
    options = ("--db", db, "--busy-timeout", "3", "--field", "owner", "--default", "none", "--format", "json")
    equals = (f"--db={db}", "--busy-timeout=3", "--field=owner", "--default=none", "--format=json")

    for given in (options, equals):
        assert cli(*given, "lease", "show", "release") == (0, "worker-a\n", "")
        assert cli("lease", *given, "show", "release") == (0, "worker-a\n", "")
        assert cli("lease", "show", *given, "release") == (0, "worker-a\n", "")
        assert cli("lease", "show", "release", *given) == (0, "worker-a\n", "")


def test_the_last_of_two_equal_options_counts(cli: Cli, db: str) -> None:
    assert cli("--db", "nowhere.db", "lease", "show", "release", "--db", db, "--field", "token").out == "1\n"


def test_a_name_may_look_like_a_command(cli: Cli, db: str) -> None:
    assert cli("--db", db, "lease", "acquire", "lease", "--owner", "acquire").value()["scope"] == "lease"
    assert cli("--db", db, "lease", "show", "show").status == 66
    assert cli("--db", db, "checkpoint", "put", "init", "--data", "1").value()["workflow"] == "init"


def test_a_name_that_begins_with_a_dash_stands_behind_two_dashes(cli: Cli, db: str) -> None:
    answer = cli("lease", "acquire", "--owner=-w", "--db", db, "--", "--release")

    assert (answer.value()["scope"], answer.value()["owner"]) == ("--release", "-w")


@pytest.mark.parametrize("option", ["--owner=--", "--metadata=--", "--ttl=--", "--default=--"])
def test_two_dashes_as_a_value_are_taken_or_refused_but_never_a_bug(cli: Cli, db: str, option: str) -> None:
    answer = cli("--db", db, "lease", "acquire", "s", "--owner=a", "--field=nope", option)

    assert answer.status in (0, 2, 66)
    assert "unexpected" not in answer.err


@pytest.mark.parametrize("name", run.COMMANDS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_every_command_exits_0_and_names_its_options(cli: Cli, name: str, option: str) -> None:
    answer = cli(*name.split(), option)

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"usage: agent-checkpoint {name} ")
    assert run.command(name).summary in answer.out
    for each in ("--db", "--busy-timeout", "--format", "--field", "--default"):
        assert each in answer.out


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("--db", "x.db", "--help"), ("--help", "--db", "x.db")])
def test_the_overview_names_every_command_and_exits_0(cli: Cli, arguments: tuple[str, ...]) -> None:
    answer = cli(*arguments)

    assert (answer.status, answer.err) == (0, "")
    for name in run.COMMANDS:
        assert f"  {name} " in answer.out


@pytest.mark.parametrize("group", ["lease", "checkpoint"])
@pytest.mark.parametrize("before", [(), ("--db", "x.db"), ("--busy-timeout", "3")])
def test_help_of_a_group_names_its_commands_only(cli: Cli, group: str, before: tuple[str, ...]) -> None:
    answer = cli(*before, group, "--help")

    assert (answer.status, answer.err) == (0, "")
    for name in run.COMMANDS:
        assert (f"  {name} " in answer.out) == name.startswith(f"{group} ")


def test_help_may_stand_before_the_words_and_does_nothing_else(cli: Cli, tmp_path: Path) -> None:
    answer = cli("--help", "--db", "new.db", "init")

    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--version",), ("--db", "x.db", "--version"), ("--version", "--db", "x.db")])
def test_version_prints_name_and_version(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments) == (0, f"agent-checkpoint {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("lease", "acquire", "s", "--own", "a"),
        ("lease", "acquire", "s", "--owner", "a", "--tt", "5"),
        ("lease", "acquire", "s", "--owner", "a", "--meta={}"),
        ("checkpoint", "put", "w", "--dat", "1"),
        ("checkpoint", "put", "w", "--data", "1", "--if-seq", "1"),
        ("events", "--lim", "1"),
        ("events", "--for", "text"),
        ("lease", "acq", "s", "--owner", "a"),
        ("le", "acquire", "s", "--owner", "a"),
        ("check", "get", "w"),
        ("ini",),
        ("--vers",),
        ("--hel",),
    ],
    ids=" ".join,
)
def test_abbreviations_are_refused(cli: Cli, db: str, arguments: tuple[str, ...]) -> None:
    before = StateStore(db).events()

    assert_usage_error(cli(*arguments, "--db", db))
    assert StateStore(db).events() == before


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--db", "x.db"),
        ("--db",),
        ("",),
        ("frobnicate",),
        ("lease",),
        ("lease", "frobnicate"),
        ("lease", "init"),
        ("checkpoint",),
        ("init", "lease"),
        ("frobnicate", "--help"),
        ("lease", "frobnicate", "--help"),
        ("frobnicate", "--version"),
        ("LEASE", "list"),
        ("lease list",),
        ("--frobnicate",),
        ("-x", "init"),
        ("init", "--frobnicate"),
        ("init", "--db"),
        ("init", "--format", "xml"),
        ("init", "surplus"),
        ("lease", "acquire"),
        ("lease", "acquire", "s"),
        ("lease", "acquire", "s", "t", "--owner", "a"),
        ("lease", "acquire", "s", "--owner"),
        ("lease", "acquire", "s", "--owner", "a", "--reclaim=yes"),
        ("lease", "force-release", "s"),
        ("lease", "show"),
        ("checkpoint", "put", "w"),
        ("checkpoint", "put", "--data", "1"),
        ("checkpoint", "diff", "w", "1", "2", "3"),
        ("checkpoint", "prune"),
        ("completion",),
        ("completion", "tcsh"),
        ("init", "--version"),
    ],
    ids=" ".join,
)
def test_a_usage_error_exits_2_with_one_json_error_and_does_nothing(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert_usage_error(cli(*arguments))
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_command_is_told_which_there_are(cli: Cli) -> None:
    assert cli("frobnicate").error()["known"] == list(run.COMMANDS)
    assert cli("lease", "frobnicate").error()["known"] == [name for name in run.COMMANDS if name.startswith("lease ")]


def test_the_installed_command_and_the_module_are_the_same(db: str) -> None:
    installed = Path(sys.executable).with_name("agent-checkpoint")
    words = ("--db", db, "lease", "show", "release", "--field", "owner")

    assert process(*COMMAND, *words) == (0, "worker-a\n", "")
    assert process(installed, *words) == (0, "worker-a\n", "")


def test_a_process_answers_mistakes_alike() -> None:
    for arguments in (("frobnicate",), ("lease", "acquire", "s"), ("init", "--frobnicate"), ()):
        assert_usage_error(process(*COMMAND, *arguments))
