"""The heartbeat of a store: one thread renews all its held leases, another watches their deadlines.

The deadline of a holder is stricter than the store's: it counts from before the
request that granted or extended the lease, less a margin, and passes whatever
state the database is in. That is why it has a thread of its own: a write that
hangs in the kernel must not keep anybody from hearing that its lease is lost.

Renewals are not flushed and leave no event; each lease gets one
``lease.heartbeat`` a minute, and one at its end, that tells how many there were.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from agent_checkpoint import leases
from agent_checkpoint.alarm import Alarm
from agent_checkpoint.errors import AgentCheckpointError, StaleLeaseError
from agent_checkpoint.ledger import leases as rows
from agent_checkpoint.names import NS
from agent_checkpoint.records import Happened
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules import grant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.records import Fence, Lease

# A lease is renewed after this part of its ttl.
BEATS = 3
# The holder's deadline is before the store's by a twentieth of the ttl, at least 50 ms.
MARGIN_SHARE = 20
LEAST_MARGIN_NS = 50_000_000
# After a failure the next try comes after this part of the ttl, between 20 ms and a second.
RETRIES = 20
SHORTEST_RETRY_NS = 20_000_000
LONGEST_RETRY_NS = NS
# How often the heartbeats of a lease go on record, and overdue leases are looked for.
MINUTE_NS = 60 * NS
QUIET = leases.HEARTBEAT._replace(durable=False)
# Leases renewed in one transaction: some 5 ms of work.
AT_ONCE = 100


def margin_ns(ttl_ns: int) -> int:
    """How long before the store its holder takes a lease for lost."""
    return max(LEAST_MARGIN_NS, ttl_ns // MARGIN_SHARE)


class Pulse:
    """What the heart knows of a held lease. Times are ticks; ``ended``: nobody cares any more."""

    def __init__(
        self,
        lease: Lease,
        asked_at: int,
        max_lifetime_ns: int | None,
        lives: Callable[[], bool],
        on_lost: Callable[[str], object],
    ) -> None:
        self.fence: Fence = lease.fence
        self.ttl_ns = lease.row.ttl_ns
        self.lost = threading.Event()
        self.lost_reason: str | None = None
        self.ended = False
        self.count = 0
        self.longest_ns = 0
        self.on_extended: Callable[[int], object] | None = None
        self._lives = lives
        self._on_lost = on_lost
        self._once = threading.Lock()
        self._told_longest_ns = 0
        self.until = None if max_lifetime_ns is None else asked_at + max_lifetime_ns
        self.tell_at = asked_at + MINUTE_NS
        self._extend(asked_at)

    def _extend(self, asked_at: int) -> None:
        self.beat_at = asked_at
        self.deadline = asked_at + self.ttl_ns - margin_ns(self.ttl_ns)
        if self.until is not None:
            self.deadline = min(self.deadline, self.until)
        self.next_at = asked_at + self.ttl_ns // BEATS

    def wants_beat(self) -> bool:
        """Whether it is to be renewed: somebody holds it, and it is not lost."""
        return not (self.ended or self.lost.is_set()) and self._lives()

    def beaten(self, asked_at: int) -> None:
        """It was renewed by a request that was sent at ``asked_at``."""
        self._note_gap(asked_at)
        self.count += 1
        self._extend(asked_at)
        if self.on_extended is not None:
            self.on_extended(self.deadline)

    def failed(self, now: int) -> None:
        """It could not be renewed, but may be still."""
        self.next_at = now + min(max(self.ttl_ns // RETRIES, SHORTEST_RETRY_NS), LONGEST_RETRY_NS)

    def summary(self, asked_at: int | None = None) -> tuple[Happened, ...]:
        """The heartbeats since the last summary, with the one of ``asked_at``, as an event; none for none."""
        count, longest_ns = self.count, self._told_longest_ns
        if asked_at is not None:
            count, longest_ns = count + 1, max(longest_ns, asked_at - self.beat_at)
        if not count:
            return ()
        detail = {"count": count, "longest_gap_seconds": round(longest_ns / NS, 6)}
        return (Happened("lease.heartbeat", *self.fence, None, None, detail),)

    def summarized(self, now: int) -> None:
        """The summary is on record."""
        self.count, self._told_longest_ns = 0, 0
        self.tell_at = now + MINUTE_NS

    def lose(self, reason: str, now: int) -> None:
        """Once, for good: note why, tell whoever looks, and call ``on_lost`` in a thread of its own."""
        with self._once:
            if self.lost.is_set() or self.ended:
                return
            self._note_gap(now)
            self.lost_reason = reason
            self.lost.set()
        self._on_lost(reason)

    def gap_ns(self, now: int) -> int:
        """The longest time between two heartbeats so far, with the one that lasts still."""
        over = self.ended or self.lost.is_set()
        return self.longest_ns if over else max(self.longest_ns, now - self.beat_at)

    def _note_gap(self, now: int) -> None:
        gap = now - self.beat_at
        self.longest_ns = max(self.longest_ns, gap)
        self._told_longest_ns = max(self._told_longest_ns, gap)


class Heart:
    """Renews what one store holds in this process."""

    def __init__(self, changes: Changes, keep_house: Callable[[], object]) -> None:
        self._changes = changes
        self._keep_house = keep_house
        self._clock = changes.database.clock
        self._start()

    def _start(self) -> None:
        """Anew in a forked child: what its parent holds, its parent renews."""
        self._pid = os.getpid()
        self._pulses: dict[int, Pulse] = {}
        self._sweep_at = self._clock.ticks_ns() + MINUTE_NS
        self._beats = Alarm("agent-checkpoint-heartbeat", self._clock, self._next_beat, self._beat)
        self._deadlines = Alarm("agent-checkpoint-deadline", self._clock, self._next_deadline, self._lose_overdue)

    def add(self, pulse: Pulse) -> None:
        """Renew this one from now on."""
        if self._pid != os.getpid():
            self._start()
        self._pulses[id(pulse)] = pulse
        self._beats.set(pulse.next_at)
        self._deadlines.set(pulse.deadline)

    def remove(self, pulse: Pulse) -> None:
        """Renew it no more."""
        pulse.longest_ns = pulse.gap_ns(self._clock.ticks_ns())
        pulse.ended = True
        self._pulses.pop(id(pulse), None)

    def _all(self) -> list[Pulse]:
        return list(self._pulses.values())  # copied in one step: other threads add and remove

    def _next_beat(self) -> int | None:
        return min((pulse.next_at for pulse in self._all() if pulse.wants_beat()), default=None)

    def _next_deadline(self) -> int | None:
        return min((pulse.deadline for pulse in self._all() if not pulse.lost.is_set()), default=None)

    def _lose_overdue(self) -> None:
        now = self._clock.ticks_ns()
        for pulse in self._all():
            if now >= pulse.deadline and not pulse.lost.is_set():
                pulse.lose("max-lifetime" if pulse.until == pulse.deadline else "expired", now)
            if pulse.lost.is_set():
                self._pulses.pop(id(pulse), None)

    def _beat(self) -> None:
        now = self._clock.ticks_ns()
        due = [pulse for pulse in self._all() if pulse.next_at <= now and pulse.wants_beat()]
        due.sort(key=lambda pulse: pulse.deadline)
        # What may be lost soonest comes first, and what is flushed comes last.
        for telling in (False, True):
            group = [pulse for pulse in due if (now >= pulse.tell_at) is telling]
            for start in range(0, len(group), AT_ONCE):
                self._renew(group[start : start + AT_ONCE], telling)
        if now >= self._sweep_at:
            self._sweep_at = now + MINUTE_NS
            with suppress(AgentCheckpointError):
                leases.sweep(self._changes)
                self._keep_house()

    def _renew(self, pulses: list[Pulse], telling: bool) -> None:
        asked_at = self._clock.ticks_ns()
        # A deadline that passed while others were served is for the other thread to tell.
        pulses = [pulse for pulse in pulses if asked_at < pulse.deadline]
        locks = tuple(sorted({f"scope:{pulse.fence.scope}" for pulse in pulses}))
        if not pulses:
            return
        told_at = asked_at if telling else None
        try:
            answers: dict[int, StaleLeaseError | None] = self._changes.run(
                locks,
                lambda change: _renew_rows(change, pulses, self._clock.ticks_ns(), told_at),
                terms=leases.HEARTBEAT if telling or self._changes.database.outlived else QUIET,
            )
        except AgentCheckpointError:
            now = self._clock.ticks_ns()
            for pulse in pulses:
                pulse.failed(now)
            return
        for pulse in pulses:
            stale = answers.get(id(pulse), _TOO_LATE)
            if isinstance(stale, StaleLeaseError):
                self._refuse(pulse, stale.reason)
            elif stale is None:
                pulse.beaten(asked_at)
                if telling:
                    pulse.summarized(asked_at)

    def _refuse(self, pulse: Pulse, reason: str) -> None:
        """The store has another holder, or none: put the refused heartbeat on record, and tell."""
        if not pulse.ended:
            with suppress(AgentCheckpointError):
                leases.heartbeat(self._changes, pulse.fence, None)
            pulse.lose(reason, self._clock.ticks_ns())


_TOO_LATE = object()


def _renew_rows(
    change: Change, pulses: Iterable[Pulse], now: int, told_at: int | None
) -> dict[int, StaleLeaseError | None]:
    """Renew what is held still: None for each, or why it cannot be. Who was lost while we waited stays lost."""
    answers: dict[int, StaleLeaseError | None] = {}
    moment = change.transaction.moment
    for pulse in pulses:
        if now >= pulse.deadline or not pulse.wants_beat():
            continue
        row = fencing.live(rows.of_scope(change.transaction, pulse.fence.scope, pulse.fence.token), pulse.fence, moment)
        answers[id(pulse)] = None
        if isinstance(row, StaleLeaseError):
            answers[id(pulse)] = row
            continue
        # Somebody may have given it another length: the store's is the one to be stricter than.
        pulse.ttl_ns = row.ttl_ns
        rows.save(change.transaction, grant.renewed(row, row.ttl_ns, moment))
        if told_at is not None:
            change.happened.extend(pulse.summary(told_at))
    return answers
