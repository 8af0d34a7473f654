"""Leases inside flow runs and task runs: what goes on record, decorators, nesting, and waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.flow_engine import run_flow

from agent_checkpoint_prefect import (
    FencedLock,
    LeaseReentrancyError,
    LeaseStore,
    current_fencing_token,
    current_lease,
    holding,
)

from .conftest import elsewhere
from .harness import WATCHDOG_SECONDS, in_async_code, until

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

# What goes on record


def test_the_ids_and_names_of_the_runs_are_on_record_with_a_lease(api: str, lock: FencedLock) -> None:
    @task
    def inner() -> dict[str, Any]:
        with lock.lease("invoices"):
            found = lock.inspect("invoices")
        assert found is not None
        return found.metadata

    @flow
    def outer() -> tuple[dict[str, Any], dict[str, Any]]:
        with lock.lease("orders", metadata={"ticket": 7}):
            found = lock.inspect("orders")
            assert found is not None
            return found.metadata, inner()

    state = outer(return_state=True)
    in_flow, in_task = state.result()

    assert in_flow["flow_run_id"] == str(state.state_details.flow_run_id)
    assert in_flow["flow_name"] == "outer"
    assert in_flow["flow_run_name"]
    assert in_flow["ticket"] == 7
    assert {name: in_task[name] for name in ("flow_run_id", "flow_run_name", "flow_name")} == {
        name: in_flow[name] for name in ("flow_run_id", "flow_run_name", "flow_name")
    }
    assert in_task["task_name"] == "inner"
    assert in_task["task_run_name"].startswith("inner-")
    assert UUID(in_task["task_run_id"])
    assert "task_run_id" not in in_flow


def test_the_owner_is_a_label_with_the_name_of_the_run(api: str, lock: FencedLock) -> None:
    @flow(flow_run_name="nightly")
    def owner() -> str:
        with lock.lease("orders") as lease:
            return lease.owner

    assert owner().startswith("nightly:")


def test_the_id_and_name_of_a_deployment_are_on_record(
    client: SyncPrefectClient, lock: FencedLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    @flow
    def deployed() -> dict[str, Any]:
        with lock.lease("orders") as lease:
            return lease.metadata

    deployment_id = client.create_deployment(client.create_flow(deployed), name="nightly")
    run = client.create_flow_run_from_deployment(deployment_id)
    monkeypatch.setenv("PREFECT__DEPLOYMENT_NAME", "nightly")  # as who starts the process of a run does

    found = run_flow(deployed, flow_run=run, return_type="result")
    assert (found["deployment_id"], found["deployment_name"]) == (str(deployment_id), "nightly")
    assert found["flow_run_id"] == str(run.id)


def test_the_id_of_a_flow_run_lets_nobody_in_twice(client: SyncPrefectClient, lock: FencedLock) -> None:
    """Prefect may start one flow run two times: the second is another holder."""

    @flow
    def started_twice(again: bool) -> bool:
        with lock.lease("orders"):
            if again:
                return second_start()
        return True

    def second_start() -> bool:
        return elsewhere(lock.try_acquire, "orders", metadata=same_run) is None

    run = client.create_flow_run(started_twice, parameters={"again": True})
    same_run = {"flow_run_id": str(run.id)}
    assert run_flow(started_twice, flow_run=run, parameters={"again": True}, return_type="result") is True


# What the code under a lease knows


def test_a_flow_and_its_tasks_are_fenced_by_names_made_of_their_arguments(api: str, lock: FencedLock) -> None:
    @task
    @lock.fenced("invoice-{invoice.number}")
    def send(invoice: Any) -> list[str]:
        return sorted(lease.scope for lease in lock.list_leases())

    @flow
    @lock.fenced("orders-{customer_id}")
    def orders(customer_id: int, invoice: Any) -> list[str]:
        return send(invoice)

    class Invoice:
        number = "2026-1"

    assert orders(7, Invoice()) == ["prefect/default/invoice-2026-1", "prefect/default/orders-7"]
    assert lock.list_leases() == []


def test_an_async_flow_and_its_tasks_are_fenced(api: str, lock: FencedLock) -> None:
    @task
    @lock.fenced("invoices")
    async def send() -> list[str]:
        return sorted(lease.scope for lease in await lock.alist_leases())

    @flow
    @lock.fenced("orders-{customer_id}")
    async def orders(customer_id: int = 7) -> list[str]:
        return await send()

    assert in_async_code(orders()) == ["prefect/default/invoices", "prefect/default/orders-7"]
    assert lock.list_leases() == []


def test_a_task_sees_the_lease_and_the_token_of_its_flow(api: str, lock: FencedLock) -> None:
    @task
    def token() -> tuple[int | None, str | None]:
        lease = current_lease()
        return current_fencing_token(), None if lease is None else lease.name

    @flow
    def outer() -> list[object]:
        with lock.lease("orders"):
            return [token(), token.submit().result(), *(each.result() for each in [token.submit() for _ in range(2)])]

    assert outer() == [(1, "orders")] * 4


def test_a_task_that_takes_the_name_its_flow_holds_is_refused_at_once(api: str, lock: FencedLock) -> None:
    @task
    def again() -> None:
        with lock.lease("orders"):
            pass

    @flow
    def outer(submitted: bool) -> None:
        with lock.lease("orders"):
            if submitted:
                again.submit().result()
            again()

    for submitted in (False, True):
        with pytest.raises(LeaseReentrancyError, match="'orders'") as refused:
            outer(submitted)
        held = refused.value
        assert (held.token, held.owner.split(":")[0]) == (1 + submitted, held.owner.split(":")[0])
    assert lock.list_leases() == []


# Waiting


class Told(logging.Handler):
    """Does something once the log says that somebody waits."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for" in record.getMessage():
            self._then()


def test_the_log_of_a_run_says_who_it_waits_for(
    client: SyncPrefectClient, lock: FencedLock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(holding, "PATIENCE", 0.05)
    caplog.set_level(logging.INFO, "prefect.flow_runs")
    store = lock.store.open()
    held = elsewhere(store.acquire, "prefect/default/orders", "night-shift", ttl_seconds=WATCHDOG_SECONDS)
    told = Told(lambda: store.release(*held.fence))

    @flow
    def waits() -> int:
        with lock.lease("orders") as lease:
            return lease.token

    runs = logging.getLogger("prefect.flow_runs")
    runs.addHandler(told)
    try:
        state = waits(return_state=True)
    finally:
        runs.removeHandler(told)

    assert state.result() == 2
    of_the_run = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[state.state_details.flow_run_id]))

    def line() -> str | None:
        found = [each.message for each in client.read_logs(of_the_run)]
        return next((message for message in found if "waiting for" in message), None)

    said = until(line)
    assert "'orders'" in said
    assert "held by night-shift with token 1" in said


def test_a_lock_in_a_run_uses_no_other_store_than_its_own(api: str, path: Path, tmp_path: Path) -> None:
    other = FencedLock(store=LeaseStore(path=tmp_path / "other.db"))
    mine = FencedLock(store=LeaseStore(path=path))

    @flow
    def both() -> list[int]:
        with mine.lease("orders") as one, other.lease("orders") as two:
            return [one.token, two.token]

    assert both() == [1, 1]
