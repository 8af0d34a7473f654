"""``events``: the audit log."""

from __future__ import annotations

from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

DEFAULT_LIMIT = 100


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="NUMBER", help=f"at most so many ({DEFAULT_LIMIT})")
    parser.add_argument(
        "--after", metavar="CURSOR", help="the next ones behind this event's cursor (or: start), not the last ones"
    )
    parser.add_argument("--scope", help="only of this scope")
    parser.add_argument("--workflow", help="only of this workflow")
    parser.add_argument("--kind", help="only of this kind, such as lease.acquired")


def _events(arguments: Namespace) -> Answer:
    limit = integer("limit", arguments.limit)
    found = store(arguments).events(
        DEFAULT_LIMIT if limit is None else limit,
        arguments.after,
        arguments.scope,
        arguments.workflow,
        arguments.kind,
    )
    return Answer(found)


COMMANDS = {"events": Command("The audit log, oldest first.", _arguments, _events)}
