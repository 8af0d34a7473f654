"""Who ends frozen agents when the tests are killed: a process that waits for the end of the tests.

It reads ``+PID`` and ``-PID`` lines. When they end, which is when the tests do,
it kills whoever was added and not taken away, with all that they started.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from contextlib import suppress

from agent_checkpoint.testing.freezing import kill

_watches: list[tuple[int, subprocess.Popen[bytes]]] = []


def over(pid: int) -> None:
    """Kill this process and all that it started, when the calling one ends before ``over_no_more``."""
    _tell(f"+{pid}\n")


def over_no_more(pid: int) -> None:
    """It has ended."""
    _tell(f"-{pid}\n")


def forget() -> None:
    """In a forked child: the end of the tests must not wait for its end."""
    for _, process in _watches:
        if process.stdin is not None:
            process.stdin.close()


def _tell(line: str) -> None:
    with suppress(BrokenPipeError):  # somebody ended the watch
        stdin = _watch().stdin
        assert stdin is not None
        stdin.write(line.encode())
        stdin.flush()


def _watch() -> subprocess.Popen[bytes]:
    """The watch of this process; a forked child has its own."""
    for owner, process in _watches:
        if owner == os.getpid():
            return process
    process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
        [sys.executable, "-c", f"from {__name__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    _watches.append((os.getpid(), process))
    atexit.register(_end, process, os.getpid())
    return process


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        with suppress(BrokenPipeError):
            process.communicate()


def main() -> None:
    """What the watch does."""
    watched: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (watched.add if line[0] == "+" else watched.discard)(pid)
    for pid in watched:
        kill(pid, tree=True)
