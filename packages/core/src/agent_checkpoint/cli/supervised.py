"""``run``: a command under a lease, ended when the lease is lost."""

from __future__ import annotations

import json
import os
from functools import partial

from agent_checkpoint import names
from agent_checkpoint.cli import environment, output
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command, integer, seconds, wait_seconds
from agent_checkpoint.environment import variables
from agent_checkpoint.errors import (
    AgentCheckpointError,
    InvalidInputError,
    LeaseHeldError,
    ReentrancyError,
    StaleLeaseError,
    WaitTimeoutError,
)
from agent_checkpoint.heart import BEATS, margin_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from typing import Any

    from agent_checkpoint.holding import HeldLease, Hold
    from agent_checkpoint.store import StateStore
    from agent_checkpoint.supervise import Ended, Supervisor

DEFAULT_TTL = 30.0
MOST_GRACE_SECONDS = 5.0
SHARE_OF_TTL = 4


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("scope", metavar="SCOPE", help="what is to be the command's alone")
    parser.add_argument("--owner", help="who asks (the machine and the process)")
    parser.add_argument("--ttl", metavar="SECONDS", help="seconds the lease lasts without a heartbeat (30)")
    parser.add_argument("--wait", metavar="SECONDS|forever", help="seconds to queue for it, or forever (0)")
    parser.add_argument("--limit", metavar="N", help="how many leases the scope may have; its first grant fixes it (1)")
    parser.add_argument(
        "--grace", metavar="SECONDS", help="between TERM and KILL when it is lost (a quarter ttl, <= 5)"
    )
    parser.add_argument(
        "--on-lost",
        choices=("term", "kill", "ignore"),
        default="term",
        help="what becomes of the command when its lease is lost (term)",
    )
    parser.add_argument("--if-held", choices=("fail", "skip"), default="fail", help="skip: exit 0, and do nothing")
    parser.add_argument("--status-fd", metavar="N", help="write how it ended to this descriptor, as a JSON line")
    parser.add_argument("--init", action="store_true", help="create the store if there is none")


def _run(arguments: Namespace) -> Answer:
    if arguments.field is not None:
        raise InvalidInputError("field: run prints nothing of its own; use --status-fd", field="field")
    if not arguments.command:
        raise InvalidInputError("command: is missing; give it behind '--'", field="command", hint="run SCOPE -- make")
    report = Report(arguments.status_fd)
    try:
        status = hold(arguments, store(arguments), report)
    except LeaseHeldError as held:
        if arguments.if_held == "fail":
            report.write(held.exit_status, held.code, held.facts)
            raise
        status = 0
        report.write(status, "skipped", held.facts)
    except AgentCheckpointError as error:
        report.write(error.exit_status, error.code, error.facts)
        raise
    return Answer(None, status=status, silent=True)


class Report:
    """What ``--status-fd`` is told, once, so that a verdict of ours cannot be taken for the command's."""

    def __init__(self, descriptor: str | None) -> None:
        self._fd = integer("status_fd", descriptor)
        self._written = False
        if self._fd is None:
            return
        try:
            os.fstat(self._fd)
        except (OSError, OverflowError):
            raise InvalidInputError(f"status_fd: descriptor {self._fd} is not open", field="status_fd") from None
        if self._fd > 2:
            os.set_inheritable(self._fd, False)  # a reader is to see its end with ours

    def write(self, status: int, verdict: str, facts: dict[str, Any], ended: Ended | None = None) -> None:
        """``verdict``: exited, skipped, or the code of an error."""
        if self._fd is None or self._written:
            return
        self._written = True
        value = {
            **facts,
            "status": status,
            "verdict": verdict,
            "command_status": None if ended is None else ended.status,
            "signal": None if ended is None else ended.signal,
        }
        try:
            os.write(self._fd, (json.dumps(output.jsonable(value), sort_keys=True) + "\n").encode())
        except OSError as error:
            output.warn("status-fd", f"how it ended cannot be written to descriptor {self._fd}: {error.strerror}")


def hold(arguments: Namespace, opened: StateStore, report: Report) -> int:
    ttl = seconds("ttl_seconds", arguments.ttl)
    ttl = DEFAULT_TTL if ttl is None else ttl
    grace = _grace(ttl, seconds("grace_seconds", arguments.grace))
    owner = f"{os.uname().nodename}:{os.getpid()}" if arguments.owner is None else arguments.owner
    wait, limit = wait_seconds(arguments.wait, 0.0), integer("limit", arguments.limit)
    holding = partial(opened.hold, arguments.scope, owner, ttl, wait_seconds=wait, limit=limit)
    # Looked at first, and asked for once in vain: what cannot be passed on, or is invalid, forks nothing.
    outer = environment.held(opened, os.environ)
    holding()
    if wait and any(fence.scope == arguments.scope for fence in outer):
        _refuse_waiting_for_oneself(opened, arguments.scope)
    # Forked before the store is opened: the guard shares no database, and there are no threads.
    supervisor = _supervisor(arguments, opened, grace)
    try:
        if arguments.init:
            opened.initialize()
        entered = holding(on_lost=lambda *_: supervisor.lose())
        held = entered.__enter__()
        try:
            environ = {**os.environ, **variables(opened.address, held.fence, outer)}
            ended = _supervise(supervisor, held, environ)
        except BaseException as error:
            entered.__exit__(type(error), error, None)
            raise
        if ended.why in ("lost", "guard-died"):  # within the grace the lease may be live still
            held.declare_lost("expired" if ended.why == "lost" else ended.why)
        return _end(ended, held, _given_back(entered), arguments.command[0], report)
    finally:
        supervisor.close()


def _refuse_waiting_for_oneself(opened: StateStore, scope: str) -> None:
    try:
        opened.wait_until_free(scope, 0)
    except WaitTimeoutError as full:
        raise ReentrancyError(
            f"this command runs under a lease on scope {scope!r} itself, and nobody else can free it: "
            "it would wait for ever",
            hint="leases are not re-entrant: use the one that it has, or another scope",
            **{**full.facts, "expires_at": full.expires_at},
        ) from None


def _given_back(hold: Hold) -> AgentCheckpointError | None:
    """Release the lease; what went wrong with that."""
    try:
        hold.__exit__(None, None, None)
    except AgentCheckpointError as error:
        return error
    return None


def _grace(ttl: float, given: float | None) -> float:
    """The seconds between TERM and KILL, which must leave time for a heartbeat that comes late.

    Raises:
        InvalidInputError: they do not.
    """
    ttl_ns = names.ttl_ns(ttl)
    most = (ttl_ns - ttl_ns // BEATS - margin_ns(ttl_ns)) / names.NS
    grace = min(MOST_GRACE_SECONDS, ttl / SHARE_OF_TTL, most / 2) if given is None else given
    if not 0 <= grace < most:
        names.invalid(
            "grace_seconds",
            f"must be from 0 to less than {most:g} seconds with a ttl of {ttl:g}: a third of the ttl passes between "
            "two heartbeats",
            hint="give a longer --ttl, or less --grace",
        )
    return grace


def _supervisor(arguments: Namespace, opened: StateStore, grace: float) -> Supervisor:
    from agent_checkpoint.supervise import Supervisor

    expire = partial(_expire, opened.address)
    return Supervisor(arguments.command, grace_seconds=grace, on_lost=arguments.on_lost, expire=expire)


def _expire(database: str, fence: str) -> None:
    """For whoever survives: nothing of the command is left, so the scope need not wait for the ttl."""
    from agent_checkpoint.store import StateStore

    with StateStore(database) as survivor:
        survivor.expire(*json.loads(fence))


def _supervise(supervisor: Supervisor, held: HeldLease, environ: dict[str, str]) -> Ended:
    try:
        group = supervisor.prepare(environ, json.dumps(held.fence), held.deadline_ns)
    except OSError as error:
        raise AgentCheckpointError(f"the command cannot be started: {error.strerror}") from error
    # The command goes only when it is on record who ends it.
    held.bind(supervised=True, guard=supervisor.guard, group=group)
    held.on_extended(supervisor.extend)
    supervisor.extend(held.deadline_ns)
    return supervisor.run()


def _end(ended: Ended, held: HeldLease, error: AgentCheckpointError | None, command: str, report: Report) -> int:
    """The command's status, unless its lease ended before it did."""
    # Where the guard did not answer, the lease was expired here, when nothing was left.
    by_us = ended.expired and ended.why == "exited"
    if isinstance(error, StaleLeaseError) and not by_us:
        if ended.why == "guard-died":
            error.hint = "look for what killed it (the out-of-memory killer?), then run it again"
        report.write(error.exit_status, error.code, error.facts, ended)
        raise error
    if error is not None and not by_us:
        output.warn(error.code, f"the lease could not be released, and ends by its ttl: {error}")
    verdict: str = ended.why
    if ended.error:
        verdict = f"command-{ended.why}"
        output.warn(verdict, f"cannot execute {command!r}: {ended.error}")
    facts = {**held.fence._asdict(), "error": ended.error or None}
    report.write(ended.status, verdict, facts, ended)
    return ended.status


COMMANDS = {"run": Command("Run a command under a lease.", _arguments, _run, takes_command=True)}
