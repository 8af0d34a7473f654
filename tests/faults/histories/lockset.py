"""The lock-set: processes add numbers to a set by reading it, thinking, and writing it back, under a lease.

Who thinks for longer than the lease lasts would undo what others have added
since. Under the fence that write is refused; without it, updates are lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tests.faults.histories.control import BEFORE_THE_WRITE, stop
from tests.faults.histories.recorder import Call
from tests.faults.histories.worker import WAIT_SECONDS, Worker

SETS = ("set-0", "set-1", "set-2")


class Adding(Worker):
    """Adds a number at each turn."""

    fenced = True

    def turn(self) -> None:
        """Take the lease, read, write back, give the lease back."""
        name = self.random.choice(SETS)
        lease = self.acquire(name, 1, WAIT_SECONDS)
        if lease is None:
            return
        found = self.read(name)
        numbers = [] if found is None else found.data["numbers"]
        number = f"{self.owner}:{self.mark()}"
        if self.control.is_asked(BEFORE_THE_WRITE):
            self.recorder.call("sleep", stop)
        self.put(name, lease if self.fenced else None, {"numbers": [*numbers, number]}, number=number)
        self.release(lease)


class AddingBare(Adding):
    """Adds without showing its lease: what a lock without a fence is worth."""

    fenced = False


def lost(calls: Iterable[Call], sets: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """A sentence for each number whose addition was answered and that is in no set, or that came from nowhere."""
    added = {call.facts["number"]: call for call in calls if "number" in call.facts and call.what in ("put", "bare")}
    kept = [number for numbers in sets.values() for number in numbers]
    for number in added.keys() - set(kept):
        if added[number].ok:
            yield f"an acknowledged number is in no set: {added[number]}"
    for number in set(kept) - added.keys():
        yield f"a number is in a set that nobody added: {number}"
    if len(kept) != len(set(kept)):
        yield "a number is twice in a set"
