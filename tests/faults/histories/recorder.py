"""What a worker does, written down before and after each call by a clock that all processes share.

Each process has a file of its own, and each line is one ``write``: whoever is
killed leaves whole lines, but perhaps for the last one, which is dropped then.
The times enclose the call: what it did, it did in between.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agent_checkpoint import AgentCheckpointError, StaleLeaseError

Answer = TypeVar("Answer")

OK = "ok"
# The outcomes of calls of which nobody can say whether they did anything.
UNSURE = (None, "storage-outcome-unknown")
# What is told of a call that raised something else than the errors of the store.
CRASHED = "crashed"


@dataclass
class Call:
    """One call: times are ticks of the kernel's monotonic clock; without an answer its caller was killed in it."""

    owner: str
    what: str
    invoked: int
    answered: int | None = None
    outcome: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it was answered that it is done."""
        return self.outcome == OK

    @property
    def unsure(self) -> bool:
        """Whether it may have happened or not."""
        return self.outcome in UNSURE

    @property
    def ended(self) -> int:
        """When it was answered; only for those that were."""
        assert self.answered is not None
        return self.answered

    @property
    def scope(self) -> str:
        """The scope that it was about."""
        return str(self.facts["scope"])

    @property
    def token(self) -> int:
        """The token that it presented, or was granted."""
        return int(self.facts["token"])

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.what} by {self.owner} [{self.invoked}, {self.answered}] {self.outcome} {told}"


class Recorder:
    """Writes down the calls of one process."""

    def __init__(self, folder: Path, owner: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self.owner = owner
        self._file = os.open(folder / f"{owner}.calls", flags, 0o600)

    def call(
        self,
        what: str,
        do: Callable[[], Answer],
        learn: Callable[[Answer], Mapping[str, Any]] = lambda _: {},
        **known: Any,
    ) -> Answer | None:
        """Make a call and write it down; its answer, or None where the store refused.

        ``known`` is what is known before, ``learn(answer)`` what the answer tells.
        """
        self._write(what, known)
        try:
            answer = do()
        except StaleLeaseError as stale:
            self._write(stale.code, {"reason": stale.reason, "recorded": stale.recorded})
            return None
        except AgentCheckpointError as error:
            self._write(error.code, {})
            return None
        except BaseException as error:
            self._write(CRASHED, {"error": repr(error)})
            raise
        self._write(OK, learn(answer))
        return answer

    def _write(self, word: str, facts: Mapping[str, Any]) -> None:
        line = json.dumps([time.monotonic_ns(), word, facts], separators=(",", ":")) + "\n"
        os.write(self._file, line.encode())

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


def read(folder: Path) -> list[Call]:
    """The calls of all processes that wrote into a folder, in the order of their beginnings."""
    calls = [call for path in folder.glob("*.calls") for call in _of_one(path)]
    calls.sort(key=lambda call: call.invoked)
    return calls


def _of_one(path: Path) -> Iterator[Call]:
    """One process makes one call after the other: each answer follows its question."""
    text = path.read_text(encoding="ascii")
    lines = text.split("\n")[:-1]  # what follows the last line's end was cut off
    asked: Call | None = None
    for at, word, facts in map(json.loads, lines):
        if asked is None:
            asked = Call(path.stem, word, at, facts=facts)
            continue
        asked.answered, asked.outcome = at, word
        asked.facts.update(facts)
        yield asked
        asked = None
    if asked is not None:
        yield asked
