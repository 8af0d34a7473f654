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

_forking = False
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


def coming() -> bool:
    """Whether another thread is about to fork."""
    return _forking and not _lock_is_mine()


def wait() -> None:
    """Let a fork that another thread has begun come to its end."""
    with _lock:
        pass


def _lock_is_mine() -> bool:
    return _forker == get_ident()


def _prepare() -> None:
    global _forking, _forker
    _lock.acquire()
    _forker = get_ident()
    _forking = True
    for call in _before:
        call()


def _in_parent() -> None:
    global _forking
    _forking = False
    _lock.release()


def _in_new_child() -> None:
    global generation, _forking, _lock
    generation += 1
    _forking = False
    _lock = allocate_lock()
    for call in _in_child:
        call()


os.register_at_fork(before=_prepare, after_in_parent=_in_parent, after_in_child=_in_new_child)
