"""What another thread does may come between any two steps of a call: close the store, fork, replace the file.

A call is halted before one line of ``agent_checkpoint.sqlite`` after the other;
while it is halted, the other thing is done.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.halting import LONG, Halted, Handled, Interrupted
from tests.watching import open_files

from agent_checkpoint import (
    InvalidInputError,
    ReentrancyError,
    StateStore,
    StorageBusyError,
    forks,
    plugins,
    sqlite,
)
from agent_checkpoint.sqlite import connections, gate, opening, transactions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are counted in /proc")


def read(store: StateStore) -> object:
    return store.get_lease("release")


def write(store: StateStore) -> object:
    return store.put_checkpoint("deploy", {"by": "the halted one"})


calls = pytest.mark.parametrize("call", [read, write])


def new_store(path: Path, by: str = "the first") -> StateStore:
    store = StateStore(path, busy_timeout_seconds=LONG)
    store.initialize()
    store.put_checkpoint("deploy", {"by": by})
    return store


def newest(store: StateStore) -> object:
    """Who has saved the last checkpoint."""
    checkpoint = store.get_checkpoint("deploy")
    assert checkpoint is not None
    return checkpoint.data["by"]


def halted_everywhere(
    folder: Path, call: Callable[[StateStore], object], code: ModuleType = sqlite
) -> Iterator[tuple[StateStore, Path, Halted]]:
    """The call on a store of its own, halted at each of its lines in turn."""
    line = 1
    while True:
        path = folder / f"{line}.db"
        store = new_store(path)
        halted = Halted(lambda store=store: call(store), code, line)  # type: ignore[misc]
        if not halted.halts():
            assert halted.ends() is None
            store.close()
            break
        yield store, path, halted
        line += 1
    assert line > 20, "too few lines: is the call traced?"


@calls
def test_a_store_closed_during_a_call_leaves_no_file_open(tmp_path: Path, call: Callable[[StateStore], object]) -> None:
    for store, path, halted in halted_everywhere(tmp_path, call):
        store.close()
        error = halted.ends()
        assert error is None or (isinstance(error, InvalidInputError) and "is closed" in str(error)), halted.where
        assert open_files(path) == [], halted.where


@calls
def test_after_a_file_was_replaced_during_a_call_the_next_sees_the_new_one(
    tmp_path: Path, call: Callable[[StateStore], object]
) -> None:
    for store, path, halted in halted_everywhere(tmp_path, call):
        other = tmp_path / "other.db"
        new_store(other, by="the other file").close()
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        os.replace(other, path)
        if call is read:  # it is in nobody's way: another thread has seen the new file before it goes on
            assert newest(store) == "the other file"
        halted.ends()
        for by in ("a", "b"):  # more than the one connection that may be idle
            with StateStore(path) as fresh:
                assert newest(store) == newest(fresh), halted.where
            store.put_checkpoint("deploy", {"by": by})
        assert [file for file in open_files(path) if file.endswith("(deleted)")] == [], halted.where
        store.close()


def back_up(store: StateStore) -> object:
    path = Path(store.database)
    return store.backup(path.with_name(f"copy-of-{path.name}"))


def initialize_again(store: StateStore) -> object:
    with StateStore(store.database) as another:
        return another.initialize()


def forget(store: StateStore) -> object:
    another = StateStore(store.database)
    read(another)
    del another  # without having closed it
    return gc.collect(0)


# Where a call is long, only where it opens and closes.
@pytest.mark.parametrize(
    ("call", "code"),
    [
        *((call, sqlite) for call in (read, write, StateStore.close)),
        *((call, opening) for call in (back_up, initialize_again, forget)),
    ],
)
def test_a_child_forked_during_a_call_has_no_connection_of_its_parent_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[StateStore], object], code: ModuleType
) -> None:
    monkeypatch.setattr(forks, "PATIENCE", 0.01)
    for store, path, halted in halted_everywhere(tmp_path, call, code):
        verdict = _forked(path)
        assert halted.ends() is None, halted.where
        assert verdict in (FINE, REFUSED), (halted.where, verdict)
        store.close()
        with StateStore(path) as again:
            again.put_checkpoint("deploy", {"by": "the parent"})


@pytest.mark.parametrize(
    ("call", "code"), [(read, sqlite), (write, sqlite), (StateStore.close, connections), (back_up, opening)]
)
def test_a_child_forked_after_an_interrupted_call_uses_the_store(
    tmp_path: Path, call: Callable[[StateStore], object], code: ModuleType
) -> None:
    line = 1
    while True:
        path = tmp_path / f"{line}.db"
        store = new_store(path)
        interrupted = Interrupted(lambda store=store: call(store), code, line)  # type: ignore[misc]
        if not interrupted.was_interrupted():
            break
        # Were a connection lost, and still open, the fork would wait for it, and refuse the child the file.
        assert _forked(path) == FINE, interrupted.where
        with StateStore(path) as again:
            again.put_checkpoint("deploy", {"by": "the parent"})
        store.close()
        assert open_files(path) == [], interrupted.where
        line += 1
    assert line > 10, "too few lines: is the call traced?"


def acquire(store: StateStore) -> object:
    return store.acquire("release", "worker-a", 600)


@pytest.mark.parametrize("code", [transactions, gate, connections])
@pytest.mark.parametrize("call", [write, acquire])
def test_whoever_catches_an_interrupt_may_use_the_store(
    tmp_path: Path, call: Callable[[StateStore], object], code: ModuleType
) -> None:
    line = 1
    while True:
        path = tmp_path / f"{line}.db"
        store = new_store(path)

        def save(store: StateStore = store) -> None:
            store.put_checkpoint("deploy", {"by": "the handler"})
            assert store.get_lease("release") is None, "nobody knows of it"

        interrupted = Interrupted(lambda store=store: call(store), code, line, save)  # type: ignore[misc]
        if not interrupted.was_interrupted():
            break
        assert interrupted.error is None, interrupted.where
        store.close()
        line += 1
    assert line > 10, "too few lines: is the call traced?"


# Looking for plugins is the same few lines for each of hundreds of folders.
@pytest.mark.parametrize(("code", "step"), [(gate, 1), (plugins, 101)])
def test_a_handler_that_uses_the_store_at_any_line_of_a_call_hangs_nobody(
    tmp_path: Path, code: ModuleType, step: int
) -> None:
    line = 1
    while True:
        path = tmp_path / f"{line}.db"
        new_store(path).close()
        # What goes around the gate has waited in front of it for half of this.
        store = StateStore(path, busy_timeout_seconds=0.1, synchronous="normal")
        handled = Handled(lambda store=store: write(store), lambda store=store: write(store), code, line)  # type: ignore[misc]
        if not handled.was_handled():
            break
        for error in handled.errors:
            assert isinstance(error, (ReentrancyError, StorageBusyError)), handled.where
        # Whatever it was, it is over: the store takes the next write, in this process and in others.
        store.put_checkpoint("deploy", {"by": "the next one"})
        with StateStore(path) as again:
            assert newest(again) == "the next one", handled.where
        store.close()
        line += step
    assert line > 20, "too few lines: is the call traced?"


def test_a_child_forked_where_a_file_was_replaced_while_it_was_opened_is_refused_the_new_one(tmp_path: Path) -> None:
    verdicts: list[tuple[object, int]] = []

    def fork_inside(store: StateStore) -> None:
        with StateStore(store.database) as another, another.read() as reader:
            ((data,),) = reader.rows("SELECT data FROM checkpoints ORDER BY sequence DESC LIMIT 1")
            sys.settrace(None)  # nothing is halted in the child
            verdicts.append((json.loads(data)["by"], _forked(Path(store.database))))

    for store, path, halted in halted_everywhere(tmp_path, fork_inside, opening):
        other = tmp_path / "other.db"
        new_store(other, by="the other file").close()
        os.replace(other, path)
        assert halted.ends() is None, halted.where
        read_from, verdict = verdicts.pop()
        if read_from == "the other file":
            assert verdict == REFUSED, halted.where
        store.close()


FINE, REFUSED, INHERITED, BROKEN = 0, 10, 11, 12


def _forked(path: Path) -> int:
    """Fork now; what became of the child's use of the store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        child = os.fork()
    if child == 0:
        os._exit(_used_in_the_child(path))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _used_in_the_child(path: Path) -> int:
    inherited = open_files(path)
    try:
        with StateStore(path) as mine:  # the parent may have closed its own
            read(mine)
    except ReentrancyError:
        return REFUSED
    except BaseException:
        return BROKEN
    return INHERITED if inherited else FINE
