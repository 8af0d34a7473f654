"""``migrate-store``: a whole store from one database into another."""

from __future__ import annotations

import sys
import time

from agent_checkpoint.cli.opening import open_store
from agent_checkpoint.cli.parser import Answer, Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

# Seconds between two lines about how far it is.
TELL_SECONDS = 1.0


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="the store to move: a path or an URL")
    parser.add_argument("target", metavar="TO", help="an empty place for it: a path or an URL")


def _move(arguments: Namespace) -> Answer:
    source, target = open_store(arguments, arguments.source), open_store(arguments, arguments.target)
    return Answer(source.move_to(target, _Progress() if sys.stderr is not None and sys.stderr.isatty() else None))


class _Progress:
    """A line a second for a person who waits."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, table: str, done: int, total: int) -> None:
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            sys.stderr.write(f"{table}: {done:,} of {total:,} rows\n")
            sys.stderr.flush()


COMMANDS = {
    "migrate-store": Command(
        "Move a store with all that is in it into another database; the old one takes no write afterwards.",
        _arguments,
        _move,
    ),
}
