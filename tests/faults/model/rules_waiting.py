"""A queue's waiter over the pure rules alone: it asks at every step, and keeps its ticket."""

from __future__ import annotations

from typing import Any

from tests.faults.model.ledger import Ledger

from agent_checkpoint import LeaseHeldError, WaitTimeoutError
from agent_checkpoint.names import NS
from agent_checkpoint.rules import grant, present, queue

# Nobody here looks at how long it is.
PAUSE_SECONDS = 0.01


class Waiter:
    """One caller on its way to a lease; ``_ask`` is named as in the store's own, for the model looks at its ticket."""

    def __init__(self, ledger: Ledger, ask: grant.Ask, wait_seconds: float) -> None:
        self._ledger = ledger
        self._ask = ask
        self._wait_seconds = wait_seconds
        self._started = ledger.world.now.ticks

    def step(self, rang: bool) -> Any:
        """The lease, or how many seconds to pause."""
        ledger, ask = self._ledger, self._ask
        try:
            row = ledger.settle(grant.acquire(ledger.standing(ask.scope), ask, ledger.moment))
        except LeaseHeldError as held:
            if ask.ticket and (ledger.world.now.ticks - self._started) / NS >= self._wait_seconds:
                raise WaitTimeoutError(str(held), **held.facts) from held
        else:
            self._ask = ask._replace(ticket=0)
            return present.settled(row)
        if not ledger.keep_ticket(ask.ticket):
            process = ledger.world.table.identify()
            self._ask = ask._replace(ticket=ledger.put_ticket(ask.scope, ask.owner, queue.LIFE_NS, process))
        return PAUSE_SECONDS

    def leave(self) -> None:
        """Leave the queue."""
        self._ledger.tickets.pop(self._ask.ticket, None)
