"""``migrate-store``: a whole store from one database into another."""

from __future__ import annotations

from agent_checkpoint.cli.opening import open_store
from agent_checkpoint.cli.parser import Answer, Command, Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="the store to move: a path or an URL")
    parser.add_argument("target", metavar="TO", help="an empty place for it: a path or an URL")


def _move(arguments: Namespace) -> Answer:
    source, target = open_store(arguments, arguments.source), open_store(arguments, arguments.target)
    return Answer(source.move_to(target, Progress("{}: {:,} of {:,} rows")))


COMMANDS = {
    "migrate-store": Command(
        "Move a store with all that is in it into another database; the old one takes no write afterwards.",
        _arguments,
        _move,
    ),
}
