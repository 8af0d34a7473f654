"""``python -m agent_checkpoint_langgraph``: what is done once to a store, or asked once of this package.

Answers and errors are printed as the command ``agent-checkpoint`` prints them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

from agent_checkpoint import AgentCheckpointError, NotFoundError
from agent_checkpoint.cli import CLOSED_PIPE, INTERRUPTED, output
from agent_checkpoint.cli.parser import Parser
from agent_checkpoint.locate import locate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PROGRAM = "python -m agent_checkpoint_langgraph"
# Where no terminal shows the line of progress, a line comes so often.
LINE_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
    except SystemExit:  # argparse has printed its help
        return 0
    except AgentCheckpointError as error:
        facts = {"code": error.code, "message": error.message, "hint": error.hint, "retryable": error.retryable}
        output.print_error({**error.facts, **facts})
        return error.exit_status
    except BrokenPipeError:
        return CLOSED_PIPE
    except KeyboardInterrupt:
        output.print_error({"code": "interrupted", "message": "interrupted", "hint": "", "retryable": True})
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("AGENT_CHECKPOINT_TRACEBACK"):
            raise
        hint = "this is a bug; run it again with AGENT_CHECKPOINT_TRACEBACK=1 and report what it prints"
        message = f"{type(error).__name__}: {error}"
        output.print_error({"code": "unexpected", "message": message, "hint": hint, "retryable": False})
        return AgentCheckpointError.exit_status
    return status


def import_file(arguments: argparse.Namespace) -> int:
    """Import a file of LangGraph's own SQLite saver."""
    from agent_checkpoint_langgraph.importer import import_threads
    from agent_checkpoint_langgraph.saver import AgentCheckpointSaver

    line = ProgressLine()
    try:
        with AgentCheckpointSaver.from_conn_string(locate(arguments.db, os.environ)) as saver:
            report = import_threads(saver, arguments.file, on_progress=line.show)
    finally:
        line.end()
    output.write(json.dumps(report._asdict(), indent=2, sort_keys=True) + "\n")
    return 0


def conformance(arguments: argparse.Namespace) -> int:
    """Print what the saver does of what LangGraph asks of one, and of what this package promises."""
    try:
        from agent_checkpoint_langgraph.conformance import report
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("langgraph.checkpoint.conformance"):
            raise
        raise NotFoundError(
            "LangGraph's conformance suite is not installed", hint="pip install langgraph-checkpoint-conformance"
        ) from error
    return 0 if report.run(arguments.db) else 1


class ProgressLine:
    """How far an import is, on stderr: one line that changes on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = time.monotonic()
        self._is_open = False

    def show(self, done: int, total: int) -> None:
        """So many checkpoints of so many are done."""
        text = f"imported {done} of {total} checkpoints"
        now = time.monotonic()
        if self._on_terminal:
            self._write(f"\r{text}")
            self._is_open = True
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._write(f"{text}\n")

    def end(self) -> None:
        """What follows begins on a line of its own."""
        if self._is_open:
            self._write("\n")

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            try:
                sys.stderr.write(text)
                sys.stderr.flush()
            except OSError:
                output.silence(sys.stderr)


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="LangGraph threads in an Agent Checkpoint store.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    importing = commands.add_parser("import", help="copy all threads of a SqliteSaver's file into the store")
    importing.add_argument("file", metavar="OLD.sqlite", help="what SqliteSaver or AsyncSqliteSaver wrote")
    importing.add_argument("--db", metavar="PATH", help="the store: a path or an URL (else AGENT_CHECKPOINT_DB, …)")
    importing.set_defaults(run=import_file)
    suite = commands.add_parser("conformance", help="print which promises of a saver this one keeps")
    suite.add_argument("--db", metavar="URL", help="an empty store to try it on (else a temporary one)")
    suite.set_defaults(run=conformance)
    return parser


if __name__ == "__main__":
    sys.exit(main())
