"""Events as JSON lines, one write for each, so that lines of several processes never mix."""

from __future__ import annotations

import errno
import json
import os

from agent_checkpoint import Event

__all__ = ["append", "line"]


def append(path: str, event: Event) -> None:
    """Append one line to a file on a local disk; a new file is readable by its owner only.

    Raises:
        OSError: the file cannot be opened, or took only a part of the line.
    """
    data = line(event).encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(file, data)
    finally:
        os.close(file)
    if written < len(data):
        # Not tried again: the rest could land behind another process's line.
        raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written", path)


def line(event: Event) -> str:
    """The event as ``agent-checkpoint events`` prints it, on one line."""
    at = event.at.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return json.dumps({**event._asdict(), "at": at}, sort_keys=True) + "\n"
