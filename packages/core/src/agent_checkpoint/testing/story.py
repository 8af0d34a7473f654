"""The story of a zombie, on real processes: an agent is frozen under its lease, superseded, and woken."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agent_checkpoint.errors import (
    NotFoundError,
    StaleLeaseError,
    StorageBusyError,
    WaitTimeoutError,
)
from agent_checkpoint.names import invalid, real
from agent_checkpoint.store import StateStore
from agent_checkpoint.testing.agents import Agent, Ended
from agent_checkpoint.testing.freezing import LOOK_SECONDS, Frozen, freeze
from agent_checkpoint.testing.outcome import ZombieOutcome, is_mark, judged, shown
from agent_checkpoint.testing.pausing import GO_ON, PAUSED

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Literal, NoReturn

    from agent_checkpoint.records import Event, Lease
    from agent_checkpoint.testing.agents import Work

    Moment = Literal["granted", "paused"] | Callable[[StateStore], object]

SUCCESSOR = "successor"
REASON = "superseded by the zombie of a test"
# How long to wait for a lock that the frozen agent may sit on.
PROBE_SECONDS = 1.0
# How often the time between two attempts to freeze it is made four times as long.
LONGEST = 6
PAGE = 1_000


def zombie(
    agent: Work,
    *,
    db: str | os.PathLike[str],
    scope: str,
    freeze_when: Moment = "granted",
    take_over: Literal["force", "ttl"] = "force",
    successor: Work | None = None,
    acts: Callable[[], int] | None = None,
    timeout_seconds: float = 30,
) -> ZombieOutcome:
    """Run an agent, freeze it while it holds ``scope``, let another one take over, wake it; what became of it.

    ``agent`` is a list of words, or a function, which runs in a forked child;
    both find the store ``db`` in AGENT_CHECKPOINT_DB. The store is made if it
    is not there.

    Args:
        freeze_when: ``"granted"``, as soon as its lease is seen; ``"paused"``,
            where it calls ``pause_here()``; or a function of the store that is
            true when it shall be frozen.
        take_over: ``"force"`` ends its lease by ``force_release``; ``"ttl"``
            waits until it runs out.
        successor: who takes over and runs to its end before the agent is woken:
            words or a function; without one somebody acquires and releases.
        acts: counts what the agent has done outside the store.
        timeout_seconds: how long each step of the story may take.

    Nothing of it is left running, whatever happens.

    Raises:
        AssertionError: the story could not be told, for a reason that it says.
        InvalidInputError: a value breaks its rule.
    """
    __tracebackhide__ = True
    if freeze_when not in ("granted", "paused") and not callable(freeze_when):
        invalid("freeze_when", "must be 'granted', 'paused' or a function of the store")
    if take_over not in ("force", "ttl"):
        invalid("take_over", "must be 'force' or 'ttl'")
    if acts is not None and not callable(acts):
        invalid("acts", f"must be a function that counts, not {type(acts).__name__}")
    if real("timeout_seconds", timeout_seconds) <= 0:
        invalid("timeout_seconds", "must be more than 0")
    with (
        tempfile.TemporaryDirectory(prefix="zombie-") as folder,
        StateStore(db) as store,
        StateStore(db, busy_timeout_seconds=PROBE_SECONDS) as probe,
    ):
        store.initialize()
        story = _Story(Path(folder), store, probe, scope, timeout_seconds)
        return story.play(agent, freeze_when, take_over, successor, acts or (lambda: 0))


class _Story:
    def __init__(self, folder: Path, store: StateStore, probe: StateStore, scope: str, timeout_seconds: float) -> None:
        self._folder = folder
        self._store = store
        self._probe = probe
        self._scope = scope
        self._timeout = timeout_seconds
        self._begun_at = self._cursor()
        self._earlier = self._earlier_token()
        self._seen = 0
        self._bad_moments = 0

    def play(
        self,
        work: Work,
        freeze_when: Moment,
        take_over: str,
        successor: Work | None,
        acts: Callable[[], int],
    ) -> ZombieOutcome:
        __tracebackhide__ = True
        pause = self._folder / "pause"
        pause.mkdir()
        agent = Agent(work, self._folder / "agent", self._store.address, pause)
        try:
            frozen, lease = self._freeze(agent, freeze_when)
            with frozen:
                self._end_lease(lease, take_over)
                token, theirs = self._succeed(lease, successor)
                before = acts()
                _mark(self._store, "zombie.woken", lease)
                (pause / GO_ON).touch()
            ended = agent.wait(self._timeout)
            if ended is None:
                self._fail("did not end", f"after it was woken with token {lease.token}", agent.ended())
        finally:
            agent.end()
        late_acts = acts() - before
        _mark(self._store, "zombie.ended", lease)
        refused, late = judged(self._events(lease), self._scope, lease.token, token)
        return ZombieOutcome(self._scope, lease.token, token, refused, late, late_acts, ended, theirs)

    def _cursor(self) -> str:
        return next((event.cursor for event in self._store.events(1)), "start")

    def _earlier_token(self) -> int:
        latest = self._store.get_lease(self._scope, include_expired=True)
        if latest is not None and latest.state == "live":
            raise AssertionError(
                f"{self._scope!r} is held by {latest.owner!r} before the agent was started: release it, or take a store"
                " of the test's own, such as tmp_path / 'agents.db'"
            )
        return latest.token if latest else 0

    # Frozen

    def _freeze(self, agent: Agent, freeze_when: Moment) -> tuple[Frozen, Lease]:
        """Freeze it while it holds its lease, and nothing that a successor needs."""
        __tracebackhide__ = True
        deadline = time.monotonic() + self._timeout
        while True:
            lease = self._held()
            if lease is not None and self._is_moment(freeze_when):
                frozen = self._frozen(agent)
                if frozen is not None:
                    return frozen
            if agent.has_ended:
                self._fail("ended", self._why_not(freeze_when), agent.ended())
            if time.monotonic() > deadline:
                self._fail("was not frozen", self._why_not(freeze_when), agent.ended())
            # Longer each time: a program that sleeps may begin its sleep anew when it goes on.
            time.sleep(min(LOOK_SECONDS * 4 ** min(self._bad_moments, LONGEST), self._timeout / 10))

    def _held(self) -> Lease | None:
        """The lease of the agent, while it is live."""
        lease = self._store.get_lease(self._scope)
        if lease is None or lease.token <= self._earlier:
            return None
        self._seen = max(self._seen, lease.token)
        return lease

    def _is_moment(self, freeze_when: Moment) -> bool:
        if freeze_when == "paused":
            return (self._folder / "pause" / PAUSED).exists()
        return freeze_when == "granted" or bool(freeze_when(self._store))

    def _frozen(self, agent: Agent) -> tuple[Frozen, Lease] | None:
        """None when it was a bad moment: it went on, and may be frozen again."""
        try:
            frozen = freeze(agent.process, tree=True)
        except ProcessLookupError:
            return None
        lease = self._held()
        if lease is not None:
            try:
                _mark(self._probe, "zombie.frozen", lease)
                return frozen, lease
            except StorageBusyError:  # it sits on a lock
                self._bad_moments += 1
        frozen.thaw()
        return None

    def _why_not(self, freeze_when: Moment) -> str:
        latest = self._store.get_lease(self._scope, include_expired=True)
        token = max(self._seen, latest.token if latest else 0)
        if token <= self._earlier:
            others = ", ".join(repr(each.scope) for each in self._store.list_leases(include_expired=True))
            return (
                f"before it held a lease on {self._scope!r}: it must acquire that scope in {self._store.database},"
                f" which it finds in AGENT_CHECKPOINT_DB too; scopes that were granted there: {others or 'none'}"
            )
        if self._bad_moments:
            return (
                f"since with token {token} of {self._scope!r} it sat on a lock of the database each time, in which"
                " nobody could take over: let it freeze between its writes"
            )
        if freeze_when == "granted":
            return (
                f"before it could be frozen with token {token} of {self._scope!r}: call pause_here() in the step at"
                ' which it shall freeze, and give freeze_when="paused"'
            )
        what = "it never called pause_here()" if freeze_when == "paused" else "freeze_when(store) was never true"
        return f"before it could be frozen with token {token} of {self._scope!r}: {what} while it held the lease"

    # Superseded

    def _end_lease(self, lease: Lease, take_over: str) -> None:
        __tracebackhide__ = True
        if take_over == "ttl":
            try:
                self._store.wait_until_free(self._scope, self._timeout)
            except WaitTimeoutError:
                raise AssertionError(
                    f"the lease on {self._scope!r}, of {lease.ttl_seconds:g} s, did not run out within"
                    f' timeout_seconds={self._timeout:g}: give the agent a shorter ttl, or take_over="force"'
                ) from None
            return
        with suppress(NotFoundError, StaleLeaseError):  # it may have run out by itself
            self._store.force_release(self._scope, reason=REASON, token=lease.token)

    def _succeed(self, lease: Lease, successor: Work | None) -> tuple[int, Ended | None]:
        """Let somebody else work under the scope; the token, and how it ended."""
        __tracebackhide__ = True
        if successor is None:
            theirs = self._store.acquire(self._scope, SUCCESSOR, wait_seconds=self._timeout)
            self._store.release(*theirs.fence)
            return theirs.token, None
        other = Agent(successor, self._folder / "successor", self._store.address)
        try:
            ended = other.wait(self._timeout)
            if ended is None:
                self._fail("did not end", "while the agent was frozen", other.ended(), "successor")
        finally:
            other.end()
        latest = self._store.get_lease(self._scope, include_expired=True)
        if ended.returncode or latest is None or latest.token <= lease.token:
            why = f"with status {ended.returncode}; it must be granted {self._scope!r} and exit with 0"
            self._fail("ended", why, ended, "successor")
        return latest.token, ended

    # Told

    def _fail(self, what: str, why: str, ended: Ended, who: str = "agent") -> NoReturn:
        __tracebackhide__ = True
        seconds = "" if what == "ended" else f" within timeout_seconds={self._timeout:g}"
        status = f" with status {ended.returncode}," if what == "ended" and who == "agent" else ""
        separator = "," if seconds else ""
        raise AssertionError(f"the {who} {what}{status}{seconds}{separator} {why}{shown(ended)}")

    def _events(self, lease: Lease) -> list[Event]:
        """All since the beginning; a server may tell some of them a while later."""
        deadline = time.monotonic() + max(self._timeout, 1)
        while True:
            found, cursor = [], self._begun_at
            while more := self._store.events(PAGE, after=cursor):
                found += more
                cursor = more[-1].cursor
            if any(is_mark(event, "zombie.ended", lease.scope, lease.token) for event in found):
                return found
            if time.monotonic() > deadline:
                raise AssertionError("the database did not settle: somebody else keeps a transaction open in it")
            time.sleep(LOOK_SECONDS)


def _mark(store: StateStore, kind: str, lease: Lease) -> None:
    """A line in the audit log; it takes the locks that a successor needs."""
    locks = (f"scope:{lease.scope}",)
    with store.transaction(component="testing", action="zombie.mark", locks=locks) as part:
        part.event(kind, {"scope": lease.scope, "owner": lease.owner, "token": lease.token})
