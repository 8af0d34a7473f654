"""The audit log's older part in a file: what is removed was written, synced and read back before.

An archive is lines of JSON. Each carries the hash of all up to it, so that a
line which was changed, lost or put elsewhere is found; the last one says how
many there are. Whoever is killed on the way has events in the log, in the file
or in both, never in neither. The counters of refused writes that belong to that
part go the same way.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from hashlib import sha256
from time import monotonic

from agent_checkpoint import names
from agent_checkpoint.database import Terms
from agent_checkpoint.errors import (
    NotFoundError,
    OutcomeUnknownError,
    StorageBusyError,
    StorageCorruptError,
    StorageError,
    StorageFullError,
)
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import refusals, sums
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened
from agent_checkpoint.times import rfc3339, wall_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from typing import Any, BinaryIO

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database
    from agent_checkpoint.records import Event, Refusals

    Progress = Callable[[int], object]

FORMAT = "agent-checkpoint events, version 1"
ARCHIVED = "events.archived"
# What those who archive take turns by.
ARCHIVING = ("events",)
# Events that are read at once, and those that are removed at once at first.
PAGE = 2_000
FIRST_SLICE = 500
FEWEST_IN_SLICE = 100
MOST_IN_SLICE = 20_000
SHORTEST = 1e-4
# Counters that are removed in one transaction: a few milliseconds of work.
COUNTERS_AT_ONCE = 500
# What a slice of the removal should take: no heartbeat waits long for it.
SLICE_SECONDS = 0.03
# They are in the file: a power cut that takes a removal back loses nothing.
REMOVING = Terms(durable=False)
# One form for each value: what is read back is compared letter by letter.
ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Archived(Record):
    """What an archive holds. ``sha256`` is the hash of its last line: of all of it.

    ``refusals`` is the number of counters of refused writes that counted
    nothing since.
    """

    file: str
    events: int
    from_cursor: str | None
    to_cursor: str | None
    sha256: str
    refusals: int = 0


class Chain:
    """Lines whose hashes hang on each other."""

    def __init__(self) -> None:
        self.hash = ""

    def line(self, value: dict[str, Any]) -> str:
        """The next line."""
        text = ENCODE(value)
        self.hash = sha256((self.hash + text).encode()).hexdigest()
        return f'{text[:-1]},"sha256":"{self.hash}"}}\n'

    def check(self, line: str) -> dict[str, Any]:
        """The value of the next line.

        Raises:
            ValueError: it is not what was written there.
        """
        value = json.loads(line)
        found = value.pop("sha256")
        if self.line(value) != line or self.hash != found:
            raise ValueError
        return dict(value)


def archive(changes: Changes, before: datetime, to: str, progress: Progress) -> Archived:
    """Move the log's part from before a time into a new file; what the file holds.

    Raises:
        InvalidInputError: the file is there already, or the time has no time zone.
        StorageBusyError: another archive was made meanwhile; nothing was removed.
        StorageFullError: there is no space for the file.
        StorageError: the file cannot be written, or is not what was written; or the file is
            there, whole and on record, but not all that it holds could be removed from the log.
    """
    names.aware("before", before)
    names.path("to", to)
    database = changes.database
    with database.read() as reader:
        last = event_log.up_to(reader, wall_ns(before))
        # What is counted from now on is no part of it, whatever ``before`` is.
        counters = refusals.quiet(reader, min(wall_ns(before), reader.moment.wall_ns)) if last > 0 else []
        since = event_log.settled(reader)
        earlier = event_log.count_behind(reader, since, ARCHIVED)
    try:
        written = _write(database, before, last, counters, to, progress)
    except FileExistsError:
        names.invalid("to", f"{to} is there already: an archive is a file of its own")
    except OSError as error:
        kind = StorageFullError if error.errno in (ENOSPC, EDQUOT) else StorageError
        message = f"{to}: the archive cannot be written: {error.strerror}"
        raise kind(message, hint="nothing was removed") from error
    if written.events:
        _put_on_record(changes, written, since, earlier)
        _take_out(changes, written, last, counters)
    return written


def verify(path: str) -> Archived:
    """Read an archive from its first line to its last; what it holds.

    Raises:
        InvalidInputError: the path cannot be one.
        NotFoundError: there is no such file.
        StorageCorruptError: it is not as it was written; the message names the line.
    """
    number, count, refused, first, last, chain = 0, 0, 0, None, None, Chain()
    names.path("file", path)
    try:
        with open(path, encoding="utf-8", newline="\n") as source:
            for number, line in enumerate(source, start=1):
                value = chain.check(line)
                if "cursor" in value:
                    count, first, last = count + 1, first or value["cursor"], value["cursor"]
                elif number == 1 and value.get("format") == FORMAT:
                    continue
                elif "times" in value:
                    refused += 1
                elif "count" in value and value["count"] == count and not source.read(1):
                    return Archived(path, count, first, last, chain.hash, refused)
                else:
                    raise ValueError
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StorageCorruptError(
            f"{path}: line {number} is not as it was written", hint="take a copy of the archive", line=number
        ) from None
    raise StorageCorruptError(f"{path}: ends before its last line", hint="take a copy of the archive", line=number)


def _write(
    database: Database, before: datetime, last: int, counters: Sequence[Refusals], to: str, progress: Progress
) -> Archived:
    """Write the file under another name, sync it, read it back, and give it its name."""
    if os.path.lexists(to):
        raise FileExistsError
    partial = f"{to}.{os.urandom(4).hex()}.partial"
    try:
        written, digest = _write_lines(database, before, last, counters, partial, progress)
        if _hash(partial) != digest:
            raise StorageCorruptError(f"{partial}: is not what was written; nothing was removed", hint="check the disk")
        os.link(partial, to)  # unlike a rename, never over another archive
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    _sync_folder(to)
    return written._replace(file=to)


def _write_lines(
    database: Database, before: datetime, last: int, counters: Sequence[Refusals], path: str, progress: Progress
) -> tuple[Archived, bytes]:
    """Write every line, and sync them; what they hold, and the hash of the file."""
    chain, whole, count = Chain(), sha256(), 0
    first = latest = None
    with open(path, "xb", opener=_for_its_owner) as file:

        def write(value: dict[str, Any]) -> None:
            line = chain.line(value).encode()
            whole.update(line)
            file.write(line)

        write({"format": FORMAT, "store": database.name, "before": rfc3339(before)})
        for count, event in enumerate(_events(database, last), start=1):
            first, latest = first or event.cursor, event.cursor
            write({**event._asdict(), "at": rfc3339(event.at)})
            if count % PAGE == 0:
                _sync(file)
                progress(count)
        for counter in counters:
            write({**counter._asdict(), "first_at": rfc3339(counter.first_at), "last_at": rfc3339(counter.last_at)})
        write({"count": count})
        _sync(file)
    return Archived(path, count, first, latest, chain.hash, len(counters)), whole.digest()


def _sync(file: BinaryIO) -> None:
    """Now and then, too: a file system may let everybody's commits wait until all that was written is on disk."""
    file.flush()
    os.fsync(file.fileno())


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hash(path: str) -> bytes:
    digest = sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.digest()


def _events(database: Database, last: int) -> Iterator[Event]:
    """The events up to an id, in short reads."""
    after = 0
    while True:
        with database.read() as reader:
            found = event_log.page(reader, after, last, PAGE)
        if not found:
            return
        yield from found
        if found[-1].id <= after:  # damage leads back to where it was
            raise sums.gone(f"event {after + 1}")
        after = found[-1].id


def _put_on_record(changes: Changes, written: Archived, since: int, earlier: int) -> None:
    """Note what the file holds, unless another archive was noted or made meanwhile: the files would share events."""
    path, count, first, to, digest, _ = written
    file = os.path.basename(path)

    def note(change: Change) -> None:
        transaction = change.transaction
        noted = event_log.count_behind(transaction, since, ARCHIVED)  # few are so new: nobody waits long
        if noted != earlier or event_log.first_cursor(transaction) != first:
            raise StorageBusyError(
                "another archive of the audit log was made meanwhile; nothing was removed",
                database=changes.database.name,
                blocker=None,
            )
        detail = {"count": count, "from_cursor": first, "to_cursor": to, "sha256": digest, "file": file}
        change.happened.append(Happened(ARCHIVED, detail=detail))

    try:
        changes.run(ARCHIVING, note)
    except OutcomeUnknownError:
        raise
    except StorageError:
        # The first error is the one to tell; what stays is whole, and its events are in the log.
        with suppress(OSError):
            os.unlink(path)
        raise


def _take_out(changes: Changes, written: Archived, last: int, counters: Sequence[Refusals]) -> None:
    """Remove from the log what is in the file."""
    try:
        _remove(changes, last)
        _forget(changes, counters)
    except StorageBusyError as error:  # to repeat the call would not help: the file is there
        raise StorageError(
            f"{written.file} is whole and on record, but not all that it holds is out of the log: {error}",
            hint="archive what is left into another file, later; an event in two files has the same cursor in both",
        ) from error


def _remove(changes: Changes, last: int) -> None:
    """Remove from the log what is in the file, a little at a time."""
    size, reached = FIRST_SLICE, 0
    while reached < last:
        reached, begun = changes.run(ARCHIVING, lambda change: _slice(change, last, size), terms=REMOVING)  # noqa: B023
        # How long others were kept waiting, by the commit too.
        took = max(monotonic() - begun, SHORTEST)
        size = int(min(MOST_IN_SLICE, max(FEWEST_IN_SLICE, size * min(2, SLICE_SECONDS / took))))


def _forget(changes: Changes, counters: Sequence[Refusals]) -> None:
    """Remove the counters that are in the file, some at a time."""
    for start in range(0, len(counters), COUNTERS_AT_ONCE):
        some = counters[start : start + COUNTERS_AT_ONCE]
        changes.run(ARCHIVING, lambda change: refusals.forget(change.transaction, some), terms=REMOVING)  # noqa: B023


def _slice(change: Change, last: int, size: int) -> tuple[int, float]:
    """Remove the next slice: how far, and since when others are kept waiting."""
    begun = monotonic()
    _, end = event_log.remove(change.transaction, last, size)
    return end, begun


def _sync_folder(path: str) -> None:
    """A new name survives a power cut like what is behind it."""
    descriptor = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
