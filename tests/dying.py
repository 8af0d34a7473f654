"""A process that kills itself at a chosen step: just before or after one of its calls into the system or SQLite."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

PROGRAM = """
import os, signal, sys
left, told = int(sys.argv[1]), 0
CALLS = ("execute", "executemany", "open", "write", "flush", "fsync", "link", "unlink")

def watch(frame, event, called):
    global left, told
    if event in ("c_call", "c_return") and called.__name__ in CALLS:
        told += 1
        if told == left:
            os.kill(os.getpid(), signal.SIGKILL)

def act(*words):
{body}

sys.setprofile(watch)
act(*sys.argv[2:])
sys.setprofile(None)
print(told)
"""
SECONDS = 60


def run(body: str, words: tuple[object, ...], step: int = 0) -> int | None:
    """Run the body to its end, and say how many steps it has; or kill it at a step, and say None."""
    program = PROGRAM.replace("{body}", body)
    command = [sys.executable, "-c", program, str(step), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def spread(steps: int, how_many: int) -> Iterator[int]:
    """So many of the steps all over, and the last ones, where what was done is put in force."""
    all_over = {1 + round(number * (steps - 1) / (how_many - 1)) for number in range(how_many)}
    return iter(sorted(all_over | set(range(steps - 4, steps))))
