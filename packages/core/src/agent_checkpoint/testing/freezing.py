"""Stopping real processes and killing them: those that were given, and no others.

Who is to be stopped with all that it started is stopped from the top down:
a stopped process starts no other, so whoever is found below it is all there is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from agent_checkpoint.errors import InvalidInputError
from agent_checkpoint.process import ENDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

STOPPED = ("T", "t")
# How long the kernel may take for a signal that nobody can refuse.
PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 0.001


class HasPid(Protocol):
    """A ``subprocess.Popen``, a ``multiprocessing.Process``, or what else knows its process id."""

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""


class Seen(NamedTuple):
    """A process as the kernel showed it."""

    pid: int
    parent: int
    session: int
    state: str
    started: str


class Frozen:
    """Processes that are stopped until ``thaw``, or until the end of a ``with`` block."""

    def __init__(self) -> None:
        self._started: dict[int, str] = {}

    @property
    def pids(self) -> list[int]:
        """Who was stopped, in that order."""
        return list(self._started)

    def thaw(self) -> None:
        """Let them go on, children first, so that none is warned by its parent; idempotent."""
        while self._started:
            pid, started = self._started.popitem()
            with suppress(ProcessLookupError):
                if _started(pid) == started:  # it was not killed, and its id given to another one
                    os.kill(pid, signal.SIGCONT)

    def _stop(self, pid: int, timeout_seconds: float) -> None:
        started = _started(pid)
        os.kill(pid, signal.SIGSTOP)
        self._started[pid] = started
        deadline = time.monotonic() + timeout_seconds
        while not _is_stopped(pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} did not stop within {timeout_seconds:g} s of its SIGSTOP")
            time.sleep(LOOK_SECONDS)

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.thaw()


def freeze(process: HasPid | int, *, tree: bool = False, timeout_seconds: float = PATIENCE_SECONDS) -> Frozen:
    """Stop a process (SIGSTOP) and wait until each of its threads has stopped; it goes on at ``Frozen.thaw``.

    With ``tree`` also all that it started and that is below it still, or in the
    session that it leads: a shell with its commands, ``agent-checkpoint run``
    with its guard.

    Raises:
        ProcessLookupError: it has ended.
        TimeoutError: the kernel did not stop it within ``timeout_seconds``; nobody is left stopped.
        InvalidInputError: it is the calling process, or one that started it.
    """
    pid = _pid_of(process)
    if pid in _ancestors():
        raise InvalidInputError(
            f"process: {pid} is the caller or started it: it would freeze for ever", field="process"
        )
    if _was_reaped(process) or _has_ended(pid):
        raise ProcessLookupError(f"process {pid} has ended")
    frozen = Frozen()
    try:
        _stop_all(frozen, pid, tree, timeout_seconds)
    except BaseException:
        frozen.thaw()
        raise
    return frozen


def _stop_all(frozen: Frozen, pid: int, tree: bool, timeout_seconds: float) -> None:
    waiting = family(pid) if tree else [pid]
    while waiting:
        for each in waiting:
            with suppress(ProcessLookupError):
                frozen._stop(each, timeout_seconds)
        # Until it stopped, it may have started others.
        waiting = [each for each in family(pid) if each not in frozen.pids] if tree else []


def kill(process: HasPid | int, *, tree: bool = False, timeout_seconds: float = PATIENCE_SECONDS) -> None:
    """Kill a process (SIGKILL) and wait until it is gone; nothing happens to one that has ended.

    With ``tree`` also all that ``freeze`` would stop. A child of the calling
    process is reaped: give the object that stands for it rather than its id.

    Raises:
        TimeoutError: it was not gone within ``timeout_seconds``.
        InvalidInputError: it is the calling process, or one that started it.
    """
    pid = _pid_of(process)
    if pid in _ancestors():
        raise InvalidInputError(f"process: {pid} is the caller or started it", field="process")
    pids = [pid]
    if tree:
        frozen = Frozen()
        with suppress(TimeoutError):  # who cannot be stopped can be killed
            _stop_all(frozen, pid, tree, timeout_seconds)
        pids += frozen.pids
    if _was_reaped(process):
        pids = [each for each in pids if each != pid]
    for each in pids:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    _reap(process, timeout_seconds)
    _until_gone(pids, timeout_seconds)


def family(pid: int) -> list[int]:
    """Who lives of a process, those in the session that it leads or led, and all below them; parents first."""
    seen = [each for each in processes() if each.state not in ENDED]
    found = [each.pid for each in seen if each.pid == pid] + [
        each.pid for each in seen if each.session == pid and each.pid != pid
    ]
    known = set(found)
    for parent in found:  # which grows
        more = [each.pid for each in seen if each.parent == parent and each.pid not in known]
        found += more
        known.update(more)
    return found


def processes() -> list[Seen]:
    """Every process that is shown."""
    if not os.path.exists("/proc/self/stat"):
        return _processes_of_ps()
    found = (_seen(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [each for each in found if each is not None]


def _seen(pid: int, thread: str = "") -> Seen | None:
    """A process, or a thread of it (``/task/…``)."""
    try:
        with open(f"/proc/{pid}{thread}/stat", "rb", buffering=0) as source:
            # proc(5): pid (comm) state ppid pgrp session … starttime, the 22nd; comm may hold anything.
            fields = source.read().rpartition(b")")[2].split()
        return Seen(pid, int(fields[1]), int(fields[3]), fields[0].decode(), fields[19].decode())
    except (OSError, IndexError):
        return None


def _processes_of_ps() -> list[Seen]:
    words = ["ps", "-A", "-o", "pid=,ppid=,state="]
    found = []
    for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():  # noqa: S603
        pid, parent, state = line.split()
        with suppress(OSError):  # it ended, ps itself for one
            found.append(Seen(int(pid), int(parent), os.getsid(int(pid)), state[0], ""))
    return found


def _find(pid: int) -> Seen | None:
    if os.path.exists("/proc/self/stat"):
        return _seen(pid)
    return next((each for each in _processes_of_ps() if each.pid == pid), None)


def _started(pid: int) -> str:
    found = _find(pid)
    if found is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return found.started


def _threads(pid: int) -> list[Seen]:
    """The threads that have not ended; where they are not shown, the process."""
    try:
        found = [_seen(pid, f"/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        found = [_find(pid)]
    return [each for each in found if each is not None and each.state not in ENDED]


def _is_stopped(pid: int) -> bool:
    """Each thread that lives is stopped."""
    return all(each.state in STOPPED for each in _threads(pid))


def _has_ended(pid: int) -> bool:
    return not _threads(pid)


def _ancestors() -> set[int]:
    """The calling process and those above it."""
    pid, found = os.getpid(), {1}
    while pid > 1 and pid not in found:
        found.add(pid)
        above = _find(pid)
        pid = above.parent if above else 0
    return found


def _pid_of(process: HasPid | int) -> int:
    pid = process if isinstance(process, int) else process.pid
    # Zero and negative ones address groups of processes.
    if type(pid) is not int or pid <= 0:
        raise InvalidInputError(f"process: {process!r} is no process that was started", field="process")
    return pid


def _was_reaped(process: Any) -> bool:
    """Whether its parent waited for it already: its id may be another one's now."""
    return any(getattr(process, name, None) is not None for name in ("returncode", "exitcode"))


def _reap(process: Any, timeout_seconds: float) -> None:
    """Collect a child, by what stands for it or by its id."""
    if isinstance(process, int):
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
    elif isinstance(process, subprocess.Popen):
        process.wait(timeout_seconds)
    elif hasattr(process, "join"):
        process.join(timeout_seconds)


def _until_gone(pids: list[int], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while left := [pid for pid in pids if not _has_ended(pid)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_seconds:g} s these are not gone: {left}")
        time.sleep(LOOK_SECONDS)
