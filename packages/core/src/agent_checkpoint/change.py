"""The one path of every change.

Vetoes, lock, clock, rows, rule, writes, commit, then the news, and only then
the answers: a refusal never aborts its neighbours in a group, and is raised
only after the commit that put it on record. The check and the write are always
in the same transaction; a check in an earlier one proves nothing.
"""

from __future__ import annotations

from time import monotonic, sleep

from agent_checkpoint.database import ORDINARY
from agent_checkpoint.errors import (
    FenceRefusedError,
    OutcomeUnknownError,
    StaleLeaseError,
    StorageBusyError,
    StorageError,
)
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.ledger import refusals
from agent_checkpoint.plugins import refuse_inside_hook
from agent_checkpoint.record import Record
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules.decision import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from agent_checkpoint.database import Database, Terms, Transaction
    from agent_checkpoint.errors import AgentCheckpointError
    from agent_checkpoint.notifier import Notifier
    from agent_checkpoint.plugins import Plugins
    from agent_checkpoint.records import Event, Happened, Write

    Decide = Callable[["Change"], Any]

# Between two tries of a change that an accident has undone.
PAUSE_SECONDS = 0.02


class Change(Record):
    """What a decision works on: the transaction, and the events it causes.

    ``shared`` is for what the changes of one transaction need not find out again.
    """

    transaction: Transaction
    happened: list[Happened]
    shared: dict[Any, Any]


class Item(Record):
    """One change of a group: the locks it needs, how it is decided, the write it is.

    ``decide(change)`` returns the answer or ``Refused``, or raises; it may be
    called again, after what it wrote was undone. ``write`` is what plugins may
    veto; None for changes that are not protected writes.
    """

    locks: tuple[str, ...]
    decide: Decide
    write: Write | None = None


class Outcome(Record):
    """What became of an item: an answer, or the error to raise."""

    answer: Any
    error: Exception | None = None


class Changes:
    """Runs changes against one database, with one set of plugins."""

    def __init__(self, database: Database, plugins: Plugins | Notifier, max_payload_bytes: int) -> None:
        self.database = database
        self._plugins = plugins
        self.max_payload_bytes = max_payload_bytes
        """The largest encoded checkpoint that is taken."""

    def run(
        self,
        locks: tuple[str, ...],
        decide: Decide,
        write: Write | None = None,
        terms: Terms = ORDINARY,
    ) -> Any:
        """Run one change; its answer, or its error raised after the commit.

        ``locks`` are sorted. ``decide(change)`` returns the answer, or
        ``Refused``; when a refusal cannot be recorded, it is raised all the
        same. ``write`` is what plugins may veto: the protected write it is.
        """
        refuse_inside_hook()
        veto = None if write is None else self._plugins.check_fence(write)
        return self._run(locks, decide, write, veto, terms)

    def veto(self, write: Write) -> FenceRefusedError | None:
        """What a plugin has against a write; asked before any lock is taken."""
        refuse_inside_hook()
        return self._plugins.check_fence(write)

    def run_all(self, items: Sequence[Item]) -> list[Outcome]:
        """Run changes in one commit; an outcome for each, in order, none raised.

        When one fails inside the group, nothing of the group is written and
        each item runs again alone. Where it is the database that failed, it may
        have ended the transaction by itself, and the rest of the group would
        have been written outside of it.
        """
        refuse_inside_hook()
        asked = [(item, item.write and self._plugins.check_fence(item.write)) for item in items]
        locks = sorted({lock for item in items for lock in item.locks})
        telling = self._plugins.listening()
        answers: list[Any] = []
        transaction = self.database.transaction(locks)
        try:
            with transaction:
                together = Change._make((transaction, [], {}))
                for item, veto in asked:
                    answers.append(item.decide(together) if veto is None else Refused(veto, item.write))
                    record_refusal(together, answers[-1])
                told = event_log.record(transaction, together.happened, telling)
        except (StorageBusyError, OutcomeUnknownError) as error:
            # Not again: it may have happened. What was refused, is refused all the same.
            vetoes = [veto and Refused(veto, item.write) for item, veto in asked]
            known = [*answers, *vetoes[len(answers) :]]
            return [Outcome(None, _unrecorded(each) if isinstance(each, Refused) else error) for each in known]
        except Exception:
            return [self._alone(item, veto) for item, veto in asked]
        except BaseException:
            transaction.leave()
            raise
        self._plugins.tell(told)
        return [_outcome(answer) for answer in answers]

    def opened(self, item: Item) -> Iterator[Change]:
        """One change whose body is the caller's ``with`` block, as ``contextmanager`` takes it.

        ``item.decide`` refuses or lets the block run; an exception in the block
        rolls everything back.
        """
        refuse_inside_hook()
        veto = item.write and self._plugins.check_fence(item.write)
        telling = self._plugins.listening()
        answer: Any = None if veto is None else Refused(veto, item.write)
        transaction = self.database.transaction(sorted(item.locks))
        try:
            with transaction:
                change = Change._make((transaction, [], {}))
                if veto is None:
                    answer = item.decide(change)
                if not isinstance(answer, Refused):
                    yield change
                told = _write_down(change, answer, telling)
        except StorageError:
            if isinstance(answer, Refused):
                raise _unrecorded(answer) from None
            raise
        except BaseException:
            transaction.leave()
            raise
        self._plugins.tell(told)
        if isinstance(answer, Refused):
            raise answer.error

    def _run(
        self,
        locks: tuple[str, ...],
        decide: Decide,
        write: Write | None,
        veto: FenceRefusedError | None,
        terms: Terms = ORDINARY,
    ) -> Any:
        """Run it; what a lost server or a deadlock has surely undone, again."""
        telling = self._plugins.listening()
        until = monotonic() + self.database.patience_seconds
        while True:
            # A veto stands, whether the lock is to be had or not.
            answer: Any = None if veto is None else Refused(veto, write)
            transaction = self.database.transaction(locks, terms)
            try:
                with transaction:
                    change = Change._make((transaction, [], {}))
                    if veto is None:
                        answer = decide(change)
                    told = _write_down(change, answer, telling)
                break
            except StorageError as error:
                if not error.undone or monotonic() >= until:
                    if isinstance(answer, Refused):
                        raise _unrecorded(answer) from None
                    raise
            except BaseException:
                # Whoever catches an interrupt may save the state of the work, while its traceback has the transaction.
                transaction.leave()
                raise
            sleep(PAUSE_SECONDS)
        if told:
            self._plugins.tell(told)
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def _alone(self, item: Item, veto: FenceRefusedError | None) -> Outcome:
        try:
            return Outcome(self._run(tuple(sorted(item.locks)), item.decide, item.write, veto))
        except Exception as error:
            return Outcome(None, error)


def _write_down(change: Change, answer: Any, telling: bool) -> list[Event]:
    """Write what an answer leaves behind, a refusal included; the events to tell after the commit."""
    if isinstance(answer, Refused):
        record_refusal(change, answer)
    return event_log.record(change.transaction, change.happened, telling)


def _outcome(answer: Any) -> Outcome:
    return Outcome(None, answer.error) if isinstance(answer, Refused) else Outcome._make((answer, None))


def record_refusal(change: Change, refused: Any) -> None:
    """Write down a refusal, as a part of a change; anything else is no refusal."""
    if not isinstance(refused, Refused):
        return
    for row in refused.rows:
        lease_rows.save(change.transaction, row)
    change.happened.extend(refused.events)
    write = refused.write
    if write is None:
        return
    # A write without a fence is counted under the scope that it lacked.
    scope = write.scope or refused.error.facts.get("protected_by") or ""
    # Each reason is counted apart: a veto must not keep a later stale write out of the log.
    vetoed = isinstance(refused.error, FenceRefusedError)
    reason = f"vetoed by {refused.error.facts['plugin']}" if vetoed else refused.error.facts["reason"]
    if refusals.count(change.transaction, scope, write.token, write.action, reason) == 1:
        change.happened.append(fencing.refusal(write, refused.error, scope or None))


def _unrecorded(refused: Refused) -> AgentCheckpointError:
    error = refused.error
    if isinstance(error, (StaleLeaseError, FenceRefusedError)):
        error.recorded = False
        error.facts["recorded"] = False
    return error
