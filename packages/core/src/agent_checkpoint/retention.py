"""What is kept, and for how long: a policy that lives in the store, and is applied when somebody asks for it.

``checkpoints.keep_last``: so many checkpoints of each workflow.
``events.days``: events that are older (from one day on: by whole days, UTC) go to
a file in the folder ``events.archive_to``. ``holders``: whoever holds a lease applies the policy now
and then, in the background. Adapters' packages add rules of their own.
"""

from __future__ import annotations

import os
from datetime import datetime, timezone
from itertools import count

from agent_checkpoint import archive, checkpoints, names, payload
from agent_checkpoint.errors import AgentCheckpointError, InvalidInputError
from agent_checkpoint.ledger import checkpoints as checkpoint_rows
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import retention as rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Reader
    from agent_checkpoint.store import StateStore

    Apply = Callable[[StateStore, Any, bool], int]

KEEP_LAST, DAYS, ARCHIVE_TO, HOLDERS = "checkpoints.keep_last", "events.days", "events.archive_to", "holders"
# Those of core.
OURS = (KEEP_LAST, DAYS, ARCHIVE_TO, HOLDERS)
# Where installed adapters name what applies a rule of theirs.
GROUP = "agent_checkpoint.retention"
DAY_NS = 86_400 * names.NS
# How often a holder applies the policy, where it says so.
HOLDERS_EVERY_NS = 600 * names.NS
# Longer than anybody keeps a log.
MOST_DAYS = 36_500


class Freed(Record):
    """What a rule removed, or would; ``archive`` is the file that events went to."""

    rule: str
    removed: int
    archive: str | None = None


def policy(database: Database) -> dict[str, Any]:
    """Every rule that is set."""
    with database.read() as reader:
        return rows.rules(reader)


def set_rule(changes: Changes, rule: str, value: Any) -> dict[str, Any]:
    """Set a rule, or with None forget it; the policy then.

    Raises:
        InvalidInputError: there is no such rule, or the value breaks it.
    """
    names.name("rule", rule)
    if value is not None:
        value = _valid(rule, value)
    elif rule not in OURS and rule not in policy(changes.database):  # which an adapter that is gone may have set
        _found(rule)

    def decide(change: Change) -> dict[str, Any]:
        before = rows.rules(change.transaction).get(rule)
        if value is None:
            rows.unset(change.transaction, rule)
        else:
            rows.set_rule(change.transaction, rule, payload.encode("value", value))
        if value != before:
            detail = {"rule": rule, "value": value, "previous": before}
            change.happened.append(Happened("store.retention-set", detail=detail))
        return rows.rules(change.transaction)

    return changes.run(("retention",), decide)  # type: ignore[no-any-return]


def apply(store: StateStore, changes: Changes, dry_run: bool) -> list[Freed]:
    """Apply every rule; what each removed, or with ``dry_run`` would remove.

    A rule that fails keeps no other from being applied; its error is raised in the end.
    """
    names.flag("dry_run", dry_run)
    freed: list[Freed] = []
    failed: list[Exception] = []
    for rule, value in policy(changes.database).items():
        if rule in (ARCHIVE_TO, HOLDERS):
            continue  # they say how
        try:
            freed.append(_apply(store, changes, rule, value, dry_run))
        except Exception as error:
            if isinstance(error, AgentCheckpointError):
                error.facts["retention"] = rule
            failed.append(error)
    if failed:
        raise failed[0]
    return freed


def _apply(store: StateStore, changes: Changes, rule: str, value: Any, dry_run: bool) -> Freed:
    if rule == KEEP_LAST:
        pruned = checkpoints.prune(changes, changes.database, value, None, dry_run)
        return Freed(rule, sum(each.removed for each in pruned))
    if rule == DAYS:
        return _archive(changes, value, dry_run)
    return Freed(rule, _found(rule)(store, value, dry_run))


def is_due(database: Database, last_ticks: int | None) -> bool:
    """Whether holders are to apply the policy, and have not done so for a while."""
    waited = last_ticks is None or database.clock.ticks_ns() - last_ticks >= HOLDERS_EVERY_NS
    return waited and policy(database).get(HOLDERS) is True


def apply_quietly(store: StateStore, changes: Changes) -> None:
    """``apply`` for a thread of its own: what goes wrong is logged, and tried again later."""
    try:
        apply(store, changes, dry_run=False)
    except Exception:
        import logging

        logging.getLogger("agent_checkpoint").warning("the retention policy could not be applied", exc_info=True)


def growth(reader: Reader) -> dict[str, Any]:
    """How many events and checkpoints came in the last day, the policy, and what core's rules would remove now."""
    events, saved = rows.grown(reader, reader.moment.wall_ns - DAY_NS)
    rules, free = rows.rules(reader), {}
    if KEEP_LAST in rules:
        spans = (
            checkpoint_rows.span_to_prune(reader, name, rules[KEEP_LAST]) for name in checkpoint_rows.workflows(reader)
        )
        free[KEEP_LAST] = sum(count for count, _, _ in spans)
    if DAYS in rules:
        free[DAYS] = _overdue(reader, _before_ns(reader, rules[DAYS]))
    return {"events_a_day": events, "checkpoints_a_day": saved, "policy": rules, "would_remove": free}


def _before_ns(reader: Reader, days: float) -> int:
    """Since when events are kept."""
    before_ns = reader.moment.wall_ns - int(days * DAY_NS)
    # A file a day, however often the policy is applied.
    return before_ns - before_ns % DAY_NS if days >= 1 else before_ns


def _overdue(reader: Reader, before_ns: int) -> int:
    return rows.events_up_to(reader, event_log.up_to(reader, before_ns))


def _archive(changes: Changes, days: float, dry_run: bool) -> Freed:
    with changes.database.read() as reader:
        folder = rows.rules(reader).get(ARCHIVE_TO)
        before_ns = _before_ns(reader, days)
        overdue = _overdue(reader, before_ns)
    if folder is None:
        names.invalid(ARCHIVE_TO, "is not set: events are removed only into a file")
    if dry_run or not overdue:
        return Freed(DAYS, overdue)
    before = datetime.fromtimestamp(before_ns / names.NS, timezone.utc)
    path = _free_name(folder, f"events-before-{before:%Y%m%dT%H%M%S.%fZ}")
    written = archive.archive(changes, before, path, lambda _: None)
    return Freed(DAYS, written.events, written.file)


def _free_name(folder: str, stem: str) -> str:
    """A file that is not there: that of today may be another store's, or of a call that was killed."""
    paths = (os.path.join(folder, f"{stem}{f'-{number}' if number else ''}.jsonl") for number in count())
    return next(path for path in paths if not os.path.lexists(path))


def _valid(rule: str, value: Any) -> Any:
    if rule == KEEP_LAST:
        return names.integer(rule, value, 1)
    if rule == DAYS:
        days = names.real(rule, value)
        if not 0 <= days <= MOST_DAYS:
            names.invalid(rule, f"must be from 0 to {MOST_DAYS} days")
        return value
    if rule == HOLDERS:
        if type(value) is not bool:
            names.invalid(rule, "must be true or false")
        return value
    if rule == ARCHIVE_TO:
        if not (isinstance(value, str) and os.path.isabs(value) and os.path.isdir(value)):
            names.invalid(rule, "must be the absolute path of a folder that is there")
        return value
    _found(rule)
    days = names.real(rule, value)
    if not 0 < days <= MOST_DAYS:
        names.invalid(rule, f"must be more than 0 and at most {MOST_DAYS} days")
    return value


def _found(rule: str) -> Apply:
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=GROUP, name=rule))
    if not found:
        known = ", ".join(OURS)
        raise InvalidInputError(
            f"rule: there is no rule {rule!r}; core has {known}, installed adapters have theirs", field="rule"
        )
    return found[0].load()  # type: ignore[no-any-return]
