"""Other locks, made to do what a lease does: get it, extend it where that is possible, give it back.

They are optional and imported by name. What each of them does not do is said
here too, since a lock that does less is faster for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import redis_server
from benchmarks.harness import Note

INSTALL = "`uv run --group benchmarks python -m benchmarks` installs it"
TTL_SECONDS = 30
NAME = "release"

SOFT_LEASE = "SoftFileLease"
PORTALOCKER = "portalocker.Lock"
PORTALOCKER_REDIS = "portalocker.RedisLock"
REDIS_LOCK = "python-redis-lock"

# The module of each.
PEERS = {
    SOFT_LEASE: "filelock",
    PORTALOCKER: "portalocker",
    PORTALOCKER_REDIS: "portalocker",
    REDIS_LOCK: "redis_lock",
}
# What each leaves out of what a lease of ours does.
DOES_NOT = {
    SOFT_LEASE: """
        a file with the owner's name; its heartbeat is a thread of its own; a dead owner on this machine is found out,
        a frozen one by its ttl; a random token, which cannot be compared, and no write that checks it; polls, no queue;
        no audit log; nothing is synced""",
    PORTALOCKER: """
        the kernel's lock on a file, freed when its process ends; a frozen owner keeps it for ever; no ttl, no
        heartbeat, no token; polls, no queue; no audit log; nothing to sync""",
    PORTALOCKER_REDIS: """
        a subscription of a Redis connection, freed when the connection ends; a token on request (`fencing=True`, as
        measured), which no write checks by itself; polls, no queue; no audit log; needs a Redis""",
    REDIS_LOCK: """
        a key with an expiry; who dies or freezes, keeps it until then; a random id, no token, no write that checks it;
        waiters race when it is freed; no audit log; needs a Redis""",
}
OVER_REDIS = (PORTALOCKER_REDIS, REDIS_LOCK)


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock that is ready: how it is got (waiting if need be), extended where that is possible, and given back."""

    acquire: Callable[[], object]
    release: Callable[[], object]
    extend: Callable[[], object] | None = None
    own_thread: bool = False
    """Whether it renews itself in the background while it is held."""


def notes(benchmark: str) -> Iterator[Note]:
    """What the peers do not do, and which of them are missing, and why."""
    for name, does_not in DOES_NOT.items():
        if why_absent(name) is None:
            yield Note(benchmark, f"{name}: {' '.join(does_not.split())}.")
    yield from absent(benchmark)


def absent(benchmark: str) -> Iterator[Note]:
    """Which of the peers are missing, and why."""
    for name in PEERS:
        if (reason := why_absent(name)) is not None:
            yield Note(benchmark, f"{name} is not measured: {reason}.")


def why_absent(name: str) -> str | None:
    """What has to be there to measure a peer; None where nothing is missing."""
    module = PEERS[name]
    if find_spec(module) is None:
        return f"it is not installed; {INSTALL}"
    if name == SOFT_LEASE and not hasattr(import_module(module), "SoftFileLease"):
        return "the installed filelock is older than 3.30 and has none"
    return redis_server.missing() if name in OVER_REDIS else None


@contextmanager
def opened(name: str, folder: Path, synced: bool) -> Iterator[Lock]:
    """A peer in a folder, or on a Redis that is there for it."""
    with ExitStack() as stack:
        where = stack.enter_context(redis_server.server(folder, synced)) if name in OVER_REDIS else str(folder)
        yield make(name, where)


def make(name: str, where: str, ttl_seconds: float = TTL_SECONDS) -> Lock:
    """A lock by its name; ``where`` is the folder of its file, or the URL of its Redis."""
    return _MAKERS[name](where, ttl_seconds)


def _soft_lease(folder: str, ttl_seconds: float) -> Lock:
    filelock: Any = import_module("filelock")
    lock = filelock.SoftFileLease(f"{folder}/{NAME}.lease", lease_duration=ttl_seconds)
    return Lock(lock.acquire, lock.release, own_thread=True)


def _portalocker(folder: str, _: float) -> Lock:
    portalocker: Any = import_module("portalocker")
    lock = portalocker.Lock(f"{folder}/{NAME}.lock", timeout=1e9)
    return Lock(lock.acquire, lock.release)


def _portalocker_redis(url: str, _: float) -> Lock:
    portalocker: Any = import_module("portalocker")
    connection = redis_server.client(url)
    lock = portalocker.RedisLock(NAME, connection=connection, timeout=1e9, fencing=True, interrupt_on_lost=False)
    return Lock(lock.acquire, lock.release, own_thread=True)


def _redis_lock(url: str, ttl_seconds: float) -> Lock:
    redis_lock: Any = import_module("redis_lock")
    lock = redis_lock.Lock(redis_server.client(url), NAME, expire=int(ttl_seconds))
    return Lock(lock.acquire, lock.release, lock.extend)


_MAKERS: dict[str, Callable[[str, float], Lock]] = {
    SOFT_LEASE: _soft_lease,
    PORTALOCKER: _portalocker,
    PORTALOCKER_REDIS: _portalocker_redis,
    REDIS_LOCK: _redis_lock,
}
