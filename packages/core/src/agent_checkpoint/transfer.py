"""Moving a whole store into another database: all of it, once, verified, and the old one sealed.

Two control planes that hand out equal tokens must never be. So the old store is
sealed before the new one is there: in the database itself, against every
process that has it open, of whatever version. The new one appears with one
commit. Whoever is killed in between runs the same move again.
"""

from __future__ import annotations

from hashlib import sha256

from agent_checkpoint import leases, names
from agent_checkpoint.errors import (
    LeaseHeldError,
    OutcomeUnknownError,
    StorageCorruptError,
    StoreMovedError,
    schema_version_error,
)
from agent_checkpoint.ledger import components
from agent_checkpoint.ledger import events as event_log
from agent_checkpoint.ledger import leases as lease_rows
from agent_checkpoint.migrations import CORE, MIGRATING, read
from agent_checkpoint.record import Record
from agent_checkpoint.records import Happened
from agent_checkpoint.rules import expiry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agent_checkpoint.change import Change, Changes
    from agent_checkpoint.database import Database, Reader, Row, Table, Transaction

    Files = Mapping[str, Sequence[str]]
    Progress = Callable[[str, int, int], object]

# Where installed adapters name the migrations of their tables, by component.
GROUP = "agent_checkpoint.components"
# Not copied: versions are written anew, who waits has to ask anew, and numbers go on by themselves.
LEFT_BEHIND = ("components", "event_ids", "tickets")
# Rows that are read and written at once.
PAGE = 200


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
    """
    here, there = source.database, target.database
    if here.address == there.address:
        names.invalid("target", "is the store itself")
    with here.read() as reader:
        scripts = _scripts(reader, here, there)
        moved_to = components.moved_to(reader)
    there.create()
    if moved_to is None:
        _refuse_full(there)
        seal(source, there.name)
    elif moved_to != there.name:
        raise StoreMovedError(f"{here.name}: this store was moved to {moved_to}", database=here.name, moved_to=moved_to)
    try:
        return _move(here, there, scripts, progress)
    except OutcomeUnknownError:
        raise  # sealed it stays: the same move again finds out
    except BaseException:
        unseal(source)
        raise


def _move(here: Database, there: Database, scripts: dict[str, list[str]], progress: Progress) -> Moved:
    with there.transaction((f"component:{CORE}",), MIGRATING) as transaction:
        if components.version(transaction, CORE):
            return _moved_before(transaction, here, there)
        for component, texts in scripts.items():
            for text in texts:
                transaction.script(text)
            components.set_version(transaction, component, len(texts))
        with here.read() as reader:
            tables = _same_tables(reader, transaction)
            sent = {table.name: _copy(reader, transaction, table, progress) for table in tables}
        for table in tables:
            if _digest(_pages(transaction, table)) != sent[table.name]:
                raise StorageCorruptError(f"{there.name}: table {table.name} did not arrive as it was sent")
        transaction.count_on()
        rows = {name: count for name, (count, _) in sent.items()}
        digest = sha256("".join(each for _, each in sent.values()).encode()).hexdigest()
        detail = {"from": here.name, "rows": sum(rows.values()), "sha256": digest}
        event_log.record(transaction, [Happened("store.moved", detail=detail)], False)
    return Moved(here.name, there.name, rows, digest)


def _moved_before(transaction: Transaction, here: Database, there: Database) -> Moved:
    """The answer of the earlier call whose answer was lost: only it can have filled the target."""
    found = event_log.latest(transaction, "store.moved")
    if found is None or found.get("from") != here.name:
        raise _full(there)
    return Moved(here.name, there.name, {}, found["sha256"], already=True)


def seal(source: Changes, place: str) -> None:
    """Let nobody change a store any more, for it was moved to a place.

    Raises:
        LeaseHeldError: a lease is live; nothing was changed.
    """
    leases.sweep(source)

    def decide(change: Change) -> None:
        transaction = change.transaction
        event_log.record(transaction, [Happened("store.sealed", detail={"moved_to": place})], False)
        components.seal(transaction, place)
        # Waits for every change that is under way: what is live after that, stays live.
        transaction.seal([table.name for table in transaction.tables() if table.name != "components"], place)
        for row in lease_rows.live(transaction):
            left = expiry.remaining(row, transaction.moment)
            raise LeaseHeldError(
                f"scope {row.scope!r} is held by {row.owner!r} (token {row.token}); nothing was changed",
                hint="let the work end, or force-release the lease, and try again",
                scope=row.scope,
                owner=row.owner,
                token=row.token,
                retry_after=left.ns / names.NS,
            )

    source.run((), decide)


def unseal(source: Changes) -> None:
    """Take that back."""

    def decide(change: Change) -> None:
        components.unseal(change.transaction)
        change.transaction.unseal([table.name for table in change.transaction.tables()])
        change.happened.append(Happened("store.unsealed"))

    source.run((), decide)


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


def _same_tables(reader: Reader, transaction: Transaction) -> list[Table]:
    """The tables to copy, which must be the same on both sides."""
    tables, there = (
        {table.name: table for table in each.tables() if table.name not in LEFT_BEHIND}
        for each in (reader, transaction)
    )
    for name in sorted({*tables, *there}):
        if name not in there or name not in tables or set(tables[name].columns) != set(there[name].columns):
            names.invalid("source", f"has a table {name!r} that no installed package makes in the target")
    return list(tables.values())


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
            progress(table.name, done, total)
            yield page

    return _digest(copied())


def _pages(reader: Reader, table: Table) -> Iterator[list[Row]]:
    """The rows in the order of their key, some at a time."""
    columns, key = ([f'"{column}"' for column in each] for each in (table.columns, table.key))
    select = f'SELECT {", ".join(columns)} FROM "{table.name}"'  # noqa: S608
    order = f" ORDER BY {', '.join(key)} LIMIT {PAGE}"
    behind = f" WHERE ({', '.join(key)}) > ({', '.join('?' * len(key))})"
    places = [table.columns.index(column) for column in table.key]
    page = reader.rows(select + order)
    while page:
        yield page
        page = reader.rows(select + behind + order, tuple(page[-1][place] for place in places))


def _digest(pages: Iterator[list[Row]]) -> tuple[int, str]:
    count, digest = 0, sha256()
    for page in pages:
        count += len(page)
        for row in page:
            digest.update(repr(row).encode())
    return count, digest.hexdigest()


def _refuse_full(there: Database) -> None:
    with there.transaction((), MIGRATING) as transaction:
        if components.everyone(transaction):
            raise _full(there)


def _full(there: Database) -> Exception:
    from agent_checkpoint.errors import InvalidInputError

    return InvalidInputError(
        f"target: {there.name} has a store already",
        field="target",
        hint="name a place where no store is; to move into it again, remove what is there",
    )
