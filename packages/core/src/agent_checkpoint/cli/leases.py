"""``lease …``: acquire, heartbeat, release, show, list, check, force-release, wait, set-limit."""

from __future__ import annotations

import os

from agent_checkpoint import payload
from agent_checkpoint.cli import environment
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer, seconds, wait_seconds
from agent_checkpoint.errors import InvalidInputError, NotFoundError
from agent_checkpoint.records import Fence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent_checkpoint.store import StateStore

DEFAULT_TTL = 60.0


def _scope(parser: ArgumentParser) -> None:
    parser.add_argument("scope", metavar="SCOPE", help="what is protected")


def _fenced(parser: ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("--owner", help="who holds the lease (without: the environment's lease on SCOPE)")
    parser.add_argument("--token", help="its fencing token")


def _fence(opened: StateStore, arguments: Namespace) -> Fence:
    """The fence of the options, or the environment's when neither is given."""
    if arguments.owner is None and arguments.token is None:
        return environment.held_on(opened, arguments.scope, os.environ)
    token = integer("token", arguments.token)
    if arguments.owner is None or token is None:
        field = "owner" if arguments.owner is None else "token"
        raise InvalidInputError(f"{field}: is missing; --owner and --token go together", field=field)
    return Fence(arguments.scope, arguments.owner, token)


def _waits(parser: ArgumentParser, what: str) -> None:
    parser.add_argument("--wait", metavar="SECONDS|forever", help=what)


def _acquire_arguments(parser: ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("--owner", required=True, help="who asks: any label")
    parser.add_argument("--ttl", metavar="SECONDS", help="seconds it lasts without a heartbeat (60)")
    _waits(parser, "seconds to queue for it, or forever (0)")
    parser.add_argument("--limit", metavar="N", help="how many leases the scope may have; its first grant fixes it (1)")
    parser.add_argument("--pid", metavar="PID", help="bind it to this process: it ends when that one is provably dead")
    parser.add_argument("--metadata", metavar="JSON", help="a JSON object to keep with the lease; no secrets")
    parser.add_argument("--reclaim", action="store_true", help="take back the same owner's live lease, fencing it off")
    parser.add_argument("--export", action="store_true", help="print export lines for eval instead of JSON")


def _acquire(arguments: Namespace) -> Answer:
    opened = store(arguments)
    ttl = seconds("ttl_seconds", arguments.ttl)
    # Looked at first: what cannot be exported is not acquired.
    outer = environment.held(opened, os.environ) if arguments.export else []
    lease = opened.acquire(
        arguments.scope,
        arguments.owner,
        DEFAULT_TTL if ttl is None else ttl,
        wait_seconds=wait_seconds(arguments.wait, 0.0),
        limit=integer("limit", arguments.limit),
        pid=integer("pid", arguments.pid),
        metadata=None if arguments.metadata is None else payload.parse("metadata", os.fsencode(arguments.metadata)),
        reclaim=arguments.reclaim,
    )
    if not arguments.export:
        return Answer(lease)
    arguments.format = "text"
    return Answer(lease, environment.exports(opened, lease.fence, outer))


def _heartbeat_arguments(parser: ArgumentParser) -> None:
    _fenced(parser)
    parser.add_argument("--ttl", metavar="SECONDS", help="seconds it lasts from now (as it was granted)")


def _heartbeat(arguments: Namespace) -> Answer:
    opened = store(arguments)
    return Answer(opened.heartbeat(*_fence(opened, arguments), seconds("ttl_seconds", arguments.ttl)))


def _release(arguments: Namespace) -> Answer:
    opened = store(arguments)
    return Answer(opened.release(*_fence(opened, arguments)))


def _check(arguments: Namespace) -> Answer:
    opened = store(arguments)
    return Answer(opened.check_lease(*_fence(opened, arguments)))


def _expired(parser: ArgumentParser) -> None:
    parser.add_argument("--include-expired", action="store_true", help="the last lease, live or not")


def _show_arguments(parser: ArgumentParser) -> None:
    _scope(parser)
    _expired(parser)


def _show(arguments: Namespace) -> Answer:
    lease = store(arguments).get_lease(arguments.scope, arguments.include_expired)
    if lease is None:
        none = "no lease was ever granted" if arguments.include_expired else "no lease is live"
        hint = "" if arguments.include_expired else "--include-expired shows the last one"
        raise NotFoundError(f"{none} on scope {arguments.scope!r}", hint=hint, scope=arguments.scope)
    return Answer(lease)


def _wait_arguments(parser: ArgumentParser) -> None:
    _scope(parser)
    _waits(parser, "at most so many seconds (forever)")


def _wait(arguments: Namespace) -> Answer:
    opened = store(arguments)
    opened.wait_until_free(arguments.scope, wait_seconds(arguments.wait, float("inf")))
    return Answer({"scope": arguments.scope, "free": True, "last": opened.get_lease(arguments.scope, True)})


def _limit_arguments(parser: ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("limit", metavar="N", help="how many leases it may have at once")


def _set_limit(arguments: Namespace) -> Answer:
    limit = integer("limit", arguments.limit)
    assert limit is not None
    return Answer(store(arguments).set_limit(arguments.scope, limit))


def _list(arguments: Namespace) -> Answer:
    return Answer(store(arguments).list_leases(arguments.include_expired))


def _force_arguments(parser: ArgumentParser) -> None:
    _scope(parser)
    parser.add_argument("--reason", required=True, help="why; goes on record")
    parser.add_argument("--token", help="only the lease with this token, never its successor")


def _force_release(arguments: Namespace) -> Answer:
    token = integer("token", arguments.token)
    return Answer(store(arguments).force_release(arguments.scope, reason=arguments.reason, token=token))


COMMANDS = {
    "lease acquire": Command("Ask for a scope; the answer carries the fencing token.", _acquire_arguments, _acquire),
    "lease heartbeat": Command("Extend a live lease.", _heartbeat_arguments, _heartbeat),
    "lease release": Command("End a live lease.", _fenced, _release),
    "lease show": Command("The live lease of a scope.", _show_arguments, _show),
    "lease wait": Command("Wait until a scope is free, without asking for it.", _wait_arguments, _wait),
    "lease set-limit": Command("How many leases a scope may have at once.", _limit_arguments, _set_limit),
    "lease list": Command("The live leases of every scope, latest grant first.", _expired, _list),
    "lease check": Command("Whether a lease is live still; exit 76 when it is not.", _fenced, _check),
    "lease force-release": Command("End somebody's live lease, on record.", _force_arguments, _force_release),
}
