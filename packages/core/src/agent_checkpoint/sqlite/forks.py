"""Forking a process that has stores open.

SQLite keeps what it knows of locks and shared memory per file in the process,
and a fork copies that knowledge but not the locks: a child would believe that
it holds what its parent holds, and lose writes once the parent has gone (seen).
So before a fork every idle connection is closed, and connections that other
threads are using get a moment to come back. A file that is in use all the same,
as when a transaction's block forks, cannot be used by the child.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

generation = 0
"""How many forks lie between this process and the one that imported the module."""

coming = False
"""Whether a thread of this process is about to fork, be it this one."""

_forker = 0
_lock = allocate_lock()
_before: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []


def at_fork(*, before: Callable[[], None] | None = None, in_child: Callable[[], None] | None = None) -> None:
    """Call ``before`` before every fork, ``in_child`` in every child, before anything else runs there."""
    if before is not None:
        _before.append(before)
    if in_child is not None:
        _in_child.append(in_child)


def is_mine() -> bool:
    """Whether it is this thread that is about to."""
    return _forker == get_ident()


def wait() -> None:
    """Let a fork that another thread has begun come to its end."""
    with _lock:
        pass


def _prepare() -> None:
    global coming, _forker
    _lock.acquire()
    _forker = get_ident()
    coming = True
    for call in _before:
        call()


def _in_parent() -> None:
    global coming
    coming = False
    _lock.release()


def _in_new_child() -> None:
    global generation, coming, _lock
    generation += 1
    coming = False
    _lock = allocate_lock()
    for call in _in_child:
        call()


os.register_at_fork(before=_prepare, after_in_parent=_in_parent, after_in_child=_in_new_child)
