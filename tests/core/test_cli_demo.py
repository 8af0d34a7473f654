"""The demo, played as a visitor plays it: what it tells, how it ends, what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from agent_checkpoint import StateStore

from .conftest import CLEAN, COMMAND, WATCHDOG_SECONDS


class Played(NamedTuple):
    """A demo that has ended, and the folder it had for temporary files."""

    status: int
    out: str
    err: str
    temporary: Path


@contextmanager
def playing(temporary: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A demo in a process group of its own, as a terminal starts it."""
    temporary.mkdir()
    # The store of somebody who tries the demo must not be touched by it.
    bystander = temporary.parent / f"{temporary.name}.db"
    with subprocess.Popen(
        [*COMMAND, "demo", *map(str, arguments)],
        env={**CLEAN, "TMPDIR": str(temporary), "AGENT_CHECKPOINT_DB": str(bystander)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    assert not bystander.exists()


def listen(process: subprocess.Popen[str], words: str) -> None:
    """Wait until the demo has told something."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"it ended before it said {words!r}")


def left_running(temporary: Path) -> dict[int, str]:
    """The command lines, by pid, of processes that work on a store in that folder."""
    commands = dict(_commands_of_proc() if os.path.exists("/proc/self/cmdline") else _commands_of_ps())
    return {pid: command for pid, command in commands.items() if str(temporary) in command}


def _commands_of_proc() -> Iterator[tuple[int, str]]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it may end while we look
            yield int(pid), Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _commands_of_ps() -> Iterator[tuple[int, str]]:
    printed = subprocess.run(["ps", "-axww", "-o", "pid=,args="], stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in printed.splitlines():
        pid, _, command = line.strip().partition(" ")
        yield int(pid), command


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Played]:
    """The demo, and the demo with --keep, played side by side."""
    folder = tmp_path_factory.mktemp("demo")
    with playing(folder / "plain") as plain, playing(folder / "kept", "--keep", folder / "kept" / "here") as kept:
        ended = []
        for process, name in ((plain, "plain"), (kept, "kept")):
            out, err = process.communicate(timeout=WATCHDOG_SECONDS)
            ended.append(Played(process.returncode, out, err, folder / name))
    return ended[0], ended[1]


@pytest.fixture(scope="module")
def plain(both: tuple[Played, Played]) -> Played:
    return both[0]


@pytest.fixture(scope="module")
def kept(both: tuple[Played, Played]) -> Played:
    return both[1]


def test_the_demo_exits_0_and_has_nothing_to_complain_of(plain: Played) -> None:
    assert (plain.status, plain.err) == (0, "")


def test_the_demo_tells_the_story_in_order(plain: Played) -> None:
    story = [
        "A      is granted 'release' with token 1",
        "A      saves checkpoint 1",
        "A      saves checkpoint 2",
        "A      is frozen (SIGSTOP)",
        "runs out",
        "B      is granted 'release' with token 2",
        "B      finds checkpoint 2",
        "B      saves checkpoint 3",
        "A      wakes up (SIGCONT)",
        "refused (superseded)",
        "The audit trail",
        "store.initialized",
        "lease.expired",
        "write.refused",
        "The four questions",
        "Who owns it, and is the owner alive?",
        "Is a resumed worker stale?",
        "Where does the work continue?",
        "The late write was refused.",
    ]
    at = 0
    for words in story:
        at = plain.out.find(words, at)
        assert at >= 0, words


def test_the_demo_cleans_up_after_itself(plain: Played) -> None:
    assert list(plain.temporary.iterdir()) == []
    assert left_running(plain.temporary) == {}


def test_the_demo_with_keep_says_where_the_store_is(kept: Played) -> None:
    assert (kept.status, kept.err) == (0, "")
    assert f"agent-checkpoint --db {kept.temporary / 'here' / 'agents.db'} status" in kept.out


def test_the_kept_store_is_read_by_status_and_sound(kept: Played) -> None:
    database = str(kept.temporary / "here" / "agents.db")
    status = subprocess.run(
        [*COMMAND, "--db", database, "status"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    doctor = subprocess.run(
        [*COMMAND, "--db", database, "doctor"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout

    assert "worker-b" in status
    assert "deploy-v2" in status
    assert json.loads(doctor)["verdict"] in ("ok", "warning")


def test_the_kept_store_holds_the_work_of_b_and_the_refusal_of_a(kept: Played) -> None:
    with StateStore(kept.temporary / "here" / "agents.db") as store:
        checkpoint = store.get_checkpoint("deploy-v2")
        (refused,) = store.events(kind="write.refused")

    assert checkpoint is not None
    assert (checkpoint.sequence, checkpoint.owner, checkpoint.token) == (3, "worker-b", 2)
    assert (refused.owner, refused.token, refused.detail["reason"]) == ("worker-a", 1, "superseded")


def test_a_kept_store_is_not_played_over(kept: Played) -> None:
    database = kept.temporary / "here" / "agents.db"
    before = database.read_bytes()

    done = subprocess.run(
        [*COMMAND, "demo", "--keep", str(database.parent)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"]["field"] == "keep"
    assert database.read_bytes() == before


def test_when_nobody_listens_any_more_the_demo_ends_with_141_and_leaves_no_worker(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    with playing(temporary) as process:
        listen(process, "with token 1")
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=WATCHDOG_SECONDS)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (141, "")
        assert left_running(temporary) == {}
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("moment", ["runs out", "wakes up"])
def test_ctrl_c_ends_the_demo_with_130_one_json_error_and_no_worker(tmp_path: Path, moment: str) -> None:
    temporary = tmp_path / "temporary"
    with playing(temporary) as process:
        listen(process, moment)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group, workers included
        _, err = process.communicate(timeout=WATCHDOG_SECONDS)
        assert process.returncode == 130
        assert json.loads(err)["error"]["code"] == "interrupted"
        assert left_running(temporary) == {}
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_leaves_no_frozen_worker(
    tmp_path: Path, number: signal.Signals, unmeasured: None
) -> None:
    temporary = tmp_path / "temporary"
    with playing(temporary) as process:
        listen(process, "is frozen")
        process.send_signal(number)
        process.wait(timeout=WATCHDOG_SECONDS)
        left = left_running(temporary)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert process.returncode in (-number, 128 + number)
    assert left == {}
    assert list(temporary.iterdir()) == []
