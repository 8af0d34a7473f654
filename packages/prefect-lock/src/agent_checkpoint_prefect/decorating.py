"""``@lock.fenced("orders-{customer_id}")``: each call of a function holds a name made of its arguments."""

from __future__ import annotations

import functools
import inspect
import re
import string
from types import FunctionType
from typing import TYPE_CHECKING, Any

from agent_checkpoint import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent_checkpoint_prefect.blocks import FencedLock

Function = Any

PLACE = "put it below @flow or @task and every other decorator, right above the function"


def fenced(lock: FencedLock, template: str, options: dict[str, Any]) -> Callable[[Function], Function]:
    """The decorator of a lock."""

    def decorate(function: Function) -> Function:
        if not inspect.isfunction(function):
            raise InvalidInputError(
                f"fenced: is for functions, not for {type(function).__name__}", hint=PLACE, field="function"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise _runs_later(function, "is a generator function")
        signature = inspect.signature(function)
        _check(template, signature)

        def name(arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            return template.format(**bound.arguments)

        def done(result: Any) -> Any:
            if not _is_to_run(result):
                return result
            raise _runs_later(function, f"has a result of type {type(result).__name__}")

        # All that these two name is theirs or decorate's, and nothing is this module's: see _at_home.
        def run(*arguments: Any, **named: Any) -> Any:
            with lock.lease(name(arguments, named), **options) as lease:
                result = done(function(*arguments, **named))
                lease.check()
                return result

        async def arun(*arguments: Any, **named: Any) -> Any:
            async with lock.alease(name(arguments, named), **options) as lease:
                result = done(await function(*arguments, **named))
                await lease.acheck()
                return result

        return _at_home(arun if inspect.iscoroutinefunction(function) else run, function)

    return decorate


def _at_home(wrapper: Function, function: Function) -> Function:
    """The wrapper with the globals of the function: there Prefect looks up what its annotations name."""
    home = getattr(inspect.unwrap(function), "__globals__", function.__globals__)
    moved = FunctionType(wrapper.__code__, home, wrapper.__name__, None, wrapper.__closure__)
    return functools.update_wrapper(moved, function)


def _is_to_run(result: Any) -> bool:
    """Whether a call's result is a body that has yet to run; closed then, so that nobody is told it never ran."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        return True
    return inspect.isasyncgen(result)


def _runs_later(function: Function, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"fenced: {function.__name__} {why}, whose body would run without the lease",
        hint=f"{PLACE}; a generator takes the name in its body: with lock.lease(...)",
        field="function",
    )


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
