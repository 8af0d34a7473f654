"""Processes that work on one store at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SECONDS = 120


class Hand:
    """One process: it is told to go on by a line, and answers by lines of JSON."""

    def __init__(self, source: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        return json.loads(line)

    def end(self) -> list[Any]:
        """Wait for its end, which must be a good one; all that it said and was not read yet."""
        out, errors = self.process.communicate(timeout=SECONDS)
        assert (self.process.returncode, errors) == (0, "")
        return [json.loads(line) for line in out.splitlines()]


@contextmanager
def crew(source: str, each: Sequence[Sequence[object]]) -> Iterator[list[Hand]]:
    """One process for each list of arguments; none outlives the block."""
    hands = [Hand(source, *arguments) for arguments in each]
    try:
        yield hands
    finally:
        for hand in hands:
            hand.process.kill()
            hand.process.communicate()


def work(source: str, each: Sequence[Sequence[object]]) -> list[list[Any]]:
    """Let them start, go all at once when each has said that it is ready, and end; what each said."""
    with crew(source, each) as hands:
        for hand in hands:
            assert hand.answer() == "ready"
        for hand in hands:
            hand.go()
        return [hand.end() for hand in hands]
