"""``export`` and ``import``: checkpoints on their way from one store to another."""

from __future__ import annotations

import sys

from agent_checkpoint.cli import output
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.errors import InvalidInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _export_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--workflow", metavar="WORKFLOW", help="only this one")


def _export(arguments: Namespace) -> Answer:
    if arguments.format != "jsonl":
        raise InvalidInputError("format: export writes lines of JSON", field="format", hint="leave --format away")
    for line in store(arguments).export_checkpoints(arguments.workflow):
        output.write(line)
    return Answer(None, silent=True)


def _import_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE|-", help="what export wrote; - is stdin")


def _import(arguments: Namespace) -> Answer:
    opened = store(arguments)
    if arguments.file == "-":
        if sys.stdin is None:
            raise InvalidInputError("file: stdin is closed", field="file")
        return Answer(opened.import_checkpoints(sys.stdin))
    try:
        with open(arguments.file, encoding="utf-8", newline="\n") as source:
            return Answer(opened.import_checkpoints(source))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"file: cannot read {arguments.file!r}: {error}", field="file") from error


COMMANDS = {
    "export": Command("Print checkpoints as JSON lines that hang together.", _export_arguments, _export, "jsonl"),
    "import": Command("Take over what export printed.", _import_arguments, _import),
}
