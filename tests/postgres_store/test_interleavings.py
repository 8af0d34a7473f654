"""Another thread may close the store between any two steps of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests import postgres
from tests.halting import LONG, Halted, Interrupted

import agent_checkpoint_postgres
from agent_checkpoint import InvalidInputError, StateStore, StorageBusyError
from agent_checkpoint_postgres import transactions


def read(store: StateStore) -> object:
    return store.list_leases()


def write(store: StateStore) -> object:
    return store.put_checkpoint("deploy", {"by": "the halted one"})


calls = pytest.mark.parametrize("call", [read, write])


@pytest.fixture
def server() -> Iterator[postgres.Server]:
    """A server of its own: it is counted who is connected."""
    server = postgres.Server(*postgres.QUICK).start()
    yield server
    server.remove()


def halted_everywhere(url: str, call: Callable[[StateStore], object]) -> Iterator[tuple[StateStore, Halted]]:
    """The call on a store that was used before, halted at each of its lines in turn."""
    line = 1
    while True:
        store = StateStore(url)
        store.initialize()
        store.put_checkpoint("deploy", {"by": "the first"})
        halted = Halted(lambda store=store: call(store), agent_checkpoint_postgres, line)  # type: ignore[misc]
        if not halted.halts():
            assert halted.ends() is None
            store.close()
            break
        yield store, halted
        line += 1
    assert line > 20, "too few lines: is the call traced?"


@calls
def test_a_store_closed_during_a_call_leaves_no_connection(
    server: postgres.Server, call: Callable[[StateStore], object]
) -> None:
    for store, halted in halted_everywhere(server.url(), call):
        store.close()
        error = halted.ends()
        assert error is None or (isinstance(error, InvalidInputError) and "is closed" in str(error)), (
            halted.where,
            error,
        )
        with pytest.raises(InvalidInputError, match="is closed"):
            read(store)
    deadline = time.monotonic() + LONG
    while server.sql("SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend'") != [(1,)]:
        assert time.monotonic() < deadline, "more than who asks are connected"
        time.sleep(0.05)


@calls
def test_an_interrupted_call_costs_no_place_in_the_pool(
    server: postgres.Server, call: Callable[[StateStore], object]
) -> None:
    line, lost = 1, []
    while True:
        with StateStore(server.url("agent_checkpoint", "pool_size=1"), busy_timeout_seconds=0.5) as store:
            store.initialize()
            interrupted = Interrupted(lambda store=store: call(store), transactions, line)  # type: ignore[misc]
            if not interrupted.was_interrupted():
                break
            try:
                read(store)
            except StorageBusyError:
                lost.append(interrupted.where)
        line += 1
    assert line > 10, "too few lines: is the call traced?"
    # Between taking a connection for another's and letting it be one there is a moment.
    assert len(lost) <= 1, lost
