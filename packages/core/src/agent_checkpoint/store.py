"""The one door: ``StateStore`` checks nothing and decides nothing, it delegates."""

from __future__ import annotations

import math
import os

from agent_checkpoint import checkpoints, leases, names, payload
from agent_checkpoint.change import Changes
from agent_checkpoint.clock import Clock
from agent_checkpoint.holders import Holders
from agent_checkpoint.names import NOTHING
from agent_checkpoint.plugins import Plugins, refuse_inside_hook
from agent_checkpoint.process import ProcessTable
from agent_checkpoint.rules.fence import presented, presented_by
from agent_checkpoint.sqlite.database import SqliteDatabase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime
    from types import TracebackType
    from typing import Any, Literal

    from agent_checkpoint.acting import Acting, Resolution
    from agent_checkpoint.archive import Archived
    from agent_checkpoint.change import Outcome
    from agent_checkpoint.database import Database, Reader
    from agent_checkpoint.exchange import Imported
    from agent_checkpoint.fenced import FencedWrite, Part
    from agent_checkpoint.heart import Heart
    from agent_checkpoint.holding import HeldLease, Hold
    from agent_checkpoint.records import (
        Check,
        Checkpoint,
        CheckpointInfo,
        Effect,
        Event,
        Fenced,
        Lease,
        Limit,
        Pruned,
        Status,
    )
    from agent_checkpoint.restoring import Backup, Restored
    from agent_checkpoint.retention import Freed
    from agent_checkpoint.rules.grant import Ask
    from agent_checkpoint.transfer import Moved
    from agent_checkpoint.waiting import Waiter

# Longest busy timeout: a day. SQLite counts it in 32-bit milliseconds.
MAX_BUSY_SECONDS = 86_400


class StateStore:
    """Leases, checkpoints and audit events in one database, shared by independent processes.

    Safe to use from many threads, after ``fork`` in parent and child, and by
    many processes at once. Nothing is opened before the first use.

    Args:
        database: the path of an SQLite file, or the URL of a database whose
            package is installed (``postgresql://…``).
        busy_timeout_seconds: how long a call waits for other writers, 0 to 86,400.
        synchronous: ``"full"``, or ``"normal"`` for those who accept that a power
            cut takes back the last commits, tokens and cursors included.
        plugins: plugin objects beside the installed ones.
        max_payload_bytes: the largest encoded checkpoint that is taken.
        clock: another clock, for tests (``agent_checkpoint.testing.FakeClock``).
        processes: other processes, for tests (``agent_checkpoint.testing.FakeProcesses``).

    Every method may raise a ``StorageError``; what else it raises it says.
    """

    def __init__(
        self,
        database: str | os.PathLike[str],
        *,
        busy_timeout_seconds: float = 10,
        synchronous: Literal["full", "normal"] = "full",
        plugins: Sequence[object] = (),
        max_payload_bytes: int = payload.MAX_BYTES,
        clock: Clock | None = None,
        processes: ProcessTable | None = None,
    ) -> None:
        names.integer("max_payload_bytes", max_payload_bytes, 1)
        self._clock = clock or Clock()
        processes = processes or ProcessTable(self._clock.domain)
        self._database = _open(database, busy_timeout_seconds, synchronous, self._clock, processes)
        self._plugins = Plugins(plugins)
        self._changes = Changes(self._database, self._plugins, max_payload_bytes)
        self._holders = Holders()
        self._hearts: dict[str, Heart] = {}
        self._kept_house_at: int | None = None

    @property
    def database(self) -> str:
        """The absolute path, or the URL without its password."""
        return self._database.name

    @property
    def address(self) -> str:
        """What another process opens the store by: the absolute path, or the URL with its password."""
        return self._database.address

    def initialize(self) -> bool:
        """Create the store and its folders, or bring its tables up to date; True when it was created.

        Idempotent, and safe with many at once.

        Raises:
            NotAStoreError: the file is somebody else's; it is left as it is.
            UnsupportedFilesystemError: locks cannot be trusted where it would live.
        """
        refuse_inside_hook()
        self._database.create()
        # Imported here, as elsewhere below: whoever finds a store made pays for what they use.
        from agent_checkpoint import migrations

        return migrations.migrate(self._changes, self._database.dialect, "core", self._database.core_migrations) == 0

    # Leases

    def acquire(
        self,
        scope: str,
        owner: str,
        ttl_seconds: float = 60,
        *,
        wait_seconds: float = 0,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        reclaim: bool = False,
        pid: int | None = None,
    ) -> Lease:
        """Grant ``scope`` to ``owner`` for ``ttl_seconds`` (0.1 s to 30 days) with a new, higher token.

        A live lease refuses everybody, its own owner included; with ``reclaim``
        the same owner takes its live lease back with a new token, which fences
        its earlier self. ``wait_seconds`` (infinity: for ever) is how long to
        queue for it, first come, first served. ``limit`` is how many leases the
        scope may have at once: its first grant fixes it, 1 without one.
        ``pid`` binds the lease to a process: it ends when that one is provably
        dead. ``metadata`` is a JSON object of at most 64 KiB.

        Raises:
            LeaseHeldError: another lease is live; ``retry_after`` says for how long still.
            WaitTimeoutError: it was not granted within ``wait_seconds``.
            ReentrancyError: this thread waits for a lease that it holds itself.
            InvalidInputError: a value breaks its rule, or the scope has another ``limit``.
        """
        process = "" if pid is None else self._database.identify(names.integer("pid", pid, 1))
        ask = leases.valid_ask(scope, owner, ttl_seconds, metadata, reclaim, limit, process)
        if names.wait_seconds(wait_seconds) == 0:
            return leases.acquire_now(self._changes, ask, self._holders.note)
        from agent_checkpoint import waiting

        return waiting.wait(self._waiter(ask, wait_seconds), self._clock.sleep)

    def hold(
        self,
        scope: str,
        owner: str,
        ttl_seconds: float = 30,
        *,
        wait_seconds: float = 0,
        limit: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_lost: Callable[[HeldLease, str], object] | None = None,
        max_lifetime_seconds: float | None = None,
    ) -> Hold:
        """A ``with`` block that holds a lease: granted at its start, renewed in the background, given back at its end.

        The lease is bound to this process, and renewed every third of its ttl
        while the block's thread lives and somebody has the held lease, for at
        most ``max_lifetime_seconds``. When it is lost, ``lost`` is set and
        ``on_lost(held_lease, reason)`` is called once, in a thread of its own,
        where it may use the store. The rest is as for ``acquire``.

        Raises:
            LeaseHeldError, WaitTimeoutError, ReentrancyError: at the start, as for ``acquire``.
            StaleLeaseError: at the end, when the lease was lost and the block raised nothing.
            InvalidInputError: a value breaks its rule.
        """
        from agent_checkpoint.holding import Hold

        ask = leases.valid_ask(scope, owner, ttl_seconds, metadata, False, limit)
        heart = self._beating()
        return Hold(self._changes, heart, self._holders, ask, wait_seconds, on_lost, max_lifetime_seconds)

    def heartbeat(self, scope: str, owner: str, token: int, ttl_seconds: float | None = None) -> Lease:
        """Extend a live lease to ``ttl_seconds`` from now; its token stays.

        Without ``ttl_seconds`` the lease keeps the length it was granted. Not for
        leases that somebody holds: whoever holds one does not hear of a shorter ttl.

        Raises:
            StaleLeaseError: the lease expired, was released or was superseded.
            InvalidInputError: a value breaks its rule.
        """
        return leases.heartbeat(self._changes, presented(scope, owner, token), ttl_seconds)

    def release(self, scope: str, owner: str, token: int) -> Lease:
        """End a live lease. A second release is stale.

        Raises:
            StaleLeaseError: the lease is not live any more.
            InvalidInputError: a value breaks its rule.
        """
        fence = presented(scope, owner, token)
        released = leases.release(self._changes, fence)
        self._holders.forget(fence.scope, fence.token)
        return released

    def expire(self, scope: str, owner: str, token: int, *, reason: str = "owner-dead") -> Lease:
        """End a live lease in the name of an owner that is known to be dead; ``reason`` goes on record.

        For supervisors. Where the lease is bound to a process this is done for you.

        Raises:
            StaleLeaseError: the lease is not live any more.
            InvalidInputError: a value breaks its rule.
        """
        return leases.expire(self._changes, presented(scope, owner, token), names.text("reason", reason))

    def set_limit(self, scope: str, limit: int) -> Limit:
        """Set how many leases a scope may have at once; those that are live stay.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        return leases.set_limit(self._changes, scope, limit)

    def sweep(self) -> list[Lease]:
        """Put on record which leases are over, by their time or since their process is dead; those.

        Nobody needs it to be granted a scope. It is for those who read the audit
        log, and made by ``hold`` and the command's ``doctor``, ``status`` and ``events --follow`` too.
        It waits 0.2 s for other writers, whatever the busy timeout: call it again.
        """
        return leases.sweep(self._changes)

    def wait_until_free(self, scope: str, wait_seconds: float = math.inf) -> None:
        """Wait until the scope has a free slot, without asking for it or queueing.

        Raises:
            WaitTimeoutError: it had none for ``wait_seconds``.
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        from agent_checkpoint import waiting

        waiting.until_free(waiting.FreeWaiter(self._database, scope, wait_seconds), self._clock.sleep)

    def check_lease(self, scope: str, owner: str, token: int) -> Lease:
        """The live lease that scope, owner and token match. Writes nothing.

        The answer may be old when you read it: what must not happen twice goes
        into a protected write, which checks in its own transaction.

        Raises:
            StaleLeaseError: there is no such live lease; ``reason`` says why.
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        return leases.check(self._database, presented(scope, owner, token))

    def check_scope(self, scope: str, lease: Fenced | None = None, *, required: bool = False) -> None:
        """Whether a write to what ``scope`` guards would be let pass now, under ``lease`` or under none.

        The rule is that of ``FencedWrite.scope``; without a lease a scope lets
        pass until its first grant, unless one is ``required``. Writes nothing.

        Raises:
            StaleLeaseError: it would be refused; ``reason`` says why.
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        fence = None if lease is None else presented_by(lease)
        leases.check_scope(self._database, names.name("scope", scope), fence, names.flag("required", required))

    def get_lease(self, scope: str, include_expired: bool = False) -> Lease | None:
        """The live lease of a scope, with ``include_expired`` the last one; None when there is none.

        Where a scope has several, the one that was granted last.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        return leases.find(self._database, scope, include_expired)

    def list_leases(self, include_expired: bool = False) -> list[Lease]:
        """The live leases of every scope, latest grant first; with ``include_expired`` the last of each slot."""
        refuse_inside_hook()
        return leases.everyone(self._database, include_expired)

    def force_release(self, scope: str, *, reason: str, token: int | None = None) -> Lease:
        """End a live lease against its owner's will; ``reason`` goes on record.

        With ``token`` only that lease, so that a healthy successor is not hit.

        Raises:
            NotFoundError: no lease is live in the scope; with several live ones ``token`` is needed.
            StaleLeaseError: the live lease is not the one with ``token``.
            InvalidInputError: a value breaks its rule.
        """
        return leases.force_release(self._changes, scope, reason, token)

    # Checkpoints

    def put_checkpoint(
        self,
        workflow: str,
        data: Any,
        *,
        lease_scope: str | None = None,
        owner: str | None = None,
        token: int | None = None,
        lease: Fenced | None = None,
        expected_sequence: int | None = None,
        rebind: bool = False,
    ) -> Checkpoint:
        """Save the next checkpoint of a workflow; ``data`` is any JSON value within the limits.

        Protected when it presents a fence: ``lease``, or ``lease_scope``,
        ``owner`` and ``token``. Once a workflow's latest checkpoint is
        protected by a scope, it takes only writes under a live lease of that
        scope, unless ``rebind`` moves it on purpose. ``expected_sequence`` is
        the sequence the writer read last; 0: only if there is none yet.

        Raises:
            StaleLeaseError: the fence matches no live lease, or the workflow is protected by another scope.
            SequenceConflictError: the workflow is not at ``expected_sequence``.
            FenceRefusedError: a plugin vetoed it.
            InvalidInputError: a value breaks its rule, or the fence is incomplete.
        """
        fence = checkpoints.fence_of(lease, lease_scope, owner, token)
        most = self._changes.max_payload_bytes
        save = checkpoints.valid_save(workflow, data, fence, expected_sequence, rebind, most)
        return checkpoints.put(self._changes, data, save)

    def get_checkpoint(self, workflow: str, *, sequence: int | None = None) -> Checkpoint | None:
        """The latest checkpoint of a workflow, or the one with ``sequence``; None when absent.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        return checkpoints.find(self._database, workflow, sequence)

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """The latest checkpoint of every workflow without its data, last saved first."""
        refuse_inside_hook()
        return checkpoints.latest_of_each(self._database)

    def checkpoint_history(self, workflow: str) -> list[CheckpointInfo]:
        """Every checkpoint of a workflow without its data, newest first; [] when there is none.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        return checkpoints.history(self._database, workflow)

    def prune_checkpoints(self, keep_last: int, workflow: str | None = None, dry_run: bool = False) -> list[Pruned]:
        """Remove all but the last ``keep_last`` (at least 1) checkpoints of one or every workflow.

        In short transactions, so that no heartbeat waits long; a call that is
        interrupted has removed the oldest ones. ``dry_run`` only counts.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        refuse_inside_hook()
        return checkpoints.prune(self._changes, self._database, keep_last, workflow, dry_run)

    # Effects

    def effect(
        self,
        key: str,
        *,
        lease: Fenced,
        request: Any = None,
        resolve: Callable[[Effect], Resolution | None] | None = None,
    ) -> Acting:
        """A ``with`` block around an action outside that must not happen twice.

        Inside, ``fresh`` is true for the one caller that may act, and has to say
        ``done(result)`` or ``failed()``; for others ``result`` is what was
        recorded. *Begun* is committed before the block runs, so whoever dies in
        it leaves an effect that is *unknown*: ``resolve(effect)``, which asks the
        system outside, may return a ``Resolution``; without one a person decides
        with ``resolve_effect``. ``request`` is a JSON value: the same key with
        another one is refused.

        Raises:
            StaleLeaseError: the lease is not live.
            EffectRunningError: it was begun under a lease that is live.
            EffectUnknownError: it was begun before, and nobody has told what became of it;
                at the end: the block ended without a word.
            EffectMismatchError: the key is known for another request.
            FenceRefusedError: a plugin vetoed it.
            InvalidInputError: a value breaks its rule.
        """
        from agent_checkpoint.acting import Acting

        return Acting(self._changes, key, lease, request, resolve)

    def resolve_effect(
        self,
        key: str,
        *,
        done: Any = NOTHING,
        retry: bool = False,
        by: str = "a person",
        begun_at: datetime | None = None,
    ) -> Effect:
        """Record what somebody found who looked whether an effect happened; the next caller goes by it.

        Either ``done``, the JSON result, since it happened; or ``retry``, since it surely did not.
        ``begun_at`` of the effect that was looked at makes sure that it is still the same try.

        Raises:
            NotFoundError: there is no such effect.
            EffectRunningError: the lease that began it is live: it may be under way.
            InvalidInputError: a value breaks its rule, what became of it is known already, or it was begun anew.
        """
        from agent_checkpoint import acting

        return acting.decide(self._changes, key, done, retry, names.text("by", by), begun_at)

    def get_effect(self, key: str) -> Effect | None:
        """An effect as it stands; None when it was never begun.

        Raises:
            InvalidInputError: a value breaks its rule.
        """
        from agent_checkpoint import effects

        refuse_inside_hook()
        return effects.find(self._database, key)

    def list_effects(self, limit: int = 100) -> list[Effect]:
        """The effects that were begun last, latest first, without their results."""
        from agent_checkpoint import effects

        refuse_inside_hook()
        return effects.latest(self._database, limit)

    def export_checkpoints(self, workflow: str | None = None) -> Iterator[str]:
        """The checkpoints of one workflow or of all as lines of JSON, which hang together by hashes.

        Raises:
            NotFoundError: the workflow has no checkpoint.
            InvalidInputError: a value breaks its rule.
        """
        from agent_checkpoint import exchange

        refuse_inside_hook()
        return exchange.export(self._database, workflow)

    def import_checkpoints(self, lines: Iterable[str]) -> list[Imported]:
        """Take over the checkpoints of another store; they keep their sequences. All lines are checked first.

        Those that are here already, as they are there, stay: it can be done again.

        Raises:
            StorageCorruptError: the lines are not as they were exported; nothing was written.
            InvalidInputError: a workflow has other checkpoints here, or a value breaks its rule.
        """
        from agent_checkpoint import exchange

        return exchange.take_over(self._changes, lines, self._changes.max_payload_bytes)

    # Audit and overview

    def events(
        self,
        limit: int = 100,
        after: str | None = None,
        scope: str | None = None,
        workflow: str | None = None,
        kind: str | None = None,
    ) -> list[Event]:
        """Audit events, oldest first: the last ``limit``, or the next ``limit`` behind the cursor ``after``.

        ``after="start"`` reads from the first event on; a reader that then goes
        on from the cursor of the last event it saw misses none.

        Raises:
            InvalidInputError: a value breaks its rule, or ``after`` is no cursor of this store.
        """
        from agent_checkpoint import journal

        refuse_inside_hook()
        return journal.events(self._database, limit, after, scope, workflow, kind)

    def archive_events(
        self, before: datetime, to: str | os.PathLike[str], progress: Callable[[int], object] | None = None
    ) -> Archived:
        """Move the audit log's part from before a time into a new file; what the file holds.

        Lines of JSON that hang together by hashes, synced and read back before
        anything is removed, in short transactions. ``events.archived`` stays in
        the log. ``agent_checkpoint.archive.verify`` reads a file again.
        ``progress(events written)`` is called now and then.

        Raises:
            InvalidInputError: the file is there already, or the time has no time zone.
        """
        from agent_checkpoint import archive

        refuse_inside_hook()
        return archive.archive(self._changes, before, os.fspath(to), progress or (lambda _: None))

    def retention(self) -> dict[str, Any]:
        """The rules of what is kept, and for how long, that were set."""
        from agent_checkpoint import retention

        refuse_inside_hook()
        return retention.policy(self._database)

    def set_retention(self, rule: str, value: Any) -> dict[str, Any]:
        """Set a rule of what is kept, or with None forget it; the rules then.

        ``checkpoints.keep_last`` (of each workflow), ``events.days`` with
        ``events.archive_to`` (a folder), ``holders`` (true: applied by who holds
        a lease, in the background), and what adapters add
        (``langgraph.thread_days``).

        Raises:
            InvalidInputError: there is no such rule, or the value breaks it.
        """
        from agent_checkpoint import retention

        refuse_inside_hook()
        return retention.set_rule(self._changes, rule, value)

    def apply_retention(self, dry_run: bool = False) -> list[Freed]:
        """Remove what the rules do not keep, in short transactions; with ``dry_run`` only count."""
        from agent_checkpoint import retention

        refuse_inside_hook()
        return retention.apply(self, self._changes, dry_run)

    def stamp(self) -> object:
        """A value that is another one after every commit of anybody, to compare with an earlier one.

        Many times cheaper than a read: for those who follow what happens.
        """
        refuse_inside_hook()
        return self._database.stamp()

    def status(self) -> Status:
        """Who owns what, until when, where each workflow stands, who was refused: one consistent look."""
        from agent_checkpoint import journal

        refuse_inside_hook()
        return journal.status(self._database)

    def doctor(self) -> list[Check]:
        """Is the store sound? One check a line; anything ``broken`` needs a person."""
        # Imported here: nobody else needs it, and the command starts faster without.
        from agent_checkpoint import doctor

        refuse_inside_hook()
        return doctor.examine(self._database, self._plugins)

    # For adapters

    def migrate(self, component: str, files: Mapping[str, Sequence[str | os.PathLike[str]]]) -> int:
        """Bring an adapter's own tables up to date; the version they were at before.

        ``files`` names, for each dialect (``sqlite``, ``postgresql``), the
        component's migrations ``0001_name.sql``, ``0002_name.sql``, … All that
        are missing run in one transaction; many at once do it once.

        Raises:
            NewerSchemaError: the tables are of a later version than ``files`` knows.
            InvalidInputError: no files for this database, or their numbers have a gap.
        """
        from agent_checkpoint import migrations

        return migrations.migrate(self._changes, self._database.dialect, component, files)

    def transaction(
        self,
        *,
        component: str,
        action: str,
        fence: Fenced | None = None,
        workflow: str | None = None,
        detail: Mapping[str, Any] | None = None,
        locks: Sequence[str] = (),
    ) -> AbstractContextManager[Part]:
        """A ``with`` block whose SQL commits together with the fence check and its audit events.

        An exception in the block rolls everything back. The block must not call
        the store.

        Raises:
            StaleLeaseError: the fence matches no live lease; the block does not run.
            FenceRefusedError: a plugin vetoed the write; the block does not run.
        """
        from agent_checkpoint import fenced

        return fenced.transaction(
            self._changes,
            fenced.FencedWrite(component, action, None, fence, workflow, dict(detail or {}), tuple(locks)),
        )

    def write_all(self, writes: Iterable[FencedWrite]) -> list[Outcome]:
        """Run many writes of adapters in one commit; an outcome for each, in order, none raised.

        A refused or failed write leaves its neighbours alone.
        """
        from agent_checkpoint import fenced

        return fenced.write_all(self._changes, writes)

    def read(self) -> AbstractContextManager[Reader]:
        """A ``with`` block that reads one state of the database with ``rows(sql, parameters)``."""
        refuse_inside_hook()
        return self._database.read()

    def shrink(self) -> int:
        """Give the space of what was removed back to the file system, in short transactions; how many bytes."""
        refuse_inside_hook()
        return self._database.shrink()

    def move_to(self, target: StateStore, progress: Callable[[str, int, int], object] | None = None) -> Moved:
        """Move everything into an empty place, in this database or another; this store takes no write afterwards.

        Events keep their order and their cursors, tokens and sequences go on.
        ``progress(table, rows copied, rows)`` is called now and then. A call
        that was killed is repeated with the same target. Adapters' packages
        must be installed here.

        Raises:
            LeaseHeldError: a lease is live; nothing was moved.
            StoreMovedError: it was moved elsewhere before.
            InvalidInputError: the target has a store, or an adapter's package is missing.
            StorageCorruptError: what arrived is not what was sent; nothing was moved.
        """
        from agent_checkpoint import transfer

        refuse_inside_hook()
        if not isinstance(target, StateStore):
            names.invalid("target", f"must be a StateStore, not {type(target).__name__}")
        return transfer.move(self._changes, target._changes, progress or (lambda *_: None))

    def backup(self, path: str | os.PathLike[str]) -> Backup:
        """Copy the store into a new file while others use it: consistent, checked, synced, for its owner only.

        Raises:
            InvalidInputError: the file is there already, or the store is on PostgreSQL, which has its own way.
        """
        from agent_checkpoint import restoring

        refuse_inside_hook()
        return restoring.backup(self._changes, os.fspath(path))

    def restore(self, path: str | os.PathLike[str]) -> Restored:
        """Put a backup in place of what is here. What was handed out since is not handed out again.

        Leases in the backup end (reason ``restored``), tokens and sequences go
        on behind those of the store that is replaced, what that one knows of
        effects stays. Other processes go on with what was restored.

        Raises:
            LeaseHeldError: a lease is live here; nothing was changed.
            NotAStoreError: the file is no backup of a store.
            StoreMovedError: this store was moved away.
        """
        from agent_checkpoint import restoring

        refuse_inside_hook()
        return restoring.restore(self._changes, os.fspath(path))

    def mark_restored(self) -> Restored:
        """For a store that was copied here by hand, or loaded from a dump: end its leases, set its counters.

        What the store that was here before had handed out is not known, so
        tokens, sequences and event ids go 1,000,000 ahead, tokens at least to
        the milliseconds since 1970.
        """
        from agent_checkpoint import restoring

        return restoring.mark(self._changes)

    def close(self) -> None:
        """Close the connections; idempotent. The store cannot be used afterwards."""
        self._database.close()

    def _waiter(self, ask: Ask, wait_seconds: float, holder: object = None) -> Waiter:
        from agent_checkpoint import waiting

        return waiting.Waiter(self._changes, ask, wait_seconds, self._holders, holder)

    def _beating(self) -> Heart:
        """The heart of this store; made by the first who needs it."""
        heart = self._hearts.get("the only")
        if heart is None:
            from agent_checkpoint.heart import Heart
            from agent_checkpoint.notifier import Notifier

            # In one step: of two threads that come at once both get the same.
            changes = Changes(self._database, Notifier(self._plugins), self._changes.max_payload_bytes)
            heart = self._hearts.setdefault("the only", Heart(changes, self._keep_house))
        return heart

    def _keep_house(self) -> None:
        """Where the policy says so, holders apply it: asked by the heart now and then, done in another thread."""
        from threading import Thread

        from agent_checkpoint import retention

        if retention.is_due(self._database, self._kept_house_at):
            self._kept_house_at = self._database.clock.ticks_ns()
            name = "agent-checkpoint-retention"
            Thread(target=retention.apply_quietly, args=(self, self._changes), name=name, daemon=True).start()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StateStore({self.database!r})"


def _open(
    database: str | os.PathLike[str],
    busy_timeout_seconds: float,
    synchronous: str,
    clock: Clock,
    processes: ProcessTable,
) -> Database:
    busy = names.real("busy_timeout_seconds", busy_timeout_seconds)
    if not 0 <= busy <= MAX_BUSY_SECONDS:
        names.invalid("busy_timeout_seconds", f"must be from 0 to {MAX_BUSY_SECONDS} seconds")
    if synchronous not in ("full", "normal"):
        names.invalid("synchronous", "must be 'full' or 'normal'")
    try:
        path = os.fspath(database)
    except TypeError:
        names.invalid("database", f"must be a path or a URL, not {type(database).__name__}")
    names.path("database", path)
    if path == ":memory:":
        names.invalid("database", "must be a file: other processes could not share a store in memory")
    if "://" in path:
        return _find_package(path)(path, busy_timeout_seconds=busy, synchronous=synchronous, clock=clock)
    try:
        # Sidecars stand beside the file itself, not beside a link to it.
        path = os.path.realpath(path)
    except OSError as error:
        names.invalid("database", f"cannot be made absolute: {error.strerror}")
    return SqliteDatabase(path, busy_timeout_seconds=busy, synchronous=synchronous, clock=clock, processes=processes)


def _find_package(url: str) -> Callable[..., Database]:
    """What opens databases of the URL's scheme: an entry point of an installed package."""
    from importlib.metadata import entry_points

    scheme = url.partition("://")[0]
    found = tuple(entry_points(group="agent_checkpoint.databases", name=scheme))
    if not found:
        names.invalid("database", f"no installed package opens {scheme}:// (for PostgreSQL: agent-checkpoint-postgres)")
    opener: Callable[..., Database] = found[0].load()
    return opener
