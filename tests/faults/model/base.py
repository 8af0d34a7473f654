"""One round of the model: a world, a store in it, its shadow, and what the two are compared by.

Each operation (``asking``, ``holders``, ``writing``, ``keeping``, ``nemesis``)
calls the store, says what must have become of it, and ends in ``settle``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, Protocol

from tests.faults.model.saved import Book, Try
from tests.faults.model.shadow import Ask, Expected, Fence, Grant, Leases, Place, check
from tests.faults.model.world import Identity, Process, World

from agent_checkpoint import Event

SCOPES = ("s", "t")
OWNERS = ("ada", "bob")
WORKFLOWS = ("v", "w")
KEYS = ("k", "l")
WORKERS = 3
# Of every grant the fences are kept, to be presented when they are long stale.
FENCES_KEPT = 40

PlaceRow = tuple[int, int, str, int, int]
"""Number, wall time of the end, domain and ticks of the last word, whether it was passed."""


class Ground(Protocol):
    """What is under the model: the rules alone, a file, a server."""

    world: World

    def open(self) -> Any:
        """A store for another process."""

    def waiter(self, store: Any, ask: Ask, wait_seconds: float, holder: object) -> Any:
        """The store's own waiter, to be stepped by hand."""

    def new_file(self, suffix: str) -> str:
        """A path where nothing is."""

    def events(self, after: str) -> list[Event]:
        """The log behind a cursor."""

    def leases(self, scope: str) -> list[tuple[int, int, str, str]]:
        """Slot, token, owner and recorded state of a scope's leases, by slot."""

    def places(self, scope: str) -> list[PlaceRow]:
        """The queue of a scope."""

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """What a query finds."""

    def close(self) -> None:
        """Forget it all."""


class Worker:
    """A process with the store open."""

    def __init__(self, store: Any, process: Process) -> None:
        self.store = store
        self.process = process


class Person:
    """Somebody who waits, in a process of its own."""

    def __init__(self, worker: Worker, ask: Any, waiter: Any) -> None:
        self.worker = worker
        self.ask = ask
        self.waiter = waiter
        self.frozen = False


class Action:
    """A try of an effect that whoever began it has in hand."""

    def __init__(self, key: str, acting: Any, begun: Try, process: Process) -> None:
        self.key = key
        self.acting = acting
        self.begun = begun
        self.process = process


class Model:
    """The state of one round; ``operations`` counts the store's calls whose outcome was checked."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.world = ground.world
        self.leases = Leases(self.world)
        self.book = Book(self.leases)
        self.operations = 0
        self.outcomes: Counter[str] = Counter()
        self.fences: list[Fence] = []
        self.persons: list[Person] = []
        self.actions: list[Action] = []
        self.tickets: dict[int, Identity] = {}
        self.highest_token: dict[str, int] = {}
        self.highest_ticket = 0
        self.numbered = 0
        self.workers = [Worker(ground.open(), self.world.start()) for _ in range(WORKERS)]
        self.log: list[Event] = ground.events("start")
        self.cursor = self.log[-1].cursor if self.log else "start"
        self.archives: list[tuple[str, int]] = []
        self.backups: list[Any] = []
        self.restored: list[Any] = []
        """What the tables said after each restore that is in the log."""

    def close(self) -> None:
        """Close every store."""
        for worker in self.workers:
            worker.store.close()

    # What operations choose from

    def worker(self, dice: Random) -> Worker:
        """One who calls; an earlier one's process may have died since, then it is a new one's."""
        worker = dice.choice(self.workers)
        if worker.process.ended:
            worker.process = self.world.start()
        return worker

    def fence(self, dice: Random) -> Fence:
        """One to present: mostly the last ones, now and then one that is old, another's or nobody's."""
        if not self.fences:
            return Fence(dice.choice(SCOPES), dice.choice(OWNERS), 1)
        live = [each.fence for scope in SCOPES for each in self.leases.in_time(scope)]
        kind = dice.randrange(8)
        if kind < 4 and live:
            return dice.choice(live)
        fence = dice.choice(self.fences[-4:] if kind < 6 else self.fences)
        if dice.randrange(10) == 0:
            return fence._replace(owner=dice.choice(OWNERS))
        return fence._replace(token=fence.token + 1) if dice.randrange(20) == 0 else fence

    def somebody(self, dice: Random) -> Person | None:
        """One who waits and is awake."""
        awake = [each for each in self.persons if not each.frozen]
        return dice.choice(awake) if awake else None

    def new_data(self) -> dict[str, int]:
        """Something to save that was not saved before."""
        self.numbered += 1
        return {"number": self.numbered}

    def places(self, scope: str) -> list[Place]:
        """The queue of a scope: when each spoke last it says itself, who it is the model knows."""
        found = []
        for number, wall_end, domain, ticks, passed in self.ground.places(scope):
            place = Place(number, bool(passed), self.world.now, self.tickets.get(number))
            place.wall_end, place.domain, place.ticks = wall_end, domain, ticks
            found.append(place)
        return found

    def remember(self, grant: Grant) -> None:
        """Keep a fence for later. No token of a scope comes twice, whatever was restored meanwhile."""
        scope, _, token = grant.fence
        check(token > self.highest_token.get(scope, 0), f"token {token} of {scope} was granted before")
        self.highest_token[scope] = token
        self.fences.append(grant.fence)
        del self.fences[:-FENCES_KEPT]

    # What they end in

    def did(self, what: str) -> None:
        """Count an operation and its outcome."""
        self.operations += 1
        self.outcomes[what] += 1

    def settle(self, scopes: Iterable[str], expected: Iterable[Expected]) -> None:
        """The log has those events more and no other, and the leases of those scopes are as they must be."""
        found = self._read_on()
        expected = list(expected)
        same = len(found) == len(expected) and all(map(_matches, found, expected))
        check(same, f"the log got {list(map(_short, found))} where it must get {list(map(tuple, expected))}")
        for scope in scopes:
            self.compare(scope)

    def settle_ends(self, first: Expected, ends: Iterable[Expected]) -> None:
        """The log has that event more, and behind it those, in whatever order."""
        found = self._read_on()
        ends = sorted(ends, key=_whose)
        same = sorted(found[1:], key=_whose)
        holds = len(found) == len(ends) + 1 and all(map(_matches, same, ends)) and _matches(found[0], first)
        check(holds, f"the log got {list(map(_short, found))} where it must get {[tuple(first), *map(tuple, ends)]}")

    def settle_perhaps(self, expected: Iterable[Expected]) -> bool:
        """The same where it may have happened or not; whether it did."""
        expected = list(expected)
        if expected and not self.ground.events(self.cursor):
            return False
        self.settle((), expected)
        return True

    def compare(self, scope: str) -> None:
        """The leases of a scope are on record as they must be."""
        found = self.ground.leases(scope)
        known = [
            (each.slot, each.fence.token, each.fence.owner, each.state) for each in self.leases.scope(scope).in_order()
        ]
        check(found == known, f"scope {scope} has the leases {found} where it must have {known}")

    def _read_on(self) -> list[Event]:
        found = self.ground.events(self.cursor)
        if found:
            self.log += found
            self.cursor = found[-1].cursor
        return found


def _whose(event: Event | Expected) -> tuple[str, int]:
    return event.scope or "", event.token or 0


def _matches(event: Event, expected: Expected) -> bool:
    same = (event.kind, event.scope, event.owner, event.token, event.workflow, event.sequence) == expected[:6]
    return same and all(event.detail.get(name) == value for name, value in expected.detail.items())


def _short(event: Event) -> tuple[Any, ...]:
    return (event.kind, event.scope, event.owner, event.token, event.workflow, event.sequence, event.detail)
