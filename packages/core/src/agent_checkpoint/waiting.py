"""Waiting for a scope: a place in its queue, and a look now and then whether it is one's turn.

A waiter is stepped: each step asks, or looks, and says how long to pause. Who
steps it, a thread that sleeps or a task that awaits, is all that differs. A
look is a read, and most are not even that: nothing was committed, nobody died,
no time is over since the last one. Whoever frees the scope rings the bell of
the next in line, where there are bells.
"""

from __future__ import annotations

import math
from contextlib import suppress

from agent_checkpoint import leases, names
from agent_checkpoint.database import Terms
from agent_checkpoint.errors import AgentCheckpointError, LeaseHeldError, WaitTimeoutError
from agent_checkpoint.ledger import tickets
from agent_checkpoint.names import NS
from agent_checkpoint.rules import expiry, grant, queue
from agent_checkpoint.rules.decision import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Bell, Database
    from agent_checkpoint.holders import Holders
    from agent_checkpoint.records import Lease, LeaseRow, Ticket

# The head of the queue pauses 1 ms and a hundredth of the time it has waited, at
# most 48 ms; those behind it twice as long, but no longer than that either: a free
# slot is kept for 50 ms for each in front, else who is awake would be passed over.
# Whoever has a bell looks only for what nobody rings for, a death or a time that
# is over, and starts with the longest.
SHORTEST_NS = 1_000_000
SHORTEST_BY_BELL_NS = 48_000_000
SHARE_OF_WAIT = 100
LONGEST_NS = 48_000_000
BEHIND = 2
# Nobody is told of a ticket, so it need not survive a power cut.
QUEUEING = Terms(durable=False)
# A ticket is renewed after this part of its life.
RENEWALS = 3
# Lower than every ticket: nobody is ahead of who does not queue.
NO_TICKET = -1


class Waiter:
    """One caller on its way to a lease; ``asked_at`` is when (in ticks) the request was sent that granted it."""

    def __init__(self, changes: Changes, ask: grant.Ask, wait_seconds: float, holders: Holders, holder: object) -> None:
        self._changes = changes
        self._database = changes.database
        self._ask = ask
        self._holders = holders
        self._holder = holder
        self._now = self._database.clock.ticks_ns
        self._started = self.asked_at = self._now()
        self._wait_seconds = names.wait_seconds(wait_seconds)
        self._locks = (f"scope:{ask.scope}",)
        self._refused: LeaseHeldError | None = None
        self._live: list[LeaseRow] = []
        self._renew_at = 0
        self._stamp: object = None
        self._look_at = 0
        # What was written last; whether it was committed an interrupt may have kept from us.
        self._queued: Ticket | None = None
        self._granted: LeaseRow | None = None
        self.bell: Bell | None = None
        """What to listen to while pausing; None: only the time."""

    def step(self, rang: bool = False) -> Lease | float:
        """The lease, or how many seconds to pause before the next step; ``rang``: the bell did, meanwhile.

        Raises:
            LeaseHeldError: another lease is live, and the caller does not wait.
            WaitTimeoutError: its time is over.
            ReentrancyError: it holds the scope itself.
        """
        if not self._ask.ticket:
            return self._first()
        left = self._left()
        lease = self._try() if rang else self._look() if left <= 0 or self._is_news() else None
        if lease is not None:
            return lease
        if left <= 0:
            assert self._refused is not None
            raise _timeout(self._refused, self._waited_ns())
        if self._now() >= self._renew_at:
            self._keep_place()
        return min(self._pause(), left)

    def leave(self) -> None:
        """Leave the queue, and give back what was granted; without the database both end by their own time."""
        if self._queued is not None:
            with suppress(AgentCheckpointError):
                self._changes.run(self._locks, self._give_up, terms=QUEUEING)
            self._queued, self._ask = None, self._ask._replace(ticket=0)
        if self._granted is not None:
            self._holders.forget(self._ask.scope, self._granted.token)
            with suppress(AgentCheckpointError):
                leases.take_back(self._changes, self._granted)
            self._granted = None
        self._silence()

    def _give_up(self, change: Change) -> None:
        assert self._queued is not None
        tickets.remove_own(change.transaction, self._queued)
        leases.wake_next(change, self._ask.scope)

    def _silence(self) -> None:
        bell, self.bell = self.bell, None
        if bell is not None:
            bell.close()

    def _first(self) -> Lease | float:
        """Ask; who is refused, and waits, queues up."""
        lease = self._try() if self._wait_seconds == 0 else self._look()
        if lease is not None:
            return lease
        assert self._refused is not None
        if self._wait_seconds == 0:
            raise self._refused
        if self._refused.token is not None:  # no slot is free
            self._holders.refuse_waiting(self._live, self._holder)
        if self._left() <= 0:
            raise _timeout(self._refused, self._waited_ns())
        self.bell = self.bell or self._database.bell()
        return self._queue_up()

    def _try(self) -> Lease | None:
        self.asked_at = self._now()
        try:
            lease = leases.acquire(self._changes, self._ask, self._note)
        except LeaseHeldError as held:
            self._refused = held
            return None
        self._queued, self._ask = None, self._ask._replace(ticket=0)
        self._holders.note(lease, self._holder)
        self._silence()
        return lease

    def _note(self, granted: LeaseRow) -> None:
        self._granted = granted

    def _is_news(self) -> bool:
        """Whether anything happened since the last look that could make it our turn."""
        stamp = self._database.stamp()
        if stamp != self._stamp or self._now() >= self._look_at:
            self._stamp = stamp
            return True
        return any(self._database.alive(row.process) is False for row in self._live if row.process)

    def _look(self) -> Lease | None:
        """Ask the rule without the lock; only when it would be granted, or has something to record, with it."""
        with self._database.read() as reader:
            standing = leases.standing(self._database, reader, self._ask.scope, self._ask.ticket)
        decision = grant.acquire(standing, self._ask, reader.moment)
        if not isinstance(decision, Refused) or decision.rows:
            lease = self._try()
            if lease is not None:
                return lease
        else:
            assert isinstance(decision.error, LeaseHeldError)
            self._refused = decision.error
        assert self._refused is not None
        self._live = [row for row in standing.rows if expiry.is_live(row, reader.moment)]
        self._look_at = self._now() + int(self._refused.retry_after * NS)
        mine = next((ticket for ticket in standing.tickets if ticket.number == self._ask.ticket), None)
        if mine is None or mine.passed or not expiry.remaining(mine, reader.moment).ns:
            self._renew_at = 0
        return None

    def _queue_up(self) -> float:
        ask, process = self._ask, self._database.identify()
        bell = "" if self.bell is None else self.bell.name

        def decide(change: Change) -> tuple[int, bool]:
            self._queued = tickets.add(change.transaction, ask.scope, ask.owner, queue.LIFE_NS, process, bell)
            return self._queued.number, leases.is_held(change.transaction, ask.scope)

        number, held = self._changes.run(self._locks, decide, terms=QUEUEING)
        self._ask = ask._replace(ticket=number)
        self._renew_at = self._now() + queue.LIFE_NS // RENEWALS
        self._look_at = 0
        # Whoever freed the scope since the last look knew of nobody to wake.
        return self._pause() if held else 0.0

    def _keep_place(self) -> None:
        """Renew the ticket; whoever slept through its whole life queues up anew, at the end."""
        if self._changes.run(self._locks, self._renew, terms=QUEUEING):
            self._renew_at = self._now() + queue.LIFE_NS // RENEWALS
        else:
            self._queue_up()

    def _renew(self, change: Change) -> bool:
        transaction, number = change.transaction, self._ask.ticket
        mine = [ticket for ticket in tickets.of_scope(transaction, self._ask.scope) if ticket.number == number]
        if mine and expiry.remaining(mine[0], transaction.moment).ns:
            tickets.renew(transaction, self._ask.scope, number, queue.LIFE_NS)
            return True
        tickets.remove(transaction, self._ask.scope, [ticket.number for ticket in mine])
        return False

    def _waited_ns(self) -> int:
        return self._now() - self._started

    def _left(self) -> float:
        return self._wait_seconds - self._waited_ns() / NS

    def _pause(self) -> float:
        shortest = SHORTEST_NS if self.bell is None else SHORTEST_BY_BELL_NS
        pause = min(shortest + self._waited_ns() // SHARE_OF_WAIT, LONGEST_NS)
        refused = self._refused
        if refused is None or refused.position == 1:
            return pause / NS
        # A scope that is free: until those ahead have had their turns.
        longest = math.inf if refused.token is not None else refused.retry_after
        return min(pause * BEHIND / NS, LONGEST_NS / NS, longest)


def wait(waiter: Waiter, sleep: Callable[[float], object]) -> Lease:
    """Step a waiter to its lease; whatever ends the wait before, takes it out of the queue."""
    try:
        found = waiter.step()
        while isinstance(found, float):
            if waiter.bell is None:
                sleep(found)
                found = waiter.step()
            else:
                found = waiter.step(waiter.bell.wait(found))
    except BaseException:
        waiter.leave()
        raise
    return found


class FreeWaiter:
    """One who waits until a scope has a free slot, and does not ask for it."""

    def __init__(self, database: Database, scope: str, wait_seconds: float) -> None:
        self._database = database
        self._scope = names.name("scope", scope)
        self._wait_seconds = names.wait_seconds(wait_seconds)
        self._now = database.clock.ticks_ns
        self._started = self._now()

    def step(self) -> float | None:
        """None when it is free, or how many seconds to pause before the next step.

        Raises:
            WaitTimeoutError: the time is over.
        """
        with self._database.read() as reader:
            standing = leases.standing(self._database, reader, self._scope, NO_TICKET)
        held = grant.fullness(standing, self._scope, reader.moment)
        if held is None:
            return None
        waited_ns = self._now() - self._started
        left = self._wait_seconds - waited_ns / NS
        if left <= 0:
            raise _timeout(held, waited_ns, queued=False)
        return min((SHORTEST_NS + waited_ns // SHARE_OF_WAIT) / NS, LONGEST_NS / NS, left)


def until_free(waiter: FreeWaiter, sleep: Callable[[float], object]) -> None:
    """Step a waiter to its end."""
    while (pause := waiter.step()) is not None:
        sleep(pause)


def _timeout(held: LeaseHeldError, waited_ns: int, queued: bool = True) -> WaitTimeoutError:
    waited = waited_ns / NS
    place = f", at position {held.facts['position']} in the queue" if queued else ""
    return WaitTimeoutError(
        f"{held.message}; waited {waited:.1f} s{place}",
        hint="wait longer, or try again later; the holder may release it earlier",
        **{**held.facts, "expires_at": held.expires_at, "waited_seconds": waited},
    )
