"""The lock on a PostgreSQL server: the same promises, for several machines, and no password where people look."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.locking.protocol import LockManager
from pydantic import SecretStr
from tests import postgres

from agent_checkpoint import AgentCheckpointError, StorageError, WaitTimeoutError
from agent_checkpoint_prefect import FencedLock, LeaseLostError, LeaseStore

from .conftest import WATCHDOG_SECONDS, elsewhere, in_loop, in_thread, result_store, wait_until

pytestmark = [
    pytest.mark.skipif(not postgres.is_installed(), reason="its package is not installed"),
    pytest.mark.usefixtures("unmeasured"),
]

PASSWORD = "hunter2-of-the-lock"
TTL_SECONDS = 1.0
_schemas = itertools.count(1)

WORKER = """
import sys
from pydantic import SecretStr
from agent_checkpoint_prefect import FencedLock, LeaseLostError, LeaseStore
lock = FencedLock(store=LeaseStore(dsn=SecretStr(sys.argv[1])), ttl_seconds=float(sys.argv[2]), timeout_seconds=60)
lease = lock.acquire("orders")
print(lease.token, flush=True)
sys.stdin.readline()
try:
    lease.check()
    print("held", flush=True)
except LeaseLostError as lost:
    print(lost.code, lost.token, flush=True)
lease.release()
"""


def dsn(schema: str | None = None) -> SecretStr:
    """A store in the server of the tests, which asks for no password, but is given one."""
    url = postgres.url(schema or f"lock_{os.getpid()}_{next(_schemas)}")
    return SecretStr(url.replace("postgres@", f"postgres:{PASSWORD}@", 1))


@pytest.fixture
def store() -> Iterator[LeaseStore]:
    made = LeaseStore(dsn=dsn())
    yield made
    made.open().close()


@pytest.fixture
def lock(store: LeaseStore) -> FencedLock:
    return FencedLock(store=store)


def test_one_holds_a_name_and_the_next_has_a_higher_token(lock: FencedLock) -> None:
    with lock.lease("orders") as lease:
        lease.check()
        assert elsewhere(lock.try_acquire, "orders") is None
        other = lock.try_acquire("invoices")
        assert other is not None
        other.release()
    with lock.lease("orders") as again:
        assert (lease.token, again.token) == (1, 2)
    assert lock.list_leases() == []


def test_it_is_awaited_in_the_same_way(lock: FencedLock) -> None:
    async def run() -> list[int]:
        tokens = []
        for _ in range(2):
            async with lock.alease("orders") as lease:
                await lease.acheck()
                tokens.append(lease.token)
        return tokens

    assert in_loop(run()) == [1, 2]


def test_as_many_hold_a_name_as_its_limit_says(store: LeaseStore) -> None:
    lock = FencedLock(store=store, limit=2)
    first, second = elsewhere(lock.acquire, "orders"), elsewhere(lock.acquire, "orders")

    assert elsewhere(lock.try_acquire, "orders") is None
    assert {first.slot, second.slot} == {0, 1}
    first.release()
    second.release()


def test_who_waits_is_served_when_the_name_is_free(lock: FencedLock) -> None:
    held = lock.acquire("orders")
    waits = in_thread(lock.acquire, "orders", timeout_seconds=WATCHDOG_SECONDS)
    wait_until(lambda: lock.store.open().status().queues)
    assert not waits.done()
    held.release()

    served = waits.result(WATCHDOG_SECONDS)
    assert served.token == 2
    served.release()


def test_who_lost_the_name_is_refused(lock: FencedLock) -> None:
    held = lock.acquire("orders")
    lock.force_release("orders", reason="it hangs")

    with pytest.raises(LeaseLostError) as lost:
        held.check()
    assert (lost.value.reason, lost.value.token) == ("released", 1)
    held.release()


def test_it_locks_result_records(lock: FencedLock) -> None:
    assert isinstance(lock, LockManager)
    assert lock.acquire_lock("key", "one") is True
    assert lock.acquire_lock("key", "one") is True
    assert elsewhere(lock.acquire_lock, "key", "two", acquire_timeout=0) is False
    assert (lock.is_locked("key"), lock.is_lock_holder("key", "one"), lock.is_lock_holder("key", "two")) == (
        True,
        True,
        False,
    )
    assert lock.wait_for_lock("key", timeout=0.05) is False
    lock.release_lock("key", "one")
    assert not lock.is_locked("key")
    assert lock.wait_for_lock("key", timeout=0.05) is True


def test_prefects_store_of_results_writes_under_it(lock: FencedLock, tmp_path: Path) -> None:
    results = result_store(lock, tmp_path)
    results.acquire_lock("key", holder="one")
    results.write("value", key="key", holder="one")
    assert results.is_locked("key")
    results.release_lock("key", holder="one")

    assert results.read("key").result == "value"


# Two processes


def worker(place: SecretStr, ttl_seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, place.get_secret_value(), str(ttl_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_waits_until_the_first_one_gives_it_back(store: LeaseStore, lock: FencedLock) -> None:
    held = lock.acquire("orders")
    with worker(store.dsn, 30) as other:  # type: ignore[arg-type]  # it has one
        wait_until(lambda: lock.store.open().status().queues)
        with pytest.raises(WaitTimeoutError):  # the queue has a turn for each
            elsewhere(lock.acquire, "orders", timeout_seconds=0.05)
        held.release()
        assert line(other) == "2"
        assert elsewhere(lock.try_acquire, "orders") is None
        other.communicate("go on\n", WATCHDOG_SECONDS)
    assert other.returncode == 0
    assert lock.inspect("orders") is None


def test_a_frozen_process_is_superseded_after_its_ttl_and_refused_when_it_wakes(
    store: LeaseStore, lock: FencedLock
) -> None:
    with worker(store.dsn, TTL_SECONDS) as frozen:  # type: ignore[arg-type]  # it has one
        assert line(frozen) == "1"
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            held = lock.acquire("orders", timeout_seconds=WATCHDOG_SECONDS)
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        said, _ = frozen.communicate("go on\n", WATCHDOG_SECONDS)
    assert said.split() == ["stale-lease", "1"]
    assert frozen.returncode == 0
    held.check()
    assert held.token == 2
    held.release()


# The password


def everything_said(lock: FencedLock) -> Iterator[str]:
    store = lock.store.open()
    yield from (repr(lock), str(lock), repr(lock.store), lock.model_dump_json(), repr(lock.model_dump()))
    yield from (repr(store), store.database, json.dumps([each._asdict() for each in store.events()], default=str))
    yield from (repr(store.status()), repr(store.doctor()))


def test_the_password_is_in_nothing_that_is_shown(lock: FencedLock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with lock.lease("orders", metadata={"customer": "ann"}) as lease:
        lock.acquire_lock("key", "one")
        said = [*everything_said(lock), repr(lease), repr(lock.list_leases())]
        with pytest.raises(AgentCheckpointError) as held:
            elsewhere(lock.acquire, "orders", timeout_seconds=0)
        said += [str(held.value), repr(held.value.facts), held.value.hint]
        lock.release_lock("key", "one")

    assert "customer" in "".join(said)
    assert PASSWORD not in "".join([*said, caplog.text])


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url.replace("127.0.0.1:", "127.0.0.1:1"),
        lambda url: url.replace("/postgres?", "/no-such-database?"),
        lambda url: url.replace("postgres:", "nobody-there:"),
        lambda url: url + "&pool_size=many",
        lambda url: url.replace(PASSWORD, f"{PASSWORD}/@:?"),
    ],
    ids=["port", "database", "role", "option", "not encoded"],
)
def test_nor_in_an_error_of_a_place_that_cannot_be_reached(
    change: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = change(dsn("never_there").get_secret_value()) + "&connect_timeout=2"
    lock = FencedLock(store=LeaseStore(dsn=SecretStr(url)))
    with pytest.raises((StorageError, ValueError)) as refused:
        lock.acquire("orders", timeout_seconds=0)

    error: Any = refused.value
    said = ["".join(traceback.format_exception(error)), repr(error), repr(getattr(error, "facts", "")), repr(lock)]
    assert PASSWORD not in "".join([*said, caplog.text])


def test_a_lock_that_was_sent_elsewhere_has_its_place_and_does_not_show_it(lock: FencedLock) -> None:
    sent = pickle.loads(pickle.dumps(lock))

    assert sent == lock
    assert PASSWORD not in f"{sent!r} {sent.store!r}"
    assert elsewhere(sent.try_acquire, "orders").token == 1
    assert elsewhere(lock.try_acquire, "orders") is None
    lock.force_release("orders", reason="the test is over")
