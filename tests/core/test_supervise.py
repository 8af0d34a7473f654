"""A supervised command: what it gets, what is told of its end, and that nothing of it is left.

Each test is a program of its own, since supervising forks and takes the signals.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")

PROGRAM = str(Path(__file__).parents[1] / "supervised.py")
# A command that needs no packages, and starts at once.
BARE = (sys.executable, "-S")


def status_of(pid: int, field: str) -> str:
    """A line of ``/proc/PID/status``; "" when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next(line.split(None, 1)[1] for line in lines if line.startswith(f"{field}:"))


class Program:
    """``tests/supervised.py`` as it runs, and what it told."""

    def __init__(self, told: Path, command: tuple[str | bytes, ...], options: dict[str, Any], popen: Any) -> None:
        self.told_at = told
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        before = given.pop("before", [])
        arguments = [*before, sys.executable, PROGRAM, str(told), json.dumps(options), *command]
        self.process = subprocess.Popen(arguments, **given)

    def told(self, what: str) -> Any:
        """The last that was told of this."""
        lines = self.told_at.read_text().splitlines(keepends=True) if self.told_at.exists() else []
        found = [fact[what] for line in lines if line.endswith("\n") and what in (fact := json.loads(line))]
        return found[-1] if found else None

    def ready(self) -> Program:
        wait_until(lambda: self.told("group") or self.process.poll() is not None)
        return self

    def reads(self, line: bytes) -> Program:
        """The command says so."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line
        return self

    def alive(self) -> list[int]:
        """Everybody that has the command's environment."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if self.told_at.name.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def end(self, given: bytes | None = None) -> tuple[bytes, dict[str, Any]]:
        """Wait for the end; what it wrote, and how it ended. Nothing may be left, nor a word on stderr."""
        out, errors = self.process.communicate(given, timeout=LONG)
        assert errors in (b"", None)
        ended: dict[str, Any] = self.told("ended")
        assert self.process.returncode == ended["status"]
        if sys.platform == "linux":
            assert self.told("alive") in (None, [])
            assert self.alive() == []
            assert status_of(self.told("guard"), "State") == ""
        return out, ended


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    programs: list[Program] = []

    def start(*command: str | bytes, popen: Any = None, **options: Any) -> Program:
        told = tmp_path / f"told-{uuid.uuid4().hex}"
        programs.append(Program(told, command, options, popen or {}))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()
        for pid in program.alive() if sys.platform == "linux" else ():
            os.kill(pid, signal.SIGKILL)


def ended(status: int, why: str = "exited", **facts: Any) -> dict[str, Any]:
    return {"status": status, "signal": None, "why": why, "error": "", "expired": False, **facts}


@pytest.mark.parametrize("status", [0, 1, 7, 75, 255])
def test_the_status_is_the_commands_own(start: Start, status: int) -> None:
    assert start("sh", "-c", f"exit {status}").end() == (b"", ended(status))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGHUP])
def test_a_command_that_dies_of_a_signal_has_128_and_its_number(start: Start, number: signal.Signals) -> None:
    _, how = start("sh", "-c", f"kill -{int(number)} $$").end()
    assert how == ended(128 + number, signal=number)


@pytest.mark.parametrize("command", ["/not/there", "not-there", "./not-there"])
def test_a_command_that_is_not_found_is_127(start: Start, command: str) -> None:
    _, how = start(command).end()
    assert how == ended(127, "not-found", error="No such file or directory")


def test_a_command_that_cannot_be_executed_is_126(start: Start, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("exit 0\n")
    (tmp_path / "no-format").write_text("exit 0\n")
    (tmp_path / "no-format").chmod(0o755)
    for command, error in {
        tmp_path / "plain": "Permission denied",
        tmp_path: "Permission denied",
        tmp_path / "no-format": "Exec format error",
        tmp_path / "plain" / "x": "Not a directory",
    }.items():
        _, how = start(str(command)).end()
        assert how == ended(126, "cannot-execute", error=error)


def test_stdin_and_stdout_are_the_commands(start: Start) -> None:
    much = os.urandom(5_000_000)
    assert start("cat", popen={"stdin": subprocess.PIPE}).end(much) == (much, ended(0))


def test_stderr_is_the_commands(start: Start) -> None:
    program = start("sh", "-c", "echo out; echo err >&2")
    assert program.process.communicate(timeout=LONG) == (b"out\n", b"err\n")


def test_a_pipe_ends_when_the_command_is_gone(start: Start) -> None:
    # Nobody holds it any longer, so that "run ... | cat" ends.
    program = start("sh", "-c", "echo out")
    assert program.process.stdout is not None
    assert program.process.stdout.read() == b"out\n"
    program.end()


def test_arguments_arrive_as_they_are(start: Start) -> None:
    source = "import os, sys; os.write(1, b'|'.join(map(os.fsencode, sys.argv[1:])))"
    words = ["two words", "$HOME", "*", "", "'", "\\", "a\nb", "ü", b"\xff\xfe", "--", "-c"]
    out, _ = start(*BARE, "-c", source, *words).end()
    assert out == b"|".join(map(os.fsencode, words))


def test_the_environment_is_the_one_given_also_for_finding_the_command(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text('#!/bin/sh\necho "$LEASE,$ODD,$HOME"\n')
    (tmp_path / "mine").chmod(0o755)
    body = """
del environ["HOME"]
environ |= {"LEASE": "yes", "ODD": os.fsdecode(b"\\xff")}
environ["PATH"] = os.path.dirname(told) + ":" + environ["PATH"]
plain()
"""
    assert start("mine", body=body).end() == (b"yes,\xff,\n", ended(0))


# Which of the descriptors are open, without opening any.
OPEN = """
import os, sys
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
found = list(filter(is_open, range(256)))
open(sys.argv[1], "w").write(repr(found))
"""


def test_no_descriptor_of_ours_reaches_the_command_and_those_passed_on_do(start: Start, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    start(*BARE, "-c", OPEN, str(tmp_path / "fds"), popen={"pass_fds": [writing]}).end()
    assert json.loads((tmp_path / "fds").read_text()) == [0, 1, 2, writing]
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_standard_files_that_were_closed_stay_closed(start: Start, tmp_path: Path, closed: tuple[int, ...]) -> None:
    shut = " ".join(f"{fd}>&-" for fd in closed)
    before = ["sh", "-c", f'exec "$@" {shut}', "sh"]
    start(*BARE, "-c", OPEN, str(tmp_path / "fds"), popen={"before": before}).end()
    assert json.loads((tmp_path / "fds").read_text()) == [fd for fd in (0, 1, 2) if fd not in closed]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"])
def test_a_signal_to_the_wrapper_reaches_the_command(start: Start, name: str) -> None:
    source = f"trap 'echo heard {name}; exit 3' {name}; echo ready; while :; do sleep 0.02; done 2> /dev/null"
    program = start("bash", "-c", source)
    program.reads(b"ready\n")
    program.process.send_signal(getattr(signal, f"SIG{name}"))
    assert program.end() == (f"heard {name}\n".encode(), ended(3))


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_a_signal_to_the_wrapper_ends_a_command_that_does_not_care(start: Start, name: str) -> None:
    program = start("sleep", "100").ready()
    number = getattr(signal, f"SIG{name}")
    program.process.send_signal(number)
    _, how = program.end()
    assert how == ended(128 + number, signal=number)


@on_linux
def test_a_command_is_stopped_and_continued_through_the_wrapper(start: Start) -> None:
    program = start("sleep", "100").ready()
    command = program.told("group")
    for _ in range(3):
        program.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: status_of(command, "State").startswith("T"))
        assert not status_of(program.process.pid, "State").startswith("T")  # it has a lease to keep
        program.process.send_signal(signal.SIGCONT)
        wait_until(lambda: status_of(command, "State").startswith("S"))
    program.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: status_of(command, "State").startswith("T"))
    program.process.send_signal(signal.SIGTERM)  # who is stopped is woken to hear it
    _, how = program.end()
    assert how == ended(143, signal=signal.SIGTERM)


DEAF = "trap '' TERM INT; echo ready; while :; do sleep 0.02; done"


@pytest.mark.parametrize("names", ["TERM TERM", "INT INT", "INT TERM", "TERM INT"])
def test_a_second_request_to_end_kills(start: Start, names: str) -> None:
    program = start("sh", "-c", DEAF)
    program.reads(b"ready\n")
    for name in names.split():
        assert program.process.poll() is None
        program.process.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)  # two signals at once might be one
    _, how = program.end()
    assert how == ended(137, signal=signal.SIGKILL)


def test_what_was_ignored_at_the_start_stays_ignored(start: Start) -> None:
    program = start("sleep", "100", popen={"before": ["nohup"]}).ready()
    program.process.send_signal(signal.SIGHUP)
    program.process.send_signal(signal.SIGUSR1)
    _, how = program.end()
    assert how == ended(128 + signal.SIGUSR1, signal=signal.SIGUSR1)


@on_linux
@pytest.mark.parametrize("before", ["", "trap '' HUP USR1 CHLD TSTP;"])
def test_signals_are_ignored_and_blocked_as_without_us(start: Start, before: str) -> None:
    grep = ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
    shell = ["bash", "-c", f'{before} exec "$@"', "bash"]
    # The interpreter ignores these two; a program started by it as well.
    bare = subprocess.run([*shell, *grep], stdout=subprocess.PIPE, check=True, restore_signals=True).stdout
    assert start(*grep, popen={"before": shell}).end() == (bare, ended(0))


def test_signals_that_were_blocked_stay_blocked(start: Start) -> None:
    body = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM}); plain()"
    source = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    out, _ = start(*BARE, "-c", source, body=body).end()
    assert out.split() == [str(number).encode() for number in (signal.SIGUSR2, signal.SIGTERM)]


def test_a_signal_before_the_command_goes_is_not_lost(start: Start, tmp_path: Path) -> None:
    body = """
supervisor = make()
prepare(supervisor)
os.kill(os.getpid(), 15)
os._exit(run(supervisor).status)
"""
    _, how = start("touch", str(tmp_path / "touched"), body=body).end()
    assert how == ended(143, signal=signal.SIGTERM)
    assert not (tmp_path / "touched").exists()


def test_handlers_of_the_caller_are_back_after_close(start: Start) -> None:
    body = """
import signal
signal.signal(signal.SIGTERM, handler := lambda *_: None)
supervisor = make()
prepare(supervisor)
ended = run(supervisor)
assert signal.getsignal(signal.SIGTERM) is handler
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.set_wakeup_fd(-1) == -1
os._exit(0)
"""
    start("true", body=body).end()


@on_linux
def test_what_the_command_leaves_behind_is_ended_before_its_end_is_told(start: Start, tmp_path: Path) -> None:
    source = """
exec 2> /dev/null
(trap 'echo bye > "$0"; exit' TERM; touch "$0".one; while :; do sleep 0.02; done) &
setsid sh -c "trap '' TERM; touch '$0.two'; while :; do sleep 0.02; done" &
while ! [ -e "$0".one -a -e "$0".two ]; do sleep 0.01; done
exit 5
"""
    began = time.monotonic()
    assert start("sh", "-c", source, str(tmp_path / "said"), popen={"stdout": subprocess.DEVNULL}).end() == (
        None,
        ended(5),
    )
    assert time.monotonic() - began > 0.3  # the grace
    assert (tmp_path / "said").read_text() == "bye\n"


@on_linux
def test_a_daemon_does_not_outlive_its_command(start: Start) -> None:
    daemon = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for fd in range(3): os.close(fd)
time.sleep(100)
"""
    _, how = start(*BARE, "-c", daemon).end()
    assert how == ended(0)


def test_a_request_to_end_kills_what_the_command_left_behind(start: Start) -> None:
    program = start("sh", "-c", "trap '' TERM INT; (while :; do sleep 0.02; done) & echo ready; exit 3", grace=50)
    program.reads(b"ready\n")
    wait_until(lambda: program.told("group") not in program.alive())
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == (b"", ended(3))


@on_linux
def test_the_guard_is_left_untouched_by_signals(start: Start) -> None:
    program = start("sh", "-c", "read line; exit 3", popen={"stdin": subprocess.PIPE}).ready()
    guard = program.told("guard")
    assert status_of(guard, "Name") == "lease-guard"
    assert os.getpgid(guard) not in (os.getpgid(program.process.pid), program.told("group"))
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(guard, number)
    assert program.end(b"go on\n")[1] == ended(3)


LOSES = """
supervisor = make()
prepare(supervisor)
def lose():
    while not os.path.exists(command[-1]):
        time.sleep(0.001)
    supervisor.lose()
    supervisor.extend(ahead())
threading.Thread(target=lose, daemon=True).start()
os._exit(run(supervisor).status)
"""
HEEDS = "exec 2> /dev/null; trap 'echo asked; exit 4' TERM; touch \"$0\"; while :; do sleep 0.02; done"
HEEDS_NOT = "exec 2> /dev/null; trap 'echo asked' TERM; touch \"$0\"; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("on_lost", "source", "out", "how"),
    [
        ("term", HEEDS, b"asked\n", ended(4, "lost")),
        ("term", HEEDS_NOT, b"asked\n", ended(137, "lost", signal=9)),
        ("kill", HEEDS, b"", ended(137, "lost", signal=9)),
        ("ignore", 'touch "$0"; sleep 0.5; exit 6', b"", ended(6)),
    ],
)
def test_a_lost_lease_ends_the_command_as_was_asked(
    start: Start, tmp_path: Path, on_lost: str, source: str, out: bytes, how: dict[str, Any]
) -> None:
    ready = str(tmp_path / "ready")
    program = start("sh", "-c", source, ready, body=LOSES, on_lost=on_lost, grace=0.5)
    assert program.end() == (out, how)
    assert (program.told("took") >= 0.5) == ("trap 'echo asked' TERM" in source or on_lost == "ignore")


def test_a_deadline_asks_first_and_then_kills(start: Start, tmp_path: Path) -> None:
    program = start("sh", "-c", HEEDS_NOT, str(tmp_path / "ready"), ttl=2, grace=1)
    assert program.end() == (b"asked\n", ended(137, "lost", signal=9))
    assert 1.5 < program.told("took") < 3
    program = start("sh", "-c", HEEDS, str(tmp_path / "ready"), ttl=2, grace=1)
    assert program.end() == (b"asked\n", ended(4, "lost"))
    assert program.told("took") < 2


def test_a_lease_lost_before_the_command_goes_keeps_it_from_going(start: Start, tmp_path: Path) -> None:
    body = """
supervisor = make()
prepare(supervisor)
supervisor.lose()
os._exit(run(supervisor).status)
"""
    _, how = start("touch", str(tmp_path / "touched"), body=body, on_lost="kill").end()
    assert how == ended(137, "lost", signal=9)
    assert not (tmp_path / "touched").exists()


def test_a_deadline_that_passes_before_the_command_goes_keeps_it_from_going(start: Start, tmp_path: Path) -> None:
    body = """
supervisor = make()
prepare(supervisor)
time.sleep(0.5)
os._exit(run(supervisor).status)
"""
    _, how = start("touch", str(tmp_path / "touched"), body=body, ttl=0.4).end()
    assert how == ended(137, "lost", signal=9)
    assert not (tmp_path / "touched").exists()


def test_close_without_run_leaves_nothing(start: Start, tmp_path: Path) -> None:
    body = """
for prepared in (False, True):
    supervisor = make()
    if prepared:
        prepare(supervisor)
    supervisor.close()
    supervisor.close()
    supervisor.extend(0)
    supervisor.lose()
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        tell(ended={"status": 0})
"""
    start("touch", str(tmp_path / "touched"), body=body).end()
    assert not (tmp_path / "touched").exists()


def test_prepare_says_when_there_can_be_no_process(start: Start) -> None:
    body = """
fork, count = os.fork, iter(range(9))
def scarce():
    if next(count) == 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = scarce
supervisor = make()
try:
    prepare(supervisor)
except OSError as error:
    tell(guard=supervisor.guard, ended={"status": 0, "error": error.strerror})
supervisor.close()
"""
    _, how = start("true", body=body).end()
    assert how["error"] == "Resource temporarily unavailable"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prepare_says_when_the_guard_does_not_answer(start: Start, number: signal.Signals) -> None:
    body = f"""
supervisor = make()
os.kill(supervisor.guard, {int(number)})
try:
    prepare(supervisor)
except ChildProcessError as error:
    tell(guard=supervisor.guard, ended={{"status": 0, "error": error.strerror}})
supervisor.close()
"""
    _, how = start("true", body=body, ttl=0.2).end()
    assert how["error"] == "the guard has died, or does not answer"


@on_linux
@pytest.mark.parametrize("adopting", [True, False])
@pytest.mark.parametrize("ignored", ["", "trap '' CHLD; "])
def test_children_from_before_are_spared(start: Start, adopting: bool, ignored: str) -> None:
    # A shell that starts something and then becomes the wrapper by exec.
    before = ["bash", "-c", f'sleep 100 > /dev/null 2>&1 & echo $!; {ignored}exec "$@"', "bash"]
    program = start("sh", "-c", "sleep 100 & wait", popen={"before": before}, adopting=adopting).ready()
    assert program.process.stdout is not None
    sleeping = int(program.process.stdout.readline())
    os.kill(program.told("guard"), signal.SIGKILL)
    try:
        _, how = program.end()
        assert how == ended(137, "guard-died", signal=9, expired=True)
        assert status_of(sleeping, "State").startswith("S")
    finally:
        os.kill(sleeping, signal.SIGKILL)


@on_linux
def test_a_supervised_command_may_supervise(start: Start, tmp_path: Path) -> None:
    inner = [sys.executable, PROGRAM, str(tmp_path / "inner-told"), "{}"]
    assert start(*inner, "sh", "-c", "sleep 100 & exit 9").end() == (b"", ended(9))

    program = start(*inner, "sh", "-c", "(setsid sleep 100 &); echo ready; sleep 100")
    program.reads(b"ready\n")
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == (b"", ended(143))

    program = start(*inner, "sh", "-c", f'(setsid sh -c "{DEAF}" &); {DEAF}')
    program.reads(b"ready\n")
    os.kill(program.told("guard"), signal.SIGKILL)
    assert program.end()[1] == ended(137, "guard-died", signal=9, expired=True)


def test_an_expiry_that_fails_is_nobodys_trouble(start: Start) -> None:
    body = """
def expire(token):
    tell(tried=token)
    raise OSError("no")
supervisor = make()
prepare(supervisor)
os.kill(supervisor.guard, 9)
os._exit(run(supervisor).status)
"""
    program = start("sleep", "100", body=body)
    assert program.end()[1] == ended(137, "guard-died", signal=9)
    assert program.told("tried") == "token-1"


@pytest.mark.parametrize("command", ["exit 7", "sleep 100 & exit 7"])
def test_without_adoption_the_process_group_is_ended(start: Start, command: str) -> None:
    assert start("sh", "-c", command, adopting=False).end() == (b"", ended(7))


def test_without_adoption_the_wrapper_ends_the_group_of_a_dead_guard(start: Start) -> None:
    program = start("sh", "-c", f"({DEAF}) & {DEAF}", adopting=False)
    program.reads(b"ready\n")
    os.kill(program.told("guard"), signal.SIGKILL)
    assert program.end()[1] == ended(137, "guard-died", signal=9, expired=True)


@on_linux
def test_without_the_kernels_lists_of_children_nothing_is_left_either(start: Start) -> None:
    body = "os.path.exists = lambda path: False; plain()"
    program = start("sh", "-c", f'(setsid sh -c "{DEAF}" &); exit 3', body=body)
    assert program.end()[1] == ended(3)


@on_linux
def test_without_descriptors_of_processes_nothing_is_left_either(start: Start) -> None:
    program = start("sh", "-c", f'(setsid sh -c "{DEAF}" &); exit 3', body="del os.pidfd_open; plain()")
    assert program.end()[1] == ended(3)


# Forks without end, each time into another session, and lives for microseconds.
COMET = """
#include <unistd.h>
int main(void) { for (;;) { setsid(); if (fork() > 0) _exit(0); } }
"""


@on_linux
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.long)])
def test_what_flees_by_forking_is_caught(start: Start, tmp_path: Path, times: int) -> None:
    (tmp_path / "comet.c").write_text(COMET)
    comet = str(tmp_path / "comet")
    if subprocess.run(["cc", "-O2", "-o", comet, f"{comet}.c"], check=False).returncode:
        pytest.skip("there is no C compiler")
    for _ in range(times):
        assert start("sh", "-c", f"{comet}; {comet}; exit 3", grace=0.05).end()[1] == ended(3)


# Without adoption the orphans are left to the system's first process, which may take its time.
@pytest.mark.parametrize(
    ("adopting", "times"), [(True, 10), (False, 2), pytest.param(True, 500, marks=pytest.mark.long)]
)
def test_one_after_the_other_they_leave_no_process_no_zombie_and_no_descriptor(
    start: Start, adopting: bool, times: int
) -> None:
    body = f"""
def fds():
    return os.listdir("/dev/fd")
before = fds()
for number in range({times}):
    supervisor = make()
    prepare(supervisor)
    ended = run(supervisor)
    assert ended.status == 3, ended
    assert fds() == before
    try:
        os.waitpid(-1, os.WNOHANG)
        raise AssertionError("a child is left")
    except ChildProcessError:
        pass
os._exit(3)
"""
    start("sh", "-c", "sleep 10 & exit 3", body=body, adopting=adopting).end()
