"""``@lock.fenced("orders-{customer_id}")``: each call of a function holds a name made of its arguments."""

from __future__ import annotations

import functools
import inspect
import re
import string
from typing import TYPE_CHECKING, Any

from agent_checkpoint import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_checkpoint_prefect.blocks import FencedLock

Function = Any


def fenced(lock: FencedLock, template: str, options: dict[str, Any]) -> Callable[[Function], Function]:
    """The decorator of a lock."""

    def decorate(function: Function) -> Function:
        if not inspect.isfunction(function) or _generates(function):
            raise InvalidInputError(
                f"fenced: is for functions, not for {type(function).__name__}",
                hint="put it below @flow or @task, right above the function",
                field="function",
            )
        signature = inspect.signature(function)
        _check(template, signature)

        def name(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return template.format(**bound.arguments)

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            with lock.lease(name(arguments, named), **options) as lease:
                result = function(*arguments, **named)
                lease.check()
                return result

        @functools.wraps(function)
        async def arun(*arguments: Any, **named: Any) -> Any:
            async with lock.alease(name(arguments, named), **options) as lease:
                result = await function(*arguments, **named)
                await lease.acheck()
                return result

        return arun if inspect.iscoroutinefunction(function) else run

    return decorate


def _generates(function: Function) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _check(template: str, signature: inspect.Signature) -> None:
    """Refuse a template that names what the function does not take, when it is defined and not when it runs."""
    for field in _fields(template):
        argument = re.split(r"[.\[]", field, maxsplit=1)[0]
        if argument not in signature.parameters:
            raise InvalidInputError(
                f"fenced: {template!r} names {argument!r}, which the function does not take",
                hint=f"it takes {', '.join(signature.parameters) or 'nothing'}",
                field="template",
            )


def _fields(template: str) -> Iterator[str]:
    """The fields of a template, and those inside of their format."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidInputError(f"fenced: {template!r} is no template: {error}", field="template") from error
    for _, field, spec, _ in parts:
        if field is not None:
            yield field
            yield from _fields(spec or "")
