"""Limits that an administrator set for the role end a call by an error of ours, and deadlocks are tried again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from agent_checkpoint import StateStore, StorageBusyError, StorageUnreachableError
from agent_checkpoint.fenced import FencedWrite, Part


def with_setting(url: str, name: str, value: object) -> str:
    return f"{url}&options=-c%20{name}%3D{value}"


@pytest.fixture
def limited(store: StateStore, url: str, request: pytest.FixtureRequest) -> Iterator[StateStore]:
    with StateStore(with_setting(url, *request.param)) as opened:
        opened.list_leases()
        yield opened


@pytest.mark.parametrize("limited", [("statement_timeout", 300)], indirect=True)
def test_a_statement_that_took_too_long_is_busy(store: StateStore, limited: StateStore) -> None:
    holding = store.transaction(component="tests", action="test.write", locks=("scope:release",))
    with holding, pytest.raises(StorageBusyError, match="statement_timeout") as caught:
        limited.acquire("release", "worker-a")
    assert (caught.value.exit_status, caught.value.retryable) == (75, True)
    body = limited.transaction(component="tests", action="test.write")
    with pytest.raises(StorageBusyError, match="statement_timeout"), body as part:
        part.rows("SELECT pg_sleep(10)")
    assert limited.acquire("release", "worker-a").token == 1


@pytest.mark.parametrize("limited", [("transaction_timeout", 300)], indirect=True)
def test_a_transaction_that_took_too_long_is_undone(limited: StateStore) -> None:
    body = limited.transaction(component="tests", action="test.write")
    with pytest.raises(StorageUnreachableError) as caught, body as part:
        part.event("test.happened")
        threading.Event().wait(0.6)
        part.rows("SELECT 1")
    assert caught.value.undone
    body = limited.transaction(component="tests", action="test.write")
    with pytest.raises(StorageUnreachableError) as caught, body as part:
        part.event("test.happened")
        threading.Event().wait(0.6)  # and is committed after that
    assert caught.value.undone
    assert limited.events(kind="test.happened") == []


@pytest.mark.parametrize("limited", [("idle_session_timeout", 100)], indirect=True)
def test_a_session_that_idled_too_long_is_replaced(limited: StateStore) -> None:
    for number in range(1, 4):
        threading.Event().wait(0.3)
        assert limited.put_checkpoint("deploy", {}).sequence == number
        threading.Event().wait(0.3)
        assert limited.list_leases() == []
    lease = limited.acquire("release", "worker-a")
    threading.Event().wait(0.3)
    assert limited.check_lease(*lease.fence).token == 1


@pytest.mark.parametrize("limited", [("idle_in_transaction_session_timeout", 100), ("lock_timeout", 1)], indirect=True)
def test_limits_that_are_ours_to_set_are_ours(store: StateStore, limited: StateStore) -> None:
    with limited.transaction(component="tests", action="test.write") as part:
        threading.Event().wait(0.3)
        part.event("test.happened")
    thread = threading.Thread(target=limited.acquire, args=("release", "worker-a"))
    with store.transaction(component="tests", action="test.write", locks=("scope:release",)):
        thread.start()
        threading.Event().wait(0.1)
    thread.join()
    assert [lease.token for lease in store.list_leases()] == [1]


LOCK = "SELECT pg_advisory_xact_lock(?)"


def test_a_deadlock_of_an_adapter_s_own_locks_is_tried_again(store: StateStore) -> None:
    # Each takes one, meets the other, and then wants the other's: the server ends one of them.
    met = threading.Barrier(2)
    tries: list[str] = []
    answers: list[object] = []

    def writes(name: str, locks: tuple[int, int]) -> None:
        def body(part: Part) -> str:
            tries.append(name)
            part.rows(LOCK, (locks[0],))
            if tries.count(name) == 1:
                met.wait(30)
            part.rows(LOCK, (locks[1],))
            part.event("test.happened", {"by": name})
            return name

        answers.extend(store.write_all([FencedWrite("tests", "test.write", body)]))

    threads = [threading.Thread(target=writes, args=each) for each in (("one", (1, 2)), ("two", (2, 1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(str(outcome.answer) for outcome in answers) == ["one", "two"]  # type: ignore[attr-defined]
    assert len(tries) == 3
    assert sorted(event.detail["by"] for event in store.events(kind="test.happened")) == ["one", "two"]
