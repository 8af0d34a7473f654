"""Waiters are woken by NOTIFY, and look for themselves where nothing is heard."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests import postgres

from agent_checkpoint import Lease, StateStore, leases, waiting
from agent_checkpoint.aio import AsyncStateStore

LISTENERS = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND application_name = '{name}'"


def waiter(store: StateStore, owner: str) -> waiting.Waiter:
    """One who waits for the scope, and has found it taken."""
    made = store._waiter(leases.valid_ask("release", owner, 60, None), 600)
    assert isinstance(made.step(), float)
    assert made.bell is not None
    return made


def wait_for(server: postgres.Server, question: str) -> None:
    for _ in range(1_000):
        if server.sql(question)[0][0]:
            return
        threading.Event().wait(0.01)
    raise AssertionError(question)


def test_a_waiter_is_rung_by_who_frees_the_scope(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    held = store.acquire("release", "worker-a", ttl_seconds=3600)
    with StateStore(f"{url}&application_name={schema}") as other:
        first, second = waiter(other, "worker-b"), waiter(other, "worker-c")
        wait_for(server, "SELECT COUNT(*) " + LISTENERS.format(name=schema))
        assert first.bell is not None
        assert second.bell is not None
        first.bell.wait(0.2), second.bell.wait(0.2)  # what rang when the listening began

        store.release(*held.fence)

        assert first.bell.wait(30), "its time was over, nobody rang"
        assert not second.bell.wait(0), "it is not its turn"
        lease = first.step(True)
        assert isinstance(lease, Lease)
        assert (lease.owner, lease.token) == ("worker-b", 2)
        other.release(*lease.fence)
        assert second.bell.wait(30)
        second.leave()
    assert store.acquire("release", "worker-d").token == 3


def test_nobody_is_notified_where_nobody_waits(store: StateStore, url: str, server: postgres.Server) -> None:
    def notified() -> int:
        return (server.folder / "log").read_text(errors="replace").count("pg_notify")

    with StateStore(url + "&options=-c%20log_statement%3Dall") as told:
        before = notified()
        lease = told.acquire("release", "worker-a")
        told.heartbeat(*lease.fence)
        told.put_checkpoint("deploy", {}, lease=lease)
        told.release(*lease.fence)
        assert notified() == before

        lease = told.acquire("release", "worker-a")
        late = waiter(store, "worker-b")
        told.release(*lease.fence)
        assert notified() == before + 1
        late.leave()


@pytest.mark.parametrize("option", ["listen=on", "listen=off"])
def test_a_waiter_is_served_whether_or_not_it_listens(store: StateStore, url: str, option: str) -> None:
    with StateStore(f"{url}&{option}") as other:
        held = store.acquire("release", "worker-a", ttl_seconds=3600)
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(other.acquire("release", "worker-b", wait_seconds=60).token)
        )
        thread.start()
        while not store.status().queues:
            threading.Event().wait(0.01)
        listening = [each for each in threading.enumerate() if each.name == "agent-checkpoint-listener"]
        assert bool(listening) is (option == "listen=on")
        store.release(*held.fence)
        thread.join(60)
        assert found == [2]


def test_a_task_that_waits_is_rung_too(store: StateStore, url: str) -> None:
    async def play() -> tuple[int, int]:
        async with AsyncStateStore(url) as other:
            async with other.hold("release", "worker-a", wait_seconds=60) as first:
                second = asyncio.ensure_future(other.acquire("release", "worker-b", wait_seconds=60))
                while not (await other.status()).queues:
                    await asyncio.sleep(0.01)
                token = first.token
            return token, (await second).token

    assert asyncio.run(play()) == (1, 2)


def test_a_listener_whose_connection_was_ended_listens_anew(
    store: StateStore, url: str, server: postgres.Server, schema: str
) -> None:
    held = store.acquire("release", "worker-a", ttl_seconds=3600)
    with StateStore(f"{url}&application_name={schema}") as other:
        first = waiter(other, "worker-b")
        listeners = LISTENERS.format(name=schema)
        wait_for(server, f"SELECT COUNT(*) {listeners}")
        (ended,) = server.sql(f"SELECT pid {listeners}")[0]
        server.sql(f"SELECT pg_terminate_backend(pid) {listeners}")
        wait_for(server, f"SELECT COUNT(*) {listeners} AND pid <> {ended}")
        assert first.bell is not None
        assert first.bell.wait(30), "what was notified meanwhile was not heard: it must look"
        first.bell.wait(0.2)
        store.release(*held.fence)
        assert first.bell.wait(30)
        first.leave()


def test_a_closed_store_listens_no_more(store: StateStore, url: str, server: postgres.Server, schema: str) -> None:
    store.acquire("release", "worker-a", ttl_seconds=3600)
    other = StateStore(f"{url}&application_name={schema}")
    waiter(other, "worker-b").leave()
    wait_for(server, "SELECT COUNT(*) " + LISTENERS.format(name=schema))
    other.close()
    wait_for(server, f"SELECT COUNT(*) = 0 FROM pg_stat_activity WHERE application_name = '{schema}'")
    names = [thread.name for thread in threading.enumerate()]
    assert "agent-checkpoint-listener" not in names
