"""Checkpoints on their way from one store to another, as lines of JSON that hang together by hashes."""

from __future__ import annotations

import json

from agent_checkpoint import names, payload
from agent_checkpoint.archive import Chain
from agent_checkpoint.errors import InvalidInputError, NotFoundError, StorageCorruptError
from agent_checkpoint.ledger import checkpoints as rows
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Reader, Row

FORMAT = "agent-checkpoint checkpoints, version 1"
COLUMNS = ("workflow", "sequence", "saved_at_ns", "scope", "owner", "token", "data")
# Checkpoints that are read at once.
PAGE = 50
EXPORT_AGAIN = "export it again where it came from, and bring the file here whole"


class Imported(Record):
    """A workflow that was taken over: its checkpoints keep their sequences."""

    workflow: str
    checkpoints: int
    from_sequence: int
    to_sequence: int


def export(database: Database, workflow: str | None) -> Iterator[str]:
    """The checkpoints of one workflow or of all, a line each; the first line says what it is, the last how many.

    Raises:
        NotFoundError: the workflow has no checkpoint.
    """
    if workflow is not None:
        names.name("workflow", workflow)
    with database.read() as reader:
        chosen = rows.workflows(reader) if workflow is None else [workflow]
        if workflow is not None and not rows.standing(reader, workflow).sequence:
            raise NotFoundError(f"workflow {workflow!r} has no checkpoint", workflow=workflow)
    return _lines(database, chosen)


def _lines(database: Database, chosen: Sequence[str]) -> Iterator[str]:
    chain, count = Chain(), 0
    yield chain.line({"format": FORMAT, "store": database.name})
    for name in chosen:
        sequence = 0
        while page := _page(database, name, sequence):
            for row in page:
                *facts, data = row
                yield chain.line(dict(zip(COLUMNS, (*facts, payload.decode(data)), strict=True)))
            count, sequence = count + len(page), page[-1][1]
    yield chain.line({"checkpoints": count})


def take_over(changes: Changes, lines: Iterable[str], max_bytes: int) -> list[Imported]:
    """Write exported checkpoints: all of a workflow in one transaction, none before every line was checked.

    Those that are here as they are there stay: whoever was killed on the way does the same again.

    Raises:
        StorageCorruptError: they are not as they were exported.
        InvalidInputError: a workflow has other checkpoints here.
    """
    workflows: dict[str, list[Row]] = {}
    for row in _checked(lines, max_bytes):
        workflows.setdefault(row[0], []).append(row)
    for found in workflows.values():
        found.sort(key=lambda row: row[1])
    with changes.database.read() as reader:
        for name, found in workflows.items():
            _is_here(reader, name, found)
    return [_write(changes, name, found) for name, found in workflows.items()]


def _page(database: Database, workflow: str, sequence: int) -> list[Row]:
    with database.read() as reader:
        return rows.page(reader, workflow, sequence, PAGE)


def _checked(lines: Iterable[str], max_bytes: int) -> list[Row]:
    chain, found, number, ended = Chain(), [], 0, False
    known: set[Row] = set()
    try:
        for number, line in enumerate(lines, start=1):
            value = chain.check(line)
            if ended or (number == 1) is not (value.get("format") == FORMAT):
                raise ValueError
            if "workflow" in value:
                found.append(_row(value, max_bytes))
                if found[-1][:2] in known:
                    raise ValueError
                known.add(found[-1][:2])
            elif number > 1:
                ended = value["checkpoints"] == len(found)
                if not ended:
                    raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise StorageCorruptError(
            f"line {number} is not as it was exported; nothing was written", hint=EXPORT_AGAIN, line=number
        ) from None
    if not ended:
        raise StorageCorruptError(
            f"the export ends after line {number}, before its last one; nothing was written",
            hint=EXPORT_AGAIN,
            line=number,
        )
    return found


def _row(value: dict[str, Any], max_bytes: int) -> Row:
    workflow, sequence, saved_at, scope, owner, token, data = (value[column] for column in COLUMNS)
    names.name("workflow", workflow)
    names.integer("sequence", sequence, 1)
    names.integer("saved_at_ns", saved_at, 0)
    if scope is not None:
        names.name("scope", scope)
        names.name("owner", owner)
        names.integer("token", token, 1)
    return (workflow, sequence, saved_at, scope, owner, token, payload.encode("data", data, max_bytes))


def _write(changes: Changes, workflow: str, found: list[Row]) -> Imported:
    imported = Imported(workflow, len(found), found[0][1], found[-1][1])

    def decide(change: Change) -> Imported:
        if _is_here(change.transaction, workflow, found):
            return imported
        rows.take_over(change.transaction, found)
        detail = {
            "count": imported.checkpoints,
            "from_sequence": imported.from_sequence,
            "to_sequence": imported.to_sequence,
        }
        change.happened.append(Happened("checkpoint.imported", workflow=workflow, detail=detail))
        return imported

    return changes.run((f"workflow:{workflow}",), decide)  # type: ignore[no-any-return]


def _is_here(reader: Reader, workflow: str, found: list[Row]) -> bool:
    """Whether these checkpoints are here as they are there; other ones of the workflow must not be."""
    last = rows.standing(reader, workflow).sequence
    if last and list(map(_sorted, rows.page(reader, workflow, 0, len(found)))) != list(map(_sorted, found)):
        names.invalid("workflow", f"{workflow!r} has checkpoints of its own here, up to sequence {last}")
    return last > 0


def _sorted(row: Row) -> Row:
    """A row as it comes back from an export: there the keys of objects are in order."""
    return (*row[:-1], json.dumps(payload.decode(row[-1]), sort_keys=True))
