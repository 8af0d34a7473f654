"""The locks of Prefect's result records: what a ``LockManager`` has to answer.

Prefect names a holder by an id that it makes for each transaction. A lease that
this process holds for one is kept here by place, scope and holder; so a copy of
the block, as in a task that was pickled and came back, knows it too.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_checkpoint import (
    AgentCheckpointError,
    FencedWrite,
    LeaseHeldError,
    ReentrancyError,
    StateStore,
    WaitTimeoutError,
)
from agent_checkpoint_prefect import context, names
from agent_checkpoint_prefect.stores import awaited, blocking

if TYPE_CHECKING:
    from agent_checkpoint import Fence, Lease

Place = tuple[str, str, str]
"""Which store, which scope, which holder."""


class Record(NamedTuple):
    """A lease that this process holds for a transaction. ``hold`` renews it; None: it is over at ``until``."""

    hold: Any
    held: Any
    attempt: context.Attempt | None
    until: float = math.inf

    @property
    def fence(self) -> Fence:
        """What a protected write presents."""
        fence: Fence = self.held.fence
        return fence

    @property
    def over(self) -> bool:
        """Whether it is known to be over, though nobody gave it back."""
        return time.monotonic() >= self.until if self.hold is None else bool(self.held.lost.is_set())


_records: dict[Place, Record] = {}
# A transaction that ends without a release leaves its record here. Who has lost a lock is refused by its record, so
# it stays; but only so many of those that are over, the latest.
KEPT = 1_000


class RecordLocks(NamedTuple):
    """The locks of one namespace of a store. Times are seconds; None waits for ever."""

    store: StateStore
    namespace: str
    ttl_seconds: float
    timeout_seconds: float | None

    def acquire(self, key: str, holder: str, acquire_timeout: float | None, hold_timeout: float | None) -> bool:
        """Take the lock of a record; True also where the holder has it already.

        With an ``acquire_timeout`` False says that another one has it. Without
        one that is raised: Prefect does not look at the answer.

        Raises:
            WaitTimeoutError: another one has it, after the block's own timeout.
        """
        place, attempt = self._place(key, holder), context.attempt()
        if self._has(place):
            return True
        self._give_back_earlier(key, place, attempt)
        for wait in self._waits(acquire_timeout):
            try:
                if wait and _ends_by_itself(place):
                    asked_at = time.monotonic()
                    self.store.wait_until_free(place[1], wait)
                    wait = _left(wait, asked_at)
                if hold_timeout is None:
                    hold = self.store.hold(place[1], holder, **self._terms(self.ttl_seconds, wait))
                    _keep(place, Record(hold, hold.__enter__(), attempt))
                else:
                    lease = self.store.acquire(place[1], holder, **self._terms(hold_timeout, wait))
                    _keep(place, Record(None, lease, attempt, time.monotonic() + hold_timeout))
                return True
            except (LeaseHeldError, ReentrancyError) as error:
                if getattr(error, "owner", None) == holder:
                    return True  # in another process: a copy of the transaction
                refusal = error
        if acquire_timeout is None:
            raise refusal
        return False

    async def aacquire(self, key: str, holder: str, acquire_timeout: float | None, hold_timeout: float | None) -> bool:
        """See ``acquire``."""
        place, attempt = self._place(key, holder), context.attempt()
        if self._has(place):
            return True
        self._give_back_earlier(key, place, attempt)
        store = awaited(self.store)
        for wait in self._waits(acquire_timeout):
            try:
                if wait and _ends_by_itself(place):
                    asked_at = time.monotonic()
                    await store.wait_until_free(place[1], wait)
                    wait = _left(wait, asked_at)
                if hold_timeout is None:
                    hold = store.hold(place[1], holder, **self._terms(self.ttl_seconds, wait))
                    _keep(place, Record(hold, await hold.__aenter__(), attempt))
                else:
                    lease = await store.acquire(place[1], holder, **self._terms(hold_timeout, wait))
                    _keep(place, Record(None, lease, attempt, time.monotonic() + hold_timeout))
                return True
            except (LeaseHeldError, ReentrancyError) as error:
                if getattr(error, "owner", None) == holder:
                    return True
                refusal = error
        if acquire_timeout is None:
            raise refusal
        return False

    def _give_back_earlier(self, key: str, place: Place, attempt: context.Attempt | None) -> None:
        """Give back what earlier attempts at the same run left.

        Prefect takes the lock before it looks for the record, and forgets it
        when that does not come to an end, as by a timeout.
        """
        if attempt is None or attempt.number < 2:
            return
        for at, record in list(_records.items()):
            if at[:2] == place[:2] and attempt.follows(record.attempt):
                self.release(key, at[2])

    def release(self, key: str, holder: str) -> None:
        """Give the lock of a record back, if this process took it. Never raises: what was lost is over already."""
        place = self._place(key, holder)
        record = _records.pop(place, None)
        with suppress(AgentCheckpointError):
            if record is not None and record.hold is not None:
                # Prefect releases in sync code what async code acquired.
                blocking(record.hold).__exit__(AgentCheckpointError, None, None)
            elif record is not None:
                self.store.release(*record.fence)

    def is_locked(self, key: str) -> bool:
        """Whether a lease of the record is live, or one that this process had was lost and not given back yet.

        The second so that Prefect asks who holds it, and refuses the result of
        the holder that lost it: it would write it where nobody holds the lock.
        """
        place = self._place(key, "")
        lease = self.store.get_lease(place[1])
        if lease is not None and lease.owner_alive is not False:
            return True
        return any(at[:2] == place[:2] and record.hold is not None for at, record in list(_records.items()))

    def is_holder(self, key: str, holder: str) -> bool:
        """Whether the holder's lease is live; plugins may veto, for Prefect asks before it writes a result."""
        place = self._place(key, holder)
        record = _records.get(place)
        if record is None:
            return self._lease(place) is not None
        (outcome,) = self.store.write_all([FencedWrite("prefect", "prefect.save-result", None, record)])
        return outcome.error is None

    def wait(self, key: str, timeout: float | None) -> bool:
        """Wait until nobody holds the lock of a record; whether that came true in time."""
        try:
            self.store.wait_until_free(self._place(key, "")[1], math.inf if timeout is None else timeout)
        except WaitTimeoutError:
            return False
        return True

    async def await_(self, key: str, timeout: float | None) -> bool:
        """See ``wait``."""
        try:
            scope = self._place(key, "")[1]
            await awaited(self.store).wait_until_free(scope, math.inf if timeout is None else timeout)
        except WaitTimeoutError:
            return False
        return True

    def fence(self, key: str, holder: str) -> Fence | None:
        """The fence of the lease that this process holds for a transaction."""
        record = _records.get(self._place(key, holder))
        return None if record is None else record.fence

    def _place(self, key: str, holder: str) -> Place:
        return self.store.database, names.scope_of_record(self.namespace, str(key)), holder

    def _waits(self, acquire_timeout: float | None) -> tuple[float, ...]:
        """How long to wait at each try: at first not at all, since the holder may be oneself."""
        wait = self.timeout_seconds if acquire_timeout is None else acquire_timeout
        if wait is None:
            return (0, math.inf)
        return (0, wait) if wait else (0,)

    def _terms(self, ttl_seconds: float, wait_seconds: float) -> dict[str, Any]:
        return {"ttl_seconds": ttl_seconds, "wait_seconds": wait_seconds, "metadata": context.run_metadata()}

    def _has(self, place: Place) -> bool:
        """Whether the holder has it already, here."""
        record = _records.get(place)
        if record is None:
            return False
        return self._lease(place) is not None if record.hold is None else not record.held.lost.is_set()

    def _lease(self, place: Place) -> Lease | None:
        """The live lease of a scope, if it is the holder's."""
        lease = self.store.get_lease(place[1])
        mine = lease is not None and lease.owner == place[2] and lease.owner_alive is not False
        return lease if mine else None


def _keep(place: Place, record: Record) -> None:
    _records[place] = record
    if len(_records) > KEPT:
        over = [at for at, each in list(_records.items()) if each.over]
        for at in over[:-KEPT]:
            _records.pop(at, None)


def _ends_by_itself(place: Place) -> bool:
    """Whether this process has a lock of fixed length there: core calls it waiting for oneself to queue behind it."""
    records = list(_records.items())
    return any(at[:2] == place[:2] and record.hold is None and not record.over for at, record in records)


def _left(wait: float, asked_at: float) -> float:
    return max(0.0, wait - (time.monotonic() - asked_at))


def _begin_in_child() -> None:
    _records.clear()  # they are its parent's


os.register_at_fork(after_in_child=_begin_in_child)
