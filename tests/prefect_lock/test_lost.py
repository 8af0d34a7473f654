"""A lease that is lost while the code of a thread runs under it, and what ``on_lost`` makes of that."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agent_checkpoint_prefect import FencedLease, FencedLock, LeaseLostError, current_lease

from .conftest import (
    WATCHDOG_SECONDS,
    Locks,
    elsewhere,
    in_thread,
    take_away,
)
from .losing import lose

Where = Callable[..., Any]


@pytest.fixture(autouse=True)
def _same_handler() -> Iterator[None]:
    """Whatever happens in a block, the handler of its signal is the one of before, and not one comes late."""
    came: list[int] = []
    handler = lambda number, frame: came.append(number)  # noqa: E731
    before = signal.signal(signal.SIGURG, handler)
    try:
        yield
        after = signal.getsignal(signal.SIGURG)
    finally:
        signal.signal(signal.SIGURG, before)
    assert after is handler
    assert came == []


def in_main(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


@pytest.fixture(params=[in_main, elsewhere], ids=["main thread", "another thread"])
def where(request: pytest.FixtureRequest) -> Where:
    """Calls a function in the main thread, or in another one."""
    call: Where = request.param
    return call


def sleep_in_c(lease: FencedLease) -> None:
    time.sleep(WATCHDOG_SECONDS)


def run_python(lease: FencedLease) -> None:
    until = time.monotonic() + WATCHDOG_SECONDS
    while time.monotonic() < until:
        pass


def wait_for_a_lock(lease: FencedLease) -> None:
    threading.Event().wait(WATCHDOG_SECONDS)


def sleep_again(lease: FencedLease) -> None:
    for _ in range(WATCHDOG_SECONDS * 1000):
        time.sleep(0.001)


def lost_inside(lock: FencedLock, body: Callable[[FencedLease], Any]) -> LeaseLostError:
    """The error of a block whose lease is lost while its body runs."""
    with pytest.raises(LeaseLostError) as lost, lock.lease("orders") as lease:
        in_thread(lose, lock, lease)
        body(lease)
        pytest.fail("the body was not interrupted")
    return lost.value


@pytest.mark.parametrize("body", [sleep_in_c, run_python, wait_for_a_lock, sleep_again])
def test_a_loss_interrupts_the_main_thread(lock: FencedLock, body: Callable[[FencedLease], Any]) -> None:
    error = lost_inside(lock, body)
    assert (error.scope, error.token, error.reason) == ("prefect/default/orders", 1, "released")


@pytest.mark.parametrize("body", [run_python, sleep_again])
def test_a_loss_interrupts_another_thread(lock: FencedLock, body: Callable[[FencedLease], Any]) -> None:
    error = elsewhere(lost_inside, lock, body)
    assert (error.scope, error.token, error.reason) == ("prefect/default/orders", 1, "released")


def test_a_check_by_a_helper_that_finds_the_loss_interrupts_the_block(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            take_away(lock, lease)
            with pytest.raises(LeaseLostError):
                elsewhere(lease.check)
            sleep_again(lease)
            pytest.fail("the body was not interrupted")

    with pytest.raises(LeaseLostError):
        where(run)


def test_a_check_by_the_block_itself_that_finds_the_loss_is_all_that_it_hears(lock: FencedLock, where: Where) -> None:
    def run() -> list[bool]:
        reached = []
        with pytest.raises(LeaseLostError), lock.lease("orders") as lease:
            take_away(lock, lease)
            with pytest.raises(LeaseLostError):
                lease.check()
            sleep_again_shortly()
            reached.append(lease.lost)
        return reached

    assert where(run) == [True]


def test_after_a_loss_a_retry_has_a_new_token(lock: FencedLock, where: Where) -> None:
    def twice() -> int:
        lost_inside(lock, sleep_again)
        assert current_lease() is None
        with lock.lease("orders") as again:
            again.check()
            return again.token

    assert where(twice) == 2


def test_a_lease_that_runs_out_is_lost_too(locks: Locks, where: Where) -> None:
    lock = locks(ttl_seconds=0.3)

    def run() -> LeaseLostError:
        with pytest.raises(LeaseLostError) as lost, lock.lease("orders"):
            # A transaction that nobody ends: no heartbeat gets through.
            blocker = in_thread(_sit_in_a_transaction, lock)
            try:
                sleep_again(None)  # type: ignore[arg-type]
            finally:
                blocked.set()
                blocker.result(WATCHDOG_SECONDS)
        return lost.value

    blocked.clear()
    assert where(run).reason == "expired"
    assert elsewhere(lock.acquire, "orders").token == 2


blocked = threading.Event()


def _sit_in_a_transaction(lock: FencedLock) -> None:
    with lock.store.open().transaction(component="tests", action="test.sit"):
        blocked.wait(WATCHDOG_SECONDS)


def test_the_loss_of_the_outer_lease_ends_both_blocks(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("outer") as outer:
            with lock.lease("inner"):
                in_thread(lose, lock, outer)
                sleep_again(outer)
            pytest.fail("the outer block goes on")

    with pytest.raises(LeaseLostError) as lost:
        where(run)
    assert lost.value.scope == "prefect/default/outer"
    assert lock.list_leases() == []


def test_the_loss_of_the_inner_lease_leaves_the_outer_one(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("outer") as outer:
            with pytest.raises(LeaseLostError) as lost, lock.lease("inner") as inner:
                in_thread(lose, lock, inner)
                sleep_again(inner)
            assert lost.value.scope == "prefect/default/inner"
            outer.check()
            assert current_lease() is outer
            with pytest.raises(LeaseLostError) as lost:
                in_thread(lose, lock, outer)
                sleep_again(outer)
            raise lost.value

    with pytest.raises(LeaseLostError, match="outer"):
        where(run)


def test_a_body_that_swallows_the_interruption_is_told_at_its_end(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            try:
                in_thread(lose, lock, lease)
                sleep_again(lease)
            except LeaseLostError:
                pass

    with pytest.raises(LeaseLostError):
        where(run)


def test_what_the_body_raises_instead_is_what_is_raised(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            try:
                in_thread(lose, lock, lease)
                sleep_again(lease)
            except LeaseLostError as error:
                raise ZeroDivisionError from error

    with pytest.raises(ZeroDivisionError):
        where(run)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_another_interruption_is_not_taken_for_a_loss(
    lock: FencedLock, where: Where, error: type[BaseException]
) -> None:
    def run() -> None:
        with lock.lease("orders"):
            raise error

    with pytest.raises(error):
        where(run)
    assert lock.inspect("orders") is None


def test_ctrl_c_ends_a_block_as_it_ends_any(lock: FencedLock) -> None:
    with pytest.raises(KeyboardInterrupt), lock.lease("orders") as lease:
        in_thread(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        sleep_again(lease)
    assert lock.inspect("orders") is None


def test_the_signal_of_somebody_else_goes_where_it_went_before(lock: FencedLock) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: came.append(number))
    try:
        with lock.lease("a"), lock.lease("b") as lease:
            signal.raise_signal(signal.SIGURG)
            lease.check()
    finally:
        signal.signal(signal.SIGURG, before)
    assert came == [signal.SIGURG]


def test_a_loss_after_the_end_interrupts_nobody(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        with lock.lease("orders") as lease:
            pass
        lease.on_lost(None, "expired")
        for _ in range(100):
            time.sleep(0)

    where(run)


# The other ways


@pytest.mark.parametrize("on_lost", ["raise", "warn"])
def test_a_loss_interrupts_nobody_who_does_not_want_it(locks: Locks, where: Where, on_lost: str) -> None:
    lock, reached = locks(on_lost=on_lost), []

    def run() -> None:
        with lock.lease("orders") as lease:
            lose(lock, lease)
            sleep_again_shortly()
            reached.append(lease.lost)

    if on_lost == "raise":
        with pytest.raises(LeaseLostError) as lost:
            where(run)
        assert (lost.value.token, lost.value.reason) == (1, "released")
    else:
        where(run)
    assert reached == [True]


def sleep_again_shortly() -> None:
    for _ in range(20):
        time.sleep(0.001)


def test_a_warning_says_which_lease_was_lost(locks: Locks, caplog: pytest.LogCaptureFixture) -> None:
    lock = locks(on_lost="warn")
    with caplog.at_level(logging.WARNING, logger="agent_checkpoint_prefect"), lock.lease("orders") as lease:
        lose(lock, lease)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'orders'" in record.getMessage()
    assert "token 1" in record.getMessage()


@pytest.mark.parametrize("on_lost", ["cancel", "raise"])
def test_a_loss_that_nobody_heard_of_is_told_at_the_end(locks: Locks, where: Where, on_lost: str) -> None:
    lock = locks(on_lost=on_lost)

    def run() -> None:
        with lock.lease("orders") as lease:
            take_away(lock, lease)  # between two heartbeats: only the store knows

    with pytest.raises(LeaseLostError) as lost:
        where(run)
    assert (lost.value.token, lost.value.reason) == (1, "released")


def test_a_loss_that_nobody_heard_of_is_warned_of_at_the_end(locks: Locks, caplog: pytest.LogCaptureFixture) -> None:
    lock = locks(on_lost="warn")
    with caplog.at_level(logging.WARNING, logger="agent_checkpoint_prefect"), lock.lease("orders") as lease:
        take_away(lock, lease)
    assert len(caplog.records) == 1


def test_without_a_block_a_loss_interrupts_nobody(lock: FencedLock, where: Where) -> None:
    def run() -> None:
        lease = lock.acquire("orders")
        lose(lock, lease)
        sleep_again_shortly()
        assert lease.lost
        assert lease.remaining() == 0
        with pytest.raises(LeaseLostError):
            lease.check()
        lease.release()

    where(run)
