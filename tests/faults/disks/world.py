"""A store in a folder, with what its callers know of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.faults.disks import truth as truths
from tests.faults.disks.truth import WORKFLOW, Broken, Call, Mark, Truth, must

from agent_checkpoint import Event, Fence, OutcomeUnknownError, StateStore
from agent_checkpoint.archive import verify
from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock

HOUR = 3600.0
NOTES = "CREATE TABLE tests_notes (note TEXT NOT NULL, filling BLOB);\n"


class World:
    """A store in a folder, its clock, and what its callers know of it."""

    def __init__(self, folder: Path, truth: Truth | None = None, number: int = 0, ticks_ns: int = 0) -> None:
        self.folder = folder
        self.path = folder / "agents.db"
        self.truth = truth or Truth()
        self.clock = FakeClock()
        self.clock.advance(max(0, ticks_ns - self.clock.now_ticks_ns) / NS)
        self.number = number
        self.operations = 0
        self.store = self.opened()
        (folder / "0001_notes.sql").write_text(NOTES)

    def opened(self) -> StateStore:
        """Another user of the store; no call of it waits long."""
        return StateStore(self.path, clock=self.clock, busy_timeout_seconds=1)

    def next(self) -> int:
        """A number that was not used before."""
        self.number += 1
        return self.number

    def call(self, marks: list[Mark], action: Callable[[], Any], data: Any = None) -> Any:
        """Make a call, and keep what is known of it then."""
        call = Call(marks, data)
        self.truth.calls.append(call)
        self.operations += 1
        try:
            answer = action()
        except OutcomeUnknownError:
            call.state = "unknown"
            raise
        except BaseException:
            self.truth.calls.remove(call)
            raise
        call.marks = [told(mark, answer) for mark in marks]
        call.state = "done"
        return answer

    def fence(self, scope: str) -> Fence | None:
        """The fence of the scope's live lease."""
        lease = self.store.get_lease(scope)
        return None if lease is None else Fence(*lease.fence)

    def check(self, store: StateStore | None = None, files: tuple[str, ...] | None = None) -> list[Event]:
        """Raise ``Broken`` unless the store, or another that must be the same, is what was answered."""
        store = store or self.store
        log = truths.check(store, self.truth, self.archived(files))
        truths.check_notes(store, log)
        return log

    def files(self, suffix: str) -> tuple[str, ...]:
        """The files with that ending which have their final name."""
        return tuple(sorted(name for name in os.listdir(self.folder) if name.endswith(suffix)))

    def archived(self, files: tuple[str, ...] | None = None) -> list[Event]:
        """The events in archives, each of which is whole."""
        names = self.files(".jsonl") if files is None else files
        return [event for name in names for event in events_in(self.folder / name)]

    def settle(self) -> None:
        """Read what became of a call whose answer was lost, as its caller has to."""
        last = self.truth.calls[-1] if self.truth.calls else None
        if last is None or last.state != "unknown":
            return
        log = truths.whole(self.store, self.archived())
        last.state = "done"
        try:
            truths.compare(log, self.truth)
        except Broken:
            last.state = "unknown"


def told(mark: Mark, answer: Any) -> Mark:
    """A mark with what the answer says of it."""
    return mark._replace(
        token=mark.token if mark.token is not None else getattr(answer, "token", None),
        sequence=mark.sequence if mark.sequence is not None else getattr(answer, "sequence", None),
    )


def events_in(file: Path) -> list[Event]:
    """The events in an archive, which must be whole; counters of refusals are behind them."""
    verify(str(file))
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()[1:-1]]
    return [_event(line) for line in lines if "cursor" in line]


def _event(line: dict[str, Any]) -> Event:
    at = datetime.fromisoformat(line["at"].replace("Z", "+00:00"))
    return Event(**{name: value for name, value in line.items() if name not in ("sha256", "at")}, at=at)


def go_on(world: World) -> None:
    """All goes on: each scope's next token, the next sequence, an effect; long after every lease is over."""
    before, _ = truths.numbers(truths.whole(world.store, world.archived()))
    leases = {}
    for scope in {*before, "release"}:  # which protects the workflow, be it granted for the first time
        lease = leases[scope] = world.store.acquire(scope, "after", ttl_seconds=HOUR)
        must(lease.token == before[scope] + 1, f"token {lease.token} of {scope}, not {before[scope] + 1}")
    sequence = world.store.put_checkpoint(WORKFLOW, {"after": True}, lease=leases["release"]).sequence
    log = truths.whole(world.store, world.archived())
    _, after = truths.numbers(log)
    must(after[WORKFLOW] == sequence, f"sequence {sequence}, not {after[WORKFLOW]}")
    with world.store.read() as reader:
        must(reader.rows("PRAGMA integrity_check") == [("ok",)], "integrity, after it went on")
    world.operations += len(leases) + 2
