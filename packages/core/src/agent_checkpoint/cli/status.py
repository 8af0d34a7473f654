"""``status``: the four questions for every scope and workflow, for a person."""

from __future__ import annotations

import os
import re
import sys
import time

from agent_checkpoint.cli import output
from agent_checkpoint.cli.following import sweep, ticks
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.output import shown
from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.times import rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any, NoReturn

    from agent_checkpoint.records import Lease, Status
    from agent_checkpoint.store import StateStore


# Seconds between two drawings on a terminal, where the time that is left runs down.
REDRAW_SECONDS = 1.0
HOME_AND_CLEAR = "\x1b[H\x1b[J"
COLORS = {"live": "32", "yes": "32", "expired": "33", "no": "31"}


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--watch", action="store_true", help="show it anew when it changes, till interrupted")


def _status(arguments: Namespace) -> Answer:
    opened = store(arguments)
    if arguments.watch:
        _watch(opened, arguments)
    sweep(opened)
    found = opened.status()
    return Answer(found, describe(found))


def _watch(opened: StateStore, arguments: Namespace) -> NoReturn:
    """On a terminal one picture that is redrawn, elsewhere the status after each change."""
    draws = arguments.format == "text" and sys.stdout.isatty()
    color = draws and not os.environ.get("NO_COLOR")
    if arguments.format == "json":
        arguments.format = "jsonl"
    drawn = 0.0
    for changed in ticks(opened):
        if changed or (draws and time.monotonic() - drawn >= REDRAW_SECONDS):
            drawn = time.monotonic()
            found = opened.status()
            text = describe(found, color)
            output.print_answer(Answer(found, HOME_AND_CLEAR + text if draws else text + "\n"), arguments)
    raise AssertionError("ticks never end")


def describe(status: Status, color: bool = False) -> str:
    """The whole status as aligned text."""
    parts = [
        f"{status.database} at {rfc3339(status.at)}\n",
        _part("Who owns it, and is the owner alive?", _leases(status), color),
        *([_part("Who waits for it?", _queues(status), color)] if status.queues else []),
        _part("Is a resumed worker stale? (writes that were refused)", _refusals(status), color),
        _part("Where does the work continue?", _workflows(status), color),
    ]
    return "\n".join(parts)


def _part(question: str, rows: list[list[str]], color: bool) -> str:
    body = output.table(rows) if len(rows) > 1 else "nothing yet\n"
    lines = body.splitlines()
    if color:
        lines = [re.sub(r"(?<=  )(live|expired|yes|no)(?=  )", _paint, line) for line in lines]
    return f"{question}\n" + "".join(f"  {line}\n" for line in lines)


def _paint(word: re.Match[str]) -> str:
    return f"\x1b[{COLORS[word[1]]}m{word[1]}\x1b[0m"


def _leases(status: Status) -> list[list[str]]:
    rows = [["SCOPE", "SLOT", "OWNER", "TOKEN", "STATE", "LEFT", "ALIVE", "PROCESS", "LAST HEARTBEAT"]]
    for lease in status.leases:
        name, owner, token = shown(lease.scope), shown(lease.owner), str(lease.token)
        alive, process = (
            _lives(lease.owner_alive, lease.process if lease.state == "live" else None),
            _pid(lease.process),
        )
        rows.append([name, str(lease.slot), owner, token, lease.state, _left(lease), alive, process, _beat(lease)])
    return rows


def _lives(alive: bool | None, process: dict[str, Any] | None) -> str:
    if process is None:
        return "-"
    return "unknown" if alive is None else "yes" if alive else "no"


def _pid(process: dict[str, Any] | None) -> str:
    return "-" if process is None else str(process.get("pid"))


def _queues(status: Status) -> list[list[str]]:
    rows = [["SCOPE", "PLACE", "OWNER", "ALIVE", "PROCESS", "SINCE"]]
    for each in status.queues:
        place, since = str(each.position), rfc3339(each.asked_at)
        rows.append(
            [
                shown(each.scope),
                place,
                shown(each.owner),
                _lives(each.owner_alive, each.process),
                _pid(each.process),
                since,
            ]
        )
    return rows


def _left(lease: Lease) -> str:
    return f"{lease.remaining_seconds:.1f} s of {lease.ttl_seconds:g} s" if lease.state == "live" else "-"


def _beat(lease: Lease) -> str:
    return rfc3339(lease.heartbeat_at)


def _refusals(status: Status) -> list[list[str]]:
    rows = [["SCOPE", "TOKEN", "REFUSED", "REASON", "TIMES", "LAST"]]
    for each in status.refusals:
        token = "none" if each.token is None else str(each.token)
        rows.append([shown(each.scope), token, each.action, each.reason, str(each.times), rfc3339(each.last_at)])
    return rows


def _workflows(status: Status) -> list[list[str]]:
    rows = [["WORKFLOW", "SEQUENCE", "PROTECTED BY", "BYTES", "SAVED"]]
    for each in status.checkpoints:
        scope = "nobody" if each.scope is None else f"{shown(each.scope)}, token {each.token}"
        rows.append([shown(each.workflow), str(each.sequence), scope, str(each.size_bytes), rfc3339(each.saved_at)])
    return rows


COMMANDS = {"status": Command("Who owns what, who is stale, where work continues.", _arguments, _status, "text")}
