"""``demo``: the main job, on real processes."""

from __future__ import annotations

from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.errors import InvalidInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", metavar="DIR", help="run in this directory, and leave the store there")


def _demo(arguments: Namespace) -> Answer:
    from agent_checkpoint import demo

    if arguments.format != "text" or arguments.field is not None:
        raise InvalidInputError("format: demo tells a story, there is no value to print", field="format")
    return Answer(None, "", demo.play(arguments.keep))


COMMANDS = {"demo": Command("A frozen worker wakes up too late: see it refused.", _arguments, _demo, "text")}
