"""Standard streams that are closed, full or cut off, and Ctrl-C: a status that tells, never a traceback."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agent_checkpoint import StateStore

from .conftest import CLEAN, COMMAND, WATCHDOG_SECONDS, needs_proc_locks, the_error

# A shell without our variables, and with buffers as a shell's user has them.
ENVIRONMENT = {name: value for name, value in CLEAN.items() if name != "PYTHONUNBUFFERED"}
needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@pytest.fixture
def db(path: Path) -> Path:
    """A store with one live lease."""
    with StateStore(path) as store:
        store.initialize()
        store.acquire("release", "worker-a", ttl_seconds=3600)
    return path


def redirected(where: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command with a redirection of the shell's."""
    line = f'exec "$@" {where}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *map(str, arguments)],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )


def unread(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, writing into a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
    finally:
        os.close(writer)


def scopes(db: Path) -> list[str]:
    with closing(sqlite3.connect(db)) as connection:
        return [scope for (scope,) in connection.execute("SELECT scope FROM leases ORDER BY scope")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("lease", "list"),
        ("events", "--format", "jsonl"),
        ("status",),
        ("doctor",),
        ("completion", "bash"),
        ("--help",),
        ("--version",),
        ("lease", "--help"),
        ("lease", "acquire", "--help"),
    ],
    ids=" ".join,
)
def test_a_pipe_that_nobody_reads_ends_it_with_141_and_silence(
    db: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "AGENT_CHECKPOINT_DB", str(db))

    done = unread(*arguments)

    assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def buffering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the buffers of a shell's user, and without, as in containers."""
    monkeypatch.setitem(ENVIRONMENT, "PYTHONUNBUFFERED", request.param)


@pytest.mark.usefixtures("buffering")
def test_a_reader_that_takes_one_byte_is_no_error_to_a_shell(db: Path) -> None:
    with StateStore(db) as store:
        store.put_checkpoint("large", "x" * 1_000_000)
    line = '{ "$@"; echo "$?" >&2; } | head -c 1'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, "--db", db, "checkpoint", "get", "large"],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=True,
    )

    assert (done.stdout, done.stderr) == ("{", "141\n")


@pytest.mark.usefixtures("buffering")
@pytest.mark.parametrize("words", [("checkpoint", "get", "large"), ("export",)], ids=" ".join)
def test_a_disk_that_takes_half_of_an_answer_is_an_error(db: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    with StateStore(db) as store:
        store.put_checkpoint("large", "x" * 1_000_000)
    half = f'ulimit -f 800; exec "$@" >"{tmp_path / "answer"}"'  # of blocks of 512 bytes, or of 1,024
    done = subprocess.run(
        ["sh", "-c", half, "sh", *COMMAND, "--db", db, *words],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )

    assert 0 < (tmp_path / "answer").stat().st_size < 1_000_000
    assert (done.returncode, the_error(done.stderr)["code"]) == (74, "storage")


@pytest.mark.usefixtures("buffering")
def test_a_stdout_that_does_not_block_gets_all_of_an_answer(db: Path) -> None:
    with StateStore(db) as store:
        store.put_checkpoint("large", "x" * 1_000_000)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [*COMMAND, "--db", db, "checkpoint", "get", "large", "--field", "data"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=writer) as process, open(reader, "rb") as source:
        os.close(writer)
        assert len(source.read()) == 1_000_001
    assert process.returncode == 0


def test_an_error_needs_no_stdout(db: Path) -> None:
    done = unread("--db", db, "lease", "show", "nope")

    assert done.returncode == 66
    assert the_error(done.stderr)["code"] == "not-found"


def test_with_stdout_closed_nothing_is_done(db: Path) -> None:
    done = redirected(">&-", "--db", db, "lease", "acquire", "new", "--owner", "a")

    assert done.returncode == 2
    assert the_error(done.stderr)["field"] == "stdout"
    assert scopes(db) == ["release"]


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("lease", "--help"), ("init", "--help"), ("completion", "bash"), ("demo",)],
    ids=" ".join,
)
def test_with_stdout_closed_no_command_calls_itself_a_bug(arguments: tuple[str, ...]) -> None:
    done = redirected(">&-", *arguments)

    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2)


@needs_dev_full
@pytest.mark.parametrize(
    "arguments",
    [("lease", "list"), ("status",), ("completion", "bash"), ("--help",), ("--version",), ("init", "--help")],
    ids=" ".join,
)
def test_a_full_stdout_is_one_json_error_and_a_status(
    db: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "AGENT_CHECKPOINT_DB", str(db))

    done = redirected("> /dev/full", *arguments)
    error = the_error(done.stderr)

    assert done.returncode in (1, 74)
    assert "No space left" in error["message"]
    assert "bug" not in error["hint"]


@pytest.mark.parametrize("where", ["2>&-", pytest.param("2> /dev/full", marks=needs_dev_full)])
def test_where_stderr_cannot_be_written_the_status_must_do(db: Path, where: str) -> None:
    done = redirected(where, "--db", db, "lease", "show", "nope")

    assert (done.returncode, done.stdout) == (66, "")


@pytest.mark.parametrize("where", ["<&-", "2>&-", "<&- 2>&-"])
def test_other_streams_may_be_closed_while_it_works(db: Path, where: str) -> None:
    done = redirected(where, "--db", db, "lease", "acquire", "new", "--owner", "a", "--field", "token")

    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert scopes(db) == ["new", "release"]
    with closing(sqlite3.connect(db)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# Ctrl-C


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command, still at work; killed at the end if it should be running then."""
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Look again and again: what another process waits for can only be watched."""
    while not happened():
        assert process.poll() is None, "it ended too early"
        time.sleep(0.005)


def interrupted(process: subprocess.Popen[str], seconds: float = WATCHDOG_SECONDS) -> tuple[int, str, str]:
    """What is left of a process after Ctrl-C: status, stdout, stderr."""
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.fail("Ctrl-C does not end it")
    return process.returncode, out, err


def at_the_gate(db: Path, pid: int) -> bool:
    """Whether a process holds the gate: the last step before it asks for the write lock."""
    try:
        inode = os.stat(f"{db}-gate").st_ino
    except FileNotFoundError:
        return False
    with open("/proc/locks", encoding="ascii") as table:
        found = [line.split() for line in table if "->" not in line]
    return any(fields[4] == str(pid) and fields[5].endswith(f":{inode}") for fields in found)


@needs_proc_locks
def test_ctrl_c_ends_a_wait_for_the_write_lock_with_130_and_nothing_written(db: Path) -> None:
    with closing(sqlite3.connect(db, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with running("--db", db, "--busy-timeout", "86400", "lease", "acquire", "new", "--owner", "a") as process:
            until(lambda: at_the_gate(db, process.pid), process)
            # A watchdog, not a measurement: without an end to the wait it would take a day.
            status, out, err = interrupted(process, seconds=10)
        other.execute("ROLLBACK")

    assert (status, out) == (130, "")
    assert the_error(err)["code"] == "interrupted"
    assert scopes(db) == ["release"]


@needs_proc_locks
def test_ctrl_c_ends_a_wait_behind_another_writer_at_the_gate(db: Path) -> None:
    with closing(sqlite3.connect(db, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with running("--db", db, "--busy-timeout", "60", "lease", "acquire", "first", "--owner", "a") as first:
            until(lambda: at_the_gate(db, first.pid), first)
            with running("--db", db, "--busy-timeout", "60", "lease", "acquire", "new", "--owner", "a") as process:
                until(lambda: waits_in_the_kernel(process.pid), process)
                status, out, err = interrupted(process, seconds=10)
        other.execute("ROLLBACK")

    assert (status, out) == (130, "")
    assert the_error(err)["code"] == "interrupted"
    assert scopes(db) == ["release"]


def waits_in_the_kernel(pid: int) -> bool:
    """Whether a process is queued for a lock that somebody else holds."""
    with open("/proc/locks", encoding="ascii") as table:
        return any(str(pid) in line.split() for line in table if "->" in line)


def test_ctrl_c_while_it_reads_data_from_stdin_is_130_and_nothing_written(db: Path) -> None:
    with running("--db", db, "checkpoint", "put", "w", "--data", "-") as process:
        assert process.stdin is not None
        process.stdin.write('{"stage":')
        process.stdin.flush()
        pipe = process.stdin.fileno()
        until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4) == b"\0" * 4, process)
        status, out, err = interrupted(process)

    assert (status, out) == (130, "")
    assert the_error(err)["code"] == "interrupted"
    with closing(sqlite3.connect(db)) as connection:
        assert connection.execute("SELECT count(*) FROM checkpoints").fetchone() == (0,)
