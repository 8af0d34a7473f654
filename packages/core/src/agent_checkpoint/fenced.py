"""What adapters write: rows of their own tables, under core's fence, in core's one commit."""

from __future__ import annotations

from contextlib import contextmanager

from agent_checkpoint import leases, names, payload
from agent_checkpoint.change import Item, Outcome
from agent_checkpoint.errors import InvalidInputError, StaleLeaseError
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Fence, Happened, Write
from agent_checkpoint.rules import fence as fencing
from agent_checkpoint.rules.decision import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Parameters, Row
    from agent_checkpoint.records import Fenced, Moment


# The lease of a write that takes its scope: it is over with the transaction, whatever its length.
TAKEN_SECONDS = 60


# The fences that were found live in this transaction, and whether a scope ever was
# granted: only a write that takes a scope changes that.
LIVE = "live fences"
GRANTED = "granted scopes"


class FencedWrite(Record):
    """One write of an adapter, for ``write_all``.

    ``body(part)`` runs after the fence was found live in the same transaction;
    what it returns is the answer. Where another write of the group fails,
    everything is undone and it runs again. ``fence`` None makes it
    an unprotected write: whether that is allowed is the adapter's rule.
    ``locks`` are names (``kind:name``) that no two writers may hold at once,
    beside the fence's scope and the workflow, which are locked anyway.
    """

    component: str
    action: str
    body: Callable[[Part], Any] | None = None
    fence: Fenced | None = None
    workflow: str | None = None
    detail: dict[str, Any] = {}  # noqa: RUF012 -- a named tuple's default, never mutated
    locks: tuple[str, ...] = ()
    scope: str | None = None
    required: bool = False
    takes: str | None = None


class Part:
    """An adapter's hands inside a transaction of the store."""

    __slots__ = ("_change", "_write")

    def __init__(self, change: Change, write: Write) -> None:
        self._change = change
        self._write = write

    @property
    def moment(self) -> Moment:
        """The time of this change, read once after its locks."""
        return self._change.transaction.moment

    @property
    def shared(self) -> dict[Any, Any]:
        """What the writes of this component in one transaction need not find out again; gone with the transaction."""
        shared: dict[Any, Any] = self._change.shared.setdefault((self._write.component,), {})
        return shared

    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows of a query."""
        return self._change.transaction.rows(sql, parameters)

    def run(self, sql: str, parameters: Parameters = ()) -> int:
        """Execute one statement; the number of rows it touched."""
        return self._change.transaction.run(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        """Execute one statement for each set of parameters."""
        self._change.transaction.executemany(sql, parameters)

    def event(self, kind: str, detail: dict[str, Any] | None = None, *, sequence: int | None = None) -> None:
        """Append an audit event (``noun.verb-ed``) under the fence and workflow of this write."""
        names.name("kind", kind)
        encoded = payload.Encoded(detail or {})
        encoded.text = payload.encode("detail", detail or {})
        scope, owner, token, workflow = self._write[2:6]
        self._change.happened.append(Happened._make((kind, scope, owner, token, workflow, sequence, encoded)))


def write_all(changes: Changes, writes: Iterable[FencedWrite]) -> list[Outcome]:
    """Run many writes in one commit; an outcome for each, in order, none raised."""
    outcomes: list[Outcome | None] = []
    items: list[Item] = []
    for fenced in writes:
        try:
            items.append(_item(changes, fenced))
            outcomes.append(None)
        except InvalidInputError as error:
            outcomes.append(Outcome(None, error))
    ran = iter(changes.run_all(items))
    return [outcome or next(ran) for outcome in outcomes]


@contextmanager
def transaction(changes: Changes, fenced: FencedWrite) -> Iterator[Part]:
    """The one-item form: the body is the caller's ``with`` block."""
    write = _write(fenced)
    item = Item(_locks(fenced, write), lambda change: _refused(change, fenced, write), _protected(fenced, write))
    with contextmanager(changes.opened)(item) as change:
        yield Part(change, write)


def _item(changes: Changes, fenced: FencedWrite) -> Item:
    write = _write(fenced)

    def decide(change: Change) -> Any:
        if fenced.takes is not None and fenced.fence is None and (fenced.required or _was_granted(change, fenced)):
            return _run_taking(change, changes.database, fenced, write)
        return _refused(change, fenced, write) or _run(change, fenced, write)

    return Item._make((_locks(fenced, write), decide, _protected(fenced, write)))


def _run(change: Change, fenced: FencedWrite, write: Write) -> Any:
    return fenced.body(Part(change, write)) if fenced.body else None


def _run_taking(change: Change, database: Database, fenced: FencedWrite, write: Write) -> Any:
    """Run the body under a lease that begins and ends with it."""
    ask = leases.valid_ask(fenced.scope, fenced.takes, TAKEN_SECONDS, None)
    taken = leases.grant_in(change, database, ask)
    if isinstance(taken, Refused):
        return taken
    change.shared.pop(LIVE, None)
    change.shared.pop(GRANTED, None)
    answer = _run(change, fenced, write._replace(scope=taken.scope, owner=taken.owner, token=taken.token))
    leases.release_in(change, taken.row)
    return answer


def _refused(change: Change, fenced: FencedWrite, write: Write) -> Refused | None:
    fence = None
    if write.scope is not None and write.owner is not None and write.token is not None:
        fence = Fence(write.scope, write.owner, write.token)
    if fenced.scope is not None:
        granted = fence is None and not fenced.required and _was_granted(change, fenced)
        refusal = fencing.guard(granted, fenced.scope, fence, fenced.required)
        if refusal is not None:
            return Refused(refusal, write)
    if fence is None:
        return None
    live = change.shared.setdefault(LIVE, set())
    if fence not in live:
        found = fencing.live(
            lease_rows.of_scope(change.transaction, fence.scope, fence.token), fence, change.transaction.moment
        )
        if isinstance(found, StaleLeaseError):
            return Refused(found, write)
        live.add(fence)
    return None


def _was_granted(change: Change, fenced: FencedWrite) -> bool:
    """Whether the scope ever had a lease: its rows are never deleted."""
    if fenced.scope is None:
        return False
    known: dict[str, bool] = change.shared.setdefault(GRANTED, {})
    if fenced.scope not in known:
        known[fenced.scope] = bool(lease_rows.of_scope(change.transaction, fenced.scope))
    return known[fenced.scope]


def _protected(fenced: FencedWrite, write: Write) -> Write | None:
    """What plugins may veto: a write under a lease, its own included."""
    return write if fenced.fence or fenced.takes else None


def _write(fenced: FencedWrite) -> Write:
    component, action = names.name("component", fenced.component), names.name("action", fenced.action)
    workflow = None if fenced.workflow is None else names.name("workflow", fenced.workflow)
    if fenced.detail:
        payload.encode_object("detail", fenced.detail)
    if fenced.scope is not None:
        names.name("scope", fenced.scope)
    if fenced.takes is not None:
        names.name("takes", fenced.takes)
    scope, owner, token = None, None, None
    if fenced.fence is not None:
        scope, owner, token = fencing.presented_by(fenced.fence)
    return Write._make((component, action, scope, owner, token, workflow, None, fenced.detail))


def _locks(fenced: FencedWrite, write: Write) -> tuple[str, ...]:
    scope = () if write.scope is None else (f"scope:{write.scope}",)
    if fenced.scope is not None and fenced.scope != write.scope:
        scope = (*scope, f"scope:{fenced.scope}")
    workflow = () if write.workflow is None else (f"workflow:{write.workflow}",)
    return (*scope, *workflow, *fenced.locks)
