"""What Linux does for a supervisor, by ``prctl``; on other systems the answer is no.

This is the only module that calls C, and it is imported for ``run`` only.
"""

from __future__ import annotations

import ctypes
import os
import sys

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends; False if that is of no use.

    Then to have no children means to have no descendants. But to end them one
    has to see them, in a ``/proc`` of one's own pid namespace. Not inherited by
    children.
    """
    try:
        shown = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        shown = False
    return _prctl(PR_SET_CHILD_SUBREAPER, 1) and shown


def die_with_parent(number: int) -> bool:
    """Get signal ``number`` when the parent ends. The caller checks that it has not ended before."""
    return _prctl(PR_SET_PDEATHSIG, number)


def call_oneself(name: bytes) -> bool:
    """The name by which ``ps``, ``pkill`` and ``killall`` know the process; at most 15 bytes."""
    return _prctl(PR_SET_NAME, ctypes.c_char_p(name))


def _prctl(option: int, argument: int | ctypes.c_char_p) -> bool:
    if sys.platform != "linux":
        return False
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return False
    value = ctypes.c_ulong(argument) if isinstance(argument, int) else argument
    zero = ctypes.c_ulong(0)
    return bool(prctl(option, value, zero, zero, zero) == 0)
