"""The port: what a database must offer, and the whole of what the layers above may use.

SQL is one text for every database: ``?`` placeholders, no dialect words. The
data definition is each database's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from agent_checkpoint.records import Check, Moment

    Parameters = Sequence[Any]
    Row = tuple[Any, ...]


class Reader(ABC):
    """One consistent look at the database."""

    moment: Moment
    horizon: int
    """Events with an id below it are settled: none can appear before them any more."""

    @abstractmethod
    def rows(self, sql: str, parameters: Parameters = ()) -> list[Row]:
        """All rows of a query."""


class Transaction(Reader):
    """A change in the making: nobody else writes what its locks name until it ends.

    ``moment`` was read after the locks were held. Every method raises a
    ``StorageError`` where the database fails, and refuses to run once the
    database has ended the transaction by itself (SQLITE_FULL does): a statement
    after that would be committed alone.
    """

    @abstractmethod
    def run(self, sql: str, parameters: Parameters = ()) -> int:
        """Execute one statement; the number of rows it touched."""

    @abstractmethod
    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> None:
        """Execute one statement for each set of parameters."""

    @abstractmethod
    def script(self, text: str) -> None:
        """Execute the statements of a migration file, as a part of this transaction."""

    @abstractmethod
    def savepoint(self) -> AbstractContextManager[None]:
        """A part that is undone alone when its block raises."""


class Database(ABC):
    """One database with the store's tables in it; safe to use from many threads."""

    dialect: str
    core_migrations: Mapping[str, Sequence[str]]
    """The migration files of core's own tables, as ``{dialect: files}``."""

    name: str
    """The path or address, without secrets."""

    @abstractmethod
    def create(self) -> None:
        """Make an empty store if there is none: ours by its mark, no tables of core yet."""

    @abstractmethod
    def transaction(
        self, locks: Sequence[str], migrating: bool = False, patience: float | None = None
    ) -> AbstractContextManager[Transaction]:
        """A transaction that holds ``locks`` (``scope:…``, ``workflow:…``), taken sorted.

        Leaving the block commits, an exception rolls back. Only a ``migrating``
        one is let at tables of another version than this package writes.
        ``patience`` is how many seconds to queue in front of the lock, where
        there is a queue, before going around it.

        Raises:
            StorageBusyError: no lock within the busy timeout.
            SchemaVersionError: core's tables are of another version.
        """

    @abstractmethod
    def read(self) -> AbstractContextManager[Reader]:
        """A read of one state; it takes no lock that a writer would wait for."""

    @abstractmethod
    def health(self) -> Iterable[Check]:
        """What ``doctor`` reports of the database itself, one check at a time."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; idempotent."""
