"""A small machine that does what it is told: its clocks, its boots, its processes, and the workers in them.

What is true of it is written down here a second time, beside the fake clock and
the fake process table that the stores are given: the model asks this copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from tests.faults import variants

from agent_checkpoint.names import NS
from agent_checkpoint.testing import FakeClock, FakeProcesses

# Pids come again: after a reboot they are counted anew, and a recycled one is another's at once.
FIRST_PID = 100


class Instant(NamedTuple):
    """Now, by every clock there is; ``one_kernel``: another boot's processes are surely gone."""

    wall: int
    ticks: int
    domain: str
    one_kernel: bool


class Process:
    """A process, known by more than its pid."""

    def __init__(self, pid: int, boot: str) -> None:
        self.pid = pid
        self.boot = boot
        self.ended = False
        self.hidden = False


class Identity(NamedTuple):
    """A process as it was written down; ``started``: with its start, which tells it from a later one of its pid."""

    process: Process
    started: bool


class World:
    """One machine, whose store is a file; ``domain`` "": nobody can tell its boot."""

    by_server = False
    """Whether all goes by the wall clock of a server, which knows nothing of processes and boots."""

    def __init__(self, *, domain: str = "boot-1", one_kernel: bool = True) -> None:
        self.clock = FakeClock(domain=domain)
        self.table = FakeProcesses(domain)
        self.one_kernel = one_kernel
        self.boots = 1
        self.running: dict[int, Process] = {}
        self.faults: Counter[str] = Counter()
        self.meanwhile: Callable[[], object] | None = None
        """What others do while somebody sleeps."""
        self._next_pid = FIRST_PID

    @property
    def now(self) -> Instant:
        """The time as a lease is judged by it."""
        clock = self.clock
        return Instant(clock.now_wall_ns, clock.now_ticks_ns, clock.domain, self.one_kernel)

    # Processes

    def start(self) -> Process:
        """Let a process begin."""
        pid, self._next_pid = self._next_pid, self._next_pid + 1
        return self._begin(pid)

    def _begin(self, pid: int) -> Process:
        self.table.start(pid)
        self.running[pid] = Process(pid, self.clock.domain)
        return self.running[pid]

    def kill(self, process: Process, *, recycled: bool = False) -> None:
        """Let a process end; ``recycled``: its pid is another's at once."""
        process.ended = True
        self.table.kill(process.pid)
        del self.running[process.pid]
        if recycled:
            self._begin(process.pid)
        self.faults["pid-recycled" if recycled else "kill"] += 1

    def hide(self, process: Process) -> None:
        """Let /proc not show a process any more."""
        process.hidden = True
        self.table.hide(process.pid)
        self.faults["hide"] += 1

    def written_down(self, process: Process) -> Identity:
        """A process as somebody writes it down now."""
        return Identity(process, not process.hidden)

    def is_dead(self, who: Identity | None) -> bool:
        """Whether a process is provably dead: its pid is free, or another's who began later."""
        if who is None or not self._comparable(who) or not who.process.ended:
            return False
        heir = self.running.get(who.process.pid)
        return heir is None or (who.started and not heir.hidden)

    def is_alive(self, who: Identity | None) -> bool:
        """Whether a process is provably alive."""
        return who is not None and self._comparable(who) and self._seen_alive(who)

    def _seen_alive(self, who: Identity) -> bool:
        return who.started and not who.process.ended and not who.process.hidden

    def _comparable(self, who: Identity) -> bool:
        return not self.by_server and bool(who.process.boot) and who.process.boot == self.clock.domain

    @contextmanager
    def acting_as(self, process: Process) -> Iterator[None]:
        """Within the block it is this process that calls."""
        own, self.table.pid = self.table.pid, process.pid
        try:
            yield
        finally:
            self.table.pid = own

    # Time

    def pass_time(self, ns: int) -> None:
        """Let time pass, by all clocks."""
        self.clock.now_wall_ns += ns
        self.clock.now_ticks_ns += ns

    def step_wall(self, ns: int) -> None:
        """Set the wall clock; no time passes."""
        self.clock.now_wall_ns = max(NS, self.clock.now_wall_ns + ns)
        self.faults["clock-step"] += 1

    def suspend(self, ns: int) -> None:
        """Close the lid for so long: the monotonic clock stops, for everybody alike."""
        self.clock.now_wall_ns += ns
        self.faults["suspend"] += 1

    def reboot(self, *, known: bool, down_ns: int) -> None:
        """End every process, and begin another boot; without ``known`` its id cannot be told."""
        self._end_all()
        self.boots += 1
        self.clock.reboot(domain=f"boot-{self.boots}" if known else "", down_seconds=down_ns / NS)
        self.table.boot = self.clock.domain

    def _end_all(self) -> None:
        for process in self.running.values():
            process.ended = True
        for pid in list(self.running):
            self.table.kill(pid)
        self.running.clear()
        self._next_pid = FIRST_PID
        self.faults["reboot"] += 1

    @contextmanager
    def slept_in(self, dice: Random) -> Iterator[None]:
        """Within the block a broken store that sleeps lets this world's time pass, and others act meanwhile."""
        with patch.multiple(variants, time=SimpleNamespace(sleep=self._sleep), random=dice):
            yield

    def _sleep(self, seconds: float) -> None:
        self.pass_time(round(seconds * NS))
        others, self.meanwhile = self.meanwhile, None
        if others is not None:
            others()


class ServedWorld(World):
    """Machines whose store is on a server: its wall clock decides, and goes on while they sleep or boot."""

    by_server = True

    def __init__(self) -> None:
        super().__init__(domain="server", one_kernel=False)
        self.clock.now_ticks_ns = self.clock.now_wall_ns

    def step_wall(self, ns: int) -> None:
        """Set the server's clock: there is no other."""
        self.pass_time(ns)
        self.faults["clock-step"] += 1

    def suspend(self, ns: int) -> None:
        """Close the lid of the machines that ask for so long."""
        self.pass_time(ns)
        self.faults["suspend"] += 1

    def reboot(self, *, known: bool, down_ns: int) -> None:
        """End every process of theirs."""
        self._end_all()
        self.pass_time(down_ns)
