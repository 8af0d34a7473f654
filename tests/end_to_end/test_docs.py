"""The documents: what they print runs as printed, what they name exists, and what exists is named.

The convention of the code blocks is in CONTRIBUTING.md, "How the docs are tested".
"""

from __future__ import annotations

import configparser
import inspect
import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import agent_checkpoint
from agent_checkpoint import AgentCheckpointError, StateStore
from agent_checkpoint.aio import AsyncStateStore
from agent_checkpoint.cli import CLOSED_PIPE, INTERRUPTED
from agent_checkpoint.cli.parser import Parser, parser_for
from agent_checkpoint.cli.run import COMMANDS, _cut, _split, command

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "packages/core/src/agent_checkpoint"
REFERENCE = ROOT / "docs/cli.md"
RUN_PAGE = ROOT / "docs/run.md"
# A page of files that belong together; its own test saves them and runs it whole.
RUN_ELSEWHERE = {ROOT / "docs/plugins.md": Path(__file__).with_name("test_example_plugin.py")}
RUN_HERE = [
    page
    for page in (ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md")))
    if page not in RUN_ELSEWHERE
]
PAGES = sorted(page for pattern in ("*.md", "docs/*.md", "*/*/README.md") for page in ROOT.glob(pattern))
# Files of other programs, which start the command: not run, but read.
FILES = ("crontab", "ini", "sql", "xml")
SECONDS = 60

# What differs between two runs of one snippet, and what stands for it when they are compared.
VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"), "TIME"),
    (re.compile(r'("(?:heartbeat_gap|remaining_seconds|retry_after|waited_seconds)": )[\d.]+'), r"\1SECONDS"),
    (re.compile(r'/(?:[^\s"/]+/)+(?=\.state/|\.agent-checkpoint/)'), "FOLDER/"),
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class Block(NamedTuple):
    """A fenced code block: its language, the other words behind the fence, and its text."""

    language: str
    words: tuple[str, ...]
    code: str

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") and "no-run" not in self.words

    @property
    def status(self) -> int:
        return next((int(word.removeprefix("exits-")) for word in self.words if word.startswith("exits-")), 0)


class Section(NamedTuple):
    """What stands under one heading, up to the next one of any level."""

    page: Path
    heading: str
    text: str
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.heading}"


def sections(page: Path) -> Iterator[Section]:
    heading, text, blocks = "", "", []
    fence: str | None = None
    code = ""
    for line in page.read_text("utf-8").splitlines(keepends=True):
        text += line
        if fence is None and line.startswith("#"):
            yield Section(page, heading, text, tuple(blocks))
            heading, text, blocks = line.lstrip("#").strip().replace("`", ""), "", []
        elif not line.startswith("```"):
            code += line
        elif fence is None:
            fence, code = line[3:].strip(), ""
        else:
            language, *words = fence.split() or [""]
            blocks.append(Block(language, tuple(words), code))
            fence = None
    assert fence is None, f"{page} ends inside a code block"
    yield Section(page, heading, text, tuple(blocks))


SECTIONS = [section for page in RUN_HERE for section in sections(page)]
BLOCKS = [block for section in SECTIONS for block in section.blocks]


def in_reference(heading: str) -> Section:
    (found,) = (section for section in SECTIONS if section.page == REFERENCE and section.heading == heading)
    return found


def table(section: Section) -> list[list[str]]:
    """The rows of the tables of a section, without their heads."""
    lines = [line for line in section.text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = [at for at, row in enumerate(rows) if set("".join(row)) <= set("-: ")]
    heads = {at - 1 for at in rules}
    return [row for at, row in enumerate(rows) if at not in heads and at not in rules]


# The snippets


def environment() -> dict[str, str]:
    """That of a new user: the command is installed, nothing is set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT")}
    return {**kept, "PATH": os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))}


def run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    """A block as its reader runs it; what it prints on both streams comes as one text."""
    words = ["sh", "-e", "-c"] if block.language == "sh" else [sys.executable, "-W", "error", "-c"]
    return subprocess.run(
        [*words, block.code],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


def alike(printed: str) -> str:
    """The text without what differs between two runs."""
    for pattern, instead in VARYING:
        printed = pattern.sub(instead, printed)
    return printed


@pytest.mark.parametrize("section", [each for each in SECTIONS if any(block.runs for block in each.blocks)], ids=str)
def test_the_snippets_of_a_section_run_as_printed_in_an_empty_directory(section: Section, tmp_path: Path) -> None:
    for block, after in zip(section.blocks, (*section.blocks[1:], Block("", (), "")), strict=True):
        if not block.runs:
            continue
        ran = run(block, tmp_path)
        assert ran.returncode == block.status, f"{block.code}\n{ran.stdout}"
        if after.language in ("json", "text"):
            assert alike(ran.stdout) == alike(after.code), block.code


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.language for block in BLOCKS} <= {"sh", "python", "json", "text", "", *FILES}
    for block in BLOCKS:
        for word in block.words:
            assert block.language in ("sh", "python"), block
            assert re.fullmatch(r"no-run|exits-[1-9][0-9]*", word), block


def test_every_output_that_is_shown_is_compared_with_a_run() -> None:
    for section in SECTIONS:
        for before, block in zip((None, *section.blocks), section.blocks, strict=False):
            if block.language in ("json", "text"):
                assert before is not None, f"{section}: {block.code}"
                assert before.runs, f"{section}: {block.code}"


def test_only_the_few_blocks_that_install_something_are_not_run() -> None:
    left_out = [block for block in BLOCKS if "no-run" in block.words]

    # Or that need a server.
    assert all("pip install" in block.code or "postgresql://" in block.code for block in left_out)
    assert len(left_out) <= 12
    assert sum(block.runs for block in BLOCKS) > 4 * len(left_out)


@pytest.mark.parametrize("page", RUN_ELSEWHERE, ids=lambda page: page.name)
def test_a_page_that_is_not_run_here_is_run_by_its_own_test(page: Path) -> None:
    assert str(page.relative_to(ROOT)) in RUN_ELSEWHERE[page].read_text("utf-8")


# Files of other programs


def command_lines(block: Block) -> Iterator[list[str]]:
    """The commands that a file of cron, systemd or launchd starts."""
    if block.language == "crontab":
        yield from (shlex.split(line)[5:] for line in block.code.splitlines())
    elif block.language == "sql":
        return  # for another program's prompt
    elif block.language == "ini":
        unit = configparser.RawConfigParser()
        unit.read_string(block.code)
        if unit.has_option("Service", "ExecStart"):
            yield shlex.split(unit.get("Service", "ExecStart"))
    else:
        yield plistlib.loads(block.code.encode())["ProgramArguments"]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language in FILES], ids=lambda block: block.language
)
def test_a_file_of_another_program_can_be_read_and_starts_a_command_that_exists(block: Block) -> None:
    for program, *words in command_lines(block):
        assert Path(program).is_absolute()
        assert Path(program).name == "agent-checkpoint"
        ours, theirs = _cut(words)
        named, rest = _split(ours)
        parser_for(" ".join(named), command(" ".join(named))).parse_args(rest)
        assert theirs
        assert Path(theirs[0]).is_absolute()


# The reference of the command


def long_options(parser: Parser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--")}


def global_options() -> set[str]:
    parser = Parser(prog="agent-checkpoint")
    parser.add_globals()
    return long_options(parser)


def own_options(name: str) -> set[str]:
    return long_options(parser_for(name, command(name))) - global_options()


def synopses(page: Path) -> dict[str, str]:
    """What blocks without a language show: each command with its arguments."""
    text = "".join(block.code for section in sections(page) for block in section.blocks if block.language == "")
    lines = re.sub(r"\n +", " ", text).splitlines()
    shown = {}
    for line in lines:
        words = line.removeprefix("agent-checkpoint ")
        names = [name for name in COMMANDS if words == name or words.startswith(f"{name} ")]
        # Some commands have others below them.
        name = max(names, key=len, default=None)
        if name is not None:
            shown[name] = words.removeprefix(name)
    return shown


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_its_section_with_every_option(name: str) -> None:
    first_cells = " ".join(row[0] for row in table(in_reference(name)))

    assert set(OPTION.findall(first_cells)) == own_options(name)


def test_the_options_of_every_command_are_in_a_section_of_their_own() -> None:
    first_cells = " ".join(row[0] for row in table(in_reference("Options of every command")))

    assert set(OPTION.findall(first_cells)) == global_options()
    assert "--version" in REFERENCE.read_text("utf-8")


@pytest.mark.parametrize(
    ("page", "names"),
    [(ROOT / "README.md", COMMANDS), (REFERENCE, COMMANDS), (RUN_PAGE, ("run",))],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_a_synopsis_shows_exactly_the_arguments_of_its_command(page: Path, names: Iterable[str]) -> None:
    shown = synopses(page)

    assert set(shown) == set(names)
    for name, arguments in shown.items():
        assert (" -- CMD" in arguments) is command(name).takes_command
        assert set(OPTION.findall(arguments)) == own_options(name), name
        for action in parser_for(name, command(name))._actions:
            if not action.option_strings:
                word = "|".join(action.choices) if action.choices else str(action.metavar)
                assert word in arguments, (name, word)


# Statuses, errors, variables, kinds


def error_classes(root: type[AgentCheckpointError] = AgentCheckpointError) -> Iterator[type[AgentCheckpointError]]:
    yield root
    for each in root.__subclasses__():
        if each.__module__.startswith("agent_checkpoint."):
            yield from error_classes(each)


def test_the_table_of_errors_is_that_of_the_classes() -> None:
    documented = {
        (code.strip("`"), int(status), retryable, name.strip("`"))
        for code, status, retryable, name, _ in table(in_reference("Errors"))
    }

    assert documented == {
        (each.code, each.exit_status, "yes" if each.retryable else "no", each.__name__) for each in error_classes()
    }


def test_every_error_that_can_reach_a_caller_is_public() -> None:
    assert {each.__name__ for each in error_classes()} <= set(agent_checkpoint.__all__)


def test_the_table_of_exit_statuses_has_each_one_once() -> None:
    documented = [int(status) for status, _ in table(in_reference("Exit statuses"))]

    assert documented == sorted({0, INTERRUPTED, CLOSED_PIPE, *(each.exit_status for each in error_classes())})


def test_the_environment_variables_are_those_that_the_source_reads(tmp_path: Path) -> None:
    source = "".join(file.read_text("utf-8") for file in sorted(SOURCE.rglob("*.py")))
    code = "agent-checkpoint init >init.json; agent-checkpoint lease acquire release --owner worker-a --export"
    exported = run(Block("sh", (), code), tmp_path).stdout
    known = set(re.findall(r"\bAGENT_CHECKPOINT_[A-Z]+\b", source + exported))

    documented = {
        name for row in table(in_reference("Environment variables")) for name in re.findall("[A-Z_]+", row[0])
    }

    assert documented == known


def test_every_kind_of_event_is_in_the_section_of_events() -> None:
    source = "".join(file.read_text("utf-8") for file in sorted(SOURCE.rglob("*.py")))
    refused_actions = {"lease.release", "lease.expire", "lease.bind", "checkpoint.put", "effect.begin", "events.days"}
    kinds = set(re.findall(r'"((?:store|lease|checkpoint|effect|events|write)\.[a-z-]+)"', source)) - refused_actions

    for page in (REFERENCE, ROOT / "docs/plugins.md"):
        assert kinds <= set(re.findall(r"`([a-z]+\.[a-z-]+)`", page.read_text("utf-8"))), page


# Links and docstrings


def anchors(page: Path) -> set[str]:
    """What a link may point to in a page, as the hosts of repositories name headings."""
    return {re.sub(r"[^\w\- ]", "", section.heading.lower()).replace(" ", "-") for section in sections(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", sorted(set(agent_checkpoint.__all__) - {"__version__"}))
def test_a_public_name_has_a_docstring(name: str) -> None:
    public: Any = getattr(agent_checkpoint, name)

    assert vars(public).get("__doc__") if inspect.isclass(public) else inspect.getdoc(public), name


@pytest.mark.parametrize(
    "public",
    [
        *(value for name in agent_checkpoint.__all__ if inspect.isclass(value := getattr(agent_checkpoint, name))),
        AsyncStateStore,
    ],
    ids=lambda public: public.__name__,
)
def test_what_a_public_class_offers_has_a_docstring(public: type) -> None:
    for name, member in vars(public).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), name


def test_a_docstring_of_the_store_names_the_errors_of_its_method() -> None:
    errors = {each.__name__ for each in error_classes()}
    for name, member in inspect.getmembers(StateStore, inspect.isfunction):
        for line in re.findall(r"^\s+(\w+Error): ", inspect.getdoc(member) or "", re.MULTILINE):
            assert line in errors, name
