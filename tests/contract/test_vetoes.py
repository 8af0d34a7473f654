"""A veto stands, whether it can be put on record or not, on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent_checkpoint import FencedWrite, FenceRefusedError, Lease, StateStore, StorageBusyError, Write, hookimpl

WATCHDOG_SECONDS = 60


class Veto:
    @hookimpl
    def check_fence(self, write: Write) -> None:
        raise FenceRefusedError(f"no {write.action} today")


@pytest.fixture
def lease(store: StateStore) -> Lease:
    return store.acquire("release", "worker-a")


@pytest.fixture
def hasty(path: Path | str) -> Iterator[StateStore]:
    """One who does not wait for the lock, with a plugin that vetoes all."""
    with StateStore(path, busy_timeout_seconds=0.05, plugins=[Veto()]) as opened:
        yield opened


@contextmanager
def occupied(store: StateStore, lease: Lease) -> Iterator[None]:
    """Another thread is in the middle of a write under the lease."""
    inside, leave = threading.Event(), threading.Event()

    def write() -> None:
        with store.transaction(component="notes", action="note.write", fence=lease):
            inside.set()
            leave.wait(WATCHDOG_SECONDS)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert inside.wait(WATCHDOG_SECONDS)
        yield
    finally:
        leave.set()
        thread.join(WATCHDOG_SECONDS)


def _put(store: StateStore, lease: Lease) -> None:
    store.put_checkpoint("deploy", 1, lease=lease)


def _write(store: StateStore, lease: Lease) -> None:
    with store.transaction(component="notes", action="note.write", fence=lease):
        pytest.fail("it was let in")


@pytest.mark.parametrize("write", [_put, _write])
def test_a_veto_is_raised_though_somebody_else_has_the_lock(
    store: StateStore, hasty: StateStore, lease: Lease, write: Callable[[StateStore, Lease], None]
) -> None:
    with occupied(store, lease), pytest.raises(FenceRefusedError, match="today") as refused:
        write(hasty, lease)

    assert (refused.value.recorded, refused.value.facts["recorded"]) == (False, False)
    with pytest.raises(FenceRefusedError) as refused:
        write(hasty, lease)
    assert refused.value.recorded
    assert len(store.events(kind="write.refused")) == 1


def test_in_a_group_a_veto_stands_and_the_others_may_try_again(
    store: StateStore, hasty: StateStore, lease: Lease
) -> None:
    group = [FencedWrite("notes", "note.write", None, lease), FencedWrite("notes", "note.write")]
    with occupied(store, lease):
        vetoed, other = hasty.write_all(group)

    assert isinstance(vetoed.error, FenceRefusedError)
    assert vetoed.error.recorded is False
    assert isinstance(other.error, StorageBusyError)
