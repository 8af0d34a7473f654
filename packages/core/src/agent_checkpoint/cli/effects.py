"""``effect list``, ``effect show``, ``effect resolve``: what was done outside, and what nobody can tell of."""

from __future__ import annotations

import os

from agent_checkpoint import payload
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, date, integer
from agent_checkpoint.errors import InvalidInputError, NotFoundError
from agent_checkpoint.names import NOTHING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _key(parser: ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="what names the action")


def _list_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="N", help="the last N that were begun (100)")


def _list(arguments: Namespace) -> Answer:
    limit = integer("limit", arguments.limit)
    effects = store(arguments).list_effects(100 if limit is None else limit)
    return Answer([{name: value for name, value in each._asdict().items() if name != "result"} for each in effects])


def _show(arguments: Namespace) -> Answer:
    found = store(arguments).get_effect(arguments.key)
    if found is None:
        raise NotFoundError(f"there is no effect {arguments.key!r}", hint="see 'agent-checkpoint effect list'")
    return Answer(found)


def _resolve_arguments(parser: ArgumentParser) -> None:
    _key(parser)
    parser.add_argument("--done", action="store_true", help="it happened: it is not to be done again")
    parser.add_argument("--result", metavar="JSON", help="what it resulted in, where it happened (null)")
    parser.add_argument("--retry", action="store_true", help="it surely did not happen: the next caller may do it")
    parser.add_argument("--by", metavar="WHO", help="who found out, for the record (the user's name)")
    parser.add_argument("--begun-at", metavar="TIME", help="only if it is still this try, by its begun_at")


def _resolve(arguments: Namespace) -> Answer:
    if arguments.done is arguments.retry:
        raise InvalidInputError("done: give --done or --retry, one of them", field="done")
    if arguments.result is not None and not arguments.done:
        raise InvalidInputError("result: goes with --done", field="result")
    done = NOTHING
    if arguments.done:
        done = None if arguments.result is None else payload.parse("result", os.fsencode(arguments.result))
    return Answer(
        store(arguments).resolve_effect(
            arguments.key,
            done=done,
            retry=arguments.retry,
            by=_user() if arguments.by is None else arguments.by,
            begun_at=None if arguments.begun_at is None else date("begun_at", arguments.begun_at),
        )
    )


def _user() -> str:
    """Who is at the keyboard, as far as the system knows."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


COMMANDS = {
    "effect list": Command("The effects that were begun last, latest first.", _list_arguments, _list),
    "effect show": Command("One effect, with its result.", _key, _show),
    "effect resolve": Command(
        "Say what became of an effect that nobody can tell of; look outside first.", _resolve_arguments, _resolve
    ),
}
