"""From words to a command, from its answer or error to output and exit status."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from agent_checkpoint.cli import output
from agent_checkpoint.cli.parser import GLOBAL_VALUES, Parser, parser_for
from agent_checkpoint.errors import AgentCheckpointError, InvalidInputError
from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent_checkpoint.cli.parser import Command

# Every command, and the module of this package that has it.
COMMANDS = {
    "init": "stores",
    "lease acquire": "leases",
    "lease heartbeat": "leases",
    "lease release": "leases",
    "lease show": "leases",
    "lease list": "leases",
    "lease check": "leases",
    "lease force-release": "leases",
    "lease wait": "leases",
    "lease set-limit": "leases",
    "checkpoint put": "checkpoints",
    "checkpoint get": "checkpoints",
    "checkpoint list": "checkpoints",
    "checkpoint history": "checkpoints",
    "checkpoint diff": "checkpoints",
    "checkpoint prune": "checkpoints",
    "run": "supervised",
    "once": "once",
    "effect list": "effects",
    "effect show": "effects",
    "effect resolve": "effects",
    "events": "events",
    "events archive": "archives",
    "events verify": "archives",
    "retention show": "retaining",
    "retention set": "retaining",
    "retention unset": "retaining",
    "prune": "retaining",
    "status": "status",
    "doctor": "stores",
    "migrate-store": "moving",
    "export": "exchanging",
    "import": "exchanging",
    "backup": "copies",
    "restore": "copies",
    "demo": "demonstration",
    "completion": "completion",
}
GROUPS = sorted({name.split()[0] for name in COMMANDS if " " in name})


def run(argv: Sequence[str]) -> int:
    """Run one command; the exit status. Its error is printed as JSON."""
    try:
        return _run(argv)
    except AgentCheckpointError as error:
        facts = {"code": error.code, "message": error.message, "hint": error.hint, "retryable": error.retryable}
        output.print_error({**error.facts, **facts})
        return error.exit_status
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except Exception as error:
        if os.environ.get("AGENT_CHECKPOINT_TRACEBACK"):
            raise
        hint = "this is a bug; run it again with AGENT_CHECKPOINT_TRACEBACK=1 and report what it prints"
        message = f"{type(error).__name__}: {error}"
        output.print_error({"code": "unexpected", "message": message, "hint": hint, "retryable": False})
        return AgentCheckpointError.exit_status


def command(name: str) -> Command:
    """A command by its words; loads its module."""
    module = import_module(f"agent_checkpoint.cli.{COMMANDS[name]}")
    found: Command = module.COMMANDS[name]
    return found


def _run(argv: Sequence[str]) -> int:
    argv, inner = _cut(argv)
    words, rest = _split(argv)
    name = " ".join(words)
    if not (words and name in COMMANDS and len(words) == len(name.split())):
        return _overview(words, rest)
    chosen = command(name)
    if inner is not None and not chosen.takes_command:
        rest += ["--", *inner]
    try:
        arguments = parser_for(name, chosen).parse_args(rest)
    except SystemExit:  # argparse has printed its help
        return 0
    arguments.command = inner
    if arguments.default is not None and arguments.field is None:
        raise InvalidInputError("default: --default goes with --field", field="default")
    if sys.stdout is None and not chosen.takes_command:
        raise InvalidInputError("stdout: is closed, there is nowhere to print the answer", field="stdout")
    try:
        answer = chosen.run(arguments)
        if not answer.silent:
            output.print_answer(answer, arguments)
    finally:
        _close_stores()
    return answer.status


def _close_stores() -> None:
    opening = sys.modules.get("agent_checkpoint.cli.opening")
    if opening is not None:
        opening.close()


def _cut(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """What stands before the first ``--``, and what behind it; None without one.

    A name that begins with a dash has a ``--`` of its own: ``once -- -k -- CMD``.
    """
    if "--" not in argv:
        return argv, None
    at = list(argv).index("--")
    name, *second = argv[at + 1 : at + 3] or ("",)
    if name.startswith("-") and second == ["--"]:
        at += 2
    return argv[:at], argv[at + 1 :]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's words, and the other arguments; options may stand before the words."""
    words: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(argv):
        wanted = 2 if words and words[0] in GROUPS else 1
        if argv[at] in GLOBAL_VALUES:
            rest += argv[at : at + 2]
            at += 2
            continue
        is_word = len(words) < wanted and not argv[at].startswith("-")
        if words and words[0] in COMMANDS:  # which has commands below it, and arguments of its own
            value = argv[at - 1].startswith("-")  # of an option: `events --kind archive`
            is_word = is_word and not value and f"{words[0]} {argv[at]}" in COMMANDS
        (words if is_word else rest).append(argv[at])
        at += 1
    return words, rest


def _overview(words: Sequence[str], options: Sequence[str]) -> int:
    """Help and the version; anything else without a known command is a mistake."""
    group = words[0] if words and words[0] in GROUPS else None
    known = [name for name in COMMANDS if group is None or name.startswith(f"{group} ")]
    if "--version" in options and not words:
        output.write(f"agent-checkpoint {__version__}\n")
        return 0
    if {"-h", "--help"} & set(options) and (not words or words == [group]):
        output.write(_help(group, known))
        return 0
    what = f"unknown command {' '.join(words)!r}" if words else "no command given"
    raise InvalidInputError(what, field="command", hint="agent-checkpoint --help lists the commands", known=known)


def _help(group: str | None, known: Sequence[str]) -> str:
    lines = [f"  {name:<22} {command(name).summary}" for name in known]
    parser = Parser(
        prog="agent-checkpoint" + (f" {group}" if group else ""),
        usage=f"agent-checkpoint [--db PATH] [--busy-timeout S] {group or 'COMMAND'} …",
        epilog="commands:\n" + "\n".join(lines) + "\n\n'agent-checkpoint COMMAND --help' tells the rest.",
    )
    parser.add_globals()
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser.format_help()
