"""``events``: the audit log."""

from __future__ import annotations

from agent_checkpoint.cli import output
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.times import rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import NoReturn

    from agent_checkpoint.records import Event
    from agent_checkpoint.store import StateStore

DEFAULT_LIMIT = 100
# Events that are read at once while following.
PAGE = 1_000


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="NUMBER", help=f"at most so many ({DEFAULT_LIMIT})")
    parser.add_argument(
        "--after", metavar="CURSOR", help="the next ones behind this event's cursor (or: start), not the last ones"
    )
    parser.add_argument("--scope", help="only of this scope")
    parser.add_argument("--workflow", help="only of this workflow")
    parser.add_argument("--kind", help="only of this kind, such as lease.acquired")
    parser.add_argument(
        "--follow", action="store_true", help="go on with what happens, as JSON lines, till interrupted"
    )


def _events(arguments: Namespace) -> Answer:
    opened = store(arguments)
    limit = integer("limit", arguments.limit)
    if arguments.follow:
        _follow(opened, arguments, limit)
    return Answer(_read(opened, arguments, DEFAULT_LIMIT if limit is None else limit, arguments.after))


def _read(opened: StateStore, arguments: Namespace, limit: int, after: str | None) -> list[Event]:
    return opened.events(limit, after, arguments.scope, arguments.workflow, arguments.kind)


def _follow(opened: StateStore, arguments: Namespace, limit: int | None) -> NoReturn:
    from agent_checkpoint.cli.following import ticks

    if arguments.format == "json":
        arguments.format = "jsonl"
    if limit is not None and arguments.after is not None:
        raise InvalidInputError("limit: does not go with --after and --follow, which leaves out nothing", field="limit")
    cursor = arguments.after
    if cursor is None:
        earlier = _read(opened, arguments, DEFAULT_LIMIT if limit is None else limit, None)
        cursor = _print(earlier, arguments, "start")
    for changed in ticks(opened):
        while changed and (found := _read(opened, arguments, PAGE, cursor)):
            cursor = _print(found, arguments, cursor)
    raise AssertionError("ticks never end")


def _print(events: list[Event], arguments: Namespace, cursor: str) -> str:
    """Print events, a line each; the cursor to go on from."""
    for event in events:
        output.print_answer(Answer(event, _line(event)), arguments)
    return events[-1].cursor if events else cursor


def _line(event: Event) -> str:
    about = [event.scope, event.owner, event.token, event.workflow, event.sequence, event.detail or None]
    words = [rfc3339(event.at), event.kind, *(output.shown(each) for each in about if each is not None)]
    return "  ".join(words) + "\n"


COMMANDS = {"events": Command("The audit log, oldest first.", _arguments, _events)}
