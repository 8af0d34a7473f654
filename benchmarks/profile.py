"""Where the time of the hot path goes: ``python -m benchmarks.profile [lease|hold|checkpoint|effect|import]``.

In memory, where there is a disk of it, so that what shows is ours. Profiling
makes Python calls look dearer than calls of C; the first line has the time
without it, and what bare sqlite3 takes for the same rows of ``lease``.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType

from agent_checkpoint import StateStore
from benchmarks.floor import OWNER, Floor
from benchmarks.growth import DATA

MEMORY = Path("/dev/shm")
SCOPE = "release"
WORKFLOW = "deploy-v2"
TTL_SECONDS = 3600
SHOWN = 40
MODULES_SHOWN = 25

Cycle = Callable[[], object]


def main() -> int:
    """Print a table: own time and calls a cycle, dearest first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description="Where the time goes.")
    parser.add_argument("what", nargs="?", default="lease", choices=[*CYCLES, "import"], help="lease by default")
    parser.add_argument("--cycles", type=int, default=2_000, metavar="N", help="2000 by default")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder to use instead of memory")
    options = parser.parse_args()
    if options.what == "import":
        _imports()
        return 0
    with ExitStack() as stack:
        parent = options.disk or (MEMORY if MEMORY.is_dir() else None)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="profile-", dir=parent)))
        store = stack.enter_context(StateStore(folder / "profile.db"))
        store.initialize()
        cycle = CYCLES[options.what](store)
        _warm(cycle)
        plain = _seconds(cycle, options.cycles)
        print(f"a cycle: {plain * 1e6:.1f} µs{_floor(folder, options) if options.what == 'lease' else ''}")
        _profile(cycle, options.cycles)
    return 0


def _lease(store: StateStore) -> Cycle:
    def cycle() -> None:
        token = store.acquire(SCOPE, OWNER).token
        store.heartbeat(SCOPE, OWNER, token)
        store.release(SCOPE, OWNER, token)

    return cycle


def _hold(store: StateStore) -> Cycle:
    def cycle() -> None:
        with store.hold(SCOPE, OWNER):
            pass

    return cycle


def _checkpoint(store: StateStore) -> Cycle:
    lease = store.acquire(SCOPE, OWNER, TTL_SECONDS)
    return lambda: store.put_checkpoint(WORKFLOW, DATA, lease=lease)


def _effect(store: StateStore) -> Cycle:
    lease = store.acquire(SCOPE, OWNER, TTL_SECONDS)
    numbers = itertools.count()

    def cycle() -> None:
        with store.effect(f"refund-{next(numbers)}", lease=lease) as effect:
            effect.done()

    return cycle


CYCLES: dict[str, Callable[[StateStore], Cycle]] = {
    "lease": _lease,
    "hold": _hold,
    "checkpoint": _checkpoint,
    "effect": _effect,
}


def _floor(folder: Path, options: argparse.Namespace) -> str:
    with StateStore(folder / "floor.db") as empty:
        empty.initialize()
    with closing(Floor(folder / "floor.db", SCOPE, "full")) as floor:

        def cycle() -> None:
            floor.acquire()
            floor.heartbeat()
            floor.release()

        _warm(cycle)
        return f"; bare sqlite3: {_seconds(cycle, options.cycles) * 1e6:.1f} µs"


def _warm(cycle: Cycle) -> None:
    _seconds(cycle, 100)


def _seconds(cycle: Cycle, cycles: int) -> float:
    started = time.perf_counter()
    for _ in range(cycles):
        cycle()
    return (time.perf_counter() - started) / cycles


def _profile(cycle: Cycle, cycles: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(cycles):
        cycle()
    profile.disable()
    entries = sorted(profile.getstats(), key=lambda entry: -entry.inlinetime)
    total = sum(entry.inlinetime for entry in entries)
    print(f"\n{'own µs':>8} {'share':>6} {'calls':>6}  function")
    for entry in entries[:SHOWN]:
        own, share, calls = entry.inlinetime / cycles * 1e6, entry.inlinetime / total, entry.callcount / cycles
        print(f"{own:8.2f} {share:6.1%} {calls:6.1f}  {_name(entry.code)}")


def _name(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code.strip("<>")
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"


def _imports() -> None:
    """The modules that ``import agent_checkpoint`` brings, dearest first, without what they import in turn."""
    command = (sys.executable, "-X", "importtime", "-c", "import agent_checkpoint")
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    own: list[tuple[int, str]] = []
    for line in said.splitlines()[1:]:
        of_itself, _, module = line.removeprefix("import time:").split("|")
        own.append((int(of_itself), module.strip()))
    print(f"{len(own)} modules, {sum(micros for micros, _ in own) / 1e3:.1f} ms\n\n  own ms  module")
    for micros, module in sorted(own, reverse=True)[:MODULES_SHOWN]:
        print(f"{micros / 1e3:8.2f}  {module}")


if __name__ == "__main__":
    sys.exit(main())
