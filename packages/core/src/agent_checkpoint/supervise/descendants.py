"""All that a command has started: finding it, sending it signals, seeing it gone.

Where orphans are adopted (``kernel.adopt_orphans``) these are all descendants
of the calling process: they may change their process group, their session and
their parent, and are found still. Elsewhere only the command's process group is.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Descendants:
    """What the calling process has to see ended, but for ``spared``: children of its earlier life.

    A child's id is its own until its parent waits for it, and so is the id of
    the command's group: these are signalled by their ids. Whoever is further
    down is held by a descriptor first.
    """

    def __init__(self, adopting: bool, spared: Iterable[int] = ()) -> None:
        self.group: int | None = None
        self.left = False
        self._adopting = adopting
        self._spared = frozenset(spared)

    def signal_group(self, *numbers: int) -> None:
        """Send signals to the command's process group."""
        if self.group is not None:
            for number in numbers:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.group, number)

    def terminate(self) -> None:
        """Ask each of them to end; who is stopped is woken to hear it."""
        numbers = (signal.SIGTERM, signal.SIGCONT)
        if self._adopting:
            self._signal_all(numbers)
        else:
            self.signal_group(*numbers)

    def kill(self, *, deep: bool) -> None:
        """Kill the group and all children, whose children become ours by that; ``deep``: these at once too.

        To be repeated while something is left: who is not dead yet may fork.
        """
        self.signal_group(signal.SIGKILL)
        if self._adopting:
            for pid in self._children(look()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if deep:
                self._signal_all((signal.SIGKILL,))

    def reap(self) -> Iterator[tuple[int, int]]:
        """Who ended, stopped or went on since the last time, as (pid, wait status); at its end ``left`` is set."""
        try:
            while (ended := self._next())[0]:
                yield ended
            self.left = True
        except ChildProcessError:
            self.left = False
        if not self._adopting:
            self.left = self.group is not None and group_exists(self.group)

    def forget_group(self) -> None:
        """The command was waited for: an empty group's id may be given to others now."""
        if self._adopting:
            self.group = None

    def _next(self) -> tuple[int, int]:
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        if not self._spared:
            return os.waitpid(-1, flags)
        for _ in range(2):  # one look may miss a child that is born while its parent dies
            children = self._children(look())
            for child in children:
                ended = os.waitpid(child, flags)
                if ended[0]:
                    return ended
            if children:
                return 0, 0
        raise ChildProcessError

    def _children(self, children_of: Callable[[int], list[int]]) -> list[int]:
        return [pid for pid in children_of(os.getpid()) if pid not in self._spared]

    def _signal_all(self, numbers: Iterable[int]) -> None:
        """Parents before their children, so that none sees a child die and does something about it."""
        children_of = look()
        found = self._children(children_of)
        family = {os.getpid(), *found}
        for pid in found:  # which grows
            more = [child for child in children_of(pid) if child not in family]
            found += more
            family.update(more)
            _signal_exactly(pid, family, numbers)


def has_ended(status: int) -> bool:
    """The wait status is one of an end."""
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)


def look() -> Callable[[int], list[int]]:
    """Who is whose child: a function from a process to its children."""
    if os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):
        return _listed
    parents = _parents()
    return lambda pid: [child for child, parent in parents.items() if parent == pid]


def _listed(pid: int) -> list[int]:
    """The children of each thread, by the kernel's own list (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as source:
                found += map(int, source.read().split())
    return found


def _parents() -> dict[int, int]:
    """Every process and its parent, as far as there is a ``/proc`` to see them."""
    with suppress(OSError):
        return {int(name): _parent(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    return {}


def _parent(pid: int) -> int:
    """The parent's id; 0 when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as source:
            # proc(5): pid (comm) state ppid …; comm may hold spaces and parentheses.
            return int(source.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _signal_exactly(pid: int, family: set[int], numbers: Iterable[int]) -> None:
    """Signal a process if its parent still is of the family; who was orphaned meanwhile was adopted in it.

    Else its id may have been given to somebody else, if we were frozen since we looked.
    """
    handle = None
    with suppress(AttributeError, OSError):  # before Linux 5.3, or none such: its id must do
        handle = os.pidfd_open(pid)
    try:
        if _parent(pid) in family:
            for number in numbers:
                with suppress(ProcessLookupError, PermissionError):
                    if handle is None:
                        os.kill(pid, number)
                    else:
                        signal.pidfd_send_signal(handle, number)
    finally:
        if handle is not None:
            os.close(handle)


def group_exists(group: int) -> bool:
    """Somebody is in the process group."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
