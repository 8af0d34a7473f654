"""What a Prefect lock costs: ours against Prefect's ``concurrency()`` on a local server, and its file locks.

A pass is to get a lock that nobody else wants and to give it back; a wait is
the longest of many by eight processes that want the same one. Prefect's file
locks are never flushed to the disk, so that they are compared with ours at
NORMAL. They also fail by themselves where several processes want one: who reads
the file while another one writes it gets a ValueError. Such a try is counted,
and made again.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Plan, Row, Target, interleave, timed
from benchmarks.prefect_server import server

NAME = "bench"
TIMES_FASTER = {"full": Target("≤", 1 / 20), "normal": Target("≤", 1 / 50)}
NOT_SLOWER = Target("≤", 1.0)
WAIT_SHARE = Target("≤", 0.1)
ROUNDS = 15
SERVER_PASSES = 5
OUR_PASSES = 50
# The crowd: so many processes, each this often, holding it so long.
PROCESSES = 8
CROWD_SECONDS = 4.0
HOLD_SECONDS = 0.005
CROWD_ROUNDS = 3

Pass = Callable[[], object]


def measure(plan: Plan) -> Iterator[Row]:
    """Passes and waits, with one Prefect server for all of them, whose database is at the first place."""
    home = next(iter(plan.places.values())) / "prefect"
    home.mkdir()
    os.environ["PREFECT_HOME"] = str(home)
    with server(home) as url:
        os.environ["PREFECT_API_URL"] = url  # Prefect reads it once, when it is imported
        try:
            for place, folder in plan.places.items():
                yield from _passes(plan, place, folder)
                if place == "disk":  # each process of a crowd imports Prefect: that takes its time
                    yield from _waits(plan, place, folder)
        finally:
            del os.environ["PREFECT_API_URL"]


def _passes(plan: Plan, place: str, folder: Path) -> Iterator[Row]:
    theirs = _concurrency(folder)
    files = _file_lock(folder)
    for synchronous in ("full", "normal"):
        ours = _ours(folder, synchronous)
        yield _row(
            plan,
            f"a pass, {synchronous.upper()}, {place}",
            "concurrency()",
            ours,
            theirs,
            SERVER_PASSES,
            TIMES_FASTER[synchronous],
        )
        target = NOT_SLOWER if synchronous == "normal" else None
        yield _row(
            plan,
            f"a pass, {synchronous.upper()}, {place}",
            "FileSystemLockManager",
            _lock_manager(folder, synchronous),
            files,
            OUR_PASSES,
            target,
        )


def _row(plan: Plan, case: str, peer: str, ours: Pass, theirs: Pass, passes: int, target: Target | None) -> Row:
    mine, other = interleave(
        timed(lambda: [ours() for _ in range(OUR_PASSES)]),
        timed(lambda: [theirs() for _ in range(passes)]),
        plan.rounds(ROUNDS),
    )
    return Row(
        "prefect",
        case,
        "s",
        peer,
        tuple(each / OUR_PASSES for each in mine),
        tuple(each / passes for each in other),
        target,
    )


def _waits(plan: Plan, place: str, folder: Path) -> Iterator[Row]:
    for peer, making in (("concurrency()", _concurrency), ("FileSystemLockManager", _file_lock)):
        mine, other, failures = [], [], 0
        for _ in range(CROWD_ROUNDS if not plan.quick else 1):
            mine.append(_longest_wait(_ours_normal, folder)[0])
            longest, failed = _longest_wait(making, folder)
            other.append(longest)
            failures += failed
        case = f"longest wait of {PROCESSES}, {place}" + (f" (peer failed {failures} times)" if failures else "")
        yield Row("prefect", case, "s", peer, tuple(mine), tuple(other), WAIT_SHARE)


def _longest_wait(making: Callable[[Path], Any], folder: Path) -> tuple[float, int]:
    """The longest wait of all, and how many tries failed."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(PROCESSES)
    with spawn.Pool(PROCESSES, _settle, (making, folder, ready)) as pool:
        waits = pool.map(_wait_often, range(PROCESSES), chunksize=1)
    return max(longest for longest, _ in waits), sum(failed for _, failed in waits)


_crowd: dict[str, Any] = {}


def _settle(making: Callable[[Path], Any], folder: Path, ready: Any) -> None:
    _crowd.update(hold=making(folder), ready=ready)


def _wait_often(_: int) -> tuple[float, int]:
    """The longest wait of one process, which gets the lock and holds it for a moment again and again."""
    hold, failed = _crowd["hold"], 0
    while True:  # what only the first one costs
        with suppress(ValueError):
            hold()
            break
    _crowd["ready"].wait()
    longest, until = 0.0, time.monotonic() + CROWD_SECONDS
    asked_at = time.monotonic()
    while asked_at < until:
        try:
            held_at = hold(HOLD_SECONDS)
        except ValueError:
            failed += 1  # it still wants it
            continue
        longest, asked_at = max(longest, held_at - asked_at), time.monotonic()
    return longest, failed


def _held(seconds: float) -> float:
    held_at = time.monotonic()
    if seconds:
        time.sleep(seconds)
    return held_at


def _ours(folder: Path, synchronous: Literal["full", "normal"]) -> Callable[..., float]:
    from agent_checkpoint_prefect import FencedLock, LeaseStore

    lock = FencedLock(
        store=LeaseStore(path=folder / f"ours-{synchronous}.db", synchronous=synchronous), on_lost="raise"
    )

    def hold(seconds: float = 0) -> float:
        with lock.lease(NAME):
            return _held(seconds)

    return hold


def _ours_normal(folder: Path) -> Callable[..., float]:
    return _ours(folder, "normal")


def _lock_manager(folder: Path, synchronous: Literal["full", "normal"]) -> Callable[..., float]:
    from agent_checkpoint_prefect import FencedLock, LeaseStore

    lock = FencedLock(store=LeaseStore(path=folder / f"records-{synchronous}.db", synchronous=synchronous))
    return _by_manager(lock)


def _file_lock(folder: Path) -> Callable[..., float]:
    from prefect.locking.filesystem import FileSystemLockManager

    return _by_manager(FileSystemLockManager(folder / "locks"))


def _by_manager(manager: Any) -> Callable[..., float]:
    holder = f"{os.getpid()}"

    def hold(seconds: float = 0) -> float:
        manager.acquire_lock(NAME, holder)
        try:
            return _held(seconds)
        finally:
            manager.release_lock(NAME, holder)

    return hold


def _concurrency(folder: Path) -> Callable[..., float]:
    del folder  # the server has its own
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.concurrency.sync import concurrency
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):  # another process was first
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=NAME, limit=1))

    def hold(seconds: float = 0) -> float:
        with concurrency(NAME, occupy=1):
            return _held(seconds)

    return hold
