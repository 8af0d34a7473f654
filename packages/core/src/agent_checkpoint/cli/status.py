"""``status``: the four questions for every scope and workflow, for a person."""

from __future__ import annotations

from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.output import shown, table
from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.times import rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from agent_checkpoint.records import Lease, Status


def _none(_: ArgumentParser) -> None:
    """No arguments of its own."""


def _status(arguments: Namespace) -> Answer:
    found = store(arguments).status()
    return Answer(found, describe(found))


def describe(status: Status) -> str:
    """The whole status as aligned text."""
    parts = [
        f"{status.database} at {rfc3339(status.at)}\n",
        _part("Who owns it, and is the owner alive?", _leases(status)),
        _part("Is a resumed worker stale? (writes that were refused)", _refusals(status)),
        _part("Where does the work continue?", _workflows(status)),
    ]
    return "\n".join(parts)


def _part(question: str, rows: list[list[str]]) -> str:
    body = table(rows) if len(rows) > 1 else "nothing yet\n"
    return f"{question}\n" + "".join(f"  {line}\n" for line in body.splitlines())


def _leases(status: Status) -> list[list[str]]:
    rows = [["SCOPE", "OWNER", "TOKEN", "STATE", "LEFT", "LAST HEARTBEAT"]]
    for lease in status.leases:
        rows.append([shown(lease.scope), shown(lease.owner), str(lease.token), lease.state, _left(lease), _beat(lease)])
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


COMMANDS = {"status": Command("Who owns what, who is stale, where work continues.", _none, _status, "text")}
