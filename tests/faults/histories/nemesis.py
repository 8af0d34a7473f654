"""What goes wrong around the workers: they are killed, and stopped anywhere, as in the write lock; the clock steps."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults.histories.control import BEFORE_THE_WRITE, IN_THE_LOCK, Control
from tests.faults.histories.nursery import Nursery
from tests.faults.histories.recorder import Recorder
from tests.faults.histories.worker import LONGEST_TTL

# How often it looks who has stopped or ended.
LOOK_SECONDS = 0.01
# More stopped ones would leave too few that work.
MOST_STOPPED = 3
# Short, or longer than any lease lasts; the latter twice as often.
STOPS = ((0.001, 0.05), *[(LONGEST_TTL, 1.5 * LONGEST_TTL)] * 2)
# How far the wall clock steps, either way, from a second to a day.
STEPS = (1, 60, 3_600, 86_400)


@dataclass(frozen=True)
class Temper:
    """How it strikes: pauses between these seconds; whether the workers' wall clock is its to step."""

    pauses: tuple[float, float]
    steps: bool


class Nemesis:
    """Works on the workers of one round; ``hire(owner, seed)`` starts one and tells its pid."""

    def __init__(
        self, nursery: Nursery, folder: Path, hire: Callable[[str, int], int], random: Random, temper: Temper
    ) -> None:
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        """What became of workers that were not killed."""
        self._nursery = nursery
        self._hire = hire
        self._pauses = temper.pauses
        self._random = random
        self._control = Control(folder / "control")
        self._recorder = Recorder(folder, "nemesis")
        self._owners: dict[int, str] = {}
        self._stopped: dict[int, float] = {}
        """When to wake whom."""
        self._hired = 0
        self._strikes = (self.kill, self.stop, self.stop_where_it_hurts, self.step_the_clock)
        self._shares = (40, 40, 10, 10 if temper.steps else 0)

    def rage(self, workers: int, seconds: float) -> None:
        """Start so many workers and strike for so long; in the end all are killed."""
        until = time.monotonic() + seconds
        strike_at = 0.0
        try:
            for _ in range(workers):
                self.start()
            while (now := time.monotonic()) < until:
                self.look(now)
                if now >= strike_at:
                    self._random.choices(self._strikes, self._shares)[0]()
                    strike_at = now + self._random.uniform(*self._pauses)
                time.sleep(LOOK_SECONDS)
        finally:
            for pid in list(self._owners):
                self._end(pid)

    def start(self) -> None:
        """Start a worker."""
        self._hired += 1
        owner = f"worker-{self._hired}"
        self._owners[self._hire(owner, self._random.getrandbits(32))] = owner

    def look(self, now: float) -> None:
        """Wake who is to be woken, and notice who stopped itself or ended."""
        for pid in list(self._owners):
            state = _state(pid)
            if state == "Z":
                self._end(pid)
                self.start()
            elif state == "T" and pid not in self._stopped:
                self._stopped[pid] = now + self._how_long()
            elif pid in self._stopped and now >= self._stopped[pid]:
                del self._stopped[pid]
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill one and start another; one that is stopped now and then, for most of those are to wake."""
        pid = self._anyone()
        self._end(self._anyone() if pid in self._stopped else pid)
        self.faults["kill"] += 1
        self.start()

    def stop(self) -> None:
        """Stop one, wherever it is."""
        pid = self._anyone()
        if pid not in self._stopped and len(self._stopped) < MOST_STOPPED:
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + self._how_long()
            self.faults["stop"] += 1

    def stop_where_it_hurts(self) -> None:
        """Ask one to stop itself inside the write lock, or one between a read and the write that rests on it.

        Which of them comes to such a place depends on what they do.
        """
        self._control.ask(IN_THE_LOCK, self._anyone())
        self._control.ask(BEFORE_THE_WRITE, self._anyone())

    def step_the_clock(self) -> None:
        """Set the wall clock forward or back."""
        self._control.offset_ns = round(self._random.choice((-1, 1)) * self._random.choice(STEPS) * 1e9)
        self.faults["clock-step"] += 1

    def _anyone(self) -> int:
        return self._random.choice(list(self._owners))

    def _how_long(self) -> float:
        return self._random.uniform(*self._random.choice(STOPS))

    def _end(self, pid: int) -> None:
        owner = self._owners.pop(pid)
        self._stopped.pop(pid, None)
        status = self._recorder.call("kill", lambda: self._nursery.kill(pid), victim=owner)
        if status != -signal.SIGKILL:
            told = self._nursery.errors.read_text(errors="replace")[-1500:]
            self.wrong.append(f"{owner} was not killed, but ended with {status}: {told}")


def _state(pid: int) -> str:
    """The letter of a process's state: T is stopped, Z is ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
