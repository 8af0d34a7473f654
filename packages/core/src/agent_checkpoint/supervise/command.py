"""The command's own process: forked by the guard, held before its first instruction, then executed."""

from __future__ import annotations

import errno
import json
import os
import signal
from contextlib import suppress

from agent_checkpoint.supervise.channel import drain, pipe
from agent_checkpoint.supervise.kernel import die_with_parent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import NoReturn

    from agent_checkpoint.supervise.signals import Dispositions

CANNOT_EXECUTE = 126
NOT_FOUND = 127


class Command:
    """A process in a group of its own, which waits for ``go``. It dies with the process that made it.

    Signals wait as well, so that none is lost: with ``go`` it gets them, and
    may end of them without having executed anything.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], start: Dispositions, foreign: Iterable[int]
    ) -> None:
        """``foreign``: descriptors that must not be open in it, not even before it executes."""
        held_at, self._go = pipe()
        self._failure, tell = pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (*foreign, self._go, self._failure):
                os.close(fd)
            _become(argv, environ, start, parent, held_at, tell)
        os.close(held_at)
        os.close(tell)
        _lead_group(self.pid)

    def go(self) -> None:
        """Let it execute."""
        with suppress(BrokenPipeError):  # it was killed meanwhile
            os.write(self._go, b"!")

    def failure(self) -> tuple[int, str] | None:
        """Once it has ended: the exit status and the reason, if it could not be executed."""
        told = drain(self._failure)
        if not told:
            return None
        number, reason = json.loads(told)
        return (NOT_FOUND if number == errno.ENOENT else CANNOT_EXECUTE), reason


def _lead_group(pid: int) -> None:
    """Done by parent and child, so that it is done for both when they go on."""
    with suppress(PermissionError, ProcessLookupError):  # it has been killed meanwhile
        os.setpgid(pid, pid)


def _become(
    argv: Sequence[str], environ: Mapping[str, str], start: Dispositions, parent: int, held_at: int, tell: int
) -> NoReturn:
    """What the child does; it never returns into the code of its parent."""
    try:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL)
        os.set_blocking(held_at, True)
        if os.getppid() == parent and os.read(held_at, 1):
            start.restore()
            os.execvpe(argv[0], list(argv), environ)  # noqa: S606 -- without a shell is what we want
        os.kill(os.getpid(), signal.SIGKILL)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps([number, reason]).encode())
    finally:
        os._exit(NOT_FOUND)
