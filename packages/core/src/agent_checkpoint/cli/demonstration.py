"""``demo``: the main job, on real processes."""

from __future__ import annotations

from agent_checkpoint.cli.parser import Answer, Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--keep", metavar="DIR", help="run in this directory, and leave the store there")


def _demo(arguments: Namespace) -> Answer:
    from agent_checkpoint import demo

    return Answer(None, "", demo.play(arguments.keep))


COMMANDS = {"demo": Command("A frozen worker wakes up too late: see it refused.", _arguments, _demo, "text")}
