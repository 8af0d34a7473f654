"""Taking the lease of a name for the length of a block, and what happens when it is lost inside."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
import weakref
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_checkpoint import AgentCheckpointError, LeaseHeldError, StateStore
from agent_checkpoint_prefect import context
from agent_checkpoint_prefect.cancel import interrupter
from agent_checkpoint_prefect.errors import LeaseReentrancyError
from agent_checkpoint_prefect.leases import FencedLease
from agent_checkpoint_prefect.stores import awaited
from agent_checkpoint_prefect.telling import logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from agent_checkpoint_prefect.cancel import TaskInterrupter, ThreadInterrupter
    from agent_checkpoint_prefect.errors import LeaseLostError

# From so many seconds of waiting on, the log says who is waited for.
PATIENCE = 5.0


class Ask(NamedTuple):
    """What is asked for. ``wait_seconds`` is 0 for not at all, infinity for ever."""

    store: StateStore
    name: str
    scope: str
    ttl_seconds: float
    wait_seconds: float
    limit: int
    metadata: Mapping[str, Any]

    def left(self) -> FencedLease | None:
        """The lease of the name that an earlier attempt at this run took, and did not give back."""
        mine = context.lease_at(self.store.database, self.scope)
        attempt = None if mine is None else context.attempt()
        return mine if mine is not None and attempt is not None and attempt.follows(mine.attempt) else None

    def lease(self) -> tuple[FencedLease, dict[str, Any]]:
        """The lease before it is granted, and the options of its hold.

        Raises:
            LeaseReentrancyError: this run holds the name already.
        """
        mine = context.lease_at(self.store.database, self.scope)
        if mine is not None:
            raise LeaseReentrancyError(
                f"this run holds {self.name!r} already, with token {mine.token}, and would wait for itself",
                hint="use the lease that is held: current_lease()",
                scope=self.scope,
                owner=mine.owner,
                token=mine.token,
            )
        metadata = {**context.run_metadata(), **self.metadata}
        owner = str(metadata.get("task_run_name") or metadata.get("flow_run_name") or socket.gethostname())[:200]
        options = {
            "owner": f"{owner}:{os.getpid()}",
            "ttl_seconds": self.ttl_seconds,
            "limit": self.limit,
            "metadata": metadata,
        }
        lease = FencedLease(self.name, self.store, awaited(self.store), metadata)
        return lease, {**options, "on_lost": _weakly(lease)}


def acquire(ask: Ask) -> FencedLease:
    """Take the lease.

    Raises:
        LeaseHeldError, WaitTimeoutError: another one holds it.
    """
    left = ask.left()
    if left is not None:
        left.release()
    lease, options = ask.lease()
    with suppress(LeaseHeldError) if ask.wait_seconds else _nothing():
        return _granted(lease, ask.store.hold(ask.scope, **options))
    with _told_after(ask):
        return _granted(lease, ask.store.hold(ask.scope, wait_seconds=ask.wait_seconds, **options))


async def aacquire(ask: Ask) -> FencedLease:
    """See ``acquire``."""
    left = ask.left()
    if left is not None:
        await left.arelease()
    lease, options = ask.lease()
    store = awaited(ask.store)
    with suppress(LeaseHeldError) if ask.wait_seconds else _nothing():
        return await _agranted(lease, store.hold(ask.scope, **options))
    with _told_after(ask):
        return await _agranted(lease, store.hold(ask.scope, wait_seconds=ask.wait_seconds, **options))


@contextmanager
def block(ask: Ask, on_lost: str) -> Iterator[FencedLease]:
    """Hold the lease for the length of a ``with`` block."""
    lease = acquire(ask)
    struck = interrupter()
    error: BaseException | None = None
    try:
        try:
            _begin(lease, struck, on_lost)
            yield lease
        finally:
            struck.close()
    except BaseException as raised:
        error = raised
    struck.close()  # again: it may have been interrupted
    try:
        lost = lease.finish()
    finally:
        struck.end()
    _end(lease, lost, error, struck, on_lost)


@asynccontextmanager
async def ablock(ask: Ask, on_lost: str) -> AsyncIterator[FencedLease]:
    """See ``block``."""
    lease = await aacquire(ask)
    struck = interrupter()
    error: BaseException | None = None
    try:
        try:
            _begin(lease, struck, on_lost)
            yield lease
        finally:
            struck.close()
    except BaseException as raised:
        error = raised
    try:
        lost = await lease.afinish()
    finally:
        struck.end()
    _end(lease, lost, error, struck, on_lost)


def _begin(lease: FencedLease, struck: TaskInterrupter | ThreadInterrupter, on_lost: str) -> None:
    struck.begin()
    if on_lost == "cancel":
        lease.when_lost(struck)


def _end(
    lease: FencedLease,
    lost: LeaseLostError | None,
    error: BaseException | None,
    struck: TaskInterrupter | ThreadInterrupter,
    on_lost: str,
) -> None:
    """Raise what the block raised, or that it lost its lease."""
    if error is not None:
        if struck.caused(error):
            # A thread may have been interrupted just before the end of a block inside: dropping that one ends it.
            traceback.clear_frames(error.__traceback__)
            raise lost or lease.lost_error() from None
        raise error
    if lost is not None and on_lost == "warn":
        logger().warning("%s", lost)
    elif lost is not None:
        raise lost


def _granted(lease: FencedLease, hold: Any) -> FencedLease:
    try:
        return lease.start(hold, hold.__enter__())
    except BaseException:  # interrupted, it may have been granted all the same
        hold.__exit__(*sys.exc_info())
        raise


async def _agranted(lease: FencedLease, hold: Any) -> FencedLease:
    return lease.start(hold, await hold.__aenter__())


def _weakly(lease: FencedLease) -> Callable[[object, str], object]:
    """A lease that nobody has any more need not be told, nor be kept for it."""
    known = weakref.ref(lease)

    def tell(held: object, reason: str) -> None:
        lease = known()
        if lease is not None:
            lease.on_lost(held, reason)

    return tell


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _told_after(ask: Ask) -> Iterator[None]:
    """Say in the run's log who is waited for, once that takes its time."""
    log = logger()

    def tell() -> None:
        try:
            holder = ask.store.get_lease(ask.scope)
        except AgentCheckpointError:
            return  # the store was closed, or cannot be asked: whoever waits hears of that by itself
        who = f"held by {holder.owner} with token {holder.token}" if holder else "others are ahead in the queue"
        log.info("waiting for %r for %.0f s: %s", ask.name, PATIENCE, who)

    if ask.wait_seconds <= PATIENCE:
        yield
        return
    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
