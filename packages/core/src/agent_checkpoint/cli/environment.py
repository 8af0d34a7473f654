"""The environment's leases, as far as they are of the store that a command works on."""

from __future__ import annotations

import os

from agent_checkpoint.environment import DATABASE, carried, variables
from agent_checkpoint.errors import InvalidInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_checkpoint.records import Fence
    from agent_checkpoint.store import StateStore


def held(store: StateStore, environ: Mapping[str, str]) -> list[Fence]:
    """The leases of this store that the environment carries, innermost last."""
    database = environ.get(DATABASE, "")
    if database and (database if "://" in database else os.path.realpath(database)) != store.address:
        return []
    return carried(environ)


def held_on(store: StateStore, scope: str, environ: Mapping[str, str]) -> Fence:
    """The environment's lease on a scope.

    Raises:
        InvalidInputError: it carries none.
    """
    for fence in reversed(held(store, environ)):
        if fence.scope == scope:
            return fence
    raise InvalidInputError(
        f"owner: give --owner and --token; the environment holds no lease on {scope!r} of this store",
        field="owner",
        hint=f'lease=$(agent-checkpoint lease acquire {scope} --owner NAME --export) && eval "$lease" puts one there',
    )


def exports(store: StateStore, fence: Fence, outer: Sequence[Fence]) -> str:
    """``export`` lines that add a lease to those of the environment, as the innermost one."""
    from shlex import quote

    values = variables(store.address, fence, outer)
    return "".join(f"export {name}={quote(value)}\n" for name, value in values.items())
