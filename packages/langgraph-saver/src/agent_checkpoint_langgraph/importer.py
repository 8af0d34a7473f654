"""``import_threads``: what LangGraph's own SQLite saver wrote, saved once more by this one.

The file is read in one state, and never changed. What it says is saved the way
that everything is saved: values once, growing ones as differences, each
checkpoint with its event, and under the fence of its thread.
"""

from __future__ import annotations

import json
import time
from contextlib import closing, contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agent_checkpoint import FencedWrite, InvalidInputError, LeaseHeldError
from agent_checkpoint_langgraph import mapping, reading, tables
from agent_checkpoint_langgraph.lineage import Lineage, in_order, stock_inside
from agent_checkpoint_langgraph.mapping import Address, Saving, TaskWrite
from agent_checkpoint_langgraph.pieces import Cutter
from agent_checkpoint_langgraph.saving import CheckpointSave, ParentGone, WritesSave
from agent_checkpoint_langgraph.sqlitefile import SqliteFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from agent_checkpoint import AgentCheckpointError, Part
    from agent_checkpoint.database import Reader
    from agent_checkpoint_langgraph.reading import Stock
    from agent_checkpoint_langgraph.saver import AgentCheckpointSaver
    from agent_checkpoint_langgraph.serde import Typed
    from agent_checkpoint_langgraph.sqlitefile import Place, StoredCheckpoint, StoredWrite

    OnProgress = Callable[[int, int], object]

# What is saved in one commit at most: so little that no heartbeat waits long.
BATCH = 64
BATCH_BYTES = 4 * 1024 * 1024
# Progress is told so often at most.
TELL_SECONDS = 0.2


class ImportReport(NamedTuple):
    """How much the file had: all of it is in the store now."""

    threads: int
    checkpoints: int
    writes: int


def import_threads(
    saver: AgentCheckpointSaver, path: str | PathLike[str], *, on_progress: OnProgress | None = None
) -> ImportReport:
    """Save all that a file of LangGraph's ``SqliteSaver`` or ``AsyncSqliteSaver`` has, oldest first.

    The file may be in use, and is not changed. No value is turned into an
    object. A checkpoint that is in the store already stays as it is; so an
    import that was interrupted is completed by running it again. Metadata that
    the saver denies (``metadata_deny``) stays behind.

    ``on_progress`` is called with how many checkpoints are done, and how many
    there are: a few times a second, and at the end.

    A thread that cannot be imported is left out; the error is raised once all
    others are in, and its ``refused_threads`` names those that were left out.
    What it holds is looked at before anything of it is saved; where a checkpoint
    turns out to be damaged, or the lease is taken meanwhile, what was saved stays.

    Raises:
        NotFoundError: there is no such file.
        InvalidInputError: it is not of that kind; or a thread holds what cannot
            be read, pickled objects among it, which are never loaded.
        LeaseHeldError: somebody else holds the lease of a thread.
    """
    with closing(SqliteFile(path)) as file:
        saver._core.prepare()
        progress = Progress(on_progress, file.count())
        refused: list[tuple[str, AgentCheckpointError]] = []
        threads, checkpoints, writes = 0, 0, 0
        for thread_id in file.threads():
            try:
                found = ThreadImport(saver, file, thread_id).run(progress)
            except (InvalidInputError, LeaseHeldError) as error:
                refused.append((thread_id, error))
                continue
            threads, checkpoints, writes = threads + 1, checkpoints + found[0], writes + found[1]
        progress.end()
    if refused:
        raise _refusal(refused)
    return ImportReport(threads, checkpoints, writes)


def _refusal(refused: Sequence[tuple[str, AgentCheckpointError]]) -> AgentCheckpointError:
    names = [thread_id for thread_id, _ in refused]
    error = refused[0][1]
    error.facts["refused_threads"] = error.refused_threads = names  # type: ignore[attr-defined]
    return error


class Progress:
    """Tells how far it is, now and then."""

    def __init__(self, tell: OnProgress | None, total: int) -> None:
        self._tell = tell
        self._total = total
        self._done = 0
        self._told = time.monotonic()

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        if self._tell is not None and now - self._told >= TELL_SECONDS:
            self._told = now
            self._tell(self._done, self._total)

    def end(self) -> None:
        """There will be no more."""
        if self._tell is not None:
            self._tell(self._done, self._total)


class Entry(NamedTuple):
    """A checkpoint, ready to be saved (None: it is not in the file), with the writes on top of it, by task."""

    place: Place
    saving: Saving | None
    tasks: list[tuple[str, str, list[TaskWrite]]]
    size: int

    @property
    def writes(self) -> int:
        """How many they are."""
        return sum(len(writes) for _, _, writes in self.tasks)


class ThreadImport:
    """One thread on its way from the file into the store."""

    def __init__(self, saver: AgentCheckpointSaver, file: SqliteFile, thread_id: str) -> None:
        self._core = saver._core
        self._serde = saver.serde
        self._file = file
        self._thread_id = mapping.thread_name(thread_id)
        self._cutter = Cutter(saver.serde)
        self._places = in_order(file.places(thread_id))
        self._lineage = Lineage(self._places)

    def run(self, progress: Progress) -> tuple[int, int]:
        """Save it; how many checkpoints and writes that were."""
        self._check()
        checkpoints, writes = 0, 0
        for batch in _batches(self._entries()):
            self._save(batch)
            count = sum(entry.saving is not None for entry in batch)
            checkpoints += count
            writes += sum(entry.writes for entry in batch)
            progress.advance(count)
        return checkpoints, writes

    def _check(self) -> None:
        """Refuse what cannot be read before anything is saved: an example of each kind."""
        for kind, data, checkpoint_id in self._file.examples(self._thread_id):
            with self._named(checkpoint_id):
                if kind.partition("+")[0] == "pickle":
                    raise InvalidInputError(
                        "is pickled: to load it would run whatever code it holds",
                        hint="load it with the saver that wrote it, and save it anew without pickle_fallback",
                        field="checkpoint",
                    )
                self._cutter.check(kind, data)

    def _entries(self) -> Iterator[Entry]:
        for place in self._places:
            with self._named(place.checkpoint_id):
                found = self._file.checkpoint(self._thread_id, place)
                saving = self._saving(place, found)
            yield self._entry(place, saving, len(found.data))
        for place in self._file.places_of_writes_alone(self._thread_id):
            yield self._entry(place, None, 0)

    def _entry(self, place: Place, saving: Saving | None, size: int) -> Entry:
        writes = self._file.writes(self._thread_id, place)
        size += sum(len(write.data) for write in writes)
        tasks = [
            (task_id, task_path, [self._task_write(write) for write in group])
            for (task_id, task_path), group in groupby(writes, key=lambda write: (write.task_id, write.task_path))
        ]
        return Entry(place, saving, tasks, size)

    def _task_write(self, write: StoredWrite) -> TaskWrite:
        return TaskWrite(write.idx, write.channel, self._cutter.value(write.kind, write.data))

    def _saving(self, place: Place, found: StoredCheckpoint) -> Saving:
        pieces = self._cutter.pieces(found.kind, found.data)
        metadata, typed = self._metadata(found.metadata)
        return Saving(
            self._address(place.namespace, place.parent_id),
            place.checkpoint_id,
            mapping.integer_column(pieces.format) or 1,
            mapping.text_column(metadata.get("source")),
            mapping.integer_column(metadata.get("step")),
            mapping.text_column(metadata.get("run_id")),
            typed,
            pieces.body,
            pieces.versions,
            pieces.values,
            # A channel has what stands in the checkpoint itself, and nothing that its parent had.
            frozenset(channel for channel in pieces.versions if channel not in pieces.values),
            {},
            {},
        )

    def _metadata(self, data: bytes) -> tuple[dict[str, Any], Typed]:
        """Metadata, and its bytes as they are, but for what the saver denies."""
        metadata = json.loads(data)
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is no object")
        kept = mapping.without_secrets(metadata, self._core.is_secret)
        return (metadata, ("json", data)) if kept == metadata else (kept, mapping.metadata_typed(self._serde, kept))

    def _save(self, batch: Sequence[Entry], tries: int = 2) -> None:
        """Save some in one commit, under the thread's lease where that is needed."""
        guarded = self._core.guarded(None, self._thread_id, takes=True)
        write = guarded("langgraph.import-thread", partial(self._store, batch))
        (outcome,) = self._core.store.write_all([write])
        if isinstance(outcome.error, ParentGone) and tries:
            self._lineage.forget_all()
            self._save(batch, tries - 1)
        elif outcome.error is not None:
            raise outcome.error
        else:
            self._lineage.commit(entry.place for entry in batch)

    def _store(self, batch: Sequence[Entry], part: Part) -> None:
        self._lineage.begin()
        stock = stock_inside(part, self._cutter)
        checkpoints, writes = 0, 0
        for entry in batch:
            saved = self._saved_writes(part, entry.place)
            if entry.saving is not None and saved is None:
                saving = self._changed(entry.saving, stock)
                known = _do(part, CheckpointSave(saving, bare, self._lineage, stock))
                self._lineage.saved(entry.place.namespace, known)
                checkpoints += 1
            writes += self._store_writes(part, entry, saved or {})
        if checkpoints or writes:
            part.event("langgraph.thread-imported", {"checkpoints": checkpoints, "writes": writes})

    def _store_writes(self, part: Part, entry: Entry, saved: dict[tuple[str, int], Any]) -> int:
        """Save the writes that are not there yet, and the special ones that are others now; how many those are."""
        where = self._address(entry.place.namespace, entry.place.checkpoint_id)
        stored = 0
        for task_id, task_path, writes in entry.tasks:
            new = [
                write
                for write in writes
                if (task_id, write.idx) not in saved
                or (write.idx < 0 and saved[task_id, write.idx] != (task_path, write.channel, *write.value))
            ]
            if new:
                _do(part, WritesSave(where, new, task_id, task_path, bare))
                stored += len(new)
        return stored

    def _saved_writes(self, part: Part, place: Place) -> dict[tuple[str, int], Any] | None:
        """The writes on top of a checkpoint that is in the store already; None where it is not."""
        header = reading.latest(cast("Reader", part), self._address(place.namespace, place.checkpoint_id))
        if header is None:
            return None
        return {
            (task_id, index): (task_path, channel, kind, data)
            for _, task_path, task_id, index, channel, kind, data in part.rows(
                *tables.among(tables.WRITES, [header.number])
            )
        }

    def _changed(self, saving: Saving, stock: Stock) -> Saving:
        """Encrypted twice, a value has other bytes: there its version tells whether it is the parent's."""
        parent_id = saving.address.checkpoint_id
        if not self._cutter.seals or parent_id is None:
            return saving
        where = saving.address
        parent = self._lineage.find(self._thread_id, where.namespace, parent_id) or stock.known(where, parent_id)
        if parent is None:
            return saving
        changed = {
            channel: value
            for channel, value in saving.changed.items()
            if channel not in parent.state or parent.versions.get(channel) != saving.versions.get(channel)
        }
        return saving._replace(changed=changed)

    def _address(self, namespace: str, checkpoint_id: str | None) -> Address:
        configurable = {"thread_id": self._thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
        return mapping.address({"configurable": configurable})

    @contextmanager
    def _named(self, checkpoint_id: str) -> Iterator[None]:
        """Errors in the block say where."""
        try:
            yield
        except ValueError as error:
            raise InvalidInputError(
                f"thread {self._thread_id!r}, checkpoint {checkpoint_id!r}: {error}",
                hint=getattr(error, "hint", ""),
                field=getattr(error, "field", "checkpoint"),
                thread_id=self._thread_id,
                checkpoint_id=checkpoint_id,
            ) from error


def bare(action: str, body: Callable[[Part], Any]) -> FencedWrite:
    """A write inside of another one, which has the fence."""
    return FencedWrite(mapping.COMPONENT, action, body)


def _do(part: Part, job: CheckpointSave | WritesSave) -> Any:
    body = job.planned().body
    assert body is not None
    return body(part)


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += entry.size
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
