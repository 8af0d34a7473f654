"""Where saves meet the store: one at a time in the calling thread, or many in one commit for asyncio.

The group is whatever came while the commit before was under way; nobody waits
for it to fill up.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from agent_checkpoint import Outcome
from agent_checkpoint_langgraph.saving import ParentGone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent_checkpoint import FencedWrite, StateStore

# Saves in one commit at most.
GROUP = 64
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


class Writer:
    """Saves what it is given, in the order in which it was given it."""

    def __init__(self, store: StateStore, prepare: Callable[[], None]) -> None:
        self._store = store
        self._prepare = prepare
        self._lock = Lock()
        self._waiting: deque[tuple[Job, Future[Any]]] = deque()
        self._busy = False
        self._thread: ThreadPoolExecutor | None = None

    def save(self, job: Job) -> Any:
        """Save it now, in this thread; its answer."""
        self._prepare()
        (outcome,) = self._run([job])
        if outcome.error is not None:
            raise outcome.error
        return outcome.answer

    def submit(self, job: Job) -> Future[Any]:
        """Save it in the writer's thread. Cancelled before its turn, it is not saved."""
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.append((job, future))
            idle, self._busy = not self._busy, True
            if idle:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-checkpoint-langgraph")
                self._thread.submit(self._work)
        return future

    def close(self) -> None:
        """Let what was given come to its end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _work(self) -> None:
        while group := self._next_group():
            jobs = [(job, future) for job, future in group if future.set_running_or_notify_cancel()]
            try:
                self._prepare()
                outcomes: Sequence[Outcome] = self._run([job for job, _ in jobs])
            except Exception as error:
                outcomes = [Outcome(None, error)] * len(jobs)
            for (_, future), outcome in zip(jobs, outcomes, strict=True):
                if outcome.error is None:
                    future.set_result(outcome.answer)
                else:
                    future.set_exception(outcome.error)

    def _next_group(self) -> list[tuple[Job, Future[Any]]]:
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
