"""The leases that a shell or a parent command holds, as the environment carries them.

AGENT_CHECKPOINT_DB names the store, _SCOPE, _OWNER and _TOKEN the innermost
lease, _LEASES all of them as JSON, outermost first. Leases of another store
than the one in use do not count.
"""

from __future__ import annotations

import os

from agent_checkpoint import payload
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.locate import VARIABLE
from agent_checkpoint.records import Fence
from agent_checkpoint.rules.fence import presented

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_checkpoint.store import StateStore

PREFIX = "AGENT_CHECKPOINT_"


def held(store: StateStore, environ: Mapping[str, str]) -> list[Fence]:
    """The leases of this store that the environment carries, innermost last."""
    database = environ.get(VARIABLE)
    if not database:
        if any(environ.get(PREFIX + part) for part in ("SCOPE", "OWNER", "TOKEN", "LEASES")):
            raise InvalidInputError(
                f"{VARIABLE}: is missing beside a lease in the environment; an unprotected write would be a surprise",
                field=VARIABLE,
                hint=f"export {VARIABLE}, or unset {PREFIX}SCOPE, _OWNER, _TOKEN and _LEASES",
            )
        return []
    if (database if "://" in database else os.path.realpath(database)) != store.database:
        return []
    innermost = [environ.get(PREFIX + part) for part in ("SCOPE", "OWNER", "TOKEN")]
    several = environ.get(PREFIX + "LEASES")
    if several:
        leases = payload.parse(PREFIX + "LEASES", several)
        if not isinstance(leases, list):
            raise _malformed("LEASES", "a JSON array")
        return [_fence(lease) for lease in leases]
    if not any(innermost):
        return []
    scope, owner, token = innermost
    if not (scope and owner and token and token.isascii() and token.isdigit() and len(token) < 20):
        raise _malformed("TOKEN", "a number, together with _SCOPE and _OWNER")
    return [Fence(scope, owner, int(token))]


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

    outer = [each for each in outer if each.scope != fence.scope]
    values = {
        "DB": store.database,
        "SCOPE": fence.scope,
        "OWNER": fence.owner,
        "TOKEN": str(fence.token),
        "LEASES": payload.dump([each._asdict() for each in (*outer, fence)]),
    }
    return "".join(f"export {PREFIX}{name}={quote(value)}\n" for name, value in values.items())


def _fence(lease: object) -> Fence:
    if not isinstance(lease, dict) or not {"scope", "owner", "token"} <= lease.keys():
        raise _malformed("LEASES", "objects with scope, owner and token")
    return presented(lease["scope"], lease["owner"], lease["token"])


def _malformed(name: str, rule: str) -> InvalidInputError:
    return InvalidInputError(f"{PREFIX}{name}: must be {rule}", field=PREFIX + name, hint=f"unset {PREFIX}{name}")
