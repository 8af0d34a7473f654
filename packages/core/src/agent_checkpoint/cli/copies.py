"""``backup`` and ``restore``: a copy of the store, and its way back."""

from __future__ import annotations

from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _to(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a new file")


def _backup(arguments: Namespace) -> Answer:
    return Answer(store(arguments).backup(arguments.file))


def _from(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what backup wrote")


def _restore(arguments: Namespace) -> Answer:
    return Answer(store(arguments).restore(arguments.file))


COMMANDS = {
    "backup": Command("Copy the store into a file while others use it.", _to, _backup),
    "restore": Command("Put a backup in place of the store; refused while a lease is live.", _from, _restore),
}
