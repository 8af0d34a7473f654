"""The same operations over the pure rules alone: many more in the same time than any database can take.

What surrounds the rules here is as plain as can be. What it proves is theirs:
that the shadow, which knows nothing of them, comes to the same.
"""

from __future__ import annotations

import json
from typing import Any

from tests.faults.model import rules_effects
from tests.faults.model.base import PlaceRow
from tests.faults.model.ledger import Ledger
from tests.faults.model.rules_waiting import Waiter
from tests.faults.model.shadow import Ask
from tests.faults.model.world import World

from agent_checkpoint import Checkpoint, Effect, Event, Fence, Limit, StaleLeaseError
from agent_checkpoint.names import NOTHING, NS, ttl_ns
from agent_checkpoint.records import Happened, LeaseRow, Pruned, Write
from agent_checkpoint.rules import expiry, fence, grant, present
from agent_checkpoint.rules.decision import Refused
from agent_checkpoint.times import utc


class OnRules:
    """The model's ground without a database: one ledger for all."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ledger = Ledger(world)

    def open(self) -> Store:
        """A store for another process."""
        return Store(self.ledger)

    def waiter(self, store: Store, ask: Ask, wait_seconds: float, holder: object) -> Waiter:
        """A waiter to be stepped by hand."""
        pid = None if ask.process is None else ask.process.process.pid
        return Waiter(self.ledger, store.ask(ask.scope, ask.owner, ask.ttl / NS, pid=pid), wait_seconds)

    def events(self, after: str) -> list[Event]:
        """The log behind a cursor."""
        return self.ledger.events[0 if after == "start" else int(after.rpartition("-")[2]) :]

    def leases(self, scope: str) -> list[tuple[int, int, str, str]]:
        """Slot, token, owner and recorded state of a scope's leases, by slot."""
        return [(row.slot, row.token, row.owner, row.state) for row in self.ledger.of_scope(scope)]

    def places(self, scope: str) -> list[PlaceRow]:
        """The queue of a scope."""
        return [
            (each.number, each.expires_at, each.domain, each.beat_ticks, each.passed)
            for each in self.ledger.queue(scope)
        ]

    def rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        """What a query finds."""
        return self.ledger.answer(sql)

    def close(self) -> None:
        """There is nothing to close."""


class Store:
    """What a ``StateStore`` offers, as far as the model uses it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def close(self) -> None:
        """There is nothing to close."""

    def ask(
        self,
        scope: str,
        owner: str,
        ttl_seconds: float,
        *,
        limit: int | None = None,
        reclaim: bool = False,
        pid: int | None = None,
        metadata: Any = None,
    ) -> grant.Ask:
        """What is asked for."""
        process = "" if pid is None else self._ledger.world.table.identify(pid)
        return grant.Ask(scope, owner, ttl_ns(ttl_seconds), json.dumps(metadata or {}), reclaim, limit, process)

    # Named, and answering, as those of a ``StateStore``.

    def acquire(self, scope: str, owner: str, ttl_seconds: float, **options: Any) -> Any:
        ledger, asked = self._ledger, self.ask(scope, owner, ttl_seconds, **options)
        return present.settled(ledger.settle(grant.acquire(ledger.standing(scope), asked, ledger.moment)))

    def heartbeat(self, scope: str, owner: str, token: int, ttl_seconds: float | None = None) -> None:
        row, ledger = self._live("lease.heartbeat", Fence(scope, owner, token)), self._ledger
        ledger.settle(grant.heartbeat(row, None if ttl_seconds is None else ttl_ns(ttl_seconds), ledger.moment))

    def release(self, scope: str, owner: str, token: int) -> None:
        row = self._live("lease.release", Fence(scope, owner, token))
        self._ledger.settle(grant.release(row, self._ledger.moment))

    def expire(self, scope: str, owner: str, token: int, *, reason: str) -> None:
        row = self._live("lease.expire", Fence(scope, owner, token))
        self._ledger.settle(grant.expire(row, reason, self._ledger.moment))

    def force_release(self, scope: str, *, reason: str, token: int | None) -> None:
        ledger, rows = self._ledger, self._ledger.of_scope(scope)
        if token is not None:
            owner = next((row.owner for row in rows if row.token == token), "")
            found = fence.live(rows, Fence(scope, owner, token), ledger.moment)
            if isinstance(found, StaleLeaseError):
                raise found
            rows = [found]
        live = [row for row in rows if expiry.is_live(row, ledger.moment)]
        ledger.settle(grant.force_release(live, scope, reason, ledger.moment))

    def set_limit(self, scope: str, limit: int) -> Limit:
        known = self._ledger.limits.get(scope)
        before = 1 if known is None else known.slots
        self._ledger.set_limit(scope, limit)
        if limit != before:
            detail = {"limit": limit, "previous": before}
            self._ledger.tell(Happened("lease.limit-set", scope, detail=detail))
        return Limit(scope, limit, before)

    def sweep(self) -> list[LeaseRow]:
        ledger = self._ledger
        live = [row for row in ledger.every_lease() if row.state == "live"]
        left = [(row, expiry.left(row, ledger.moment, ledger.alive(row))) for row in live]
        over = [(row, remaining.reason) for row, remaining in left if remaining.ns == 0]
        return [present.settled(ledger.settle(grant.expire(row, why, ledger.moment))) for row, why in over]

    def check_lease(self, scope: str, owner: str, token: int) -> Any:
        ledger = self._ledger
        row = fence.live(ledger.of_scope(scope), Fence(scope, owner, token), ledger.moment)
        if isinstance(row, StaleLeaseError):
            raise row
        return present.lease(row, ledger.moment, ledger.alive(row))

    def list_leases(self) -> list[Any]:
        ledger = self._ledger
        shown = [present.lease(row, ledger.moment, ledger.alive(row)) for row in ledger.every_lease()]
        return [lease for lease in shown if lease.state == "live"]

    def _live(self, action: str, presented: Fence) -> LeaseRow:
        row = fence.live(self._ledger.of_scope(presented.scope), presented, self._ledger.moment)
        if isinstance(row, StaleLeaseError):
            self._ledger.refuse(Refused(row, Write("core", action, *presented, None, None, {})))
        return row

    def put_checkpoint(
        self, workflow: str, data: Any, *, lease: Fence | None, expected_sequence: int | None, rebind: bool
    ) -> Checkpoint:
        decided = self.put(workflow, data, lease, expected_sequence, rebind)
        return self._ledger.refuse(decided) if isinstance(decided, Refused) else decided

    def put(
        self, workflow: str, data: Any, lease: Fence | None, expected: int | None, rebind: bool
    ) -> Checkpoint | Refused:
        """The next checkpoint, or why there is none."""
        ledger, presented = self._ledger, lease or (None, None, None)
        write = Write("core", "checkpoint.put", *presented, workflow, expected, {"rebind": rebind})
        live = None if lease is None else fence.live(ledger.of_scope(lease.scope), lease, ledger.moment)
        if isinstance(live, StaleLeaseError):
            return Refused(live, write)
        kept = ledger.checkpoints.setdefault(workflow, [])
        sequence, _, held = kept[-1] if kept else (0, "", None)
        found = fence.Workflow(sequence, held.scope if held else None)
        error = fence.binding(workflow, found, lease, expected, rebind)
        if error is not None:
            return Refused(error, write if isinstance(error, StaleLeaseError) else None)
        kept.append((found.following, json.dumps(data), lease))
        ledger.tell(*fence.saved(workflow, found, lease, len(kept[-1][1])))
        return Checkpoint(workflow, found.following, data, utc(ledger.moment.wall_ns), *presented)

    def get_checkpoint(self, workflow: str) -> Checkpoint | None:
        kept = self._ledger.checkpoints.get(workflow)
        if not kept:
            return None
        sequence, data, held = kept[-1]
        return Checkpoint(workflow, sequence, json.loads(data), utc(0), *(held or (None, None, None)))

    def prune_checkpoints(self, keep: int, name: str | None) -> list[Pruned]:
        pruned = []
        for workflow in sorted(self._ledger.checkpoints) if name is None else [name]:
            kept = self._ledger.checkpoints.get(workflow, [])
            gone, kept[:] = kept[:-keep], kept[-keep:]
            if gone:
                pruned.append(Pruned(workflow, len(gone), gone[0][0], gone[-1][0]))
                detail = {"count": len(gone), "from_sequence": gone[0][0], "to_sequence": gone[-1][0]}
                self._ledger.tell(Happened("checkpoint.pruned", workflow=workflow, detail=detail))
        return pruned

    def effect(self, key: str, *, lease: Fence, request: Any) -> rules_effects.Acting:
        return rules_effects.Acting(self, self._ledger, key, lease, request)

    def resolve_effect(self, key: str, *, done: Any = NOTHING, retry: bool = False, by: str) -> None:
        assert retry is (done is NOTHING)
        rules_effects.resolve(self._ledger, key, done, by)

    def get_effect(self, key: str) -> Effect | None:
        return rules_effects.shown(self._ledger, key)
