"""Somebody's agent as a process of its own: a command, or a function that runs in a forked child.

It leads a session of its own, so that it is found with all that it started,
and what it prints goes to files.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_checkpoint.environment import DATABASE, PREFIX
from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.testing import watch
from agent_checkpoint.testing.freezing import LOOK_SECONDS, family, kill
from agent_checkpoint.testing.pausing import PAUSE

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    Work = Sequence[str | os.PathLike[str]] | Callable[[], object]

# A lease that the tests themselves run under is not the agent's.
INHERITED = tuple(PREFIX + part for part in ("SCOPE", "OWNER", "TOKEN", "LEASES"))
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


class Ended(NamedTuple):
    """How a process ended, and what it printed.

    ``returncode`` is -n for signal n. ``exception`` is what a function raised,
    None for a command, and where it cannot be pickled.
    """

    returncode: int
    exception: BaseException | None
    stdout: str
    stderr: str


def _finished(result: object) -> None:
    """Run what a coroutine function returned."""
    if isinstance(result, CoroutineType):
        import asyncio

        asyncio.run(result)


class Agent:
    """A process that was started, until ``end``."""

    def __init__(self, work: Work, folder: Path, database: str, pause: Path | None = None) -> None:
        self._folder = folder
        self._is_gone = False
        folder.mkdir()
        environ = {name: value for name, value in os.environ.items() if name not in (*INHERITED, PAUSE)}
        environ[DATABASE] = database
        if pause is not None:
            environ[PAUSE] = str(pause)
        self.process: subprocess.Popen[bytes] | BaseProcess
        self.process = self._forked(work, environ) if callable(work) else self._started(work, environ)
        assert self.process.pid is not None
        self.pid = self.process.pid
        watch.over(self.pid)

    def _started(self, words: Any, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        if isinstance(words, (str, bytes)) or not isinstance(words, Sequence) or not words:
            raise InvalidInputError(
                f"agent: {words!r} is neither a list of words nor a function",
                hint='for a line of shell give ["sh", "-c", line]',
                field="agent",
            )
        with self._file("stdout").open("wb") as out, self._file("stderr").open("wb") as errors:
            try:
                return subprocess.Popen(  # noqa: S603 -- what the test was written to run
                    [os.fspath(word) for word in words],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise InvalidInputError(
                    f"agent: {words[0]!r} cannot be run: {error.strerror}", field="agent"
                ) from error

    def _forked(self, work: Callable[[], object], environ: dict[str, str]) -> BaseProcess:
        import multiprocessing

        process = multiprocessing.get_context("fork").Process(target=self._run, args=(work, environ))
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; the documentation says what they may do.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        return process

    def _run(self, work: Callable[[], object], environ: dict[str, str]) -> None:
        """In the forked child."""
        os.setsid()
        watch.forget()
        for number, name in ((STANDARD_OUTPUT, "stdout"), (STANDARD_ERROR, "stderr")):
            with self._file(name).open("wb") as file:
                os.dup2(file.fileno(), number)
            setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 -- until the child ends
        os.environ.clear()
        os.environ.update(environ)
        try:
            _finished(work())
        except Exception as error:
            with suppress(Exception):
                text = pickle.dumps(error)
                pickle.loads(text)  # noqa: S301 -- what was pickled just now
                self._file("exception").write_bytes(text)
            raise

    def _file(self, name: str) -> Path:
        return self._folder / name

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started has; what it started may not."""
        return self._returncode() is not None

    def wait(self, timeout_seconds: float) -> Ended | None:
        """Wait until it and all that it started have ended; None if they do not."""
        deadline = time.monotonic() + timeout_seconds
        while not self.has_ended or family(self.pid):
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_SECONDS)
        self._is_gone = True
        return self.ended()

    def ended(self) -> Ended:
        """How it ended, and what it printed so far."""
        exception = None
        with suppress(Exception):
            exception = pickle.loads(self._file("exception").read_bytes())  # noqa: S301 -- our own child's
        returncode = self._returncode()
        return Ended(
            -1 if returncode is None else returncode, exception, self.printed("stdout"), self.printed("stderr")
        )

    def printed(self, name: str) -> str:
        """What came out on ``stdout`` or ``stderr`` so far."""
        with suppress(FileNotFoundError):
            return self._file(name).read_text("utf-8", "replace")
        return ""

    def end(self) -> None:
        """Kill what is left of it."""
        if not self._is_gone:
            kill(self.process, tree=True)
        watch.over_no_more(self.pid)

    def _returncode(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode
