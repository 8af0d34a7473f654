"""The command ``agent-checkpoint``: argparse in, JSON out, exit statuses that mean something.

A command prints its answer on stdout or one JSON error on stderr, never a
traceback. Only the parser and the modules of the named command are loaded.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

INTERRUPTED = 130
CLOSED_PIPE = 141


def script() -> NoReturn:
    """The installed command: ``main``, and an end without the interpreter's own.

    Taking the interpreter down costs as much as a read of the store. With
    plugins, which may have something to do at exit, it ends as usual.
    """
    status = main()
    if "pluggy" in sys.modules:
        sys.exit(status)
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        from agent_checkpoint.cli import run

        return run.run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        return CLOSED_PIPE
    except KeyboardInterrupt:
        from agent_checkpoint.cli import output

        output.print_error({"code": "interrupted", "message": "interrupted", "hint": "", "retryable": True})
        return INTERRUPTED
