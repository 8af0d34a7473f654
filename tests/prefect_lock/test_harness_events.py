"""What Prefect shows of leases: events and artifacts. And the hooks that end the leases of a run that is over."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelled

from agent_checkpoint_prefect import FencedLock, LeaseLostError

from .conftest import in_thread, take_away
from .harness import WATCHDOG_SECONDS, ended, in_async_code, lease_events, until, worker

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time


class Crash(BaseException):
    """What Prefect takes for a crash: nothing that a flow would catch."""


# Events


def arrived(client: SyncPrefectClient, scope: str, count: int) -> list[dict[str, Any]]:
    """The first ``count`` events of a lease in Prefect's feed, once they are all there."""

    def found() -> list[dict[str, Any]] | None:
        events = lease_events(client, scope)
        return events if len(events) >= count else None

    return until(found)


def test_what_happens_to_a_lease_in_a_run_is_in_prefects_event_feed(
    client: SyncPrefectClient, lock: FencedLock
) -> None:
    with lock.lease("before"):
        pass
    arrived(client, "prefect/default/before", 2)  # Prefect's thread for events has begun, outside of the run

    @flow
    def told() -> None:
        with lock.lease("told"):
            pass
        with pytest.raises(LeaseLostError), lock.lease("told") as lease:
            take_away(lock, lease)
            lease.check()

    state = told(return_state=True)
    assert state.is_completed()

    events = arrived(client, "prefect/default/told", 5)
    said = [(event["event"].removeprefix("agent-checkpoint.lease."), event["payload"]["token"]) for event in events]
    assert sorted(said) == [("acquired", 1), ("acquired", 2), ("lost", 2), ("released", 1), ("released", 2)]
    assert said[:3] == [("acquired", 1), ("released", 1), ("acquired", 2)]  # in the order in which it happened
    (lost,) = (event for event in events if event["event"].endswith(".lost"))
    assert lost["payload"]["reason"] == "released"
    assert {event["resource"]["prefect.resource.name"] for event in events} == {"told"}
    for event in events:
        related = {each["prefect.resource.id"] for each in event["related"]}
        assert f"prefect.flow-run.{state.state_details.flow_run_id}" in related


def test_with_an_api_url_a_lease_outside_of_runs_is_told_too(client: SyncPrefectClient, lock: FencedLock) -> None:
    with lock.lease("outside"):
        pass

    events = arrived(client, "prefect/default/outside", 2)
    assert [event["event"] for event in events] == [
        "agent-checkpoint.lease.acquired",
        "agent-checkpoint.lease.released",
    ]


# Artifacts


def table(client: SyncPrefectClient, artifact_id: Any) -> Any:
    answer = client.request("GET", f"/artifacts/{artifact_id}")
    answer.raise_for_status()
    return answer.json()


@pytest.mark.parametrize("awaited", [False, True])
def test_who_holds_what_is_published_as_a_table(client: SyncPrefectClient, lock: FencedLock, awaited: bool) -> None:
    @flow(flow_run_name="nightly")
    def publish() -> Any:
        with lock.lease("orders"), lock.lease("invoices"):
            return lock.publish_artifact("who-holds-what")

    @flow(flow_run_name="nightly")
    async def apublish() -> Any:
        async with lock.alease("orders"), lock.alease("invoices"):
            return await lock.apublish_artifact("who-holds-what")

    shown = table(client, in_async_code(apublish()) if awaited else publish())

    assert (shown["key"], shown["type"]) == ("who-holds-what", "table")
    assert shown["flow_run_id"] is not None
    for scope, token in (("prefect/default/orders", 1), ("prefect/default/invoices", 1)):
        assert f'"scope": "{scope}"' in shown["data"]
        assert f'"token": {token}' in shown["data"]
    assert '"flow run": "nightly"' in shown["data"]


def test_publishing_in_async_code_by_the_plain_name_is_no_coroutine(
    client: SyncPrefectClient, lock: FencedLock
) -> None:
    @flow
    async def publish() -> Any:
        answer = lock.publish_artifact()
        assert not isinstance(answer, Awaitable)
        return answer

    assert table(client, in_async_code(publish()))["key"] == "fenced-locks"


# Hooks


def test_a_crashed_flow_gives_back_what_it_still_holds(api: str, lock: FencedLock) -> None:
    kept = []

    @task
    def inner() -> None:
        kept.append(lock.acquire("invoices"))

    @flow(on_crashed=[lock.release_on_crash])
    def crashes() -> None:
        kept.append(lock.acquire("orders"))
        inner()
        raise Crash

    other = in_thread(lock.acquire, "of-another").result(WATCHDOG_SECONDS)
    with pytest.raises(Crash):
        crashes()

    assert [lease.scope for lease in lock.list_leases()] == [other.scope]
    ended = lock.store.open().events(kind="lease.force-released")
    assert sorted(event.scope for event in ended) == ["prefect/default/invoices", "prefect/default/orders"]
    assert {event.detail["reason"] for event in ended} == {"its flow run is crashed"}
    for lease in kept:
        with pytest.raises(LeaseLostError):
            lease.check()


def test_a_crashed_async_flow_gives_back_what_it_still_holds(api: str, lock: FencedLock) -> None:
    kept = []

    @flow(on_crashed=[lock.release_on_crash])
    async def crashes() -> None:
        kept.append(await lock.aacquire("orders"))
        raise Crash

    with pytest.raises(Crash):
        in_async_code(crashes())
    assert lock.list_leases() == []


def test_a_flow_that_fails_or_ends_well_keeps_the_hook_uncalled(api: str, lock: FencedLock) -> None:
    kept = []

    @flow(on_crashed=[lock.release_on_crash], on_cancellation=[lock.release_on_crash])
    def fails(name: str) -> None:
        kept.append(lock.acquire(name))
        raise ValueError("no")

    assert fails("orders", return_state=True).is_failed()
    assert lock.inspect("orders") is not None


def test_the_hook_in_another_process_ends_what_a_cancelled_run_holds(
    client: SyncPrefectClient, lock: FencedLock, tmp_path: Path
) -> None:
    """As Prefect's runner calls it, which is not the process of the run."""
    holder = worker(tmp_path, str(client.api_url), "hold_in_task")
    with ended(holder):
        until((tmp_path / f"holding-{holder.pid}").exists, while_alive=holder)
        lease = lock.inspect("orders")
        assert lease is not None
        run = client.read_flow_run(lease.metadata["flow_run_id"])
        client.set_flow_run_state(run.id, Cancelled(), force=True)

        lock.release_on_crash(None, run, Cancelled())

        assert holder.poll() is None
        assert lock.inspect("orders") is None
        with lock.lease("orders", timeout_seconds=0) as mine:
            assert mine.token == lease.token + 1
    (event,) = lock.store.open().events(kind="lease.force-released")
    assert event.detail["reason"] == "its flow run is cancelled"
