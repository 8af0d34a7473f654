"""``lease`` where others hold the scope: waiting, limits, owners that are alive or not."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

from .conftest import CLEAN, COMMAND, Cli, acquire, held, kinds, the_error

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
OWNER = ("--owner", "b")

linux = pytest.mark.skipif(sys.platform != "linux", reason="proof of death needs Linux")

Start = Callable[..., "subprocess.Popen[str]"]


def rows(path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def queued(path: Path, waiters: int = 1) -> None:
    until(lambda: len(rows(path, "SELECT number FROM tickets")) == waiters)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is some: what is tested is not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "agents.db"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """The command in a process of its own, not waited for."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        command = [*COMMAND, "--db", str(path), *map(str, words)]
        started.append(subprocess.Popen(command, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, for long."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


# Waiting.


def test_a_wait_that_was_too_short_exits_75_and_says_who_holds_it(cli: Cli, path: Path) -> None:
    acquire(cli, "release", "a")
    started = time.monotonic()
    answer = cli("lease", "acquire", "release", *OWNER, "--wait", "0.2")
    took = time.monotonic() - started

    assert answer.status == 75
    error = answer.error()
    assert (error["code"], error["retryable"], error["scope"]) == ("wait-timeout", True, "release")
    assert (error["owner"], error["token"], error["position"]) == ("a", 1, 1)
    assert 0.2 <= error["waited_seconds"] <= took
    assert 0 < error["retry_after"] <= 60
    assert error["expires_at"] == cli("lease", "show", "release").value()["expires_at"]
    assert rows(path, "SELECT number FROM tickets") == []


@pytest.mark.parametrize("wait", [(), ("--wait", "0"), ("--wait", "0.0"), ("--wait", "0e5"), ("--wait=-0",)])
def test_who_does_not_wait_is_refused_at_once(cli: Cli, wait: tuple[str, ...]) -> None:
    acquire(cli, "release", "a")
    answer = cli("lease", "acquire", "release", *OWNER, *wait)
    assert (answer.status, answer.error()["code"], answer.error()["position"]) == (75, "lease-held", 1)


@pytest.mark.parametrize("wait", ["forever", "60", "1e300", "1" + 30 * "0", "0.5"])
def test_a_free_scope_is_granted_however_long_one_would_wait(cli: Cli, wait: str) -> None:
    assert cli("lease", "acquire", "release", *OWNER, "--wait", wait).value()["token"] == 1
    assert cli("lease", "wait", "other", "--wait", wait).value() == {"scope": "other", "free": True, "last": None}


def test_a_scope_that_runs_out_is_granted_to_who_waits(cli: Cli) -> None:
    acquire(cli, "release", "a", "--ttl", "0.3")
    assert cli("lease", "acquire", "release", *OWNER, "--wait", "forever").value()["token"] == 2
    assert kinds(cli) == [*("store.initialized", "lease.acquired"), *("lease.expired", "lease.acquired")]


def test_who_waits_forever_is_granted_the_scope_when_it_is_released(cli: Cli, path: Path, start: Start) -> None:
    fence = acquire(cli, "release", "a")
    waiter = start("lease", "acquire", "release", *OWNER, "--wait", "forever", "--metadata", '{"x": 1}')
    queued(path)
    (shown,) = cli("status", "--format", "json").value()["queues"]
    assert (shown["scope"], shown["position"], shown["owner"]) == ("release", 1, "b")
    assert shown["process"]["pid"] == waiter.pid

    # Who comes now, and does not wait, is second.
    assert cli("lease", "acquire", "release", "--owner", "c").error()["position"] == 2
    cli("lease", "release", "release", *fence)
    out, err = waiter.communicate(timeout=LONG)
    assert (waiter.returncode, err) == (0, "")
    lease = json.loads(out)
    assert (lease["owner"], lease["token"], lease["metadata"]) == ("b", 2, {"x": 1})
    assert lease["process"] is None
    assert rows(path, "SELECT number FROM tickets") == []


def test_waiting_commands_are_shown_and_served(cli: Cli, path: Path, start: Start) -> None:
    fence = acquire(cli, "release", "a")
    waiters = []
    for number in range(3):
        waiters.append(start("lease", "acquire", "release", "--owner", f"w{number}", "--wait", "60"))
        queued(path, number + 1)
    text = cli("status").out
    assert "Who waits for it?" in text
    assert [line.split()[:3] for line in text.splitlines() if "  w" in line] == [
        ["release", str(number + 1), f"w{number}"] for number in range(3)
    ]
    for number in range(3):
        cli("lease", "release", "release", *fence)
        until(lambda: cli("lease", "show", "release").status == 0)
        lease = cli("lease", "show", "release").value()
        assert lease["token"] == number + 2
        fence = ("--owner", lease["owner"], "--token", str(lease["token"]))
    assert sorted(json.loads(waiter.communicate(timeout=LONG)[0])["owner"] for waiter in waiters) == ["w0", "w1", "w2"]
    assert "Who waits" not in cli("status").out


def test_lease_wait_ends_when_the_scope_is_free_and_takes_nothing(cli: Cli, path: Path, start: Start) -> None:
    fence = acquire(cli, "release", "a")
    waiter = start("lease", "wait", "release")
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(0.5)
    assert rows(path, "SELECT number FROM tickets") == []
    cli("lease", "release", "release", *fence)
    out, err = waiter.communicate(timeout=LONG)
    assert (waiter.returncode, err) == (0, "")
    found = json.loads(out)
    assert (found["scope"], found["free"]) == ("release", True)
    assert (found["last"]["owner"], found["last"]["state"]) == ("a", "released")
    assert cli("lease", "show", "release").status == 66


def test_lease_wait_exits_75_when_the_scope_is_not_free_in_time(cli: Cli) -> None:
    acquire(cli, "release", "a")
    for wait in ("0", "0.2"):
        answer = cli("lease", "wait", "release", "--wait", wait)
        assert (answer.status, answer.error()["code"], answer.error()["owner"]) == (75, "wait-timeout", "a")
        assert answer.error()["waited_seconds"] >= float(wait)


def test_the_environment_for_eval_may_be_waited_for(cli: Cli) -> None:
    acquire(cli, "release", "a", "--ttl", "0.2")
    answer = cli("lease", "acquire", "release", *OWNER, "--wait", "60", "--export")
    assert answer.status == 0
    assert "export AGENT_CHECKPOINT_TOKEN=2" in answer.out.replace("'", "")


# What strikes while a command waits.


def test_an_interrupt_ends_the_wait_with_130_and_leaves_no_ticket(cli: Cli, path: Path, start: Start) -> None:
    acquire(cli, "release", "a")
    waiter = start("lease", "acquire", "release", *OWNER, "--wait", "forever")
    queued(path)
    time.sleep(0.3)  # until it surely pauses
    waiter.send_signal(signal.SIGINT)
    out, err = waiter.communicate(timeout=LONG)
    assert (waiter.returncode, out, the_error(err)["code"]) == (130, "", "interrupted")
    assert rows(path, "SELECT number FROM tickets") == []


def test_an_interrupt_at_any_moment_of_the_wait_keeps_nobody_waiting(cli: Cli, path: Path, start: Start) -> None:
    fence = acquire(cli, "release", "a", "--ttl", "600")
    for number in range(4):
        waiter = start("lease", "acquire", "release", *OWNER, "--wait", "forever")
        # From the moment on that its ticket is there.
        until(lambda pid=waiter.pid: f'"pid":{pid},' in str(rows(path, "SELECT process FROM tickets")))
        time.sleep(0.01 * number)
        waiter.send_signal(signal.SIGINT)
        assert waiter.wait(LONG) == 130
    assert cli("status", "--format", "json").value()["queues"] == []
    cli("lease", "release", "release", *fence)
    assert cli("lease", "acquire", "release", "--owner", "c").value()["token"] == 2
    assert rows(path, "SELECT number FROM tickets") == []


@linux
@pytest.mark.parametrize("strike", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_waiter_keeps_nobody_waiting(cli: Cli, path: Path, start: Start, strike: signal.Signals) -> None:
    fence = acquire(cli, "release", "a")
    waiter = start("lease", "acquire", "release", *OWNER, "--wait", "forever")
    queued(path)
    waiter.send_signal(strike)
    # Dead, and not reaped: its end is seen all the same.
    os.waitid(os.P_PID, waiter.pid, os.WEXITED | os.WNOWAIT)

    assert cli("status", "--format", "json").value()["queues"] == []
    assert cli("lease", "acquire", "release", "--owner", "c").error()["position"] == 1
    cli("lease", "release", "release", *fence)
    assert acquire(cli, "release", "c")
    assert rows(path, "SELECT number FROM tickets") == []
    assert waiter.communicate(timeout=LONG)[0] == ""
    assert waiter.returncode == -strike


def test_an_interrupt_ends_lease_wait_too(cli: Cli, path: Path, start: Start) -> None:
    acquire(cli, "release", "a")
    waiter = start("lease", "wait", "release")
    until(lambda: path.with_name(path.name + "-wal").exists())
    time.sleep(0.5)
    waiter.send_signal(signal.SIGINT)
    out, err = waiter.communicate(timeout=LONG)
    assert (waiter.returncode, out, the_error(err)["code"]) == (130, "", "interrupted")


# Limits.


def test_the_first_grant_fixes_the_limit(cli: Cli) -> None:
    slots = [cli("lease", "acquire", "release", "--owner", owner, "--limit", "2").value()["slot"] for owner in "ab"]
    assert slots == [0, 1]
    assert cli("lease", "acquire", "release", "--owner", "c", "--limit", "2").status == 75

    answer = cli("lease", "acquire", "release", "--owner", "c", "--limit", "3")
    assert answer.status == 2
    error = answer.error()
    assert (error["code"], error["field"], error["limit"], error["asked"]) == ("invalid-input", "limit", 2, 3)
    assert "set-limit" in error["hint"]


def test_set_limit_says_what_it_was(cli: Cli) -> None:
    acquire(cli, "release", "a")
    assert cli("lease", "set-limit", "release", "3").value() == {"scope": "release", "limit": 3, "previous": 1}
    acquire(cli, "release", "b")
    assert cli("lease", "set-limit", "release", "1").value() == {"scope": "release", "limit": 1, "previous": 3}
    assert len(cli("lease", "list").value()) == 2
    assert cli("lease", "acquire", "release", "--owner", "c").status == 75
    assert kinds(cli).count("lease.limit-set") == 2


def test_a_raised_limit_lets_a_waiting_command_in(cli: Cli, path: Path, start: Start) -> None:
    acquire(cli, "release", "a")
    waiter = start("lease", "acquire", "release", *OWNER, "--wait", "forever")
    queued(path)
    cli("lease", "set-limit", "release", "2")
    assert json.loads(waiter.communicate(timeout=LONG)[0])["slot"] == 1


def test_several_live_leases_are_shown_and_released_by_their_tokens(cli: Cli) -> None:
    for owner in "abc":
        acquire(cli, "release", owner, "--limit", "3")
    assert cli("lease", "show", "release").value()["owner"] == "c"
    assert [(lease["slot"], lease["token"]) for lease in reversed(cli("lease", "list").value())] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]
    answer = cli("lease", "force-release", "release", "--reason", "stuck")
    assert (answer.status, answer.error()["field"], answer.error()["tokens"]) == (2, "token", [1, 2, 3])
    assert cli("lease", "force-release", "release", "--reason", "stuck", "--token", "3").value()["slot"] == 2
    assert cli("lease", "show", "release").value()["owner"] == "b"
    text = cli("status").out
    assert [line.split()[:5] for line in text.splitlines() if line.startswith("  release")] == [
        ["release", "2", "c", "3", "force-released"],
        ["release", "1", "b", "2", "live"],
        ["release", "0", "a", "1", "live"],
    ]


def test_reclaim_and_several_leases_do_not_go_together(cli: Cli) -> None:
    acquire(cli, "release", "a", "--limit", "2")
    answer = cli("lease", "acquire", "release", "--owner", "a", "--reclaim")
    assert (answer.status, answer.error()["field"]) == (2, "reclaim")


# Owners that are alive, or not.


@linux
def test_a_lease_that_is_bound_to_a_process_tells_whether_it_lives(
    cli: Cli, path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    lease = cli("lease", "acquire", "release", *OWNER, "--ttl", "600", "--pid", sleeper.pid).value()
    assert (lease["process"]["pid"], lease["owner_alive"]) == (sleeper.pid, True)
    assert lease["process"].keys() == {"boot", "pid", "start_ticks", "pid_namespace", "time_namespace"}
    assert cli("lease", "show", "release", "--field", "owner_alive").out == "true\n"
    assert cli("status", "--format", "json", "--field", "leases.0.owner_alive").out == "true\n"
    assert column(cli("status").out, "ALIVE") == ["yes"]
    assert column(cli("status").out, "PROCESS") == [str(sleeper.pid)]

    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    for reaped in (False, True):
        if reaped:
            sleeper.wait()
        # It goes on until somebody asks for it, and says what is known.
        for answer in (cli("lease", "show", "release"), cli("lease", "check", "release", *OWNER, "--token", "1")):
            assert (answer.value()["state"], answer.value()["owner_alive"]) == ("live", False)
        assert [each["owner_alive"] for each in cli("lease", "list").value()] == [False]

    assert cli("lease", "acquire", "release", "--owner", "c").value()["token"] == 2
    (expired,) = (event for event in cli("events").value() if event["kind"] == "lease.expired")
    assert (expired["token"], expired["detail"]) == (1, {"reason": "owner-dead"})


@linux
def test_status_says_that_the_owner_is_dead_even_where_it_cannot_write(
    cli: Cli, path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    cli("lease", "acquire", "release", *OWNER, "--ttl", "600", "--pid", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    with held(path):
        assert column(cli("--busy-timeout", "0", "status").out, "ALIVE") == ["no"]
        found = cli("--busy-timeout", "0", "status", "--format", "json").value()
        assert [lease["owner_alive"] for lease in found["leases"]] == [False]
    # Where it can, that is the end of the lease, on record once.
    for _ in range(3):
        (lease,) = cli("status", "--format", "json").value()["leases"]
        assert lease["state"] == "expired"
    assert kinds(cli) == ["store.initialized", "lease.acquired", "lease.expired"]


@linux
@pytest.mark.parametrize("word", ["status", "doctor"])
def test_a_dead_owner_is_put_on_record_by_who_looks(
    cli: Cli, path: Path, sleeper: subprocess.Popen[bytes], word: str
) -> None:
    cli("lease", "acquire", "release", *OWNER, "--ttl", "600", "--pid", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    cli(word)
    cli(word)
    assert kinds(cli) == ["store.initialized", "lease.acquired", "lease.expired"]


@pytest.mark.parametrize("changed", [("boot", "another"), ("pid_namespace", 1), ("time_namespace", 1)])
def test_an_owner_that_nobody_can_know_of_has_its_ttl(
    cli: Cli, path: Path, sleeper: subprocess.Popen[bytes], changed: tuple[str, object]
) -> None:
    cli("lease", "acquire", "release", *OWNER, "--ttl", "600", "--pid", sleeper.pid)
    key, value = changed
    with closing(sqlite3.connect(path)) as connection, connection:
        ((text,),) = connection.execute("SELECT process FROM leases").fetchall()
        connection.execute("UPDATE leases SET process = ?, sum = NULL", (json.dumps({**json.loads(text), key: value}),))
    sleeper.kill()
    sleeper.wait()

    assert cli("lease", "show", "release", "--field", "owner_alive").out == "null\n"
    assert cli("status", "--format", "json").value()["leases"][0]["owner_alive"] is None
    assert column(cli("status").out, "ALIVE") == ["unknown"]
    assert cli("lease", "acquire", "release", "--owner", "c").status == 75


def test_a_lease_that_is_bound_to_no_process_says_so(cli: Cli) -> None:
    acquire(cli, "release", "a")
    lease = cli("lease", "show", "release").value()
    assert (lease["process"], lease["owner_alive"]) == (None, None)
    assert (column(cli("status").out, "ALIVE"), column(cli("status").out, "PROCESS")) == (["-"], ["-"])


@linux
def test_reclaim_is_refused_while_the_earlier_self_lives(cli: Cli, sleeper: subprocess.Popen[bytes]) -> None:
    cli("lease", "acquire", "release", "--owner", "a", "--pid", sleeper.pid)
    answer = cli("lease", "acquire", "release", "--owner", "a", "--reclaim")
    assert (answer.status, answer.error()["code"]) == (75, "lease-held")
    assert "alive" in answer.error()["message"]
    sleeper.kill()
    sleeper.wait()
    assert cli("lease", "acquire", "release", "--owner", "a", "--reclaim").value()["token"] == 2


def column(text: str, name: str) -> list[str]:
    """A column of the first table of ``status``."""
    lines = text.splitlines()
    (top,) = (number for number, line in enumerate(lines) if line.startswith("  SCOPE  ") and "SLOT" in line)
    at, found = lines[top].index(name), []
    for line in lines[top + 1 :]:
        if not line.startswith("  "):
            break
        found.append(line[at:].split()[0])
    return found


# Bad input.

NUMBERS = ["0", "-1", "1.5", "nan", "inf", "1e3", "", " 1", "x", "1" + 30 * "0", "9" * 5000, "٣", "0x10", "forever"]


@pytest.mark.parametrize(
    "wait",
    [
        *("-1", "-0.5", "nan", "inf", "-inf", "infinity", "forever2", "Forever", " forever", "", "1s", "1_0", "x"),
        *("0x10", "1e", "1.2.3", "٣", "9" * 5000 + "x"),
    ],
)
def test_a_bad_wait_exits_2_and_is_named(cli: Cli, path: Path, wait: str) -> None:
    acquire(cli, "release", "a")
    for words in (("lease", "acquire", "release", *OWNER), ("lease", "wait", "release")):
        answer = cli(*words, f"--wait={wait}")
        assert (answer.status, answer.error()["code"], answer.error()["field"]) == (2, "invalid-input", "wait_seconds")
    assert rows(path, "SELECT number FROM tickets") == []


def test_a_negative_wait_is_told_the_word_for_one_without_end(cli: Cli) -> None:
    assert "forever" in cli("lease", "acquire", "release", *OWNER, "--wait", "-1").error()["message"]


@pytest.mark.parametrize("limit", [*NUMBERS, "10001"])
def test_a_bad_limit_exits_2_and_is_named(cli: Cli, limit: str) -> None:
    for wait in ((), ("--wait", "forever")):
        answer = cli("lease", "acquire", "release", *OWNER, f"--limit={limit}", *wait)
        assert (answer.status, answer.error()["code"], answer.error()["field"]) == (2, "invalid-input", "limit")
    answer = cli("lease", "set-limit", "release", limit)
    assert (answer.status, answer.error()["field"]) == (2, "limit")
    assert kinds(cli) == ["store.initialized"]


@pytest.mark.parametrize("pid", [*NUMBERS, str(2**31 - 1), str(2**31)])
def test_a_bad_pid_exits_2_and_is_named(cli: Cli, pid: str) -> None:
    for wait in ((), ("--wait", "forever")):
        answer = cli("lease", "acquire", "release", *OWNER, f"--pid={pid}", *wait)
        assert (answer.status, answer.error()["code"], answer.error()["field"]) == (2, "invalid-input", "pid")
    assert kinds(cli) == ["store.initialized"]


@linux
def test_a_process_that_has_ended_is_no_owner(cli: Cli, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    for reaped in (False, True):
        if reaped:
            sleeper.wait()
        answer = cli("lease", "acquire", "release", *OWNER, "--pid", sleeper.pid)
        assert (answer.status, answer.error()["field"]) == (2, "pid")
    assert kinds(cli) == ["store.initialized"]


@pytest.mark.parametrize(
    "words",
    [
        ("lease", "set-limit", "release"),
        ("lease", "set-limit"),
        ("lease", "set-limit", "release", "1", "2"),
        ("lease", "set-limit", "release", "--limit", "2"),
        ("lease", "wait"),
        ("lease", "wait", "release", "60"),
        ("lease", "wait", "release", "--wait"),
        ("lease", "acquire", "release", *OWNER, "--wait"),
        ("lease", "acquire", "release", *OWNER, "--limit"),
        ("lease", "acquire", "release", *OWNER, "--pid"),
    ],
)
def test_bad_usage_exits_2(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli(*words)
    assert (answer.status, answer.error()["code"], answer.error()["field"]) == (2, "invalid-input", "arguments")


@pytest.mark.parametrize("scope", ["", "x" * 513, "a\nb"])
def test_a_bad_scope_exits_2_and_is_named(cli: Cli, scope: str) -> None:
    for words in (("lease", "wait", scope), ("lease", "set-limit", scope, "2")):
        answer = cli(*words)
        assert (answer.status, answer.error()["field"]) == (2, "scope")


def test_a_look_at_the_queue_changes_nothing(cli: Cli, path: Path) -> None:
    acquire(cli, "release", "a")
    with StateStore(path) as store:
        before = store.stamp()
        cli("status")
        assert store.stamp() == before
