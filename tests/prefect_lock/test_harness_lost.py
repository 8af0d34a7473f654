"""Leases that are lost inside of flow runs and task runs, and the retries that take them again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from prefect import State, flow, task

from agent_checkpoint_prefect import FencedLock, LeaseLostError, current_fencing_token

from .harness import WATCHDOG_SECONDS, in_async_code

pytestmark = pytest.mark.long  # they start a Prefect API, which takes its time

# So short that the background heartbeat, a third of it, finds out within a moment.
SHORT_TTL_SECONDS = 0.6


def steal(lock: FencedLock, name: str = "orders") -> None:
    """End the lease of a name from outside, as an operator does; its holder has yet to hear of it."""
    lock.force_release(name, reason="a test")


def test_a_retry_of_a_flow_whose_lease_was_lost_has_a_new_token(api: str, lock: FencedLock) -> None:
    tokens: list[int] = []

    @flow(retries=1)
    def publish() -> int:
        with lock.lease("orders") as lease:
            tokens.append(lease.token)
            if len(tokens) == 1:
                steal(lock)
            lease.check()
            return lease.token

    assert publish() == 2
    assert tokens == [1, 2]


def test_a_retry_of_a_task_whose_lease_was_lost_has_a_new_token(api: str, lock: FencedLock) -> None:
    tokens: list[int | None] = []

    @task(retries=1)
    @lock.fenced("orders")
    def publish() -> int | None:
        tokens.append(current_fencing_token())
        if len(tokens) == 1:
            steal(lock)
        return tokens[-1]

    @flow
    def outer() -> int | None:
        return publish()

    assert outer() == 2
    assert tokens == [1, 2]


def test_a_flow_whose_lease_was_lost_fails_with_an_ordinary_exception(api: str, lock: FencedLock) -> None:
    @flow
    @lock.fenced("orders")
    def publish() -> str:
        steal(lock)
        return "published"

    state = publish(return_state=True)

    assert state.is_failed()
    with pytest.raises(LeaseLostError, match="with token 1"):
        state.result()


def wait_in_thread() -> None:
    """Wait for longer than any test, in steps of Python."""
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.01)


def interrupted_once(lock: FencedLock, wait: Callable[[], None]) -> tuple[Any, list[int | None]]:
    """A task whose lease is stolen while it waits for what never comes, the first time that it runs."""
    tokens: list[int | None] = []

    @task(retries=1)
    @lock.fenced("orders", ttl_seconds=SHORT_TTL_SECONDS)
    def wait_once() -> int | None:
        tokens.append(current_fencing_token())
        if len(tokens) == 1:
            steal(lock)
            wait()
        return tokens[-1]

    return wait_once, tokens


def test_a_task_in_the_main_thread_is_interrupted_and_retried(api: str, lock: FencedLock) -> None:
    wait_once, tokens = interrupted_once(lock, lambda: time.sleep(WATCHDOG_SECONDS))

    @flow
    def outer() -> object:
        return wait_once()

    assert outer() == 2
    assert tokens == [1, 2]


def test_a_task_in_a_thread_of_the_task_runner_is_interrupted_and_retried(api: str, lock: FencedLock) -> None:
    wait_once, tokens = interrupted_once(lock, wait_in_thread)

    @flow
    def outer() -> object:
        return wait_once.submit().result()

    assert outer() == 2
    assert tokens == [1, 2]


@pytest.mark.parametrize("submitted", [False, True], ids=["main thread", "task runner"])
def test_the_timeout_of_a_task_and_a_loss_are_told_apart(api: str, lock: FencedLock, submitted: bool) -> None:
    @task(timeout_seconds=1)
    @lock.fenced("slow")
    def slow() -> None:
        wait_in_thread()

    @task(timeout_seconds=WATCHDOG_SECONDS)
    @lock.fenced("orders", ttl_seconds=SHORT_TTL_SECONDS)
    def lost() -> None:
        steal(lock)
        wait_in_thread()

    @flow
    def outer() -> list[tuple[str | None, str]]:
        states: list[State[Any]] = []
        for each in (slow, lost):
            if submitted:
                future = each.submit()
                future.wait()
                states.append(future.state)
            else:
                states.append(each(return_state=True))
        return [(state.name, type(state.result(raise_on_failure=False)).__name__) for state in states]

    (slow_state, _), (lost_state, error) = outer()
    assert (slow_state, lost_state, error) == ("TimedOut", "Failed", "LeaseLostError")
    assert lock.list_leases() == []


def test_an_async_task_is_interrupted_and_retried(api: str, lock: FencedLock) -> None:
    tokens: list[int | None] = []

    @task(retries=1)
    @lock.fenced("orders", ttl_seconds=SHORT_TTL_SECONDS)
    async def wait_once() -> int | None:
        tokens.append(current_fencing_token())
        if len(tokens) == 1:
            await lock.aforce_release("orders", reason="a test")
            await asyncio.sleep(WATCHDOG_SECONDS)
        return tokens[-1]

    @flow
    async def outer() -> int | None:
        return await wait_once()

    assert in_async_code(outer()) == 2
    assert tokens == [1, 2]
