"""Reading checkpoints: pages of one state each, and no transaction while the caller goes through them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph.checkpoint.base import get_checkpoint_id

from agent_checkpoint_langgraph import mapping, tables
from agent_checkpoint_langgraph.mapping import Address, storable, thread_name
from agent_checkpoint_langgraph.pages import Header, Page
from agent_checkpoint_langgraph.saving import STRIDE
from agent_checkpoint_langgraph.values import Values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import StateStore
    from agent_checkpoint.database import Reader
    from agent_checkpoint_langgraph.remembered import Known, Remembered, Stored

# Checkpoints that are read with their values at once: what is in memory while a caller goes through a list.
PAGE = 16
# Checkpoints whose metadata is looked at at once.
SCAN = 256
# Metadata that has a column: its key, the condition, and what of a value is in it.
COLUMNS = (
    ("source", tables.BY_SOURCE, mapping.text_column),
    ("step", tables.BY_STEP, mapping.integer_column),
    ("run_id", tables.BY_RUN, mapping.text_column),
)


class Search:
    """Which checkpoints to list: conditions for the database, and those that are looked at here."""

    def __init__(self) -> None:
        self._conditions: list[str] = []
        self._bound: list[Any] = []
        self.filter: dict[str, Any] = {}

    def where(self, condition: str, *values: Any) -> None:
        """Add a condition for the database."""
        self._conditions.append(condition)
        self._bound += values

    def where_in(self, thread_id: str | None, namespace: str | None) -> None:
        """Only those of a thread, of a namespace, or of a namespace of a thread."""
        if thread_id is not None and namespace is not None:
            self.where(tables.BY_HISTORY, thread_id, namespace)
        elif thread_id is not None:
            self.where(tables.BY_THREAD, thread_id)
        elif namespace is not None:
            self.where(tables.BY_NAMESPACE, namespace)

    def matching(self, filter: Mapping[str, Any]) -> None:
        """Only those with this metadata; what has a column is left to the database."""
        self.filter = dict(filter)
        for key, condition, column in COLUMNS:
            value = column(filter.get(key))
            if value is not None and value == filter[key]:
                self.where(condition, value)

    def headers(self, reader: Reader, before: int | None, count: int) -> list[Header]:
        """The next ones, newest first."""
        conditions, bound = list(self._conditions), list(self._bound)
        if before is not None:
            conditions.append(tables.BEFORE)
            bound.append(before)
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = reader.rows(f"{tables.HEADERS}{where}{tables.HEADERS_END}", (*bound, count))
        return [Header(*row) for row in rows]


def latest(reader: Reader, where: Address) -> Header | None:
    """The checkpoint that an address names, or the latest of its namespace."""
    search = Search()
    search.where_in(where.thread_id, where.namespace)
    if where.checkpoint_id is not None:
        search.where(tables.BY_ID, where.checkpoint_id)
    found = search.headers(reader, None, 1)
    return found[0] if found else None


class ThreadInfo(NamedTuple):
    """A thread, how many checkpoints it has in all its namespaces, and the one that was saved last."""

    thread_id: str
    checkpoints: int
    latest_namespace: str | None
    latest_checkpoint_id: str | None


def threads(store: StateStore) -> list[ThreadInfo]:
    """Every thread, the one that was saved to last first."""
    with store.read() as reader:
        return [ThreadInfo(*row) for row in reader.rows(tables.THREADS)]


class Stock:
    """What is in the store already, for a save to build on."""

    def __init__(self, store: StateStore, serde: SerializerProtocol) -> None:
        self._store = store
        self.serde = serde

    def known(self, where: Address, checkpoint_id: str) -> Known | None:
        """A checkpoint of a namespace; None where there is no such one."""
        found = find(self._store, Address(where.thread_id, where.namespace, checkpoint_id))
        return None if found is None else found[1].known(found[0], self.serde)

    def anchor(self, before: Stored) -> Stored | None:
        """The first value on the way to the full copy that is a multiple of the stride deep; None where it is gone."""
        with self._store.read() as reader:
            values = Values(reader.rows(tables.LINE_OF_VALUE, (before.number,)))
        if before.number not in values:
            return None
        return next(values.stored(row.number) for row in values.line(before.number) if row.depth % STRIDE == 0)


def place(reader: Reader, thread_id: str | None, checkpoint_id: str) -> int | None:
    """Where a checkpoint stands in the order; None where it is unknown."""
    sql, bound = (tables.PLACE, [checkpoint_id])
    if thread_id is not None:
        sql, bound = tables.PLACE + tables.IN_THREAD, [checkpoint_id, thread_id]
    number: int | None = reader.rows(sql, bound)[0][0]
    return number


def find(store: StateStore, where: Address, remembered: Remembered | None = None) -> tuple[Header, Page] | None:
    """The checkpoint that an address names, or the latest of its namespace, with its state."""
    with store.read() as reader:
        header = latest(reader, where)
        if header is None:
            return None
        known = None
        if remembered is not None:
            known = remembered.still(header.address, header.number, header.revision)
        return header, Page(reader, [header], known)


def search_for(
    store: StateStore, config: RunnableConfig | None, filter: Mapping[str, Any] | None, before: RunnableConfig | None
) -> Search:
    """What a list is asked for."""
    search = Search()
    configurable = (config or {}).get("configurable") or {}
    thread_id = configurable.get("thread_id")
    namespace = configurable.get("checkpoint_ns")
    search.where_in(
        None if thread_id is None else thread_name(thread_id),
        None if namespace is None else storable("checkpoint_ns", str(namespace)),
    )
    if configurable.get("checkpoint_id"):
        search.where(tables.BY_ID, storable("checkpoint_id", str(configurable["checkpoint_id"])))
    if before and (given := get_checkpoint_id(before)):
        before_id = storable("before", str(given))
        before_thread = before["configurable"].get("thread_id", thread_id)
        with store.read() as reader:
            number = place(reader, None if before_thread is None else thread_name(before_thread), before_id)
        # By our own order; by its id where it is unknown.
        search.where(*((tables.BEFORE_ID, before_id) if number is None else (tables.BEFORE, number)))
    search.matching(filter or {})
    return search


def pages(
    store: StateStore, serde: SerializerProtocol, search: Search, limit: int | None
) -> Iterator[tuple[Page, list[Header]]]:
    """The checkpoints that match, newest first, a page at a time; each page is one state of the database."""
    left, before = limit, None
    while left is None or left > 0:
        count = SCAN if search.filter else min(PAGE, left or PAGE)
        with store.read() as reader:
            headers = search.headers(reader, before, count)
            found = [header for header in headers if _matches(header, search.filter, serde)][:left]
            first = Page(reader, found[:PAGE]) if found else None
        if first:
            yield first, found[:PAGE]
        for start in range(PAGE, len(found), PAGE):
            with store.read() as reader:
                page = Page(reader, found[start : start + PAGE])
            yield page, [header for header in found[start : start + PAGE] if header in page]
        if len(headers) < count:
            return
        before = headers[-1].number
        left = None if left is None else left - len(found)


def _matches(header: Header, filter: Mapping[str, Any], serde: SerializerProtocol) -> bool:
    if not filter:
        return True
    metadata = mapping.metadata_value(serde, header.metadata_kind, header.metadata)
    return all(metadata.get(key) == value for key, value in filter.items())
