"""Who sits on a lock, as the kernel tells without our opening the locked file."""

from __future__ import annotations

import os

from agent_checkpoint.process import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The byte of the -shm file that SQLite locks for the writer (WAL_WRITE_LOCK).
WAL_WRITE_LOCK = 120


def blocker(database: str) -> dict[str, Any] | None:
    """The process that holds the write lock, else the gate: {lock, pid, command, stopped}."""
    for lock, path, byte in (("write", database + "-shm", WAL_WRITE_LOCK), ("gate", database + "-gate", 0)):
        try:
            file = os.stat(path)
        except OSError:
            continue
        pid = holder((file.st_dev, file.st_ino), byte)
        # Whoever asks may hold the gate itself: that is not what it waits for.
        if pid is not None and not (lock == "gate" and pid == os.getpid()):
            return {"lock": lock, **describe(pid)}
    return None


def holder(identity: tuple[int, int], byte: int) -> int | None:
    """Who holds an exclusive POSIX lock on a byte of the file with this (device, inode)."""
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
        if same and int(fields[6]) <= byte and (fields[7] == "EOF" or byte <= int(fields[7])):
            pid = int(fields[4])
            # 0 and -1: the holder is in a pid namespace that we cannot see.
            return pid if pid > 0 else None
    return None
