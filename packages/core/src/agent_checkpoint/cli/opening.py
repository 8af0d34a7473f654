"""The store that a command works on."""

from __future__ import annotations

import os

from agent_checkpoint.cli.parser import seconds
from agent_checkpoint.locate import locate
from agent_checkpoint.store import StateStore

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


_opened: list[StateStore] = []


def store(arguments: argparse.Namespace) -> StateStore:
    """The store that the options or the environment name; nothing is opened yet."""
    return open_store(arguments, locate(arguments.db, os.environ))


def open_store(arguments: argparse.Namespace, where: str) -> StateStore:
    """The store at a place, with the options of every command."""
    busy = seconds("busy_timeout_seconds", arguments.busy_timeout)
    opened = StateStore(where) if busy is None else StateStore(where, busy_timeout_seconds=busy)
    _opened.append(opened)
    return opened


def close() -> None:
    """Close what the command has opened."""
    while _opened:
        _opened.pop().close()
