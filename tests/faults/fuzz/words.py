"""The command line: words that its own parsers describe, with values that may be anything."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.faults.fuzz import values

from agent_checkpoint.cli import main
from agent_checkpoint.cli.parser import parser_for
from agent_checkpoint.cli.run import COMMANDS, command

# Those that go on until they are interrupted, or play a story of seconds.
ENDLESS = ("demo",)
UNENDING_OPTIONS = ("--follow", "--watch", "-h", "--help")
# DESIGN §5; 1 is for what nobody foresaw, so it is never right.
STATUSES = (0, 2, 66, 74, 75, 76, 77)
# A report is an answer also where it says that something is broken.
REPORTS = ("doctor",)

BY_NAME: dict[str, st.SearchStrategy[str]] = {
    "scope": st.one_of(st.sampled_from(values.SCOPES), values.odd_text),
    "lease_scope": st.one_of(st.sampled_from(values.SCOPES), values.odd_text),
    "workflow": st.one_of(st.sampled_from(values.WORKFLOWS), values.odd_text),
    "key": st.one_of(st.sampled_from(values.KEYS), values.odd_text),
    "owner": st.one_of(st.sampled_from(values.OWNERS), values.odd_text),
    "data": st.one_of(values.json_texts, st.sampled_from(["-", *(f"@{file}" for file in values.FILES)])),
    "metadata": values.json_texts,
    "result": values.json_texts,
    "before": st.one_of(values.times, values.odd_text),
    "after": values.cursors,
    # A wait has an end here.
    "wait": st.sampled_from(["0", "0.01", "-1", "nan", "x", ""]),
    "ttl": st.one_of(st.sampled_from(["60", "0.1", "0", "2592001"]), values.real.map(str), values.odd_numbers),
    "busy_timeout": st.sampled_from(["0", "1", "-1", "86401", "x"]),
    "rule": st.one_of(
        st.sampled_from(
            ["checkpoints.keep_last", "events.days", "events.archive_to", "langgraph.thread_days", "holders"]
        ),
        values.odd_text,
    ),
    "value": st.one_of(values.whole.map(str), st.sampled_from(["true", "false", "folder", "0.5"]), values.odd_text),
    "status_fd": st.sampled_from(["99", "-1", "x", ""]),
}
PATHS = ("file", "to", "db", "source", "target", "result_file")
NUMBERS = ("token", "limit", "sequence", "if_sequence", "keep_last", "pid", "a", "b", "grace", "max_lifetime")
# What stands behind ``--``.
INNER = st.sampled_from([["true"], ["false"], ["sh", "-c", "echo 1"], ["no-such-command"], [""], []])


class Line(NamedTuple):
    """One call of the command."""

    words: list[str]
    stdin: bytes


class Said(NamedTuple):
    """What it answered."""

    status: int
    out: str
    err: str


@cache
def _actions(name: str) -> list[argparse.Action]:
    return [
        action
        for action in parser_for(name, command(name))._actions
        if not set(action.option_strings) & set(UNENDING_OPTIONS)
    ]


def _value(action: argparse.Action) -> st.SearchStrategy[str]:
    if action.choices:
        return st.one_of(st.sampled_from(list(action.choices)), values.odd_text)
    if action.dest in PATHS:
        return st.sampled_from(values.FILES)
    if action.dest in NUMBERS:
        return st.one_of(values.whole.map(str), values.odd_numbers)
    return BY_NAME.get(action.dest, st.one_of(values.names, values.whole.map(str), values.json_texts))


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """A command with most of what it needs, some of what it may have, and now and then what it does not know."""
    name = draw(st.sampled_from([each for each in COMMANDS if each not in ENDLESS]))
    words = name.split()
    for action in _actions(name):
        wait_must_end = action.dest == "wait"
        if not wait_must_end and draw(st.integers(0, 9)) >= (9 if action.required else 2):
            continue
        words += [draw(st.sampled_from(action.option_strings))] if action.option_strings else []
        words += [] if action.nargs == 0 else [draw(_value(action))]
    if draw(st.integers(0, 19)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(values.odd_text))
    if command(name).takes_command or draw(st.integers(0, 19)) == 0:
        words += ["--", *draw(INNER)]
    stdin = draw(
        st.one_of(values.json_texts.map(lambda text: text.encode(errors="surrogatepass")), st.binary(max_size=40))
    )
    return Line(words, stdin)


@contextmanager
def _streams(stdin: bytes) -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogatepass") for _ in range(2))
    before = sys.stdin, sys.stdout, sys.stderr, dict(os.environ)
    # What the processes of ``run`` and ``once`` say themselves is for nobody.
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"), out, err
    for name in [name for name in os.environ if name.startswith("AGENT_CHECKPOINT_")]:
        del os.environ[name]
    os.environ["AGENT_CHECKPOINT_DB"] = "agents.db"
    try:
        yield out, err
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)
        sys.stdin, sys.stdout, sys.stderr = before[:3]
        os.environ.clear()
        os.environ.update(before[3])


def call(line: Line) -> Said:
    """Run the command in this process, in the current folder."""
    with _streams(line.stdin) as (out, err):
        status = main(line.words)
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode("utf-8", "surrogatepass"))  # type: ignore[attr-defined]
    return Said(status, *texts)


def wrong_answer(line: Line, said: Said) -> str | None:
    """Why the answer is none that the command may give."""
    child = "--" in line.words  # whose status it is then
    if said.status not in STATUSES and not (child and said.status in (1, 126, 127)):
        return f"status {said.status}: {said.err}"
    if "Traceback" in said.err:
        return f"a traceback: {said.err}"
    if said.status == 0 or child:
        return None
    if said.out and not line.words[0].startswith(REPORTS):
        return f"an answer beside an error: {said.out}"
    return None if said.out else _wrong_error(said.err)


def _wrong_error(text: str) -> str | None:
    try:
        (name,) = whole = json.loads(text)
        facts: dict[str, Any] = whole[name]
    except ValueError as error:
        return f"not one JSON error ({error}): {text}"
    missing = {"code", "message", "hint", "retryable"} - set(facts)
    return f"an error without {missing}" if name != "error" or missing else None


def left_behind(folder: Path) -> list[str]:
    """Files that are half of something, under whatever name."""
    return sorted(name for name in os.listdir(folder) if ".partial" in name or ".tmp" in name)
