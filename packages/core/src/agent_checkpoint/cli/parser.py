"""How a command describes itself, and the options that every command has."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import datetime, timezone

from agent_checkpoint.cli import output
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

# The options of every command that take a value; they may stand anywhere.
GLOBAL_VALUES = frozenset(("--db", "--busy-timeout", "--format", "--field", "--default"))
# Seconds between two lines about how far it is.
TELL_SECONDS = 1.0
FORMATS = ("json", "jsonl", "text")

# Patterns are compiled when they are used: compiling all of them costs a start-up millisecond.
_INTEGER = r"[+-]?[0-9]{1,40}"
_REAL = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?"
# argparse asks shutil for the width of the terminal at each option, and the
# import of shutil is a tenth of the command's start-up.
_WIDTH = 96


class Answer(Record):
    """What a command answers: a JSON value, perhaps a text for people, perhaps a status; ``silent``: nothing."""

    value: Any
    text: str | None = None
    status: int = 0
    silent: bool = False


class Command(Record):
    """One command: its sentence in the overview, its own arguments, what it does.

    ``takes_command``: what stands behind ``--`` is a command of its own, and
    stdout is for that one.
    """

    summary: str
    arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], Answer]
    format: str = "json"
    takes_command: bool = False


class Progress:
    """A line a second on stderr for a person who waits there; nothing for a file, where errors are JSON."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._told = time.monotonic()

    def __call__(self, *facts: object) -> None:
        """So far it is now."""
        if self._shown and time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            sys.stderr.write(self._line.format(*facts) + "\n")
            sys.stderr.flush()


class Parser(argparse.ArgumentParser):
    """argparse, but its errors are ours, and options are never guessed from their beginning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_formatter, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, and a value that argparse made a list of by mistake is refused."""
        parsed = super().parse_args(args, namespace)
        for name, value in vars(parsed).items():
            if isinstance(value, list):
                self.error(f"{name}: '--' is no value")
        return parsed

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002 -- argparse's signature
        output.write(message)

    takes_command = False

    def error(self, message: str) -> NoReturn:
        hint = f"see '{self.prog} --help'"
        if self.takes_command and message.startswith("unrecognized"):
            hint = f"the command stands behind '--': {self.prog} SCOPE -- CMD"
        raise InvalidInputError(message, field="arguments", hint=hint)

    def add_globals(self, default_format: str = "json") -> None:
        """The options that every command has."""
        group = self.add_argument_group("every command")
        group.add_argument("--db", metavar="PATH", help="the store: a path or an URL (else AGENT_CHECKPOINT_DB, …)")
        group.add_argument("--busy-timeout", metavar="S", help="seconds to wait for other writers (10)")
        group.add_argument("--format", choices=FORMATS, default=default_format, help=f"({default_format})")
        group.add_argument("--field", metavar="A.B.C", help="print this one value of the answer, bare")
        group.add_argument("--default", metavar="TEXT", help="what --field prints when the value is absent")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=_WIDTH)


def parser_for(name: str, command: Command) -> Parser:
    """The parser of one command."""
    parser = Parser(prog=f"agent-checkpoint {name}", description=command.summary)
    command.arguments(parser)
    parser.add_globals(command.format)
    if command.takes_command:
        parser.takes_command = True
        parser.usage = parser.format_usage().removeprefix("usage: ").rstrip() + " -- CMD [ARG …]"
    return parser


def date(field: str, text: str) -> datetime:
    """A day or a time, UTC where it does not say."""
    try:
        # Python 3.10 knows no Z, and fractions of six digits only.
        whole = re.sub(r"\.([0-9]{1,6})[0-9]*", lambda fraction: f".{fraction[1]:0<6}", text.replace("Z", "+00:00"))
        found = datetime.fromisoformat(whole)
    except ValueError:
        raise InvalidInputError(
            f"{field}: must be a date or a time of RFC 3339, not {text!r:.60}", field=field
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def integer(field: str, text: str | None) -> int | None:
    """An option's whole number: ASCII digits; its range is checked where the rule lives."""
    if text is None:
        return None
    if not re.fullmatch(_INTEGER, text):
        raise InvalidInputError(f"{field}: must be a whole number, not {text!r:.60}", field=field)
    return int(text)


def seconds(field: str, text: str | None) -> float | None:
    """An option's number of seconds: ASCII digits; its range is checked where the rule lives."""
    if text is None:
        return None
    if not re.fullmatch(_REAL, text):
        raise InvalidInputError(f"{field}: must be a number of seconds, not {text!r:.60}", field=field)
    return float(text)


def wait_seconds(text: str | None, without: float) -> float:
    """An option's time to wait: a number of seconds, or forever."""
    if text == "forever":
        return float("inf")
    if text is not None and not re.fullmatch(_REAL, text):
        raise InvalidInputError(
            f"wait_seconds: must be a number of seconds, or forever, not {text!r:.60}", field="wait_seconds"
        )
    wait = seconds("wait_seconds", text)
    return without if wait is None else wait
