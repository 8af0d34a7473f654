"""Where workers come from: a process that has imported everything forks them, and kills them at a word.

``python -m tests.faults.histories.nursery --variant NAME`` reads a line of JSON
for each wish and answers each with a number. It alone reaps its children, so a
pid that it has told names that worker, dead or alive, until it is told to kill
it. When nobody listens any more it kills them all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.histories.lockset import Adding, AddingBare
from tests.faults.histories.worker import Mixed
from tests.faults.variants import broken

ROOT = Path(__file__).parents[3]
SECONDS = 60
KINDS: dict[str, type[Mixed | Adding]] = {"mixed": Mixed, "lock-set": Adding, "bare-lock-set": AddingBare}


class Nursery:
    """The nursery, as seen by who orders workers."""

    def __init__(self, variant: str | None, errors: Path, preload: str = "") -> None:
        command = [sys.executable, "-m", "tests.faults.histories.nursery", "--preload", preload]
        command += [] if variant is None else ["--variant", variant]
        self.errors = errors
        with errors.open("ab") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def start(self, kind: str, address: str, folder: Path, owner: str, seed: int) -> int:
        """Start a worker; its pid."""
        return self._ask(kind=kind, address=address, folder=str(folder), owner=owner, seed=seed)

    def kill(self, pid: int) -> int:
        """Kill a worker, stopped or not; the status that it ended with, which may have been before."""
        return self._ask(kill=pid)

    def _ask(self, **wish: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the nursery ended: {self.errors.read_text()[-2000:]}"
        return int(answer)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """End it, and with it all workers."""
        try:
            self._process.communicate(timeout=SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Grant wishes until nobody has any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant")
    parser.add_argument("--preload", default="")
    arguments = parser.parse_args()
    for module in filter(None, arguments.preload.split(",")):
        import_module(module)
    children: set[int] = set()
    with broken(arguments.variant):
        try:
            for line in sys.stdin:
                print(_grant(json.loads(line), children), flush=True)
        finally:
            for pid in children.copy():
                _kill(pid, children)


def _grant(wish: dict[str, Any], children: set[int]) -> int:
    if "kill" in wish:
        return _kill(wish["kill"], children)
    pid = os.fork()
    if pid == 0:
        _live(KINDS[wish.pop("kind")], wish)
    children.add(pid)
    return pid


def _kill(pid: int, children: set[int]) -> int:
    children.remove(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _live(kind: type[Mixed | Adding], wish: dict[str, Any]) -> None:
    """A worker's whole life; it ends by being killed, else something is wrong."""
    try:
        with open(os.devnull) as nothing:  # the wishes are not for it
            os.dup2(nothing.fileno(), 0)
        worker = kind(wish["address"], Path(wish["folder"]), wish["owner"], wish["seed"])
        while True:
            worker.turn()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
