"""``init`` and ``doctor``: the store as a whole."""

from __future__ import annotations

from agent_checkpoint.cli import output
from agent_checkpoint.cli.following import sweep
from agent_checkpoint.cli.opening import store
from agent_checkpoint.cli.parser import Answer, Command
from agent_checkpoint.errors import StorageError
from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def _none(_: ArgumentParser) -> None:
    """No arguments of its own."""


def _init(arguments: Namespace) -> Answer:
    opened = store(arguments)
    created = opened.initialize()
    return Answer({"database": opened.database, "created": created, "version": __version__})


def _doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--restored", action="store_true", help="the store was copied here by hand: end its leases, set its counters"
    )


def _doctor(arguments: Namespace) -> Answer:
    opened = store(arguments)
    if arguments.restored:
        return Answer(opened.mark_restored())
    sweep(opened)
    checks = opened.doctor()
    verdicts = {check.verdict for check in checks}
    verdict = next((each for each in ("broken", "warning") if each in verdicts), "ok")
    value = {"database": opened.database, "verdict": verdict, "checks": checks}
    rows = [[each.verdict, each.check, output.shown(output.jsonable(each.value)), each.message] for each in checks]
    text = f"{opened.database}: {verdict}\n\n" + output.table(rows)
    return Answer(value, text, StorageError.exit_status if verdict == "broken" else 0)


COMMANDS = {
    "init": Command("Create the store, or bring its tables up to date.", _none, _init),
    "doctor": Command("Is the store sound? Exit 74 when something is broken.", _doctor_arguments, _doctor),
}
