"""Taking the lease of a name for the length of a block, and what happens when it is lost inside."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint_prefect import context
from agent_checkpoint_prefect.cancel import TaskInterrupter, ThreadInterrupter
from agent_checkpoint_prefect.errors import LeaseLostError, LeaseReentrancyError
from agent_checkpoint_prefect.leases import FencedLease
from agent_checkpoint_prefect.stores import awaited
from agent_checkpoint_prefect.telling import logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

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

    def lease(self) -> tuple[FencedLease, dict[str, Any], dict[str, Any]]:
        """The lease before it is granted, the options of its hold, and what is put on record with it.

        Raises:
            LeaseReentrancyError: this run holds the name already.
        """
        mine = context.held.get({}).get((self.store.database, self.scope))
        if mine is not None and not mine.released:
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
        return lease, options, metadata


def acquire(ask: Ask) -> FencedLease:
    """Take the lease.

    Raises:
        LeaseHeldError, WaitTimeoutError: another one holds it.
    """
    lease, options, _ = ask.lease()
    with suppress(LeaseHeldError) if ask.wait_seconds else _nothing():
        return _granted(lease, ask.store.hold(ask.scope, on_lost=lease.on_lost, **options))
    with _told_after(ask):
        hold = ask.store.hold(ask.scope, on_lost=lease.on_lost, wait_seconds=ask.wait_seconds, **options)
        return _granted(lease, hold)


async def aacquire(ask: Ask) -> FencedLease:
    """See ``acquire``."""
    lease, options, _ = ask.lease()
    store = awaited(ask.store)
    with suppress(LeaseHeldError) if ask.wait_seconds else _nothing():
        return await _agranted(lease, store.hold(ask.scope, on_lost=lease.on_lost, **options))
    with _told_after(ask):
        hold = store.hold(ask.scope, on_lost=lease.on_lost, wait_seconds=ask.wait_seconds, **options)
        return await _agranted(lease, hold)


@contextmanager
def block(ask: Ask, on_lost: str) -> Iterator[FencedLease]:
    """Hold the lease for the length of a ``with`` block."""
    lease = acquire(ask)
    interrupter = ThreadInterrupter() if on_lost == "cancel" else None
    try:
        if interrupter is not None:
            lease.when_lost(interrupter.strike)
        yield lease
    except BaseException as error:
        _over(interrupter)
        lease.release()
        if interrupter is not None and interrupter.caused(error):
            raise lease.lost_error() from None
        raise
    else:
        _over(interrupter)
        lost = lease.lost
        lease.release()
        _tell_loss(lease, lost, on_lost)


@asynccontextmanager
async def ablock(ask: Ask, on_lost: str) -> AsyncIterator[FencedLease]:
    """See ``block``."""
    lease = await aacquire(ask)
    interrupter = TaskInterrupter() if on_lost == "cancel" else None
    try:
        if interrupter is not None:
            lease.when_lost(interrupter.strike)
        yield lease
    except BaseException as error:
        _over(interrupter)
        await lease.arelease()
        if interrupter is not None and interrupter.caused(error):
            raise lease.lost_error() from None
        raise
    else:
        _over(interrupter)
        lost = lease.lost
        await lease.arelease()
        _tell_loss(lease, lost, on_lost)


def _over(interrupter: ThreadInterrupter | TaskInterrupter | None) -> None:
    """End the interrupting; an interruption that comes just now is heard as the others are."""
    if interrupter is not None:
        with suppress(LeaseLostError):
            interrupter.over()


def _tell_loss(lease: FencedLease, lost: bool, on_lost: str) -> None:
    if lost and on_lost == "warn":
        logger().warning("%s", lease.lost_error())
    elif lost:
        raise lease.lost_error()


def _granted(lease: FencedLease, hold: Any) -> FencedLease:
    return lease.start(hold, hold.__enter__())


async def _agranted(lease: FencedLease, hold: Any) -> FencedLease:
    return lease.start(hold, await hold.__aenter__())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _told_after(ask: Ask) -> Iterator[None]:
    """Say in the run's log who is waited for, once that takes its time."""
    log = logger()

    def tell() -> None:
        holder = ask.store.get_lease(ask.scope)
        who = f"held by {holder.owner} with token {holder.token}" if holder else "others are ahead in the queue"
        log.info("waiting for %r for %.0f s: %s", ask.name, PATIENCE, who)

    if ask.wait_seconds <= PATIENCE:
        yield
        return
    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
