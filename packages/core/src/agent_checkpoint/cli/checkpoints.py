"""``checkpoint …``: put, get, list, history, diff, prune."""

from __future__ import annotations

import os
import sys

from agent_checkpoint import payload
from agent_checkpoint.cli import environment
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer
from agent_checkpoint.errors import InvalidInputError, NotFoundError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import BinaryIO

    from agent_checkpoint.records import Checkpoint, Fence
    from agent_checkpoint.store import StateStore

# Text may be longer than what is stored of it (white space), but not without end.
MAX_TEXT_BYTES = 4 * payload.MAX_BYTES


def _workflow(parser: ArgumentParser) -> None:
    parser.add_argument("workflow", metavar="WORKFLOW", help="the name of a checkpoint history")


def _put_arguments(parser: ArgumentParser) -> None:
    _workflow(parser)
    parser.add_argument("--data", required=True, metavar="JSON|@FILE|-", help="the state; @FILE reads it, - is stdin")
    parser.add_argument("--lease-scope", metavar="SCOPE", help="write under this lease (else the environment's)")
    parser.add_argument("--owner", help="the owner of that lease")
    parser.add_argument("--token", help="its fencing token")
    parser.add_argument("--if-sequence", metavar="N", help="only if the latest sequence is N; 0: only the first")
    parser.add_argument("--rebind", action="store_true", help="move the workflow to another scope, on record")


def _put(arguments: Namespace) -> Answer:
    opened = store(arguments)
    data = payload.parse("data", _text(arguments.data))
    token = integer("token", arguments.token)
    expected = integer("expected_sequence", arguments.if_sequence)
    given = {"lease_scope": arguments.lease_scope, "owner": arguments.owner, "token": token}
    lease = _from_environment(opened, arguments.workflow) if set(given.values()) == {None} else None
    saved = opened.put_checkpoint(
        arguments.workflow, data, **given, lease=lease, expected_sequence=expected, rebind=arguments.rebind
    )
    return Answer(saved)


def _from_environment(opened: StateStore, workflow: str) -> Fence | None:
    """The environment's lease for the workflow's scope, else the innermost, else none."""
    fences = environment.held(opened, os.environ)
    if len(fences) > 1:
        latest = next(iter(opened.checkpoint_history(workflow)), None)
        for fence in fences:
            if latest is not None and fence.scope == latest.scope:
                return fence
    return fences[-1] if fences else None


def _text(given: str) -> bytes:
    if given == "-":
        if sys.stdin is None:
            raise InvalidInputError("data: stdin is closed", field="data")
        return _limited(sys.stdin.buffer)
    if not given.startswith("@"):
        return os.fsencode(given)  # as it was typed: the parser checks that it is UTF-8
    try:
        with open(given[1:], "rb") as source:
            return _limited(source)
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"data: cannot read {given[1:]!r}: {error}", field="data") from error


def _limited(source: BinaryIO) -> bytes:
    text = source.read(MAX_TEXT_BYTES + 1)
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidInputError(f"data: must be at most {payload.MAX_BYTES} bytes of JSON", field="data")
    return text


def _get_arguments(parser: ArgumentParser) -> None:
    _workflow(parser)
    parser.add_argument("--sequence", metavar="N", help="this checkpoint instead of the latest")


def _get(arguments: Namespace) -> Answer:
    return Answer(_find(store(arguments), arguments.workflow, integer("sequence", arguments.sequence)))


def _find(opened: StateStore, workflow: str, sequence: int | None) -> Checkpoint:
    found = opened.get_checkpoint(workflow, sequence=sequence)
    if found is None:
        which = "no checkpoint" if sequence is None else f"no checkpoint {sequence}"
        raise NotFoundError(f"workflow {workflow!r} has {which}", workflow=workflow, sequence=sequence)
    return found


def _list(arguments: Namespace) -> Answer:
    return Answer(store(arguments).list_checkpoints())


def _history(arguments: Namespace) -> Answer:
    found = store(arguments).checkpoint_history(arguments.workflow)
    if not found:
        raise NotFoundError(f"workflow {arguments.workflow!r} has no checkpoint", workflow=arguments.workflow)
    return Answer(found)


def _diff_arguments(parser: ArgumentParser) -> None:
    _workflow(parser)
    parser.add_argument("a", metavar="A", nargs="?", help="from this sequence (the previous one)")
    parser.add_argument("b", metavar="B", nargs="?", help="to this sequence (the latest one)")


def _diff(arguments: Namespace) -> Answer:
    from agent_checkpoint.diff import difference

    opened = store(arguments)
    new = _find(opened, arguments.workflow, integer("b", arguments.b))
    before = integer("a", arguments.a)
    if before is None and new.sequence == 1:
        return Answer([{"op": "add", "path": "", "new": new.data}])
    if before is None:  # not one less: a restore leaves a gap
        earlier = (each.sequence for each in opened.checkpoint_history(arguments.workflow))
        before = next((each for each in earlier if each < new.sequence), new.sequence - 1)
    old = _find(opened, arguments.workflow, before)
    return Answer(list(difference(old.data, new.data)))


def _prune_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("workflow", metavar="WORKFLOW", nargs="?", help="this one (every one)")
    parser.add_argument("--keep-last", metavar="N", required=True, help="how many stay, at least 1")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _prune(arguments: Namespace) -> Answer:
    keep_last = integer("keep_last", arguments.keep_last)
    assert keep_last is not None
    return Answer(store(arguments).prune_checkpoints(keep_last, arguments.workflow, arguments.dry_run))


def _none(_: ArgumentParser) -> None:
    """No arguments of its own."""


COMMANDS = {
    "checkpoint put": Command("Save the next checkpoint of a workflow.", _put_arguments, _put),
    "checkpoint get": Command("The latest checkpoint of a workflow: where to go on.", _get_arguments, _get),
    "checkpoint list": Command("The latest checkpoint of every workflow.", _none, _list),
    "checkpoint history": Command("Every checkpoint of a workflow, newest first.", _workflow, _history),
    "checkpoint diff": Command("What changed between two checkpoints.", _diff_arguments, _diff),
    "checkpoint prune": Command("Remove old checkpoints.", _prune_arguments, _prune),
}
