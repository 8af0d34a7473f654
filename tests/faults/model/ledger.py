"""What a store remembers, in memory: for the rules alone, without a database, without transactions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.faults.model import ending, replay
from tests.faults.model.world import World

from agent_checkpoint import Event
from agent_checkpoint.records import EffectRow, Happened, LeaseRow, LimitRow, Moment, Ticket
from agent_checkpoint.rules import expiry, fence, grant
from agent_checkpoint.rules.decision import Granted, Refused
from agent_checkpoint.times import utc


class Ledger:
    """The tables, and who decides about them: the rules."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leases: dict[str, dict[int, LeaseRow]] = {}
        self.limits: dict[str, LimitRow] = {}
        self.tickets: dict[int, Ticket] = {}
        self.numbers = 0
        self.checkpoints: dict[str, list[tuple[int, str, fence.Fence | None]]] = {}
        self.effects: dict[str, EffectRow] = {}
        self.refusals: Counter[tuple[str, int, str, str]] = Counter()
        self.events: list[Event] = []
        self._answers: dict[str, Callable[[], list[Any]]] = {
            replay.LIVE: lambda: [
                (row.scope, row.slot, row.token) for row in self.every_lease() if row.state == "live"
            ],
            replay.EVERY_LEASE: lambda: [(row.scope, row.slot, row.token) for row in self.every_lease()],
            replay.LIMITS: lambda: [(scope, row.slots) for scope, row in sorted(self.limits.items()) if row.slots > 1],
            replay.CHECKPOINTS: lambda: [
                (name, number, scope, token) for name, number, _, scope, token in self._saved()
            ],
            replay.FLOORS: list,
            replay.EFFECTS: lambda: [
                (row.key, row.state, row.scope, row.token, row.late) for _, row in sorted(self.effects.items())
            ],
            ending.DATA: self._saved,
            ending.REFUSALS: lambda: [(*key, times) for key, times in self.refusals.items()],
            ending.LATE: lambda: [
                (row.key, row.state, row.result, row.late) for _, row in sorted(self.effects.items())
            ],
        }

    @property
    def moment(self) -> Moment:
        """The time as leases are judged by it."""
        return Moment(*self.world.now)

    def answer(self, query: str) -> list[Any]:
        """What a database would find for one of the queries that the model asks."""
        return self._answers[query]()

    def of_scope(self, scope: str) -> list[LeaseRow]:
        """The leases of a scope, by slot."""
        return [row for _, row in sorted(self.leases.get(scope, {}).items())]

    def every_lease(self) -> list[LeaseRow]:
        """The leases of every scope."""
        return [row for scope in sorted(self.leases) for row in self.of_scope(scope)]

    def queue(self, scope: str) -> list[Ticket]:
        """The tickets of a scope, first come first."""
        return [ticket for ticket in self.tickets.values() if ticket.scope == scope]

    def alive(self, *rows: LeaseRow | Ticket | EffectRow) -> dict[str, bool | None]:
        """What the kernel says of the processes of these."""
        return {row.process: self.world.table.alive(row.process) for row in rows if row.process}

    def standing(self, scope: str) -> grant.Standing:
        """How a scope stands."""
        rows, line = self.of_scope(scope), self.queue(scope)
        return grant.Standing(rows, self.limits.get(scope), line, self.alive(*rows, *line))

    def settle(self, decision: Granted | Refused) -> LeaseRow:
        """Write down what a rule decided about leases; the row, or the error raised."""
        if isinstance(decision, Refused):
            self.refuse(decision)
        if decision.limit is not None:
            self.set_limit(decision.row.scope, decision.limit)
        for number in decision.passed:
            self.tickets[number] = self.tickets[number]._replace(passed=1)
        for number in decision.gone:
            self.tickets.pop(number, None)
        self.save(decision.row)
        self.tell(*decision.events)
        return decision.row

    def refuse(self, refused: Refused) -> Any:
        """Put a refusal on record, and raise it."""
        self.note(refused)
        raise refused.error

    def note(self, refused: Refused) -> None:
        """Put a refusal on record: the first of its kind is an event."""
        for row in refused.rows:
            self.save(row)
        self.tell(*refused.events)
        write = refused.write
        if write is None:
            return
        scope = write.scope or refused.error.facts.get("protected_by") or ""
        key = (scope, write.token or 0, write.action, refused.error.facts["reason"])
        self.refusals[key] += 1
        if self.refusals[key] == 1:
            self.tell(fence.refusal(write, refused.error, scope))

    def save(self, row: LeaseRow) -> None:
        """Put a lease in the place of the one before."""
        self.leases.setdefault(row.scope, {})[row.slot] = row

    def set_limit(self, scope: str, slots: int) -> None:
        """Note how many leases a scope may have from now on."""
        self.limits[scope] = LimitRow(slots, self.world.now.domain, self.world.now.ticks)

    def put_ticket(self, scope: str, owner: str, ttl: int, process: str) -> int:
        """Queue up; the number."""
        self.numbers += 1
        wall, ticks, domain, _ = self.moment
        self.tickets[self.numbers] = Ticket(
            self.numbers, scope, owner, ttl, wall, wall + ttl, domain, ticks, 0, process, ""
        )
        return self.numbers

    def keep_ticket(self, number: int) -> bool:
        """Renew a ticket; False when it is gone, or its time is over."""
        ticket = self.tickets.get(number)
        if ticket is None or not expiry.remaining(ticket, self.moment).ns:
            self.tickets.pop(number, None)
            return False
        wall, ticks, domain, _ = self.moment
        self.tickets[number] = ticket._replace(
            expires_at=wall + ticket.ttl_ns, domain=domain, beat_ticks=ticks, passed=0
        )
        return True

    def tell(self, *events: Happened) -> None:
        """Append to the log."""
        for event in events:
            number = len(self.events) + 1
            # As it would be read: what is told and changed later stays as it was told.
            detail = json.loads(json.dumps(event.detail))
            self.events.append(Event(f"0-0-{number}", number, utc(self.world.now.wall), *event[:6], detail))

    def _saved(self) -> list[Any]:
        return [
            (name, number, data, *((held.scope, held.token) if held else (None, None)))
            for name, kept in sorted(self.checkpoints.items())
            for number, data, held in kept
        ]
