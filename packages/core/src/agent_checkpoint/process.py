"""What the kernel says of processes, and when that proves one of them dead.

A proof must hold for ever, since what the dead process held is given away on
it. Whatever is not proven is unknown, never dead: a lease's ttl decides then.
"""

from __future__ import annotations

import json
import os

from agent_checkpoint import forks
from agent_checkpoint.errors import InvalidInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Namespaces = tuple[int | None, int | None]
    # The process id, and how many forks led to this process: a process id can be the parent's again.
    Life = tuple[int, int]

# The largest pid_t.
MAX_PID = 2**31 - 1
# proc(5): zombie and dead; Linux 2.6.33 to 3.13 wrote x too.
ENDED = ("Z", "X", "x")
# How often a process is looked at that changes while it is looked at.
LOOKS = 3
NOT_YET: Life = (0, 0)

_encode = json.JSONEncoder(separators=(",", ":")).encode


def describe(pid: int) -> dict[str, Any]:
    """``{pid, command, stopped}``; command and stopped are None when the kernel does not tell."""
    command, stopped = None, None
    try:
        name, rest = _read_stat(pid)
        command, stopped = name.decode(errors="replace"), rest[0] in (b"T", b"t")
    except (OSError, IndexError):
        pass
    return {"pid": pid, "command": command, "stopped": stopped}


class ProcessTable:
    """What the kernel says of processes, and whether one that was written down is provably dead.

    ``boot`` is the id of this boot (``Clock.domain``); with "" nothing is
    proven. ``exists``, ``stat`` and ``namespaces`` look, the rest decides: tests
    replace the looks (``agent_checkpoint.testing.FakeProcesses``).
    """

    def __init__(self, boot: str) -> None:
        self.boot = boot
        self._own: tuple[Life, dict[str, Any], str] = (NOT_YET, {}, "")
        self._surroundings: tuple[Life, Namespaces] = (NOT_YET, (None, None))

    def identify(self, pid: int | None = None, **more: Any) -> str:
        """The identity of this process or of another, ASCII JSON with ``more`` in it.

        It has ``boot``, ``pid``, ``start_ticks``, ``pid_namespace`` and
        ``time_namespace``, null where the kernel does not tell. The pid and the
        ticks are as this process sees them, so the namespaces are ours.

        Raises:
            InvalidInputError: there is no such process, or it has ended.
        """
        if pid is not None:
            return _encode({**more, **self._facts_of(pid)})
        life = (os.getpid(), forks.generation())
        known, facts, text = self._own
        if known != life:
            facts = self._facts(life[0])
            text = _encode(facts)
            self._own = (life, facts, text)
        return _encode({**more, **facts}) if more else text

    def alive(self, identity: str) -> bool | None:
        """Whether that process lives; False only when it is provably dead, None when nobody can know.

        A process marked ``supervised`` is never proven dead: its own supervisors
        say when it ends.
        """
        facts = _parse(identity)
        here = self._here()
        if (
            facts is None
            or not self.boot
            or facts.get("boot") != self.boot
            or here[0] is None
            or (facts.get("pid_namespace"), facts.get("time_namespace")) != here
        ):
            return None
        answer = self._look(facts["pid"], facts.get("start_ticks"))
        # Since it was looked up this process may have changed its root, or what is mounted there.
        if answer is False and (facts.get("supervised") or self.namespaces() != here):
            return None
        return answer

    def exists(self, pid: int) -> bool | None:
        """Whether the pid is taken, if only by a zombie; None when the kernel does not tell."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        except OSError:
            return None
        return True

    def stat(self, pid: int) -> tuple[str, int, int] | None:
        """The state's letter, the number of threads and the start in ticks since boot; None when not shown."""
        try:
            _, rest = _read_stat(pid)
            # proc(5) counts from 1, and the state is its third field.
            return rest[0].decode(), int(rest[17]), int(rest[19])
        except (OSError, ValueError, IndexError):
            return None

    def namespaces(self) -> Namespaces:
        """The pid and time namespace in which this process reads pids and ticks.

        (None, None) when /proc does not show our pid namespace: the pids in it
        are others then. Without time namespaces (before Linux 5.6) the second is None.
        """
        if not _proc_is_ours():
            return None, None
        # Not of self: when its first thread has ended, a process has no time namespace.
        return _inode("/proc/thread-self/ns/pid"), _inode("/proc/thread-self/ns/time")

    def _here(self) -> Namespaces:
        """``namespaces``, looked up once in the life of a process."""
        life = (os.getpid(), forks.generation())
        known, here = self._surroundings
        if known != life:
            here = self.namespaces()
            self._surroundings = (life, here)
        return here

    def _facts(self, pid: int) -> dict[str, Any]:
        pid_namespace, time_namespace = self._here()
        stat = self.stat(pid) if pid_namespace is not None else None
        return {
            "boot": self.boot,
            "pid": pid,
            "start_ticks": stat[2] if stat else None,
            "pid_namespace": pid_namespace,
            "time_namespace": time_namespace,
        }

    def _facts_of(self, pid: int) -> dict[str, Any]:
        if not _is_pid(pid):
            raise InvalidInputError(f"pid: {pid!r} is not the id of a process", field="pid")
        facts = self._facts(pid)
        # A /proc that is not ours would show another process.
        proc_is_ours = facts["pid_namespace"] is not None
        if (self._look(pid, facts["start_ticks"]) if proc_is_ours else self.exists(pid)) is False:
            raise InvalidInputError(f"pid: there is no process {pid}", field="pid")
        return facts

    def _look(self, pid: int, start_ticks: int | None) -> bool | None:
        """Whether the process with this pid and start lives; /proc is known to be ours."""
        for _ in range(LOOKS):
            if self.exists(pid) is False:
                return False
            stat = self.stat(pid)
            if stat is None:
                continue  # hidden, or it went away just now: then the pid is free
            state, threads, started = stat
            if start_ticks is not None and started != start_ticks:
                return False
            # A process whose first thread has ended shows that thread, a zombie, and counts the others.
            if state not in ENDED or threads > 1:
                return None if start_ticks is None else True
            if threads == 1:
                return False
            # No thread at all: the one we looked at was removed meanwhile. It was reaped, or
            # another thread called exec and took its place: the process lives on (seen).
        return None


def _parse(identity: str) -> dict[str, Any] | None:
    """The facts of an identity; None when it is not one."""
    try:
        facts = json.loads(identity)
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or not _is_pid(facts.get("pid")):
        return None
    start_ticks = facts.get("start_ticks")
    return facts if start_ticks is None or (type(start_ticks) is int and start_ticks >= 0) else None


def _is_pid(value: object) -> bool:
    # Zero and negative ones address groups of processes.
    return type(value) is int and 0 < value <= MAX_PID


def _read_stat(pid: int) -> tuple[bytes, list[bytes]]:
    """The command of a process, and the fields of its stat that follow: the state first."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as source:
        # proc(5): pid (comm) state …; comm may hold spaces, parentheses and any bytes.
        name, _, rest = source.read().partition(b"(")[2].rpartition(b")")
    return name, rest.split()


def _proc_is_ours() -> bool:
    """Whether /proc shows our pid namespace.

    That of an outer namespace knows us by another pid, which may be the same
    by chance; but there we have a pid in each namespace, down to ours.
    """
    try:
        with open("/proc/self/status", "rb", buffering=0) as source:
            pids = source.read().partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
        return len(pids) <= 1 and os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
