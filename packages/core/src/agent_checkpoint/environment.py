"""The leases that a process was given, as the environment carries them.

AGENT_CHECKPOINT_DB names the store, _SCOPE, _OWNER and _TOKEN the innermost
lease, _LEASES all of them as JSON, outermost first.
"""

from __future__ import annotations

import os

from agent_checkpoint import payload
from agent_checkpoint.errors import InvalidInputError, NotFoundError
from agent_checkpoint.records import Fence
from agent_checkpoint.rules.fence import presented

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PREFIX = "AGENT_CHECKPOINT_"
DATABASE = PREFIX + "DB"


def carried(environ: Mapping[str, str]) -> list[Fence]:
    """The leases of the store that DATABASE names, innermost last.

    Raises:
        InvalidInputError: a variable is malformed, or leases are there and DATABASE is not.
    """
    innermost = [environ.get(PREFIX + part) for part in ("SCOPE", "OWNER", "TOKEN")]
    several = environ.get(PREFIX + "LEASES")
    if not environ.get(DATABASE):
        if any(innermost) or several:
            raise InvalidInputError(
                f"{DATABASE}: is missing beside a lease in the environment; an unprotected write would be a surprise",
                field=DATABASE,
                hint=f"export {DATABASE}, or unset {PREFIX}SCOPE, _OWNER, _TOKEN and _LEASES",
            )
        return []
    if several:
        leases = payload.parse(PREFIX + "LEASES", several)
        if not isinstance(leases, list):
            raise _malformed("LEASES", "a JSON array")
        return [_listed(lease) for lease in leases]
    if not any(innermost):
        return []
    scope, owner, token = innermost
    if not (scope and owner and token and token.isascii() and token.isdigit() and len(token) < 20):
        raise _malformed("TOKEN", "a number, together with _SCOPE and _OWNER")
    return [_fence("TOKEN", scope, owner, int(token))]


def variables(database: str, fence: Fence, outer: Sequence[Fence]) -> dict[str, str]:
    """What adds a lease to those of the environment, as the innermost one."""
    outer = [each for each in outer if each.scope != fence.scope]
    values = {
        "DB": database,
        "SCOPE": fence.scope,
        "OWNER": fence.owner,
        "TOKEN": str(fence.token),
        "LEASES": payload.dump([each._asdict() for each in (*outer, fence)]),
    }
    return {PREFIX + name: value for name, value in values.items()}


def innermost(scope: str | None = None) -> Fence:
    """The innermost lease that this process's environment carries, or the innermost on ``scope``.

    Raises:
        NotFoundError: it carries none.
        InvalidInputError: a variable is malformed.
    """
    for fence in reversed(carried(os.environ)):
        if scope is None or fence.scope == scope:
            return fence
    raise NotFoundError(
        "the environment carries no lease" + ("" if scope is None else f" on scope {scope!r}"),
        hint="start this program with 'agent-checkpoint run SCOPE -- …'",
        scope=scope,
    )


def _listed(lease: object) -> Fence:
    if not isinstance(lease, dict) or not {"scope", "owner", "token"} <= lease.keys():
        raise _malformed("LEASES", "objects with scope, owner and token")
    return _fence("LEASES", lease["scope"], lease["owner"], lease["token"])


def _fence(variable: str, scope: object, owner: object, token: object) -> Fence:
    try:
        return presented(scope, owner, token)
    except InvalidInputError as error:
        raise _malformed(variable, f"a lease, but {error}") from None


def _malformed(name: str, rule: str) -> InvalidInputError:
    return InvalidInputError(f"{PREFIX}{name}: must be {rule}", field=PREFIX + name, hint=f"unset {PREFIX}{name}")
