"""``agent-checkpoint run``, as a shell sees it: what the command gets, how it ends, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

from agent_checkpoint import StateStore

AGENT = [sys.executable, "-m", "agent_checkpoint"]
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0


class Runs:
    """``run`` commands on one store, all ended with the test; ``MARK`` in the environment tells what they started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = f"MARK={path}"
        self.started: list[subprocess.Popen[str]] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
        self.environ = {**clean, "AGENT_CHECKPOINT_DB": str(path), "MARK": str(path), "AGENT": " ".join(AGENT)}

    def start(self, scope: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start ``run SCOPE …``, its streams in pipes."""
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [*AGENT, "run", scope, *arguments], env=self.environ, text=True, **{**streams, **options}
        )
        self.started.append(process)
        return process

    def __call__(self, scope: str, *arguments: str, give: str = "", **options: Any) -> tuple[int, str, str]:
        """Run it to its end: status, stdout, stderr."""
        process = self.start(scope, *arguments, **options)
        out, err = process.communicate(give, timeout=LONG)
        return process.returncode, out, err

    def left(self) -> list[int]:
        """What runs with our mark in its environment, zombies aside."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run(path: Path) -> Iterator[Runs]:
    with StateStore(path) as store:
        store.initialize()
    runs = Runs(path)
    yield runs
    runs.end()


def shell(script: str) -> tuple[str, ...]:
    return ("--", "sh", "-c", script)


def error(text: str) -> dict[str, Any]:
    """The one JSON error on stderr, behind what the command's shell may have said."""
    (name,) = whole = json.loads(text[text.index("{") :])
    assert name == "error"
    return dict(whole[name])


# What the command gets, and what of its end is passed on


@pytest.mark.parametrize(
    ("script", "status"), [("true", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_the_status_is_the_commands(run: Runs, script: str, status: int) -> None:
    assert run("release", *shell(script)) == (status, "", "")
    with StateStore(run.path) as store:
        assert store.get_lease("release") is None
        assert [event.kind for event in store.events()][-2:] == ["lease.acquired", "lease.released"]


def test_what_cannot_be_executed_is_126_and_what_is_not_there_127(run: Runs, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    for command, status, code in ((str(plain), 126, "command-cannot-execute"), ("no-such", 127, "command-not-found")):
        found, out, err = run("release", "--", command)
        assert (found, out, error(err)["code"]) == (status, "", code)
        assert command in error(err)["message"]
    assert run.left() == []


def test_stdin_and_stdout_are_the_commands_own(run: Runs) -> None:
    text = "a line\n" * 100_000
    assert run("release", "--", "cat", give=text) == (0, text, "")


def test_no_shell_reads_the_command(run: Runs) -> None:
    printed = "$HOME; echo 'x' | wc"
    assert run("release", "--", "printf", "%s|", printed, "--", "--wait") == (0, f"{printed}|--|--wait|", "")


def test_commands_inside_are_protected_by_themselves(run: Runs) -> None:
    status, out, err = run(
        "release",
        *("--owner", "deploy"),
        *shell('$AGENT lease check release --field owner && $AGENT checkpoint put w --data "{}" --field token'),
    )
    assert (status, out, err) == (0, "deploy\n1\n", "")
    with StateStore(run.path) as store:
        latest = store.get_checkpoint("w")
        assert latest is not None
        assert (latest.scope, latest.owner, latest.token) == ("release", "deploy", 1)


def test_a_python_program_inside_finds_its_lease(run: Runs) -> None:
    program = """
import os
from agent_checkpoint import Lease, StateStore
with StateStore(os.environ["AGENT_CHECKPOINT_DB"]) as store:
    print(store.put_checkpoint("w", 1, lease=Lease.from_env()).token, Lease.from_env("release").owner)
"""
    assert run("release", "--owner", "deploy", "--", sys.executable, "-c", program) == (0, "1 deploy\n", "")


def test_a_nested_run_adds_its_lease_and_can_still_write_for_the_outer_one(run: Runs) -> None:
    inner = (
        "$AGENT checkpoint put outer-work --data 1 --field scope && "
        "$AGENT run test --owner inner -- sh -c '"
        "$AGENT checkpoint put outer-work --data 2 --field scope; "
        "$AGENT checkpoint put inner-work --data 1 --field scope; "
        "$AGENT lease check release --field owner; printenv AGENT_CHECKPOINT_SCOPE'"
    )
    status, out, err = run("release", "--owner", "outer", *shell(inner))
    assert (status, out.split(), err) == (0, ["release", "release", "test", "outer", "test"], "")


def test_its_process_guard_and_group_are_on_record_before_the_command_goes(run: Runs) -> None:
    status, out, _ = run("release", *shell("$AGENT lease show release --format jsonl; echo $$"))
    shown, pid = out.splitlines()
    lease = json.loads(shown)
    assert status == 0
    assert lease["owner_alive"] is True
    assert lease["process"]["supervised"] is True
    assert lease["process"]["group"] == int(pid)
    assert len({lease["process"]["pid"], lease["process"]["guard"], int(pid)}) == 3


# Who else has it


def test_a_held_scope_is_75_or_skipped_and_the_command_does_not_run(run: Runs) -> None:
    with StateStore(run.path) as store, store.hold("release", "other"):
        status, out, err = run("release", *shell("echo no"))
        assert (status, out) == (75, "")
        assert (error(err)["code"], error(err)["owner"]) == ("lease-held", "other")
        assert run("release", "--if-held", "skip", *shell("echo no")) == (0, "", "")
        status, out, err = run("release", "--wait", "0.2", *shell("echo no"))
        assert (status, out, error(err)["code"]) == (75, "", "wait-timeout")
    assert run.left() == []


def test_who_waits_gets_it_next(run: Runs) -> None:
    with StateStore(run.path) as store:
        with store.hold("release", "other"):
            waiting = run.start("release", "--wait", "forever", *shell("echo mine"))
            wait_until(lambda: store.status().queues)
        assert waiting.communicate(timeout=LONG) == ("mine\n", "")


def test_who_is_told_to_stop_waiting_leaves_nothing(run: Runs) -> None:
    with StateStore(run.path) as store, store.hold("release", "other"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            waiting = run.start("release", "--wait", "forever", *shell("echo no"))
            wait_until(lambda: store.status().queues)
            waiting.send_signal(number)
            assert waiting.communicate(timeout=LONG)[0] == ""
            assert waiting.returncode == (130 if number == signal.SIGINT else -number)
            wait_until(lambda: not store.status().queues)
            wait_until(lambda: run.left() == [])


def test_a_limit_lets_so_many_in(run: Runs) -> None:
    inside = [run.start("pool", "--limit", "2", *shell("echo in; cat")) for _ in range(2)]
    for process in inside:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
    assert run("pool", *shell("echo in"))[0] == 75
    for process in inside:
        process.communicate("", timeout=LONG)
    assert run("pool", *shell("true"))[0] == 0


# How it ends


def test_term_to_the_wrapper_ends_the_command_and_releases(run: Runs) -> None:
    process = run.start("release", *shell("echo up; exec sleep 600"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(LONG) == 143
    assert run.left() == []
    with StateStore(run.path) as store:
        assert store.get_lease("release") is None
        assert store.events()[-1].kind == "lease.released"


def test_what_the_command_leaves_behind_is_ended_before_the_lease_is_released(run: Runs) -> None:
    status, _, _ = run(
        "release", *shell("setsid sleep 600 & (sleep 600 &) ; sleep 600 & exit 3"), stdout=subprocess.DEVNULL
    )
    assert status == 3
    assert run.left() == []


@pytest.mark.parametrize("on_lost", ["term", "kill"])
def test_a_lost_lease_ends_the_command_with_76(run: Runs, on_lost: str) -> None:
    script = "trap 'echo asked' TERM; echo up; while :; do sleep 0.05; done"
    process = run.start("release", "--ttl", "1", "--on-lost", on_lost, *shell(script))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    with StateStore(run.path) as store:
        store.force_release("release", reason="test")
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 76
    assert ("asked" in out) is (on_lost == "term")
    assert (error(err)["code"], error(err)["reason"]) == ("stale-lease", "released")
    assert run.left() == []


def test_a_lost_lease_may_be_ignored_but_is_told(run: Runs) -> None:
    process = run.start("release", "--ttl", "1", "--on-lost", "ignore", *shell("echo up; cat; echo done"))
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    with StateStore(run.path) as store:
        store.force_release("release", reason="test")
        wait_until(lambda: [event.kind for event in store.events()][-1] == "write.refused")
    out, err = process.communicate("", timeout=LONG)
    assert (process.returncode, out, error(err)["code"]) == (76, "done\n", "stale-lease")


def test_the_status_descriptor_tells_our_verdicts_from_the_commands(run: Runs, tmp_path: Path) -> None:
    def told(*arguments: str) -> dict[str, Any]:
        with (tmp_path / "status.json").open("w+") as file:
            number = str(file.fileno())
            status = run("release", "--status-fd", number, *arguments, pass_fds=[file.fileno()])[0]
            file.seek(0)
            (line,) = file.read().splitlines()
        found = json.loads(line)
        assert found["status"] == status
        return dict(found)

    ended = told(*shell("exit 75"))
    assert (ended["verdict"], ended["command_status"], ended["token"]) == ("exited", 75, 1)
    assert told(*shell("kill -9 $$"))["signal"] == 9
    assert told("--", "no-such")["verdict"] == "command-not-found"
    with StateStore(run.path) as store, store.hold("release", "other"):
        assert (told(*shell("true"))["verdict"], told(*shell("true"))["status"]) == ("lease-held", 75)
        assert told("--if-held", "skip", *shell("true"))["verdict"] == "skipped"
    lost = told("--ttl", "1", *shell("$AGENT lease force-release release --reason test; sleep 600"))
    assert (lost["verdict"], lost["status"], lost["reason"]) == ("stale-lease", 76, "released")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--ttl", "1", "--grace", "1"), "grace_seconds"),
        (("--grace", "-1"), "grace_seconds"),
        (("--ttl", "0"), "ttl_seconds"),
        (("--wait", "soon"), "wait_seconds"),
        (("--limit", "0"), "limit"),
        (("--owner", ""), "owner"),
        (("--status-fd", "99"), "status_fd"),
        (("--status-fd", "-1"), "status_fd"),
        (("--field", "token"), "field"),
    ],
)
def test_bad_input_is_2_and_starts_nothing(run: Runs, arguments: tuple[str, ...], field: str) -> None:
    status, out, err = run("release", *arguments, *shell("echo no"))
    assert (status, out, error(err)["field"]) == (2, "", field)


def test_a_command_must_be_given_behind_two_dashes(run: Runs) -> None:
    for arguments in ((), ("--",), ("true",)):
        status, out, err = run("release", *arguments)
        assert (status, out, error(err)["code"]) == (2, "", "invalid-input")


def test_a_missing_store_is_66_and_init_makes_it(run: Runs, tmp_path: Path) -> None:
    new = str(tmp_path / "new" / "agents.db")
    assert run("release", "--db", new, *shell("true"))[0] == 66
    assert run("release", "--db", new, "--init", *shell("printenv AGENT_CHECKPOINT_DB")) == (0, f"{new}\n", "")


@pytest.mark.parametrize("times", [25, pytest.param(500, marks=pytest.mark.long)])
def test_many_runs_in_a_row_leave_nothing(run: Runs, times: int) -> None:
    for number in range(times):
        assert run("release", *shell("exit 0")) == (0, "", "")
        assert number % 20 or run.left() == []
    assert run.left() == []
    with StateStore(run.path) as store:
        status = store.status()
        assert [(lease.state, lease.token) for lease in status.leases] == [("released", times)]
        assert status.queues == []
        with store.read() as reader:
            assert reader.rows("SELECT COUNT(*) FROM tickets") == [(0,)]


def test_a_run_that_would_wait_for_its_own_lease_is_refused(run: Runs) -> None:
    status, out, err = run("release", *shell("$AGENT run release --wait forever -- echo no"))
    assert (status, out, error(err)["code"]) == (2, "", "reentrancy")
    # Where a slot is free it need not wait for itself.
    assert run("pool", "--limit", "2", *shell("$AGENT run pool --wait forever -- echo yes")) == (0, "yes\n", "")


def test_a_command_without_the_two_dashes_is_told_where_it_stands(run: Runs) -> None:
    status, _, err = run("release", "ls", "-l")
    assert (status, "behind '--'" in error(err)["hint"]) == (2, True)
