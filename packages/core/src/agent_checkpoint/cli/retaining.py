"""``retention`` and ``prune``: what is kept, and for how long."""

from __future__ import annotations

import os

from agent_checkpoint import payload
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.retention import ARCHIVE_TO

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any


def _none(_: ArgumentParser) -> None:
    """No arguments of its own."""


def _show(arguments: Namespace) -> Answer:
    return Answer(store(arguments).retention())


def _rule(parser: ArgumentParser) -> None:
    parser.add_argument(
        "rule",
        metavar="RULE",
        help="checkpoints.keep_last, events.days, events.archive_to, holders, langgraph.thread_days",
    )


def _set_arguments(parser: ArgumentParser) -> None:
    _rule(parser)
    parser.add_argument("value", metavar="VALUE", help="a number, true or false, or a folder")


def _set(arguments: Namespace) -> Answer:
    return Answer(store(arguments).set_retention(arguments.rule, _value(arguments.rule, arguments.value)))


def _unset(arguments: Namespace) -> Answer:
    return Answer(store(arguments).set_retention(arguments.rule, None))


def _value(rule: str, text: str) -> Any:
    """A JSON scalar, or text as it was typed: a path, where the rule takes one."""
    try:
        value = payload.parse("value", os.fsencode(text))
    except InvalidInputError:
        value = text
    return os.path.abspath(value) if rule == ARCHIVE_TO and isinstance(value, str) else value


def _prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--apply-policy", action="store_true", required=True, help="remove what the policy does not keep"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say how much that is")


def _prune(arguments: Namespace) -> Answer:
    return Answer(store(arguments).apply_retention(arguments.dry_run))


COMMANDS = {
    "retention show": Command("What is kept, and for how long.", _none, _show),
    "retention set": Command("Set a rule of the policy.", _set_arguments, _set),
    "retention unset": Command("Forget a rule of the policy.", _rule, _unset),
    "prune": Command("Remove what the policy does not keep.", _prune_arguments, _prune),
}
