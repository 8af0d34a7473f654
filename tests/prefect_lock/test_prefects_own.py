"""What goes wrong with the lock managers that Prefect brings, and does not with ours: the same steps on both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from prefect.locking.filesystem import FileSystemLockManager
from prefect.locking.memory import MemoryLockManager

from agent_checkpoint_prefect import FencedLock, LeaseStore

from .conftest import WATCHDOG_SECONDS, elsewhere, in_thread, wait_until
from .forking import crash_in_fork, needs_fork

HOLD_SECONDS = 0.1
Make = Callable[[], Any]


@pytest.fixture
def theirs(tmp_path: Path) -> Make:
    """As each process makes one of its own."""
    return lambda: FileSystemLockManager(tmp_path / "locks")


@pytest.fixture
def ours(path: Path) -> Make:
    return lambda: FencedLock(store=LeaseStore(path=path))


class Crossed(FileSystemLockManager):
    """Theirs, whose second look at an expired lock is held up: it stops where any process may be stopped.

    It has found the lock expired, and removes it after the other one has taken it.
    """

    def __init__(self, folder: Path, meanwhile: Callable[[], Any]) -> None:
        super().__init__(folder)
        self._meanwhile: Callable[[], Any] | None = meanwhile

    def _get_lock_info(self, key: str, use_cache: bool = True) -> Any:
        info = super()._get_lock_info(key, use_cache)
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return info


def expired(manager: Any) -> None:
    """A lock whose time is over."""
    manager.acquire_lock("key", "gone", hold_timeout=HOLD_SECONDS)


def holders(managers: list[Any], names: list[str]) -> list[str]:
    return [name for manager, name in zip(managers, names, strict=True) if manager.is_lock_holder("key", name)]


def test_theirs_gives_an_expired_lock_to_two_holders(tmp_path: Path, theirs: Make) -> None:
    expired(theirs())
    quick, granted = theirs(), []
    wait_until(lambda: not _live(tmp_path))
    slow = Crossed(tmp_path / "locks", lambda: granted.append(quick.acquire_lock("key", "quick")))
    granted.append(slow.acquire_lock("key", "slow", acquire_timeout=HOLD_SECONDS))

    assert granted == [True, True]
    assert quick._locks["key"]["holder"] == "quick"
    assert slow._locks["key"]["holder"] == "slow"


def _live(folder: Path) -> bool:
    """Whether the lock's time is not over, without a look that would remove it."""
    from prefect.types._datetime import now

    info = FileSystemLockManager(folder / "locks")._get_lock_info("key", use_cache=False)
    return info is not None and info["expiration"] is not None and info["expiration"] >= now("UTC")


def test_ours_gives_an_expired_lock_to_one(ours: Make) -> None:
    for _ in range(5):
        lock = ours()
        expired(lock)
        assert lock.wait_for_lock("key", 30)
        ready = Barrier(8)

        def race(name: str, ready: Barrier = ready) -> bool:
            manager = ours()
            ready.wait()
            return bool(manager.acquire_lock("key", name, acquire_timeout=0))

        racing = [in_thread(race, f"racer-{number}") for number in range(8)]
        granted = [each.result(WATCHDOG_SECONDS) for each in racing]
        assert granted.count(True) == 1
        for number in range(8):
            lock.release_lock("key", f"racer-{number}")
        lock.release_lock("key", "gone")


KEYS = [("model.v1", "model.v2"), ("orders.2024", "orders.2025")]


@pytest.mark.parametrize(("one", "other"), KEYS)
def test_theirs_takes_two_keys_for_one(theirs: Make, one: str, other: str) -> None:
    theirs().acquire_lock(one, "a")
    assert theirs().is_locked(other)
    assert theirs().acquire_lock(other, "b", acquire_timeout=HOLD_SECONDS) is False


@pytest.mark.parametrize("key", ["a/b", "k" * 300])
def test_theirs_cannot_lock_every_key(theirs: Make, key: str) -> None:
    with pytest.raises(OSError, match=r"No such file|too long"):
        theirs().acquire_lock(key, "a")


def test_theirs_leaves_its_folder(theirs: Make, tmp_path: Path) -> None:
    theirs().acquire_lock("../x", "a")
    assert (tmp_path / "x.lock").exists()


@pytest.mark.parametrize(("one", "other"), [*KEYS, ("a/b", "a/c"), ("../x", "x"), ("k" * 300, "k" * 301)])
def test_ours_tells_keys_apart(ours: Make, tmp_path: Path, one: str, other: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    assert ours().acquire_lock(one, "a", acquire_timeout=0)
    assert not ours().is_locked(other)
    assert ours().acquire_lock(other, "b", acquire_timeout=0)
    assert sorted(tmp_path.parent.iterdir()) == before


def crash(manager: Any) -> None:
    def hold() -> None:
        assert manager.acquire_lock("key", "crashed")

    crash_in_fork(hold)


@needs_fork
def test_theirs_stays_locked_by_a_holder_that_crashed(theirs: Make) -> None:
    crash(theirs())
    assert theirs().is_locked("key")
    assert theirs().acquire_lock("key", "next", acquire_timeout=HOLD_SECONDS) is False
    with pytest.raises(ValueError, match="No lock held"):
        theirs().release_lock("key", "next")


@needs_fork
def test_ours_is_free_when_its_holder_crashed(ours: Make) -> None:
    crash(ours())
    assert not ours().is_locked("key")
    assert ours().acquire_lock("key", "next", acquire_timeout=0) is True


def test_theirs_waits_for_ever_with_a_timeout_of_zero(theirs: Make) -> None:
    theirs().acquire_lock("key", "a")
    waits = in_thread(theirs().acquire_lock, "key", "b", acquire_timeout=0)
    # Its waits last 100 ms each: after some of them an answer at once is overdue.
    with pytest.raises(TimeoutError):
        waits.result(0.5)
    theirs().release_lock("key", "a")
    assert waits.result(WATCHDOG_SECONDS) is True


def test_ours_answers_at_once_with_a_timeout_of_zero(ours: Make) -> None:
    ours().acquire_lock("key", "a")
    assert elsewhere(ours().acquire_lock, "key", "b", acquire_timeout=0) is False


def take_while_waited_for(manager: Any) -> tuple[bool, bool]:
    """One waits, the holder gives it back, and a third one asks before the first has woken up: who has it?"""
    manager.acquire_lock("key", "first")
    waits = in_thread(manager.acquire_lock, "key", "waiting")
    wait_until(lambda: _is_waited_for(manager))
    manager.release_lock("key", "first")
    third = manager.acquire_lock("key", "third", acquire_timeout=0)
    return bool(waits.result(WATCHDOG_SECONDS)), bool(third)


def _is_waited_for(manager: Any) -> bool:
    if isinstance(manager, FencedLock):
        with manager.store.open().read() as reader:
            return bool(reader.rows("SELECT 1 FROM tickets"))
    waits = _is_waited_for.__dict__.setdefault("looks", [])
    waits.append(manager)
    return len(waits) % 20 == 0  # its waiters leave no trace: some milliseconds do


def test_theirs_in_memory_lets_two_in(theirs: Make) -> None:
    manager = MemoryLockManager()
    try:
        assert take_while_waited_for(manager) == (True, True)
    finally:
        for holder in ("waiting", "third"):
            with suppress(ValueError, RuntimeError):
                manager.release_lock("key", holder)


def test_ours_lets_one_in(ours: Make) -> None:
    assert take_while_waited_for(ours()) == (True, False)
