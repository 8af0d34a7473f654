"""Holding a lease: it is kept alive while its holder lives, and the holder hears when it is lost.

``store.hold(…)`` is a block. Inside, the lease is renewed in the background;
leaving gives it back. A lease that is lost stays lost.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import suppress

from agent_checkpoint import leases, names, waiting
from agent_checkpoint.database import Terms
from agent_checkpoint.errors import AgentCheckpointError, ReentrancyError, StaleLeaseError
from agent_checkpoint.heart import Pulse
from agent_checkpoint.names import NS
from agent_checkpoint.rules.fence import STOP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, TypeVar

    from agent_checkpoint.acting import Acting, Resolution
    from agent_checkpoint.change import Changes
    from agent_checkpoint.heart import Heart
    from agent_checkpoint.holders import Holders
    from agent_checkpoint.records import Effect, Fence, Lease, LeaseRow
    from agent_checkpoint.rules.grant import Ask

    AnyHeld = TypeVar("AnyHeld", bound="Held")

# A hundred years: what is longer is a mistake, or means None.
LONGEST_LIFE_SECONDS = 100 * 366 * 86_400

# Why a holder takes a lease for lost, whatever the store says; others wait for it still.
OURS = ("expired", "max-lifetime", "guard-died")
# What is lost already is not waited for.
LOST = Terms(within=0.5)

_WHY = {
    "expired": "was not renewed in time",
    "guard-died": "was given up with its command, whose guard was killed",
    "max-lifetime": "reached the longest life that its holder gave it",
    "superseded": "was superseded by a later grant",
    "released": "was released by somebody else",
}


class Held:
    """A lease in its holder's hands; a write that presents it (``lease=``) is protected."""

    def __init__(self, hold: Hold, lease: Lease, asked_at: int, lives: Callable[[], bool]) -> None:
        self.lease = lease
        """The lease as it was granted."""
        self._hold = hold
        self._clock = hold.changes.database.clock
        self._pid = os.getpid()
        me = weakref.ref(self)  # all that the heart has of us: a dropped object ends the renewal

        def on_lost(reason: str) -> None:
            held = me()
            if held is not None and held._hold.on_lost is not None and held._pid == os.getpid():
                _call(held._hold.on_lost, held, reason)

        self._pulse = Pulse(lease, asked_at, hold.max_lifetime_ns, lambda: me() is not None and lives(), on_lost)

    @property
    def scope(self) -> str:
        """What is protected."""
        return self.lease.scope

    @property
    def owner(self) -> str:
        """The label of who asked for it."""
        return self.lease.owner

    @property
    def token(self) -> int:
        """The fencing token."""
        return self.lease.token

    @property
    def slot(self) -> int:
        """Which of the scope's leases it is; 0 where a scope has one."""
        return self.lease.slot

    @property
    def fence(self) -> Fence:
        """What a protected write presents."""
        return self.lease.fence

    @property
    def lost(self) -> threading.Event:
        """Set as soon as the lease is known to be lost, by the deadline at the latest; never cleared."""
        return self._pulse.lost

    @property
    def lost_reason(self) -> str | None:
        """expired, superseded, released, … or max-lifetime; None while it is held."""
        return self._pulse.lost_reason

    @property
    def heartbeat_gap(self) -> float:
        """The longest time between two heartbeats so far, in seconds; with the one that lasts still."""
        return self._pulse.gap_ns(self._clock.ticks_ns()) / NS

    @property
    def deadline_ns(self) -> int:
        """When it is lost without another heartbeat: ticks of the store's clock, earlier than the store's own."""
        return self._pulse.deadline

    def remaining(self) -> float:
        """Seconds until the deadline, 0.0 when it is lost or was given back. Asks nobody, the database neither."""
        if self.lost.is_set() or self._pulse.ended:
            return 0.0
        return max(0.0, (self._pulse.deadline - self._clock.ticks_ns()) / NS)

    def bind(self, **more: Any) -> None:
        """Put more about the process on record, such as ``supervised=True``: it is not proven dead from outside then.

        Raises:
            StaleLeaseError: it is lost.
        """
        database = self._hold.changes.database
        leases.bind(self._hold.changes, self.fence, database.identify(**more))

    def declare_lost(self, reason: str) -> None:
        """Take it for lost, for a reason of one's own: it is not renewed any more, and ``on_lost`` is called."""
        self._pulse.lose(reason, self._clock.ticks_ns())

    def on_extended(self, call: Callable[[int], object]) -> None:
        """Call this from the heartbeat thread with each new deadline (``deadline_ns``); it must not wait."""
        self._pulse.on_extended = call

    def _check_deadline(self) -> None:
        now = self._clock.ticks_ns()
        if now >= self._pulse.deadline and not self.lost.is_set():
            self._pulse.lose("max-lifetime" if self._pulse.until == self._pulse.deadline else "expired", now)
        if self.lost.is_set():
            raise self._stale()

    def confirm(self) -> None:
        """``check`` for a fraction of the cost, without the lease as an answer: for where it is asked often.

        It reads one row in the calling thread, in asyncio too.

        Raises:
            StaleLeaseError: it is lost, for good; stop.
            StorageError: the store cannot be asked.
        """
        self._check_deadline()
        if not leases.is_live(self._hold.changes.database, self.fence):
            self._check_store()

    def _check_store(self) -> Lease:
        try:
            check = leases.check_own if self._pid == os.getpid() else leases.check
            return check(self._hold.changes.database, self.fence)
        except StaleLeaseError as stale:
            self._pulse.lose(stale.reason, self._clock.ticks_ns())
            stale.heartbeat_gap = stale.facts["heartbeat_gap"] = self.heartbeat_gap
            raise

    def _stale(self) -> StaleLeaseError:
        reason = self.lost_reason or "released"
        why = _WHY.get(reason, f"is lost: {reason}")
        return StaleLeaseError(
            f"the lease of {self.owner!r} on scope {self.scope!r} with token {self.token} {why}; "
            f"the longest gap between its heartbeats was {self.heartbeat_gap:.1f} s of a ttl of "
            f"{self.lease.ttl_seconds:g} s",
            hint=STOP,
            reason=reason,
            scope=self.scope,
            owner=self.owner,
            token=self.token,
            heartbeat_gap=self.heartbeat_gap,
        )

    def __repr__(self) -> str:
        if self._pulse.ended:
            state = "given back"
        else:
            state = f"lost: {self.lost_reason}" if self.lost.is_set() else f"{self.remaining():.1f} s left"
        return f"{type(self).__name__}({self.scope!r}, {self.owner!r}, token {self.token}, {state})"


class HeldLease(Held):
    """What ``with store.hold(…)`` gives."""

    def effect(
        self, key: str, *, request: Any = None, resolve: Callable[[Effect], Resolution | None] | None = None
    ) -> Acting:
        """See ``StateStore.effect``: under this lease."""
        from agent_checkpoint.acting import Acting

        return Acting(self._hold.changes, key, self, request, resolve)

    def check(self) -> Lease:
        """Make sure that the lease is held, before what cannot be undone; the lease as the store has it.

        First the deadline, which needs no database, then the store.

        Raises:
            StaleLeaseError: it is lost, for good; stop. ``heartbeat_gap`` says how long nobody renewed it.
            StorageError: the store cannot be asked.
        """
        self._check_deadline()
        return self._check_store()


class Hold:
    """A lease for the length of a ``with`` block."""

    def __init__(
        self,
        changes: Changes,
        heart: Heart,
        holders: Holders,
        ask: Ask,
        wait_seconds: float,
        on_lost: Callable[[Any, str], object] | None,
        max_lifetime_seconds: float | None,
    ) -> None:
        self.changes = changes
        self.on_lost = on_lost
        self.thread_bound = True
        """Whether it is renewed only while the thread that entered the block lives; else until the block is left."""
        self.max_lifetime_ns = None if max_lifetime_seconds is None else _lifetime_ns(max_lifetime_seconds)
        self._heart = heart
        self._holders = holders
        self._ask = ask
        self._wait_seconds = names.wait_seconds(wait_seconds)
        self._held: Held | None = None
        self._entered = threading.Lock()
        self._granted: LeaseRow | None = None
        self._pid = 0

    def __enter__(self) -> HeldLease:
        waiter = self.waiter()
        owner = weakref.ref(threading.current_thread())
        bound = self.thread_bound
        try:
            lease = waiting.wait(waiter, self.changes.database.clock.sleep)
            return self.start(HeldLease(self, lease, waiter.asked_at, lambda: not bound or _is_alive(owner())))
        except BaseException:
            self.give_up(waiter)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        try:
            held = self.stop()
            if held is not None:
                self.give_back(held, kind is None)
        except AgentCheckpointError:
            raise
        except BaseException:  # interrupted: it may not have been released
            self._take_back()
            raise

    def waiter(self, holder: object = None) -> waiting.Waiter:
        """Who asks for the lease: bound to this process.

        Raises:
            ReentrancyError: the block is entered already.
        """
        if not self._entered.acquire(blocking=False):
            raise ReentrancyError(
                f"this block of scope {self._ask.scope!r} is entered already",
                hint="call store.hold() again for another block",
                scope=self._ask.scope,
            )
        ask = self._ask._replace(process=self.changes.database.identify())
        return waiting.Waiter(self.changes, ask, self._wait_seconds, self._holders, holder)

    def start(self, held: AnyHeld) -> AnyHeld:
        """Renew what was granted.

        Raises:
            RuntimeError: there can be no more threads.
        """
        self._granted, self._pid = held.lease.row, held._pid
        self._held = held
        self._heart.add(held._pulse)
        return held

    def give_up(self, waiter: waiting.Waiter) -> None:
        """Undo a beginning: no lease, no place in the queue, no renewal."""
        self.stop()
        waiter.leave()

    def stop(self) -> Held | None:
        """Renew it no more; None when there is nothing to give back, as in a forked child."""
        held, self._held = self._held, None
        if held is not None and held._pid == os.getpid():
            self._heart.remove(held._pulse)
        else:
            held = None
        if self._entered.locked():
            self._entered.release()
        return held

    def _take_back(self) -> None:
        granted = self._granted
        if granted is not None and self._pid == os.getpid():
            self.stop()
            with suppress(AgentCheckpointError):
                leases.take_back(self.changes, granted)

    def give_back(self, held: Held, tell: bool) -> None:
        """Release it; with ``tell`` raise what went wrong, as when the lease was lost."""
        self._holders.forget(held.scope, held.token)
        if held.lost.is_set():
            if held.lost_reason in OURS:  # the store may know nothing of it
                with suppress(AgentCheckpointError):
                    leases.release(self.changes, held.fence, held._pulse.summary(), LOST)
            if tell:
                raise held._stale()
            return
        try:
            leases.release(self.changes, held.fence, held._pulse.summary())
        except AgentCheckpointError:
            if tell:  # else what the block raised is the news; the ttl ends the lease
                raise


def _lifetime_ns(seconds: float) -> int:
    given = names.real("max_lifetime_seconds", seconds)
    if given <= 0:
        names.invalid("max_lifetime_seconds", "must be more than 0 seconds")
    if given > LONGEST_LIFE_SECONDS:
        names.invalid("max_lifetime_seconds", f"must be at most {LONGEST_LIFE_SECONDS} seconds; None for no end")
    return int(given * NS)


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _call(on_lost: Callable[[Any, str], object], held: Held, reason: str) -> None:
    """Call it in a thread of its own: no lock is held, and no heartbeat waits for it."""

    def call() -> None:
        try:
            on_lost(held, reason)
        except Exception:
            logging.getLogger("agent_checkpoint").exception("on_lost of %r failed", held)

    thread = threading.Thread(target=call, name="agent-checkpoint-lost", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if thread.ident is not None:  # it runs: somebody's signal handler raised here
            raise
        call()  # the interpreter is about to end
