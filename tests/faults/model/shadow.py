"""What must be true, written plainly and from the documents, without a look at the rules that decide it.

Leases and their queue are here, what is saved under them in ``saved``. Nothing
of ``agent_checkpoint.rules`` is used: a mistake there must not be made twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.faults.model.world import Identity, Instant, World

from agent_checkpoint.names import NS

TURN = NS // 20  # a free slot is kept for 50 ms for each who is in front
LIFE = 10 * NS  # a ticket's, after its waiter's last word


class BrokenPromiseError(AssertionError):
    """A promise that was not kept."""


def check(holds: object, sentence: str) -> None:
    """Raise ``BrokenPromiseError`` unless it holds."""
    if not holds:
        raise BrokenPromiseError(sentence)


class Fence(NamedTuple):
    """What a worker presents."""

    scope: str
    owner: str
    token: int


class Expected(NamedTuple):
    """An event that must be in the log; of its ``detail`` what is named here."""

    kind: str
    scope: str | None = None
    owner: str | None = None
    token: int | None = None
    workflow: str | None = None
    sequence: int | None = None
    detail: dict[str, Any] = {}  # noqa: RUF012 -- a named tuple's default, never mutated


class Lived:
    """Something that lives for a time after its last word, by its own clock."""

    def __init__(self, now: Instant, ttl: int, process: Identity | None) -> None:
        self.ttl = ttl
        self.process = process
        self.speak(now)

    def speak(self, now: Instant) -> None:
        """Live a whole time again."""
        self.domain, self.ticks, self.wall_end = now.domain, now.ticks, now.wall + self.ttl

    def clock(self, now: Instant) -> str:
        """By which clock it lives: ticks, wall; none where it is of a boot that is gone."""
        if self.domain and now.domain:
            # A word from the future is one of another boot.
            if self.domain == now.domain and self.ticks - now.ticks <= NS:
                return "ticks"
            if now.one_kernel:
                return "none"
        return "wall"

    def left(self, now: Instant) -> tuple[int, str]:
        """Nanoseconds that are left, whoever died, and what ends it."""
        clock = self.clock(now)
        if clock == "none":
            return 0, "reboot"
        end = self.ticks + self.ttl - now.ticks if clock == "ticks" else self.wall_end - now.wall
        return max(0, min(self.ttl, end)), "ttl"

    def is_too_long(self, now: Instant) -> bool:
        """Whether only a wall clock that was set back lets it live for more than its time."""
        return self.clock(now) == "wall" and self.wall_end - now.wall > self.ttl

    def lies_ahead(self, now: Instant) -> bool:
        """Whether its last word is in the future, for the wall clock that decides was set back since."""
        return self.clock(now) == "wall" and self.wall_end - self.ttl > now.wall + NS


class Grant(Lived):
    """A lease; ``state`` is what is on record of it."""

    def __init__(self, fence: Fence, slot: int, now: Instant, ttl: int, process: Identity | None) -> None:
        super().__init__(now, ttl, process)
        self.fence = fence
        self.slot = slot
        self.state = "live"

    def end(self, state: str, now: Instant) -> None:
        """Put its end on record."""
        self.state, self.domain, self.ticks = state, now.domain, now.ticks

    def ended_ago(self, now: Instant) -> int:
        """How long ago its end was put on record; 0 where no clock can tell."""
        return max(0, now.ticks - self.ticks) if self.domain and self.domain == now.domain else 0

    def event(self, kind: str, **detail: Any) -> Expected:
        """An event about it."""
        return Expected(kind, *self.fence, None, None, detail)


class Place(Lived):
    """A ticket in a queue."""

    def __init__(self, number: int, passed: bool, now: Instant, process: Identity | None) -> None:
        super().__init__(now, LIFE, process)
        self.number = number
        self.passed = passed


class Ask(NamedTuple):
    """What a caller wants; ``number`` is its place in the queue, 0 for none."""

    scope: str
    owner: str
    ttl: int
    limit: int | None = None
    reclaim: bool = False
    process: Identity | None = None
    number: int = 0


class Verdict(NamedTuple):
    """What must become of an ask: granted, reclaimed, held, behind or invalid."""

    outcome: str
    slot: int = -1
    events: tuple[Expected, ...] = ()
    passed: tuple[int, ...] = ()
    """The tickets of those who did not take their turn, and are not waited for any more until they wake."""


class Scope:
    """A scope's slots, each with its lease or the last one it had."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = 0
        self.slots: dict[int, Grant] = {}
        self.limit: int | None = None
        self.limit_since: tuple[str, int] = ("", 0)

    @property
    def most(self) -> int:
        """How many leases it may have."""
        return self.limit or 1

    def in_order(self) -> list[Grant]:
        """Its leases, by slot."""
        return [self.slots[slot] for slot in sorted(self.slots)]

    def find(self, token: int) -> Grant | None:
        """The lease with that token, if it is the last of its slot."""
        return next((grant for grant in self.slots.values() if grant.fence.token == token), None)

    def set_limit(self, limit: int, now: Instant) -> None:
        """From now on it may have so many."""
        self.limit, self.limit_since = limit, (now.domain, now.ticks)


class Leases:
    """Every scope, and what must become of whoever wants something of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scopes: dict[str, Scope] = {}

    def scope(self, name: str) -> Scope:
        """That scope."""
        return self.scopes.setdefault(name, Scope(name))

    def left(self, grant: Grant) -> tuple[int, str]:
        """What is left of a lease to whoever asks for its scope: it ends with its process."""
        left, reason = grant.left(self.world.now)
        return (0, "owner-dead") if left and self.world.is_dead(grant.process) else (left, reason)

    def in_time(self, scope: str) -> list[Grant]:
        """The leases whose time is not over: their fences count, whoever died."""
        return [each for each in self.scope(scope).in_order() if each.state == "live" and each.left(self.world.now)[0]]

    def over(self, scope: str) -> list[Grant]:
        """The leases that are over, which is not on record."""
        return [each for each in self.scope(scope).in_order() if each.state == "live" and not self.left(each)[0]]

    def live(self, scope: str) -> list[Grant]:
        """The leases that keep others out."""
        return [each for each in self.scope(scope).in_order() if each.state == "live" and self.left(each)[0]]

    def why_stale(self, fence: Fence) -> str | None:
        """Why a fence does not count; None: it does."""
        scope = self.scope(fence.scope)
        grant = scope.find(fence.token)
        if grant is None:
            return (
                "unknown" if fence.token > max([0, *(each.fence.token for each in scope.in_order())]) else "superseded"
            )
        if grant.fence.owner != fence.owner:
            return "wrong-owner"
        if grant.state == "live":
            return None if grant.left(self.world.now)[0] else "expired"
        return "expired" if grant.state == "expired" else "released"

    def ahead(self, places: Sequence[Place], number: int) -> list[Place]:
        """Who is in front of a place: awake, alive, and came before. Whoever slept for too long stands last.

        Of whom nobody can tell how long ago the last word was is not waited for.
        """
        now = self.world.now
        awake = [
            each
            for each in places
            if each.left(now)[0] and not each.lies_ahead(now) and not self.world.is_dead(each.process)
        ]
        kept = any(each.number == number and each.left(now)[0] for each in places)
        return [
            each for each in awake if each.number != number and not each.passed and (each.number < number or not kept)
        ]

    def judge(self, ask: Ask, places: Sequence[Place]) -> Verdict:
        """What must become of an ask."""
        scope = self.scope(ask.scope)
        first = scope.limit is None and not scope.slots
        limit = (ask.limit or 1) if first else scope.most
        if (ask.limit or limit) != limit or (ask.reclaim and limit > 1):
            return Verdict("invalid")
        live, over = self.live(ask.scope), self.over(ask.scope)
        if len(live) >= limit:
            return self._judge_full(ask, live)
        taken = {each.slot for each in live}
        slot = min(set(range(len(taken) + 1)) - taken)
        ahead, free = [each.number for each in self.ahead(places, ask.number)], limit - len(live)
        passed = tuple(ahead) if len(ahead) >= free else ()
        if self._free_for(scope, over, free) < TURN * len(passed):
            return Verdict("behind", events=tuple(self.end_of(each) for each in over))
        events = [self.end_of(each) for each in over if each.slot == slot]
        if first and limit > 1:
            events.append(Expected("lease.limit-set", ask.scope, detail={"limit": limit}))
        events.append(self._granted("lease.acquired", ask, slot))
        return Verdict("granted", slot, tuple(events), passed)

    def _judge_full(self, ask: Ask, live: list[Grant]) -> Verdict:
        own = next((each for each in live if each.fence.owner == ask.owner), None) if ask.reclaim else None
        if own is None:
            too_long = [each for each in live if each.is_too_long(self.world.now)]
            return Verdict("held", events=tuple(each.event("lease.clamped") for each in too_long))
        if own.process is not None and own.process != ask.process and self.world.is_alive(own.process):
            return Verdict("held")
        return Verdict("reclaimed", own.slot, (self._granted("lease.reclaimed", ask, own.slot),))

    def _granted(self, kind: str, ask: Ask, slot: int) -> Expected:
        token = self.scope(ask.scope).last + 1
        return Expected(kind, ask.scope, ask.owner, token, detail={"slot": slot, "ttl_seconds": ask.ttl / NS})

    def _free_for(self, scope: Scope, over: list[Grant], free: int) -> int:
        """How long so many slots have been free. An end that is not on record was noticed only now."""
        now = self.world.now
        ended = [0 for _ in over] + [each.ended_ago(now) for each in scope.in_order() if each.state != "live"]
        since = sorted(ended)[free - 1] if len(ended) >= free else 2**62
        if scope.limit is not None:
            domain, ticks = scope.limit_since
            since = min(since, max(0, now.ticks - ticks) if domain and domain == now.domain else 0)
        return since

    def end_of(self, grant: Grant) -> Expected:
        """The event about the end of a lease that is over."""
        return grant.event("lease.expired", reason=self.left(grant)[1])

    def grant(self, ask: Ask, verdict: Verdict) -> Grant:
        """Write a grant down."""
        scope, now = self.scope(ask.scope), self.world.now
        if scope.limit is None and not scope.slots and (ask.limit or 1) > 1:
            scope.set_limit(ask.limit or 1, now)
        scope.last += 1
        grant = Grant(Fence(ask.scope, ask.owner, scope.last), verdict.slot, now, ask.ttl, ask.process)
        scope.slots[verdict.slot] = grant
        return grant

    def refuse(self, verdict: Verdict) -> None:
        """Write down what a refused ask left behind."""
        now = self.world.now
        for event in verdict.events:
            grant = self.scope(event.scope or "").find(event.token or 0)
            assert grant is not None
            if event.kind == "lease.expired":
                grant.end("expired", now)
            else:
                grant.wall_end = now.wall + grant.ttl
