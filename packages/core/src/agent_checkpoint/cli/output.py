"""Printing: JSON on stdout for answers, one JSON object on stderr for errors."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import datetime

from agent_checkpoint.errors import InvalidInputError, NotFoundError, StorageError
from agent_checkpoint.records import Lease
from agent_checkpoint.times import rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any, TextIO

    from agent_checkpoint.cli.parser import Answer

_ABSENT = object()


def print_answer(answer: Answer, arguments: argparse.Namespace) -> None:
    """Print an answer as the options want it."""
    value = jsonable(answer.value)
    if arguments.field is not None:
        write(_bare(value, arguments.field, arguments.default) + "\n")
    elif arguments.format == "text":
        write(_text(value) if answer.text is None else answer.text)
    elif arguments.format == "jsonl":
        lines = value if isinstance(value, list) else [value]
        write("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
    else:
        write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def print_error(error: dict[str, Any]) -> None:
    """Print an error on stderr; where that is closed, the exit status must do."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(json.dumps({"error": jsonable(error)}, indent=2, sort_keys=True, default=str) + "\n")
            sys.stderr.flush()
        except OSError:
            silence(sys.stderr)


def warn(code: str, message: str) -> None:
    """Say something on stderr that changes nothing of the result."""
    print_error({"code": code, "message": message, "hint": "", "retryable": False})


def write(text: str) -> None:
    """``write_bytes`` of a text."""
    write_bytes(text.encode(errors="backslashreplace"))


def write_bytes(data: bytes) -> None:
    """Write to stdout now, so that whatever is wrong with it is noticed here.

    Raises:
        BrokenPipeError: nobody reads on.
        StorageError: it cannot be written; what the command did is done.
    """
    if sys.stdout is None:
        raise InvalidInputError("stdout: is closed, there is nowhere to print the answer", field="stdout")
    try:
        pour(data)
    except BrokenPipeError:
        silence(sys.stdout)
        raise
    except OSError as error:
        silence(sys.stdout)
        hint = "what the command did is done; look at it with a command that only reads"
        raise StorageError(f"the answer cannot be written to stdout: {error.strerror}", hint=hint) from error


def pour(data: bytes) -> None:
    """Write to stdout, to the last byte. A raw stream takes as much as fits and is content with that."""
    sys.stdout.flush()
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # a program that calls us has put a stream there that takes only text
        sys.stdout.write(data.decode(errors="backslashreplace"))
        return
    # With PYTHONUNBUFFERED there is no buffer before it, and it would be the raw one anyway.
    raw = getattr(binary, "raw", binary)
    rest = memoryview(data)
    while rest:
        written = raw.write(rest)
        if written is None:  # somebody has made it non-blocking, and it is full
            from select import select

            select([], [raw], [])
        rest = rest[written or 0 :]


def silence(stream: TextIO) -> None:
    """Let the interpreter find nothing wrong when it flushes a broken stream at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def jsonable(value: Any) -> Any:
    """Records become objects, times RFC 3339 text."""
    if isinstance(value, Lease):
        return jsonable(value.asdict())
    if hasattr(value, "_asdict"):
        return jsonable(value._asdict())
    if isinstance(value, dict):
        return {key: jsonable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(part) for part in value]
    return rfc3339(value) if isinstance(value, datetime) else value


def table(rows: list[list[str]]) -> str:
    """Rows of words in aligned columns; a row's last cell is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def shown(value: Any) -> str:
    """A value for a person: strings bare, everything else as JSON, in one line."""
    if isinstance(value, str):
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in value)
    return "-" if value is None else json.dumps(value, sort_keys=True)


def _bare(value: Any, field: str, default: str | None) -> str:
    for part in field.split("."):
        if isinstance(value, dict):
            value = value.get(part, _ABSENT)
        elif (
            isinstance(value, list) and part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(value)
        ):
            value = value[int(part)]
        else:
            value = _ABSENT
        if value is _ABSENT:
            if default is not None:
                return default
            raise NotFoundError(f"the answer has no field {field!r}", hint="give --default TEXT, or look at it whole")
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        names = list(value[0])
        return table([names, *([shown(row.get(name)) for name in names] for row in value)])
    if isinstance(value, dict):
        return table([[name, shown(part)] for name, part in value.items()]) if value else ""
    return "".join(shown(part) + "\n" for part in value) if isinstance(value, list) else shown(value) + "\n"
