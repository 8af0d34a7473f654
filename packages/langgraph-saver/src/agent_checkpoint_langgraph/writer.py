"""Where saves meet the store: one at a time in the calling thread, or many in one commit for asyncio.

The group is whatever came while the commit before was under way; nobody waits
for it to fill up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from agent_checkpoint import Outcome
from agent_checkpoint_langgraph.saving import ParentGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent_checkpoint import FencedWrite, StateStore

# Saves in one commit at most.
GROUP = 64
# How often somebody looks who waits for the writer to have nothing to do.
LOOK_SECONDS = 0.001
# What a save builds on was gone so many times in a row: another program is deleting all the time.
TRIES = 5


class Job(Protocol):
    """A save: planned without the lock, written behind it, settled after its commit."""

    def planned(self) -> FencedWrite:
        """The write."""

    def settle(self, answer: Any) -> None:
        """It is committed."""

    def retries(self) -> None:
        """It is about to be planned anew."""


class Submitted(NamedTuple):
    """A save that somebody awaits."""

    job: Job
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]


class Writer:
    """Saves what it is given, in the order in which it was given it."""

    def __init__(self, store: StateStore, prepare: Callable[[], None]) -> None:
        self._store = store
        self._prepare = prepare
        self._lock = Lock()
        self._waiting: deque[Submitted] = deque()
        self._busy = False
        self._thread: ThreadPoolExecutor | None = None

    def save(self, job: Job) -> Any:
        """Save it now, in this thread; its answer."""
        self._prepare()
        (outcome,) = self._run([job])
        if outcome.error is not None:
            raise outcome.error
        return outcome.answer

    def submit(self, job: Job) -> asyncio.Future[Any]:
        """Save it in the writer's thread. Cancelled before its turn, it is not saved."""
        loop = asyncio.get_running_loop()
        submitted = Submitted(job, loop, loop.create_future())
        with self._lock:
            if not self._busy:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-checkpoint-langgraph")
                self._thread.submit(self._work)  # may fail where there can be no more threads
                self._busy = True
            self._waiting.append(submitted)
        return submitted.done

    async def settled(self) -> None:
        """Until everything that was submitted so far is saved."""
        while self._busy:
            await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Let what was given come to its end."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _work(self) -> None:
        while group := self._next_group():
            wanted = [submitted for submitted in group if not submitted.done.cancelled()]
            try:
                self._prepare()
                outcomes: Sequence[Outcome] = self._run([submitted.job for submitted in wanted])
            except BaseException as error:  # whatever it is, it is theirs who wait
                outcomes = [Outcome(None, error)] * len(wanted)  # type: ignore[arg-type]
            # One call wakes a loop for all that is its own.
            told: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Outcome]]] = {}
            for submitted, outcome in zip(wanted, outcomes, strict=True):
                told.setdefault(submitted.loop, []).append((submitted.done, outcome))
            for loop, done in told.items():
                with suppress(RuntimeError):  # it is closed: nobody waits any more
                    loop.call_soon_threadsafe(_tell, done)

    def _next_group(self) -> list[Submitted]:
        with self._lock:
            group = [self._waiting.popleft() for _ in range(min(GROUP, len(self._waiting)))]
            self._busy = bool(group)
            return group

    def _run(self, jobs: Sequence[Job], tries: int = TRIES) -> list[Outcome]:
        """Save them in one commit; an outcome for each."""
        outcomes: list[Outcome | None] = []
        writes: list[FencedWrite] = []
        for job in jobs:
            try:
                writes.append(job.planned())
                outcomes.append(None)
            except Exception as error:
                outcomes.append(Outcome(None, error))
        ran = iter(self._store.write_all(writes))
        return [outcome or self._settled(job, next(ran), tries) for job, outcome in zip(jobs, outcomes, strict=True)]

    def _settled(self, job: Job, outcome: Outcome, tries: int) -> Outcome:
        if outcome.error is None:
            job.settle(outcome.answer)
        elif isinstance(outcome.error, ParentGone) and tries:
            job.retries()
            (outcome,) = self._run([job], tries - 1)
        return outcome


def _tell(done: Sequence[tuple[asyncio.Future[Any], Outcome]]) -> None:
    for future, outcome in done:
        if future.cancelled():
            continue
        if outcome.error is None:
            future.set_result(outcome.answer)
        else:
            future.set_exception(outcome.error)
