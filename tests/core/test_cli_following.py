"""``events --follow`` and ``status --watch``: what happens, as it happens, until somebody interrupts."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

from .conftest import CLEAN, COMMAND, Cli, the_error

# Longer than anything here takes: only a hang reaches it.
LONG = 30.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def store(path: Path) -> Iterator[StateStore]:
    with StateStore(path) as opened:
        opened.initialize()
        yield opened


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """The command as a process whose output is read as it comes."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": CLEAN}
        process = subprocess.Popen([*COMMAND, "--db", str(path), *arguments], text=True, **{**streams, **options})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def until(process: subprocess.Popen[str], kind: str) -> list[dict[str, Any]]:
    """The events that come, up to the first of this kind."""
    found = []
    for event in lines(process):
        found.append(event)
        if event["kind"] == kind:
            return found
    raise AssertionError(f"ended before {kind}")


# events --follow


def test_follow_begins_with_the_last_events_and_goes_on(store: StateStore, start: Start) -> None:
    for number in range(5):
        store.put_checkpoint("w", number)
    following = start("events", "--follow", "--limit", "2")
    found = lines(following)
    assert [next(found)["sequence"] for _ in range(2)] == [4, 5]

    store.put_checkpoint("w", 5)

    assert next(found)["sequence"] == 6


def test_follow_from_a_cursor_misses_none_of_many_writers(store: StateStore, start: Start, path: Path) -> None:
    cursor = store.events()[-1].cursor
    following = start("events", "--follow", "--after", cursor, "--kind", "checkpoint.saved")

    def write(name: str) -> None:
        with StateStore(path) as own:
            for number in range(100):
                own.put_checkpoint(name, number)

    writers = [threading.Thread(target=write, args=(f"w{number}",)) for number in range(4)]
    for writer in writers:
        writer.start()
    found = list(islice(lines(following), 400))
    for writer in writers:
        writer.join()

    assert [event["id"] for event in found] == sorted(event["id"] for event in found)
    for number in range(4):
        mine = [event["sequence"] for event in found if event["workflow"] == f"w{number}"]
        assert mine == list(range(1, 101))


def test_follow_of_an_empty_log_of_a_kind_sees_the_first_of_it(store: StateStore, start: Start) -> None:
    following = start("events", "--follow", "--kind", "checkpoint.saved")
    store.put_checkpoint("w", 1)
    assert next(lines(following))["sequence"] == 1


def test_follow_puts_leases_that_ran_out_on_record(store: StateStore, start: Start) -> None:
    lease = store.acquire("release", "worker-a", 0.3)
    following = start("events", "--follow")
    expired = until(following, "lease.expired")[-1]
    assert (expired["token"], expired["detail"]) == (lease.token, {"reason": "ttl"})


def test_follow_as_text_is_one_line_an_event(store: StateStore, start: Start) -> None:
    store.put_checkpoint("w", 1)
    following = start("events", "--follow", "--format", "text", "--limit", "1")
    assert following.stdout is not None
    line = following.stdout.readline()
    assert re.fullmatch(r'2\S+Z  checkpoint\.saved  w  1  \{"size_bytes": 1\}\n', line)


def test_follow_prints_one_field_bare(store: StateStore, start: Start) -> None:
    following = start("events", "--follow", "--field", "kind")
    assert following.stdout is not None
    assert following.stdout.readline() == "store.initialized\n"


def test_follow_ends_with_130_when_interrupted(store: StateStore, start: Start) -> None:
    following = start("events", "--follow")
    assert next(lines(following))["kind"] == "store.initialized"
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=LONG)
    assert following.returncode == 130
    assert the_error(err)["code"] == "interrupted"


def test_follow_ends_when_its_reader_has_gone_although_nothing_happens(store: StateStore, start: Start) -> None:
    following = start("events", "--follow")
    assert next(lines(following))["kind"] == "store.initialized"
    assert following.stdout is not None
    following.stdout.close()
    assert following.wait(LONG) == 141


def test_follow_leaves_out_nothing_behind_a_cursor(cli: Cli) -> None:
    answer = cli("events", "--follow", "--after", "start", "--limit", "3")
    assert (answer.status, answer.error()["field"]) == (2, "limit")


def test_follow_of_a_missing_store_is_66(start: Start) -> None:
    following = start("events", "--follow")
    assert following.wait(LONG) == 66


def test_follow_ends_with_66_when_the_store_is_deleted(store: StateStore, start: Start, path: Path) -> None:
    following = start("events", "--follow")
    assert next(lines(following))["kind"] == "store.initialized"
    for file in path.parent.glob("agents.db*"):
        file.unlink()
    assert following.wait(LONG) == 66


# status --watch


def test_watch_in_a_pipe_prints_the_status_after_each_change_without_codes(store: StateStore, start: Start) -> None:
    watching = start("status", "--watch")
    assert watching.stdout is not None
    first = [watching.stdout.readline() for _ in range(8)]
    assert "nothing yet" in "".join(first)

    store.acquire("release", "worker-a", 60)

    text = ""
    while "worker-a" not in text:
        text += watching.stdout.readline()
    assert "\x1b" not in text


def test_watch_as_json_is_a_line_a_change(store: StateStore, start: Start) -> None:
    watching = start("status", "--watch", "--format", "json")
    found = lines(watching)
    assert next(found)["leases"] == []
    store.acquire("release", "worker-a", 60)
    assert next(found)["leases"][0]["owner"] == "worker-a"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_watch_on_a_terminal_draws_anew_in_colors_unless_they_are_unwanted(
    store: StateStore, start: Start, no_color: str
) -> None:
    store.acquire("release", "worker-a", 600, pid=os.getpid())
    ours, theirs = pty.openpty()
    watching = start("status", "--watch", stdout=theirs, env={**CLEAN, "NO_COLOR": no_color})
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + LONG
    while seen.count(b"\x1b[H\x1b[J") < 3 and time.monotonic() < deadline:
        seen += os.read(ours, 4096)
    watching.send_signal(signal.SIGINT)
    assert watching.wait(LONG) == 130
    os.close(ours)
    assert seen.count(b"\x1b[H\x1b[J") >= 3  # the time that is left runs down, although nothing happens
    assert (b"\x1b[32mlive\x1b[0m" in seen) is (not no_color)
    assert b"worker-a" in seen


def test_status_and_doctor_put_leases_that_ran_out_on_record(cli: Cli, path: Path) -> None:
    for word in ("status", "doctor"):
        with StateStore(path) as store:
            store.acquire(word, "worker-a", 0.1)
            while store.get_lease(word) is not None:
                time.sleep(0.01)
            cli(word)
            expired = [event for event in store.events(scope=word) if event.kind == "lease.expired"]
            assert len(expired) == 1
