"""The port: what a database must offer, and the whole of what the layers above may use.

SQL is one text for every database: ``?`` placeholders, no dialect words. The
data definition is each database's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from agent_checkpoint.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Any

    from agent_checkpoint.clock import Clock
    from agent_checkpoint.records import Check, Moment

    Parameters = Sequence[Any]
    Row = tuple[Any, ...]


class Terms(Record):
    """On which terms a transaction runs.

    Only a ``migrating`` one is let at tables of another version than this
    package writes. ``patience`` is how many seconds to queue in front of the
    lock, where there is a queue, before going around it; ``within`` how many to
    wait altogether, where that is not the busy timeout. Without ``durable`` a
    power cut may take it back: for what nobody is told of, background
    heartbeats and tickets.
    """

    migrating: bool = False
    patience: float | None = None
    within: float | None = None
    durable: bool = True


ORDINARY = Terms()


# What a write to a store that was moved away is refused with, in the database itself.
MOVED = "this store was moved to "


class Table(Record):
    """A table as it stands in the database: its columns in order, and the unique ones that order its rows.

    ``size`` is SQL for how many bytes a row has, at least about.
    """

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    size: str


class Reader(ABC):
    """One consistent look at the database."""

    moment: Moment
    horizon: int
    """Events with an id below it are settled: none can appear before them any more."""

    @abstractmethod
    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows of a query."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Every table of the store, the adapters' too, by name."""


class Bell(ABC):
    """What a waiter listens to while it pauses."""

    name: str
    """For its ticket, so that others can ring it."""

    @abstractmethod
    def fileno(self) -> int:
        """What to wait on; readable when it has rung."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Until it rings, at most so many seconds; whether it rang."""

    @abstractmethod
    def silence(self) -> None:
        """Forget the rings that were heard."""

    @abstractmethod
    def close(self) -> None:
        """Listen no more."""


class Transaction(Reader):
    """A change in the making: nobody else writes what its locks name until it ends.

    ``moment`` was read after the locks were held. Every method raises a
    ``StorageError`` where the database fails, and refuses to run once the
    database has ended the transaction by itself (SQLITE_FULL does): a statement
    after that would be committed alone.
    """

    @abstractmethod
    def __enter__(self) -> Transaction:
        """Take the locks, and look at the time."""

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        """Commit, or roll back, and let go."""

    def leave(self) -> None:
        """Let go of what an interrupt kept the end of the block from letting go of; else nothing is left to do."""

    @abstractmethod
    def run(self, sql: str, parameters: Parameters = ()) -> int:
        """Execute one statement; the number of rows it touched."""

    @abstractmethod
    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        """Execute one statement for each set of parameters."""

    @abstractmethod
    def event_id(self) -> int | None:
        """The id of the next event of this transaction; None where the table counts by itself.

        Ids are in the order in which changes to one scope or workflow were
        committed, and none appears below the ``horizon`` of an earlier read.
        """

    @abstractmethod
    def ring(self, bells: Iterable[str]) -> None:
        """Ring these as soon as this is committed."""

    def where(self) -> str:
        """Where this is by the database's own word; "" where its name says it all."""
        return ""

    @abstractmethod
    def script(self, text: str) -> None:
        """Execute the statements of a migration file, as a part of this transaction."""

    @abstractmethod
    def seal(self, tables: Iterable[str], moved_to: str) -> None:
        """Refuse every later change of these tables, of whomever: the store was moved away.

        What others have begun to change is waited for.
        """

    @abstractmethod
    def unseal(self, tables: Iterable[str]) -> None:
        """Take that back."""

    @abstractmethod
    def count_on(self) -> None:
        """Let what the database numbers by itself go on behind the rows that are there."""

    @abstractmethod
    def skip(self, ahead: int) -> None:
        """Let it go on so much further, where it is not known which numbers were given."""


class Database(ABC):
    """One database with the store's tables in it; safe to use from many threads."""

    dialect: str
    core_migrations: Mapping[str, Sequence[str]]
    """The migration files of core's own tables, as ``{dialect: files}``."""

    name: str
    """The path or address, without secrets."""

    address: str
    """What another process opens it by: the absolute path, or the URL with its password."""

    patience_seconds: float
    """For how long a change that an accident has undone is tried again."""

    clock: Clock
    """This machine's clock: what local deadlines count by."""

    knows_processes = True
    """Whether the kernel's word on a process counts: not where a copy of the machine may be a client too."""

    outlived = False
    """Whether who holds a lease may live on when the database crashes: a heartbeat must survive that then."""

    @abstractmethod
    def create(self) -> None:
        """Make an empty store if there is none: ours by its mark, no tables of core yet."""

    @abstractmethod
    def transaction(self, locks: Sequence[str], terms: Terms = ORDINARY) -> Transaction:
        """A transaction, to be entered, that holds ``locks`` (``scope:…``, ``workflow:…``), taken sorted.

        Leaving the block commits, an exception rolls back.

        Raises:
            StorageBusyError: no lock within the busy timeout.
            SchemaVersionError: core's tables are of another version.
        """

    @abstractmethod
    def read(self) -> AbstractContextManager[Reader]:
        """A read of one state; it takes no lock that a writer would wait for."""

    @abstractmethod
    def glance(self, sql: str, parameters: Parameters = ()) -> tuple[list[Row], Moment]:
        """The rows of one query, and the time after they were read: a ``read`` of one statement, for less."""

    @abstractmethod
    def stamp(self) -> object:
        """A value that is another one after every commit of anybody; cheap, to be compared with ``==``.

        It may change without a commit. Where there is no such cheap value, each is another one.
        """

    @abstractmethod
    def bell(self) -> Bell | None:
        """A bell to wait by; None where nobody can ring, and waiters look for themselves."""

    @abstractmethod
    def identify(self, pid: int | None = None, **more: object) -> str:
        """The identity of this process (or of another) as stored text, with ``more`` in it; "" where it means nothing.

        Raises:
            InvalidInputError: there is no such process.
        """

    @abstractmethod
    def alive(self, process: str) -> bool | None:
        """Whether the process of that identity lives; None where it cannot be known."""

    def who_lives(self, processes: Iterable[str]) -> dict[str, bool | None]:
        """What ``alive`` says of each of these."""
        return {process: self.alive(process) for process in processes if process}

    @abstractmethod
    def copy_to(self, path: str) -> int:
        """Write a consistent, checked and synced copy into a new file, while others use the store; its bytes.

        Raises:
            InvalidInputError: the file is there already, or the database has its own way of backups.
        """

    @abstractmethod
    def opened_copy(self, path: str) -> AbstractContextManager[Callable[[Transaction], None]]:
        """Open a sound copy: what puts its content in place of everything here, as a part of a transaction.

        Raises:
            NotFoundError, NotAStoreError, StorageCorruptError: there is no copy, or a damaged one.
            InvalidInputError: it is the store itself, or the database has its own way of backups.
        """

    @abstractmethod
    def shrink(self) -> int:
        """Give unused space back to the file system, in short transactions; how many bytes."""

    @abstractmethod
    def health(self) -> Iterable[Check]:
        """What ``doctor`` reports of the database itself, one check at a time."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; idempotent."""
