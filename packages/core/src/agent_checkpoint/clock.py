"""Time, and where its monotonic part means something.

What people see is wall clock. What decides is the kernel's monotonic clock,
which all processes of one boot share: a clock that steps moves no lease.
"""

from __future__ import annotations

import os
import time

from agent_checkpoint.mounts import inside_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Condition

BOOT_ID = "/proc/sys/kernel/random/boot_id"
# The inode of the initial time namespace, fixed by Linux (PROC_TIME_INIT_INO).
INITIAL_TIME_NAMESPACE = 0xEFFFFFFA


class Clock:
    """The machine's clocks; tests give the store another one (``agent_checkpoint.testing``)."""

    wall_ns: Callable[[], int]
    """Nanoseconds since 1970, UTC."""
    ticks_ns: Callable[[], int]
    """Nanoseconds of the kernel's monotonic clock; comparable within one ``domain``."""
    sleep: Callable[[float], object]
    """Wait for so many seconds."""
    wait: Callable[[Condition, int], bool]
    """Wait for a notified condition, at most until so many ticks; False when nobody notified it."""
    by_hand = False
    """Whether a test turns it."""
    domain: str
    """The boot in which ticks are comparable; "" when it cannot be known."""

    def __init__(self) -> None:
        self.wall_ns = time.time_ns
        self.ticks_ns = time.monotonic_ns
        self.sleep = time.sleep
        self.wait = lambda condition, until: condition.wait((until - time.monotonic_ns()) / 1e9)
        self.domain = _boot()


def _boot() -> str:
    """The identity of this boot, "" when it cannot be trusted.

    A container may mount a file over the boot id, and a time namespace shifts
    the monotonic clock: either would make ticks of two processes incomparable
    while they look comparable.
    """
    try:
        # Of this thread: once the first one has ended, /proc/self has no namespaces.
        if os.stat("/proc/thread-self/ns/time").st_ino != INITIAL_TIME_NAMESPACE:
            return ""
    except OSError:
        pass  # a kernel before 5.6 has no time namespaces, and macOS has no /proc
    if inside_of(BOOT_ID) != ("proc", BOOT_ID.removeprefix("/proc")):
        return ""
    try:
        with open(BOOT_ID, encoding="utf-8") as source:
            return source.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
