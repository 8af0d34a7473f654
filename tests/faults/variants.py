"""Stores that are broken on purpose: a proof is worth what it catches of them.

``broken(name)`` breaks the store of this process for the length of a ``with``
block; processes that a test starts are given the name and do the same.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from agent_checkpoint import change, leases, names
from agent_checkpoint.change import Changes
from agent_checkpoint.errors import StaleLeaseError, StorageError
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.ledger.sums import Summed
from agent_checkpoint.process import ProcessTable
from agent_checkpoint.records import Fence
from agent_checkpoint.rules import expiry, fence, grant, queue
from agent_checkpoint.rules.decision import Refused
from agent_checkpoint.sqlite import transactions
from agent_checkpoint.sqlite.transactions import SqliteTransaction

Put = Callable[[object, str, object], None]
"""``put(owner, name, value)``: set an attribute until the block ends."""

# How long a check may be old when its write comes, in seconds: any time is too long.
GAP = 0.02


def no_fence_check(put: Put) -> None:
    """Whoever presents a fence that was granted once passes, superseded or not."""
    right = fence.live

    def live(rows: Any, presented: Fence, moment: Any) -> Any:
        found = right(rows, presented, moment)
        last = max(rows, key=lambda row: row.token, default=None)
        granted = last is not None and presented.token <= last.token
        return last if isinstance(found, StaleLeaseError) and granted else found

    put(fence, "live", live)


def check_in_another_transaction(put: Put) -> None:
    """The fence is checked, and what it protects is written in the next transaction."""
    right, live = Changes._run, fence.live
    passed: set[Fence] = set()

    def run(self: Changes, locks: Any, decide: Any, write: Any, veto: Any, *rest: Any) -> Any:
        if write is None or write.token is None:
            return right(self, locks, decide, write, veto, *rest)
        presented = Fence(write.scope, write.owner, write.token)
        try:
            leases.check(self.database, presented)
        except StaleLeaseError:
            return right(self, locks, decide, write, veto, *rest)  # refused, and on record
        time.sleep(random.uniform(0, GAP))
        passed.add(presented)
        try:
            return right(self, locks, decide, write, veto, *rest)
        finally:
            passed.discard(presented)

    def trusting(rows: Any, presented: Fence, moment: Any) -> Any:
        found = live(rows, presented, moment)
        return rows[0] if presented in passed and isinstance(found, StaleLeaseError) and rows else found

    put(Changes, "_run", run)
    put(fence, "live", trusting)


def token_reset_on_release(put: Put) -> None:
    """A released scope is forgotten, and counts from 1 again."""
    right = grant._grant

    def granting(rows: Any, *rest: Any) -> Any:
        return right([row for row in rows if row.state in ("live", "expired")], *rest)

    put(grant, "_grant", granting)
    put(lease_rows, "SAVE", lease_rows.SAVE.replace("WHERE leases.token <= excluded.token", ""))


def unsynced_grants(put: Put) -> None:
    """``synchronous=NORMAL`` for everything: a power cut takes back what was answered."""
    right = SqliteTransaction.__init__

    def init(self: SqliteTransaction, *arguments: Any) -> None:
        right(self, *arguments)
        self._terms = self._terms._replace(durable=False)

    put(SqliteTransaction, "__init__", init)


def commit_errors_swallowed(put: Put) -> None:
    """A commit that the disk refused is answered like one that was made."""
    right = SqliteTransaction._commit

    def commit(self: SqliteTransaction) -> None:
        with suppress(StorageError):
            right(self)

    put(SqliteTransaction, "_commit", commit)


def lost_answers_are_failures(put: Put) -> None:
    """A commit whose answer was lost is said to have failed, though it may be found on the disk later."""
    put(transactions, "translate_commit", transactions.translate)


def the_contenders_ttl(put: Put) -> None:
    """Whether a lease is over is judged by the ttl of whoever asks for its scope."""
    right = grant.acquire

    def acquire(standing: grant.Standing, ask: grant.Ask, moment: Any) -> Any:
        rows = [
            row._replace(ttl_ns=ask.ttl_ns, expires_at=row.expires_at - row.ttl_ns + ask.ttl_ns)
            for row in standing.rows
        ]
        return right(standing._replace(rows=rows), ask, moment)

    put(grant, "acquire", acquire)


def wall_clock(put: Put) -> None:
    """The wall clock decides, also where the monotonic one could."""
    right = expiry.remaining

    def remaining(row: Any, moment: Any) -> expiry.Remaining:
        return right(row, moment._replace(domain=""))

    everywhere(put, right, remaining)


def no_death_check(put: Put) -> None:
    """A waiter that died is waited for like one that lives."""
    right = queue.look
    put(queue, "look", lambda tickets, mine, moment, alive: right(tickets, mine, moment, {}))


def refusal_before_its_commit(put: Put) -> None:
    """A refusal is raised inside the transaction that would have put it on record."""
    right = change._write_down

    def write_down(changed: Any, answer: Any, telling: bool) -> Any:
        told = right(changed, answer, telling)
        if isinstance(answer, Refused):
            raise answer.error
        return told

    put(change, "_write_down", write_down)


def pid_alone(put: Put) -> None:
    """A process is known by its pid, whoever has it now."""

    def look(self: ProcessTable, pid: int, start_ticks: int | None) -> bool | None:
        return self.exists(pid)

    put(ProcessTable, "_look", look)


def unverified_sums(put: Put) -> None:
    """What the file says is taken for what was written."""
    put(Summed, "checked", lambda self, row: row[:-1])
    put(Summed, "numbered", lambda self, row: row[:-1])
    put(Summed, "check_text", lambda self, values, text, found: None)


def unchecked_values(put: Put) -> None:
    """Numbers are taken as they come."""
    everywhere(put, names.integer, lambda field, value, *rest: value)


VARIANTS: dict[str, Callable[[Put], None]] = {
    "no-fence-check": no_fence_check,
    "check-in-another-transaction": check_in_another_transaction,
    "token-reset-on-release": token_reset_on_release,
    "unsynced-grants": unsynced_grants,
    "commit-errors-swallowed": commit_errors_swallowed,
    "lost-answers-are-failures": lost_answers_are_failures,
    "the-contenders-ttl": the_contenders_ttl,
    "wall-clock": wall_clock,
    "no-death-check": no_death_check,
    "refusal-before-its-commit": refusal_before_its_commit,
    "pid-alone": pid_alone,
    "unverified-sums": unverified_sums,
    "unchecked-values": unchecked_values,
}


def everywhere(put: Put, right: object, wrong: object) -> None:
    """Put something in the place of a function in every module that imported it by name."""
    for module in [module for name, module in sys.modules.items() if name.startswith("agent_checkpoint")]:
        for name, value in list(vars(module).items()):
            if value is right:
                put(module, name, wrong)


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """The store of this process broken in that way; None leaves it right."""
    with ExitStack() as stack:
        if name is not None:
            VARIANTS[name](lambda owner, attribute, value: stack.enter_context(patch.object(owner, attribute, value)))
        yield
