"""Bells, which wake a waiter, and stamps, which tell it that something was committed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.sqlite.bell import Bell, bell, ring

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bells are Linux's abstract sockets")

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0


def test_who_listens_is_woken_by_its_name() -> None:
    mine, other = Bell(), Bell()
    woken: list[bool] = []
    listener = threading.Thread(target=lambda: woken.append(mine.wait(LONG)))
    listener.start()

    ring([mine.name])

    listener.join(LONG)
    assert woken == [True]
    assert not other.wait(0)
    mine.close()
    other.close()


def test_a_ring_before_the_wait_is_heard_once_however_often_it_rang() -> None:
    mine = Bell()
    ring([mine.name] * 5)
    assert mine.wait(0)
    assert not mine.wait(0)
    mine.close()


def test_another_process_can_ring() -> None:
    mine = Bell()
    program = f"from agent_checkpoint.sqlite.bell import ring; ring(['{mine.name}'])"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert mine.wait(0)
    mine.close()


def test_ringing_nobody_a_full_bell_or_nonsense_is_silent() -> None:
    mine = Bell()
    gone = Bell()
    gone.close()
    ring([gone.name, "", "x" * 500, *[mine.name] * 2_000])
    assert mine.wait(0)
    mine.close()


def test_a_closed_bell_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        made = bell()
        assert made is not None
        made.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_frees_a_scope_wakes_the_next_in_line_alone(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
        lease = store.acquire("release", "holder")
        first, second = Bell(), Bell()
        for each in (first, second):
            with store.transaction(component="tests", action="test.queue") as part:
                part.run(
                    "INSERT INTO tickets (scope, owner, ttl_ns, asked_at, expires_at, domain, beat_ticks, passed,"
                    " process, bell) VALUES ('release', 'w', 60000000000, 0, 9000000000000000000, '', 0, 0, '', ?)",
                    (each.name,),
                )
        store.release(*lease.fence)
        assert first.wait(0)
        assert not second.wait(0)
        first.close()
        second.close()


def test_a_stamp_changes_with_every_commit_and_with_no_read(path: Path) -> None:
    with StateStore(path) as store, StateStore(path) as other:
        store.initialize()
        seen = [store.stamp()]

        def changed() -> bool:
            seen.append(store.stamp())
            return seen[-1] != seen[-2]

        store.acquire("a", "w")
        assert changed()
        other.acquire("b", "w")
        assert changed()
        store.list_leases()
        other.list_leases()
        store.events()
        assert not changed()
        program = f"from agent_checkpoint import StateStore; StateStore({str(path)!r}).acquire('c', 'w')"
        subprocess.run([sys.executable, "-c", program], check=True)
        assert changed()


def test_a_stamp_misses_no_commit_of_another_thread(path: Path) -> None:
    # On whatever connection of the pool the commit was made.
    with StateStore(path) as store:
        store.initialize()
        before, done = store.stamp(), threading.Event()

        def write() -> None:
            for number in range(50):
                store.put_checkpoint("w", number)
            done.set()

        thread = threading.Thread(target=write)
        thread.start()
        sequence, deadline = 0, time.monotonic() + LONG
        while sequence < 50 and time.monotonic() < deadline:
            stamp = store.stamp()
            if stamp != before:
                before = stamp
                latest = store.get_checkpoint("w")
                sequence = 0 if latest is None else latest.sequence
        thread.join(LONG)
        assert sequence == 50
