"""Reading checkpoints: pages of one state each, and no transaction while the caller goes through them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph.checkpoint.base import CheckpointTuple, get_checkpoint_id, writes_sort_key

from agent_checkpoint_langgraph import deltas, mapping, tables
from agent_checkpoint_langgraph.mapping import Address
from agent_checkpoint_langgraph.remembered import Known, Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint import StateStore
    from agent_checkpoint.database import Reader
    from agent_checkpoint_langgraph.serde import Typed

# Checkpoints that are read with their values at once: what is in memory while a caller goes through a list.
PAGE = 16
# Checkpoints whose metadata is looked at at once.
SCAN = 256
TASKS = "__pregel_tasks"
# Metadata that has a column: its key, the condition, and what of a value is in it.
COLUMNS = (
    ("source", tables.BY_SOURCE, mapping.text_column),
    ("step", tables.BY_STEP, mapping.integer_column),
    ("run_id", tables.BY_RUN, mapping.text_column),
)


@dataclass(frozen=True)
class Header:
    """A checkpoint without its state."""

    number: int
    thread_id: str
    namespace: str
    checkpoint_id: str
    parent_id: str | None
    format: int
    metadata_kind: str
    metadata: bytes
    body: int

    @property
    def address(self) -> Address:
        """Where it is."""
        return Address(self.thread_id, self.namespace, self.checkpoint_id)


class Search:
    """Which checkpoints to list: conditions for the database, and those that are looked at here."""

    def __init__(self) -> None:
        self._conditions: list[str] = []
        self._bound: list[Any] = []
        self.filter: dict[str, Any] = {}

    def where(self, condition: str, value: Any) -> None:
        """Add a condition for the database."""
        self._conditions.append(condition)
        self._bound.append(value)

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


class Page:
    """Some checkpoints with all that is stored of them; each is put together when it is asked for."""

    def __init__(self, reader: Reader, headers: Sequence[Header]) -> None:
        self._read_state(reader, [header.number for header in headers])
        self._read_writes(reader, headers)

    @classmethod
    def of(cls, reader: Reader, numbers: Sequence[int]) -> Page:
        """The values of some checkpoints, without their writes."""
        page = cls.__new__(cls)
        page._read_state(reader, numbers)
        return page

    def _read_state(self, reader: Reader, numbers: Sequence[int]) -> None:
        self._whole: dict[int, Typed] = {}
        self._values = {row[0]: row[1:] for row in reader.rows(*tables.among(tables.VALUES, numbers))}
        self._state: dict[int, list[int]] = {number: [] for number in numbers}
        for checkpoint, value in reader.rows(*tables.among(tables.STATE, numbers)):
            self._state[checkpoint].append(value)

    def _read_writes(self, reader: Reader, headers: Sequence[Header]) -> None:
        numbers = [header.number for header in headers]
        self._writes = by_checkpoint(reader.rows(*tables.among(tables.WRITES, numbers)))
        old = any(header.format < mapping.PENDING_SENDS_FORMAT and header.parent_id for header in headers)
        self._sends = by_checkpoint(reader.rows(*tables.among(tables.SENDS, numbers))) if old else {}

    def has(self, header: Header) -> bool:
        """Whether it was there still when its state was read."""
        return header.body in self._values

    def known(self, header: Header, serde: SerializerProtocol) -> Known:
        """What a save that builds on it has to know."""
        body = self._stored(header.body)
        versions = serde.loads_typed(body.value).get("channel_versions") or {}
        state = {self._values[value][0]: self._stored(value) for value in self._state[header.number]}
        return Known(header.number, header.checkpoint_id, body, versions, state)

    def tuple(self, header: Header, serde: SerializerProtocol, next_version: Callable[[Any], Any]) -> CheckpointTuple:
        """The checkpoint as LangGraph wants it."""
        checkpoint = serde.loads_typed(self._restored(header.body))
        values = {
            self._values[value][0]: serde.loads_typed(self._restored(value)) for value in self._state[header.number]
        }
        sends = self._sends.get(header.number)
        if sends and header.format < mapping.PENDING_SENDS_FORMAT:
            values[TASKS] = [serde.loads_typed(value) for _, _, value in sends]
            versions = checkpoint["channel_versions"]
            versions[TASKS] = max(versions.values()) if versions else next_version(None)
        checkpoint["channel_values"] = values
        return CheckpointTuple(
            header.address.config(),
            checkpoint,
            mapping.metadata_value(serde, header.metadata_kind, header.metadata),  # type: ignore[arg-type]
            header.address.config(header.parent_id) if header.parent_id else None,
            [(task, channel, serde.loads_typed(value)) for task, channel, value in self._writes.get(header.number, ())],
        )

    def value(self, checkpoint: int, channel: str) -> Typed:
        """What is stored for a channel that the checkpoint has."""
        return next(self._restored(value) for value in self._state[checkpoint] if self._values[value][0] == channel)

    def _restored(self, number: int) -> Typed:
        whole = self._whole.get(number)
        if whole is None:
            _, base, _, kind, data = self._values[number]
            differences = []
            while base is not None:
                differences.append(data)
                _, base, _, _, data = self._values[base]
            whole = self._whole[number] = (kind, deltas.restored(data, differences))
        return whole

    def _stored(self, number: int) -> Stored:
        return Stored(number, self._values[number][2], self._restored(number))


def by_checkpoint(rows: Iterable[Sequence[Any]]) -> dict[int, list[tuple[str, str, Typed]]]:
    """Writes by the checkpoint that they belong to, in the order in which a run applies them."""
    ordered = sorted(rows, key=lambda row: (row[0], *writes_sort_key(row[1], row[2], row[3])))
    return {
        number: [(task_id, channel, (kind, data)) for _, _, task_id, _, channel, kind, data in group]
        for number, group in groupby(ordered, key=lambda row: row[0])
    }


def latest(reader: Reader, where: Address) -> Header | None:
    """The checkpoint that an address names, or the latest of its namespace."""
    search = Search()
    search.where(tables.BY_THREAD, where.thread_id)
    search.where(tables.BY_NAMESPACE, where.namespace)
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


def known(store: StateStore, serde: SerializerProtocol, where: Address, checkpoint_id: str) -> Known | None:
    """What a save that builds on a checkpoint has to know; None where there is no such checkpoint."""
    with store.read() as reader:
        header = latest(reader, Address(where.thread_id, where.namespace, checkpoint_id))
        page = header and Page(reader, [header])
    return page.known(header, serde) if header and page else None


def place(reader: Reader, thread_id: str | None, checkpoint_id: str) -> int | None:
    """Where a checkpoint stands in the order; None where it is unknown."""
    sql, bound = (tables.PLACE, [checkpoint_id])
    if thread_id is not None:
        sql, bound = tables.PLACE + tables.IN_THREAD, [checkpoint_id, thread_id]
    number: int | None = reader.rows(sql, bound)[0][0]
    return number


def find(store: StateStore, where: Address) -> tuple[Header, Page] | None:
    """The checkpoint that an address names, or the latest of its namespace, with its state."""
    with store.read() as reader:
        header = latest(reader, where)
        return None if header is None else (header, Page(reader, [header]))


def search_for(
    store: StateStore, config: RunnableConfig | None, filter: Mapping[str, Any] | None, before: RunnableConfig | None
) -> Search:
    """What a list is asked for."""
    search = Search()
    configurable = (config or {}).get("configurable") or {}
    thread_id = configurable.get("thread_id")
    if thread_id is not None:
        search.where(tables.BY_THREAD, mapping.thread_name(thread_id))
    if configurable.get("checkpoint_ns") is not None:
        search.where(tables.BY_NAMESPACE, configurable["checkpoint_ns"])
    if configurable.get("checkpoint_id"):
        search.where(tables.BY_ID, str(configurable["checkpoint_id"]))
    before_id = before and get_checkpoint_id(before)
    if before_id:
        with store.read() as reader:
            number = place(reader, None if thread_id is None else mapping.thread_name(thread_id), str(before_id))
        # By our own order; by its id where it is unknown.
        search.where(*((tables.BEFORE_ID, str(before_id)) if number is None else (tables.BEFORE, number)))
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
            yield page, [header for header in found[start : start + PAGE] if page.has(header)]
        if len(headers) < count:
            return
        before = headers[-1].number
        left = None if left is None else left - len(found)


def _matches(header: Header, filter: Mapping[str, Any], serde: SerializerProtocol) -> bool:
    if not filter:
        return True
    metadata = mapping.metadata_value(serde, header.metadata_kind, header.metadata)
    return all(metadata.get(key) == value for key, value in filter.items())
