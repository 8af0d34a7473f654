"""A supervised command at a terminal: it has it as it would have it alone, and the shell gets it back."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.watching import wait_until

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
PROGRAM = str(Path(__file__).parents[1] / "supervised.py")
# A program that needs no packages, and starts at once.
BARE = (sys.executable, "-S")
CTRL_C, CTRL_Z = "\x03", "\x1a"
PROMPT = "prompt> "

# Makes its stdin the terminal of a session of its own, and becomes the command.
LEAD = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
SHELL = ["bash", "--norc", "--noprofile", "--noediting", "-i"]


class Terminal:
    """A terminal and the program that leads its session; what was typed, and what came."""

    def __init__(self, where: Path, *argv: str) -> None:
        self.where = where
        self.screen = ""
        self._seen = 0
        self.master, slave = pty.openpty()
        environ = {**os.environ, "PS1": PROMPT, "TERM": "dumb", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [*BARE, "-c", LEAD, *argv], stdin=slave, stdout=slave, stderr=slave, env=environ
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str) -> str:
        """Wait until this appears after all that was expected before; what came until then."""
        deadline = time.monotonic() + LONG
        while (at := self.screen.find(text, self._seen)) < 0:
            assert select.select([self.master], [], [], deadline - time.monotonic())[0], self.screen
            try:
                self.screen += os.read(self.master, 65536).decode()
            except OSError:  # nobody has it open any more
                raise AssertionError(f"no {text!r} in {self.screen!r}") from None
        came = self.screen[self._seen : at]
        self._seen = at + len(text)
        return came

    def shell(self) -> Terminal:
        """Make it a shell that has ``run`` for a supervised command, and does not echo."""
        self.expect(PROMPT)
        self.does("stty -echo", "stty -echo")
        self.does(f"cd {self.where}")
        self.does(f"run() {{ {sys.executable} {PROGRAM} {self.where}/told '{{}}' \"$@\"; }}")
        self.does('script() { bash -c "$(declare -f run); $1"; }')
        return self

    def does(self, line: str, echo: str = "") -> str:
        self.type(line + "\n")
        return self.expect(PROMPT).removeprefix(echo).strip().replace("\r", "")

    def told(self, what: str) -> list[Any]:
        lines = (self.where / "told").read_text().splitlines()
        return [json.loads(line)[what] for line in lines if what in json.loads(line)]

    def has_told(self, what: str) -> bool:
        return (self.where / "told").exists() and bool(self.told(what))

    def has_the_command(self) -> bool:
        """The command is in the foreground, and is not stopped: CONT would undo a stop that came before it."""
        if not self.has_told("group"):
            return False
        group = self.told("group")[0]
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(group)], stdout=subprocess.PIPE, check=False).stdout
        return os.tcgetpgrp(self.master) == group and not state.startswith(b"T")

    def close(self) -> None:
        self.process.kill()
        os.close(self.master)
        self.process.wait()


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def at_terminal(*argv: str) -> Terminal:
        terminals.append(Terminal(tmp_path, *argv))
        return terminals[-1]

    yield at_terminal
    for terminal in terminals:
        with suppress(FileNotFoundError):
            for pid in (*terminal.told("wrapper"), *terminal.told("guard"), *terminal.told("group")):
                with suppress(OSError):
                    if "PS1" in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
                        os.kill(pid, signal.SIGKILL)
        terminal.close()


@pytest.fixture
def shell(at_terminal: Callable[..., Terminal]) -> Terminal:
    return at_terminal(*SHELL).shell()


IS_IN_FOREGROUND = "import os; print('it has', os.tcgetpgrp(0) == os.getpgrp())"
# A builtin waits: a shell that has started a program by vfork() may be stopped only when that goes on.
READS = "echo started; read x; echo read $x"


def test_a_command_is_in_the_foreground_and_the_shell_is_afterwards(shell: Terminal) -> None:
    assert shell.does(f'run {sys.executable} -S -c "{IS_IN_FOREGROUND}"; echo $?') == "it has True\n0"
    shell.type(f"run bash -c '{READS}'\n")
    shell.expect("started")
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect(PROMPT)
    assert shell.does("read y; echo shell read $y\nanother") == "shell read another"


COUNTS = """
import os, signal, time
heard = []
def hear(number, frame):
    heard.append(number)
    os.write(1, b"heard %d\\n" % len(heard))
    if len(heard) == 3:
        os._exit(3)
signal.signal(signal.SIGINT, hear)
os.write(1, b"started\\n")
while True:
    time.sleep(1)
"""


def test_an_interrupt_from_the_keyboard_reaches_the_command_alone(shell: Terminal) -> None:
    # The wrapper does not hear it: the second one would kill.
    (shell.where / "counts.py").write_text(COUNTS)
    shell.type(f"run {sys.executable} -S counts.py\n")
    shell.expect("started")
    for number in (1, 2, 3):
        shell.type(CTRL_C)
        shell.expect(f"heard {number}")
    shell.expect(PROMPT)
    assert shell.told("ended")[0]["status"] == 3


def test_a_command_that_is_interrupted_has_130(shell: Terminal) -> None:
    shell.type("run sleep 100\n")
    wait_until(shell.has_the_command)
    shell.type(CTRL_C)
    shell.expect(PROMPT)
    assert shell.does("echo $?") == "130"


def test_a_command_that_is_stopped_gives_the_shell_its_prompt_and_goes_on_with_fg(shell: Terminal) -> None:
    shell.type(f"run bash -c '{READS}'\n")
    shell.expect("started")
    for _ in range(3):
        shell.type(CTRL_Z)
        shell.expect("Stopped")
        shell.expect(PROMPT)
        assert shell.does("echo still here") == "still here"
        shell.type("fg\n")
        wait_until(shell.has_the_command)
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect(PROMPT)
    assert shell.told("ended")[0]["status"] == 0


def test_a_command_in_the_background_leaves_the_terminal_alone_until_it_is_fetched(shell: Terminal) -> None:
    shell.type(f"run bash -c '{READS}' &\n")
    shell.expect("started")
    assert "shell" in shell.does("echo shell")
    # It asks for the terminal, and stops for that, and so does the job.
    wait_until(lambda: "Stopped" in shell.does("jobs"))
    shell.type("fg\n")
    wait_until(shell.has_the_command)
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect(PROMPT)


def test_a_stopped_command_goes_on_in_the_background(shell: Terminal) -> None:
    shell.type("run bash -c 'echo started; while ! [ -e go ]; do sleep 0.02; done; echo went on'\n")
    shell.expect("started")
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    shell.does("bg")
    assert "shell" in shell.does("echo shell")
    shell.type("touch go\n")
    shell.expect("went on")
    wait_until(lambda: "Done" in shell.does("jobs") or shell.told("ended"))


def test_in_a_pipeline_whoever_reads_the_terminal_has_it(shell: Terminal) -> None:
    # The other reads: what is supervised must not take it.
    shell.type("run echo ready | bash -c 'read x; echo piped $x; read y < /dev/tty; echo other read $y'\n")
    shell.expect("piped ready")
    wait_until(lambda: shell.told("ended"))
    shell.type("a word\n")
    shell.expect("other read a word")
    shell.expect(PROMPT)
    # The command reads: it gets it when it asks.
    shell.type(f"run bash -c '{READS}' | cat\n")
    shell.expect("started")
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect(PROMPT)
    assert [ended["status"] for ended in shell.told("ended")] == [0, 0]


def test_in_a_pipeline_who_changes_the_terminal_gets_it(shell: Terminal) -> None:
    # The kernel stops it for that as well, and then lets it.
    assert shell.does("run bash -c 'stty intr ^A < /dev/tty; echo done' | cat") == "done"
    assert "intr = ^A" in shell.does("stty -a")


def test_a_script_is_interrupted_together_with_its_command(shell: Terminal) -> None:
    shell.type(
        "script \"trap 'echo script heard' INT; run bash -c 'trap \\\"echo command heard; exit 3\\\" INT; "
        "echo started; while :; do sleep 0.02; done'; echo then \\$?\"\n"
    )
    shell.expect("started")
    shell.type(CTRL_C)
    shell.expect("command heard")
    shell.expect("script heard")
    shell.expect("then 3")
    shell.expect(PROMPT)


def test_a_script_stops_and_goes_on_together_with_its_command(shell: Terminal) -> None:
    # At first the script's group has the terminal, then the command has asked for it.
    shell.type(
        "script \"run bash -c 'echo started; while ! [ -e go ]; do sleep 0.02; done; "
        "echo asks; read x; echo read \\$x'; echo then \\$?\"\n"
    )
    shell.expect("started")
    for text in ("touch go", "true"):
        shell.type(CTRL_Z)
        shell.expect("Stopped")
        shell.expect(PROMPT)
        shell.does(text)
        shell.type("fg\n")
        if text == "touch go":
            shell.expect("asks")
        wait_until(shell.has_the_command)
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect("then 0")
    shell.expect(PROMPT)


def test_modes_are_restored_after_a_command_that_was_killed_and_kept_after_one_that_ended(shell: Terminal) -> None:
    before = shell.does("stty -a")
    shell.does("run bash -c 'stty raw -echo; kill -KILL $$'")
    assert shell.does("stty -a") == before
    shell.does("run bash -c 'stty intr ^A'")
    assert "intr = ^A" in shell.does("stty -a")


def test_past_the_deadline_a_stopped_command_is_ended_and_fg_tells(shell: Terminal) -> None:
    shell.does(f'run() {{ {sys.executable} {PROGRAM} {shell.where}/told \'{{"ttl": 4}}\' "$@"; }}')
    shell.type(f"run bash -c '{READS}'\n")
    shell.expect("started")
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    wait_until(lambda: shell.told("expired"))
    shell.type("fg; echo status $?\n")
    shell.expect("status 143")  # it was woken and heard that it was asked to end
    ended = shell.told("ended")[0]
    assert (ended["why"], ended["expired"]) == ("lost", True)


def test_when_the_wrapper_is_killed_in_a_script_the_script_gets_the_terminal_back(shell: Terminal) -> None:
    # (As soon as it looks: a script that reads at once may be stopped, for its shell to see.)
    shell.type(f"script \"run bash -c '{READS}'; while ! [ -e go ]; do sleep 0.02; done; read y; echo got \\$y\"\n")
    shell.expect("started")
    wait_until(shell.has_the_command)
    os.kill(shell.told("wrapper")[0], signal.SIGKILL)
    wait_until(lambda: shell.told("expired"))
    (shell.where / "go").touch()
    shell.type("a word\n")
    shell.expect("got a word")
    shell.expect(PROMPT)


def test_an_interactive_shell_is_at_home_under_supervision(shell: Terminal) -> None:
    shell.type("PS1='inner> ' run bash --norc --noprofile --noediting -i\n")
    shell.expect("inner> ")
    assert "no job control" not in shell.screen
    shell.type(f"bash -c '{READS}'\n")
    shell.expect("started")
    shell.type(CTRL_Z)
    shell.expect("Stopped")
    shell.expect("inner> ")
    shell.type("exit 5\nexit 5\n")  # the first is refused: there is a stopped job
    shell.expect(PROMPT)
    assert shell.does("echo $?") == "5"
    assert shell.told("ended")[0]["status"] == 5


def test_without_a_shell_to_go_back_to_a_stop_is_passed_over(
    at_terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    # The kernel stops no orphaned group: nobody could continue it.
    source = "trap 'echo goes on' CONT; echo started; while ! read -t 0.1 x; do :; done; echo read $x"
    terminal = at_terminal(sys.executable, PROGRAM, str(tmp_path / "told"), "{}", "bash", "-c", source)
    terminal.expect("started")
    terminal.type(CTRL_Z)
    terminal.expect("goes on")
    terminal.type("a word\n")
    terminal.expect("read a word")
    assert terminal.process.wait(LONG) == 0


def test_a_command_stopped_by_somebody_else_gives_the_shell_its_prompt_too(shell: Terminal) -> None:
    shell.type(f"run bash -c '{READS}'\n")
    shell.expect("started")
    os.kill(shell.told("group")[0], signal.SIGSTOP)
    shell.expect("Stopped")
    shell.expect(PROMPT)
    shell.type("fg\n")
    wait_until(shell.has_the_command)
    shell.type("a word\n")
    shell.expect("read a word")
    shell.expect(PROMPT)


def test_a_command_in_the_background_of_nobody_is_hung_up_when_it_asks_for_the_terminal(shell: Terminal) -> None:
    # Nobody could ever give it to it. Unsupervised it would get an error.
    shell.does(f"(run bash -c '{READS}' < /dev/tty &)")
    wait_until(lambda: shell.has_told("ended"))
    assert shell.told("ended")[0]["signal"] == signal.SIGHUP
    assert "shell" in shell.does("echo shell")


def test_when_the_terminal_is_hung_up_the_command_hears_it(shell: Terminal) -> None:
    shell.type("run sh -c 'echo started; sleep 100'\n")
    shell.expect("started")
    os.close(shell.master)
    shell.master = os.open(os.devnull, os.O_RDONLY)
    wait_until(lambda: shell.told("ended"))
    assert shell.told("ended")[0]["signal"] == signal.SIGHUP
