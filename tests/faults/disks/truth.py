"""What must be in a store, from the answers that its callers got; and whether it is.

Every call is noted before it is made, with the events that it must leave. Once
it was answered they must be in the audit log for ever; if it failed they must
not be; if nobody knows (the answer was lost, or the power went in between),
they may, whole or not at all. The rest of the store must agree with the log.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from agent_checkpoint import Event, StateStore

ALL = 100_000
WORKFLOW, SCOPES = "deploy", ("release", "pool")


class Broken(AssertionError):  # noqa: N818 -- it is a promise that is broken, not a program
    """A promise is broken; the message says which."""


class Mark(NamedTuple):
    """An event that a call leaves; None where the answer would have told more, and for what it has not."""

    kind: str
    scope: str | None = None
    owner: str | None = None
    token: int | None = None
    sequence: int | None = None
    key: str | None = None

    def fits(self, event: Event) -> bool:
        """Whether it is this event."""
        key = event.detail.get("key", event.detail.get("note"))
        found = (event.kind, event.scope, event.owner, event.token, event.sequence, key)
        return all(mine is None or mine == theirs for mine, theirs in zip(self, found, strict=True))


@dataclass
class Call:
    """One call, or what one of its transactions leaves; ``data`` is the checkpoint or note it wrote."""

    marks: list[Mark]
    data: Any = None
    state: Literal["open", "done", "unknown"] = "open"


@dataclass
class Truth:
    """The calls in their order, those that failed left out."""

    calls: list[Call] = field(default_factory=list)

    def until(self, calls: int, answered: set[int]) -> Truth:
        """The same at an earlier moment: the first calls, of which those had been answered."""
        known = [
            Call(call.marks, call.data, "done" if number in answered else "unknown")
            for number, call in enumerate(self.calls[:calls])
            if call.marks
        ]
        return Truth(known)

    def copy(self) -> Truth:
        """The same, to go on differently."""
        return Truth([Call(list(call.marks), call.data, call.state) for call in self.calls])


def must(condition: object, message: str) -> None:
    """Raise ``Broken`` unless the condition holds."""
    if not condition:
        raise Broken(message)


def check(store: StateStore, truth: Truth, archived: Iterable[Event] = ()) -> list[Event]:
    """Raise ``Broken`` unless the store is what was answered; the whole log."""
    with store.read() as reader:
        found = [row[0] for row in reader.rows("PRAGMA integrity_check")]
    must(found == ["ok"], f"integrity: {found}")
    log = whole(store, archived)
    compare(log, truth)
    tokens, sequences = numbers(log)
    _leases(store, log, tokens)
    _checkpoints(store, log, sequences.get(WORKFLOW, 0), truth)
    _effects(store, log)
    return log


def whole(store: StateStore, archived: Iterable[Event] = ()) -> list[Event]:
    """The audit log, with its archived part: an event may be in both, and is the same then."""
    events = {event.id: event for event in archived}
    for event in store.events(ALL, after="start"):
        if events.setdefault(event.id, event) != event:
            raise Broken(f"{event} is another one in the archive")
    return [events[number] for number in sorted(events)]


def compare(log: list[Event], truth: Truth) -> None:
    """Every answered call left its events, in the order of the calls, and nothing else left any."""
    reached = {0}
    for call in truth.calls:
        size = len(call.marks)
        passed = {
            place + size
            for place in reached
            if place + size <= len(log)
            and all(mark.fits(event) for mark, event in zip(call.marks, log[place:], strict=False))
        }
        if call.state != "done":
            passed |= reached
        if not passed:
            there = [short(event) for event in log[max(reached) :][:3]]
            raise Broken(f"gone: {call.marks}, which was answered; the log has {there} there")
        reached = passed
    must(len(log) in reached, f"nobody did {[short(event) for event in log[max(reached) :]][:3]}")


def short(event: Event) -> str:
    """An event in few words."""
    return f"{event.kind} {event.scope or event.workflow} {event.token or ''} {event.sequence or ''}".strip()


def numbers(log: list[Event]) -> tuple[Counter[str], Counter[str]]:
    """The last token of every scope, and the last sequence of every workflow: none twice, none left out."""
    tokens: Counter[str] = Counter()
    sequences: Counter[str] = Counter()
    for event in log:
        if event.kind == "lease.acquired":
            must(event.token == tokens[str(event.scope)] + 1, f"token {event.token} behind {tokens[str(event.scope)]}")
            tokens[str(event.scope)] += 1
        if event.kind == "checkpoint.saved":
            workflow = str(event.workflow)
            must(event.sequence == sequences[workflow] + 1, f"sequence {event.sequence} behind {sequences[workflow]}")
            sequences[workflow] += 1
    return tokens, sequences


ENDS = {"lease.released": "released", "lease.force-released": "force-released", "lease.expired": "expired"}


def _leases(store: StateStore, log: list[Event], tokens: Counter[str]) -> None:
    """Each lease is in the state in which the log leaves it."""
    states: dict[tuple[str | None, int | None], str] = {}
    for event in log:
        if event.kind == "lease.acquired":
            states[event.scope, event.token] = "live"
        elif event.kind in ENDS:
            states[event.scope, event.token] = ENDS[event.kind]
    rows = store.list_leases(include_expired=True)
    must({row.scope for row in rows} == set(tokens), f"scopes {sorted({row.scope for row in rows})}")
    for row in rows:
        # One that ran out is live in the log until somebody has noticed.
        told, is_now = states.get((row.scope, row.token)), row.state
        must(told == is_now or (told, is_now) == ("live", "expired"), f"{row.scope} {row.token}: {told}, but {is_now}")
        must(row.token <= tokens[row.scope], f"token {row.token} of {row.scope} was never granted")


def _checkpoints(store: StateStore, log: list[Event], last: int, truth: Truth) -> None:
    """The history goes on to the last sequence without a gap, and holds what was saved."""
    first = 1
    for event in log:
        if event.kind == "checkpoint.pruned":
            first = max(first, int(event.detail["to_sequence"]) + 1)
    history = [info.sequence for info in store.checkpoint_history(WORKFLOW)]
    must(history == list(range(last, first - 1, -1)), f"checkpoints {history}, not {last} to {first}")
    perhaps: dict[int | None, list[Any]] = defaultdict(list)
    certain = {}
    for call, mark in _of(truth, "checkpoint.saved"):
        if call.state == "done" and mark.sequence is not None:
            certain[mark.sequence] = call.data
        else:
            perhaps[None].append(call.data)
    for sequence in history:
        found = store.get_checkpoint(WORKFLOW, sequence=sequence)
        must(found is not None, f"checkpoint {sequence} cannot be read")
        assert found is not None
        allowed = [certain[sequence]] if sequence in certain else perhaps[None]
        must(found.data in allowed, f"checkpoint {sequence} is not what was saved")


def _effects(store: StateStore, log: list[Event]) -> None:
    """Each effect is in the state in which the log leaves it, and its result is its key's."""
    states = {
        event.detail["key"]: event.kind.removeprefix("effect.") for event in log if event.kind.startswith("effect.")
    }
    for key, state in states.items():
        found = store.get_effect(key)
        must(found is not None, f"effect {key} is not there")
        assert found is not None
        # Begun by a lease that is over: nobody knows what became of it.
        must(found.state == state or (state, found.state) == ("begun", "unknown"), f"effect {key}: {found.state}")
        must(state != "done" or found.result == f"result of {key}", f"effect {key}: {found.result!r}")
    must(len(store.list_effects(1_000)) == len(states), "an effect that nobody began")


def notes(store: StateStore) -> list[str]:
    """The rows of the adapter that the workload brings along."""
    with store.read() as reader:
        if not reader.rows("SELECT 1 FROM sqlite_master WHERE name = 'tests_notes'"):
            return []
        return [text for (text,) in reader.rows("SELECT note FROM tests_notes ORDER BY rowid")]


def check_notes(store: StateStore, log: list[Event]) -> None:
    """The adapter's rows are those whose events are in the log."""
    noted = [event.detail["note"] for event in log if event.kind == "test.noted"]
    must(notes(store) == noted, f"notes {notes(store)}, but the log has {noted}")


def _of(truth: Truth, kind: str) -> Iterator[tuple[Call, Mark]]:
    for call in truth.calls:
        for mark in call.marks:
            if mark.kind == kind:
                yield call, mark
