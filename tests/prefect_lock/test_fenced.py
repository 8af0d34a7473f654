"""The decorator: each call of a function holds a name that is made of its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow
from pydantic import BaseModel

from agent_checkpoint import InvalidInputError, LeaseHeldError
from agent_checkpoint_prefect import (
    FencedLock,
    LeaseLostError,
    LeaseReentrancyError,
    current_fencing_token,
    current_lease,
)

from .conftest import Locks, elsewhere, events, in_loop, take_away


class Order(BaseModel):
    number: int


@contextmanager
def timed() -> Iterator[None]:
    yield


def held() -> list[str]:
    """The names that the calling code holds."""
    lease = current_lease()
    return [] if lease is None else [lease.name]


def test_the_body_runs_under_a_name_made_of_the_arguments(lock: FencedLock) -> None:
    @lock.fenced("orders-{customer_id}")
    def publish(customer_id: int, *, dry_run: bool = False) -> tuple[list[str], int | None, bool]:
        return held(), current_fencing_token(), dry_run

    assert publish(7) == (["orders-7"], 1, False)
    assert publish(customer_id=7, dry_run=True) == (["orders-7"], 2, True)
    assert publish(8) == (["orders-8"], 1, False)
    assert current_lease() is None
    assert lock.list_leases() == []


def test_a_coroutine_runs_under_its_name(lock: FencedLock) -> None:
    @lock.fenced("orders-{customer_id}")
    async def publish(customer_id: int) -> list[str]:
        return held()

    assert inspect.iscoroutinefunction(publish)
    assert in_loop(publish(7)) == ["orders-7"]
    assert lock.list_leases() == []


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("plain", "plain"),
        ("{region}", "eu"),
        ("{order.customer}-{order.lines[0]}", "ada-first"),
        ("{rows[key]}", "value"),
        ("{number:03d}", "007"),
        ("{number!r}", "7"),
        ("{{braces}}", "{braces}"),
        ("{args[0]}", "extra"),
        ("{more[colour]}", "red"),
    ],
)
def test_a_template_takes_what_the_function_takes(lock: FencedLock, template: str, name: str) -> None:
    @lock.fenced(template)
    def publish(
        number: int, order: Any, rows: dict[str, str], *args: str, region: str = "eu", **more: str
    ) -> list[str]:
        return held()

    order = SimpleNamespace(customer="ada", lines=["first"])
    assert publish(7, order, {"key": "value"}, "extra", colour="red") == [name]


def test_a_method_takes_its_object(lock: FencedLock) -> None:
    class Publisher:
        name = "books"

        @lock.fenced("{self.name}-{number}")
        def publish(self, number: int) -> list[str]:
            return held()

    assert Publisher().publish(3) == ["books-3"]


@pytest.mark.parametrize("template", ["{nobody}", "{}", "{0}", "orders-{customer.id}", "{number:{width}}", "{open"])
def test_a_template_that_cannot_be_filled_in_is_refused_where_it_is_defined(lock: FencedLock, template: str) -> None:
    with pytest.raises(InvalidInputError) as wrong:

        @lock.fenced(template)
        def publish(number: int) -> None: ...

    assert wrong.value.facts["field"] == "template"
    assert lock.list_leases() == []


def test_what_is_no_function_is_refused_where_it_is_defined(lock: FencedLock) -> None:
    def generate() -> Any:
        yield 1

    async def agenerate() -> Any:
        yield 1

    for wrong in (print, 7, SimpleNamespace):
        with pytest.raises(InvalidInputError, match="fenced: is for functions"):
            lock.fenced("orders")(wrong)
    for generator in (generate, agenerate):
        with pytest.raises(InvalidInputError, match="is a generator function"):
            lock.fenced("orders")(generator)


def test_a_body_that_would_run_without_the_lease_is_refused_when_it_is_called(lock: FencedLock) -> None:
    ran = []

    async def publish() -> None:
        ran.append("coroutine")

    def generate() -> Any:
        ran.append("generator")
        yield

    async def agenerate() -> Any:
        ran.append("async generator")
        yield

    for function in (publish, generate, agenerate):

        @lock.fenced("orders")
        @functools.wraps(function)
        def plain(function: Any = function) -> Any:
            return function()

        @lock.fenced("orders")
        async def awaited(function: Any = function) -> Any:
            return function()

        with pytest.raises(InvalidInputError, match="would run without the lease"):
            plain()
        with pytest.raises(InvalidInputError, match="would run without the lease"):
            in_loop(awaited())
    assert ran == []
    assert lock.list_leases() == []


def test_wrong_arguments_are_the_callers_mistake_and_nothing_is_held(lock: FencedLock) -> None:
    @lock.fenced("orders-{number}")
    def publish(number: int) -> None: ...

    with pytest.raises(TypeError):
        publish()
    with pytest.raises(TypeError):
        publish(1, 2)
    assert events(lock) == []


def test_the_function_looks_like_itself(lock: FencedLock) -> None:
    def publish(number: int) -> int:
        """Publish it."""
        return number

    fenced = lock.fenced("orders-{number}")(publish)
    assert (fenced.__name__, fenced.__doc__) == ("publish", "Publish it.")
    assert inspect.signature(fenced) == inspect.signature(publish)


def test_prefect_finds_what_the_annotations_name(lock: FencedLock) -> None:
    @lock.fenced("orders-{order.number}")
    def publish(order: Order) -> None: ...

    @lock.fenced("orders-{order.number}")
    async def apublish(order: Order) -> None: ...

    @lock.fenced("orders-{order.number}")
    @timed()  # the function that it makes is of another module
    def decorated(order: Order) -> None: ...

    for function in (publish, apublish, decorated):
        given = flow(function).validate_parameters({"order": {"number": 7}})
        assert given == {"order": Order(number=7)}


@pytest.mark.parametrize("on_lost", ["raise", "warn", "cancel"])
def test_ownership_is_checked_again_at_the_end_of_the_body(locks: Locks, on_lost: str) -> None:
    lock = locks(on_lost=on_lost)

    @lock.fenced("orders")
    def publish() -> str:
        lease = current_lease()
        assert lease is not None
        take_away(lock, lease)
        return "published"

    @lock.fenced("orders")
    async def apublish() -> str:
        return elsewhere(lambda: None) or publish.__wrapped__()

    with pytest.raises(LeaseLostError):
        publish()
    with pytest.raises(LeaseLostError):
        in_loop(apublish())
    assert [event.detail["action"] for event in events(lock, "write.refused")] == ["prefect.check"] * 2


def test_what_the_body_raises_is_what_is_raised(lock: FencedLock) -> None:
    @lock.fenced("orders")
    def publish() -> None:
        raise ZeroDivisionError

    @lock.fenced("orders")
    async def apublish() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish()
    with pytest.raises(ZeroDivisionError):
        in_loop(apublish())
    assert lock.list_leases() == []


def test_the_body_does_not_run_while_another_one_has_the_name(lock: FencedLock) -> None:
    @lock.fenced("orders-{number}", timeout_seconds=0, ttl_seconds=5)
    def publish(number: int) -> Any:
        return lock.inspect(f"orders-{number}").ttl_seconds  # type: ignore[union-attr]

    with lock.lease("orders-1"):
        with pytest.raises(LeaseHeldError):
            elsewhere(publish, 1)
        assert elsewhere(publish, 2) == 5


def test_a_call_of_itself_for_the_same_name_is_refused(lock: FencedLock) -> None:
    @lock.fenced("orders-{number}")
    def publish(number: int, then: int | None) -> list[str]:
        return held() if then is None else publish(then, None)

    assert publish(1, 2) == ["orders-2"]
    with pytest.raises(LeaseReentrancyError):
        publish(1, 1)
