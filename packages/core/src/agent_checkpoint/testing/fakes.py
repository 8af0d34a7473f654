"""Time that tests turn by hand, and processes that die at a word, for programs that use a store."""

from __future__ import annotations

import os

from agent_checkpoint.clock import Clock
from agent_checkpoint.names import NS
from agent_checkpoint.process import ProcessTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Condition
    from typing import Any

# 2030-01-01T00:00:00Z: a wall clock that no test mistakes for today's.
EPOCH_NS = 1_893_456_000 * NS


class FakeClock(Clock):
    """A clock that stands still until it is turned; hand it to ``StateStore(clock=…)``.

    Processes that share a store need clocks that agree; this one is for tests
    within one process, whose stores can share it.
    """

    by_hand = True

    def __init__(self, *, wall_ns: int = EPOCH_NS, ticks_ns: int = 1_000 * NS, domain: str = "boot-1") -> None:
        self.now_wall_ns = wall_ns
        self.now_ticks_ns = ticks_ns
        self.domain = domain
        self.wall_ns = lambda: self.now_wall_ns
        self.ticks_ns = lambda: self.now_ticks_ns
        self.sleep = self.advance
        self.wait = self._wait
        self._waiting: set[Condition] = set()

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        self.now_wall_ns += round(seconds * NS)
        self.now_ticks_ns += round(seconds * NS)
        for condition in list(self._waiting):
            with condition:
                condition.notify_all()

    def _wait(self, condition: Condition, until: int) -> bool:
        self._waiting.add(condition)
        if self.now_ticks_ns < until:  # looked at after it can be woken up
            condition.wait()  # time passes in ``advance`` alone
        return self.now_ticks_ns < until

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; no time passes."""
        self.now_wall_ns += round(seconds * NS)

    def reboot(self, *, domain: str, down_seconds: float = 30.0) -> None:
        """Start another boot: the monotonic clock begins anew, the wall clock goes on."""
        self.domain = domain
        self.now_wall_ns += round(down_seconds * NS)
        self.now_ticks_ns = NS


class FakeProcesses(ProcessTable):
    """Processes that begin and end at a word; what that proves is judged as for real ones.

    ``pid`` is the process that asks, at first the only one there is; set it to
    act as another. Set ``boot`` to reboot: what lived before is not provably
    dead then, that is for the clock to say.
    """

    def __init__(self, boot: str = "boot-1") -> None:
        super().__init__(boot)
        self.pid = os.getpid()
        self._ticks = 0
        self._stats: dict[int, tuple[str, int, int] | None] = {}
        self.start(self.pid)

    def start(self, pid: int) -> str:
        """Let a process begin, later than all others; its identity."""
        self._ticks += 1
        self._stats[pid] = ("S", 1, self._ticks)
        return self.identify(pid)

    def kill(self, pid: int) -> None:
        """Let a process end and be reaped."""
        del self._stats[pid]

    def recycle(self, pid: int) -> str:
        """Let a process end, and another begin with its pid; the identity of the other."""
        self.kill(pid)
        return self.start(pid)

    def hide(self, pid: int) -> None:
        """Let /proc not show a process any more, as with ``hidepid``."""
        self._stats[pid] = None

    def identify(self, pid: int | None = None, **more: Any) -> str:
        """As of a ``ProcessTable``, ``pid`` being this process; nothing is remembered."""
        return super().identify(self.pid if pid is None else pid, **more)

    def exists(self, pid: int) -> bool:
        """Whether it began and did not end."""
        return pid in self._stats

    def stat(self, pid: int) -> tuple[str, int, int] | None:
        """State, threads and start of a process that is not hidden."""
        return self._stats.get(pid)

    def namespaces(self) -> tuple[int, int]:
        """Those of every process here."""
        return 1, 1
