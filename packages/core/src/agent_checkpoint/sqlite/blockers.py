"""Who sits on a lock, as the kernel tells without our opening the locked file."""

from __future__ import annotations

import os

from agent_checkpoint.process import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What keeps a writer out: (name, suffix of the file, the bytes that are locked for
# writing). By SQLite's source: the writer's byte of the shared memory; the bytes of
# the database that whoever makes, converts or lastly closes it locks; the bytes of
# the checkpointer, of recovery and of the first to open the shared memory.
LOCKS = (
    ("write", "-shm", 120, 120),
    ("file", "", 0x40000000, 0x400001FF),
    ("log", "-shm", 121, 128),
    ("gate", "-gate", 0, 0),
)


def blocker(database: str) -> dict[str, Any] | None:
    """The process in a writer's way, a stopped one before others: {lock, pid, command, stopped}."""
    found = []
    for lock, suffix, first, last in LOCKS:
        try:
            file = os.stat(database + suffix)
        except OSError:
            continue
        pid = holder((file.st_dev, file.st_ino), first, last)
        # Whoever asks may hold the gate itself: that is not what it waits for.
        if pid is not None and not (lock == "gate" and pid == os.getpid()):
            found.append({"lock": lock, **describe(pid)})
    return next((each for each in found if each["stopped"]), found[0] if found else None)


def holder(identity: tuple[int, int], first: int, last: int | None = None) -> int | None:
    """Who holds an exclusive POSIX lock on bytes of the file with this (device, inode)."""
    last = first if last is None else last
    try:
        with open("/proc/locks", encoding="utf-8") as table:
            lines = table.readlines()
    except OSError:
        return None
    for line in lines:
        # proc(5): n: POSIX ADVISORY WRITE pid major:minor:inode start end; "->" marks a waiter.
        fields = line.split()
        if len(fields) < 8 or fields[1] != "POSIX" or fields[3] != "WRITE":
            continue
        major, minor, inode = fields[5].split(":")
        same = (os.makedev(int(major, 16), int(minor, 16)), int(inode)) == identity
        if same and int(fields[6]) <= last and (fields[7] == "EOF" or first <= int(fields[7])):
            pid = int(fields[4])
            # 0 and -1: the holder is in a pid namespace that we cannot see.
            return pid if pid > 0 else None
    return None
