"""``events archive`` and ``events verify``: the older part of the audit log in a file."""

from __future__ import annotations

from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, Progress, date

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--before", required=True, metavar="DATE", help="older events: 2031-05-04 or 2031-05-04T10:20Z")
    parser.add_argument("--to", required=True, metavar="FILE", help="a new file for them")


def _archive(arguments: Namespace) -> Answer:
    progress = Progress("{:,} events written")
    return Answer(store(arguments).archive_events(date("before", arguments.before), arguments.to, progress))


def _verify_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what events archive wrote")


def _verify(arguments: Namespace) -> Answer:
    from agent_checkpoint.archive import verify

    return Answer(verify(arguments.file))


COMMANDS = {
    "events archive": Command("Move older events into a file, hash-chained and read back.", _arguments, _archive),
    "events verify": Command("Is an archive as it was written?", _verify_arguments, _verify),
}
