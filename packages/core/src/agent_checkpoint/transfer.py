"""Moving a whole store into another database: all of it, once, verified, and the old one sealed.

Two control planes that hand out equal tokens must never be. So the old store is
sealed before the new one is there: in the database itself, against every
process that has it open, of whatever version. The new one appears with one
commit. Whoever is killed in between runs the same move again.
"""

from __future__ import annotations

import os
from hashlib import sha256
from itertools import accumulate

from agent_checkpoint import leases, names
from agent_checkpoint.database import ORDINARY
from agent_checkpoint.errors import (
    OutcomeUnknownError,
    StorageCorruptError,
    StorageError,
    StoreMovedError,
    schema_version_error,
)
from agent_checkpoint.ledger import components
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.migrations import CORE, MIGRATING, read
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened
from agent_checkpoint.rules import expiry, grant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Reader, Row, Table, Transaction

    Files = Mapping[str, Sequence[str]]
    Pair = tuple[Table, Table]
    Progress = Callable[[str, int, int], object]

# Where installed adapters name the migrations of their tables, by component.
GROUP = "agent_checkpoint.components"
# Not copied: versions are written anew, who waits has to ask anew, and numbers go on by themselves.
LEFT_BEHIND = ("components", "event_ids", "tickets")
# Rows that are read and written at once, and bytes of them: a server ends who takes long over it.
PAGE = 200
PAGE_BYTES = 8 << 20
# What only one mover at a time has: the target's lock, and the source's.
ONE_MOVER = (f"component:{CORE}",)
SEALING = ("seal",)
MARK_BYTES = 7
AGAIN = "run the same move again: it finds out"


class Moved(Record):
    """What became of a move: the rows of each table, and the hash of all. ``already``: an earlier call had done it."""

    source: str
    target: str
    rows: dict[str, int]
    sha256: str
    already: bool = False


def move(source: Changes, target: Changes, progress: Progress) -> Moved:
    """Move everything from one store into an empty place.

    Raises:
        LeaseHeldError: a lease is live in the source.
        StoreMovedError: the source was moved elsewhere before.
        InvalidInputError: the target is no empty place, or a package with a component's tables is not installed.
        StorageCorruptError: what arrived is not what was sent; nothing was moved.
        OutcomeUnknownError: the target cannot say whether it has it; the same move again finds out.
    """
    here, there = source.database, target.database
    if here.address == there.address:
        names.invalid("target", "is the store itself")
    with here.read() as reader:
        scripts = _scripts(reader, here, there)
        _refuse_moved(here, components.moved_to(reader), there.name)
    there.create()
    mover = _Mover(source, there, progress)
    try:
        with there.transaction(ONE_MOVER, MIGRATING) as transaction:
            return mover.move(transaction, scripts)
    except OutcomeUnknownError as error:
        error.hint = AGAIN
        raise  # sealed it stays
    except BaseException:
        mover.take_back()
        raise


class _Mover:
    """One try of a move. Of many at once, one at a time is inside the target's transaction.

    Who seals the source, or takes over the seal of a try that was killed, puts
    its own mark on it, and takes back no seal with another mark: that one may be
    copying right now.
    """

    def __init__(self, source: Changes, there: Database, progress: Progress) -> None:
        self._source, self._there, self._progress = source, there, progress
        self._mark = int.from_bytes(os.urandom(MARK_BYTES), "big")
        self._sealed = self._complete = False

    def move(self, transaction: Transaction, scripts: dict[str, list[str]]) -> Moved:
        """Make the tables, seal the source, copy and compare; the commit is the caller's."""
        here, where = self._source.database, transaction.where()
        if components.version(transaction, CORE):
            return _moved_before(transaction, here, self._there)
        strangers = {table.name for table in transaction.tables()}
        for component, texts in scripts.items():
            for text in texts:
                transaction.script(text)
            components.set_version(transaction, component, len(texts))
        with here.read() as reader:
            tables = _same_tables(reader, transaction, strangers - {"components"})
        seal(self._source, self._there.name, self._mark, where)
        self._sealed = True
        moved = self._copy(transaction, tables)
        self._complete = True
        return moved

    def _copy(self, transaction: Transaction, tables: list[Pair]) -> Moved:
        here, there = self._source.database, self._there
        with here.read() as reader:
            sent = {table.name: _copy(reader, transaction, table, self._progress) for table, _ in tables}
        for _, table in tables:
            if _digest(_pages(transaction, table)) != sent[table.name]:
                raise StorageCorruptError(f"{there.name}: table {table.name} did not arrive as it was sent")
        transaction.count_on()
        rows = {name: count for name, (count, _) in sent.items()}
        digest = sha256("".join(each for _, each in sent.values()).encode()).hexdigest()
        detail = {"from": here.name, "rows": sum(rows.values()), "sha256": digest}
        event_log.record(transaction, [Happened("store.moved", detail=detail)], False)
        return Moved(here.name, there.name, rows, digest)

    def take_back(self) -> None:
        """Let the source be written to again, where nothing was moved."""
        if self._sealed and not (self._complete and self._arrived()):
            unseal(self._source, self._mark)

    def _arrived(self) -> bool:
        """Whether the commit that failed, or was interrupted, happened all the same."""
        there = self._there
        try:
            with there.transaction(ONE_MOVER, MIGRATING) as transaction:
                return components.version(transaction, CORE) > 0
        except StorageError as error:
            raise OutcomeUnknownError(f"{there.name}: may have the store or not: {error}", hint=AGAIN) from error


def _moved_before(transaction: Transaction, here: Database, there: Database) -> Moved:
    """The answer of the earlier call whose answer was lost: only it can have filled the target."""
    with here.read() as reader:
        sealed = components.moved_to(reader)
        _refuse_elsewhere(here, sealed, components.moved_where(reader), transaction.where())
    found = event_log.latest(transaction, "store.moved")
    if sealed is None or found is None or found.get("from") != here.name:
        raise _full(there)
    return Moved(here.name, there.name, {}, found["sha256"], already=True)


def seal(source: Changes, place: str, mark: int = 0, where: str = "") -> None:
    """Let nobody change a store any more, for it was moved to a place; ``mark`` is for who takes that back.

    ``where`` is what the place says of itself: another one may have its name some day.

    Raises:
        LeaseHeldError: a lease is live; nothing was changed.
        StoreMovedError: it was moved to another place before.
    """
    leases.sweep(source, ORDINARY)

    def decide(change: Change) -> None:
        transaction = change.transaction
        sealed = components.moved_to(transaction)
        _refuse_moved(source.database, sealed, place)
        if sealed is not None:
            _refuse_elsewhere(source.database, sealed, components.moved_where(transaction), where)
            components.mark_seal(transaction, mark)
            return
        event_log.record(transaction, [Happened("store.sealed", detail={"moved_to": place})], False)
        components.seal(transaction, place, where, mark)
        # Waits for every change that is under way: what is live after that, stays live.
        transaction.seal([table.name for table in transaction.tables() if table.name != "components"], place)
        for row in lease_rows.everyone(transaction):
            if row.state == "live":
                hint = "let the work end, or force-release the lease, and try again"
                left = expiry.remaining(row, transaction.moment)
                raise grant.in_the_way(row, left, transaction.moment, hint)

    source.run(SEALING, decide)


def unseal(source: Changes, mark: int = 0) -> None:
    """Take that back, if nobody has put another mark on the seal since."""

    def decide(change: Change) -> None:
        if components.unseal(change.transaction, mark):
            change.transaction.unseal([table.name for table in change.transaction.tables()])
            change.happened.append(Happened("store.unsealed"))

    source.run(SEALING, decide)


def _refuse_moved(here: Database, sealed: str | None, place: str) -> None:
    if sealed not in (None, place):
        raise StoreMovedError(f"{here.name}: this store was moved to {sealed}", database=here.name, moved_to=sealed)


def _refuse_elsewhere(here: Database, sealed: str | None, known: str | None, where: str) -> None:
    if known not in (None, where):
        raise StoreMovedError(
            f"{here.name}: this store was moved to {sealed}, and that name leads to another place now ({where})",
            hint=f"it was moved to {known}; two stores that go on with the same tokens must not exist",
            database=here.name,
            moved_to=sealed,
        )


def _scripts(reader: Reader, here: Database, there: Database) -> dict[str, list[str]]:
    """The migrations that make the source's tables in the target, core's first."""
    scripts: dict[str, list[str]] = {}
    found = {component: version for component, version, _ in components.everyone(reader)}
    for component in sorted(found, key=lambda name: (name != CORE, name)):
        files = _files(component)
        if component == CORE:
            files = {**here.core_migrations, **there.core_migrations}
        for database in (here, there):
            if database.dialect not in files:
                names.invalid("target", f"cannot have the tables of {component!r}: they are not for {database.dialect}")
        known = len(files[here.dialect])
        if found[component] != known:
            raise schema_version_error(component, found[component], known)
        scripts[component] = read(files[there.dialect])
    return scripts


def _files(component: str) -> Files:
    if component == CORE:
        return {}
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=GROUP, name=component))
    if not found:
        names.invalid("source", f"has tables of {component!r}: install its package here too")
    files: Files = found[0].load()()
    return files


def _same_tables(reader: Reader, transaction: Transaction, strangers: set[str]) -> list[Pair]:
    """The tables to copy, which must be the same on both sides, as they are read here and there."""
    if strangers:
        names.invalid("target", f"is no empty place: it has a table {min(strangers)!r}")
    tables, there = (
        {table.name: table for table in each.tables() if table.name not in LEFT_BEHIND}
        for each in (reader, transaction)
    )
    for name in sorted({*tables, *there}):
        if name not in there or name not in tables or set(tables[name].columns) != set(there[name].columns):
            names.invalid("source", f"has a table {name!r} that no installed package makes in the target")
    # In the order of the source's columns and keys on both sides.
    return [(table, table._replace(size=there[name].size)) for name, table in tables.items()]


def _copy(reader: Reader, transaction: Transaction, table: Table, progress: Progress) -> tuple[int, str]:
    """Copy a table; how many rows, and their hash."""
    columns = ", ".join(f'"{column}"' for column in table.columns)
    insert = f'INSERT INTO "{table.name}" ({columns}) VALUES ({", ".join("?" * len(table.columns))})'  # noqa: S608
    ((total,),) = reader.rows(f'SELECT COUNT(*) FROM "{table.name}"')  # noqa: S608
    done = 0

    def copied() -> Iterator[list[Row]]:
        nonlocal done
        for page in _pages(reader, table):
            transaction.executemany(insert, page)
            done += len(page)
            if done > total:  # damage leads back to where it was
                break
            progress(table.name, done, total)
            yield page

    sent = _digest(copied())
    if done != total:
        raise StorageCorruptError(f"table {table.name}: {done} of {total} rows could be read in order")
    return sent


def _pages(reader: Reader, table: Table) -> Iterator[list[Row]]:
    """The rows in the order of their key, some at a time: so many as fit into memory."""
    columns, key = ([f'"{column}"' for column in each] for each in (table.columns, table.key))
    source = f' FROM "{table.name}"'
    order = f" ORDER BY {', '.join(key)} LIMIT ?"
    behind = f" WHERE ({', '.join(key)}) > ({', '.join('?' * len(key))})"
    places = [table.columns.index(column) for column in table.key]
    where, last = "", ()
    while True:
        sizes = reader.rows(f"SELECT {table.size}{source}{where}{order}", (*last, PAGE))
        if not sizes:
            return
        together = accumulate(size for (size,) in sizes)
        fitting = max(1, sum(1 for size in together if size <= PAGE_BYTES))
        page = reader.rows(f"SELECT {', '.join(columns)}{source}{where}{order}", (*last, fitting))
        yield page
        where, last = behind, tuple(page[-1][place] for place in places)


def _digest(pages: Iterator[list[Row]]) -> tuple[int, str]:
    count, digest = 0, sha256()
    for page in pages:
        count += len(page)
        for row in page:
            digest.update(repr(row).encode())
    return count, digest.hexdigest()


def _full(there: Database) -> Exception:
    from agent_checkpoint.errors import InvalidInputError

    return InvalidInputError(
        f"target: {there.name} has a store already",
        field="target",
        hint="name a place where no store is; to move into it again, remove what is there",
    )
