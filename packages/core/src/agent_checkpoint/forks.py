"""Forking a process that has stores open.

SQLite keeps what it knows of locks and shared memory per file in the process,
and a fork copies that knowledge but not the locks: a child would believe that
it holds what its parent holds, and lose writes once the parent has gone (seen).
So before a fork every idle connection is closed, and connections that other
threads are using get a moment to come back. A file that is in use all the same,
as when a transaction's block forks, cannot be used by the child.

A signal that is pending strikes at the first line of Python that runs after the
fork, and what it raises there nobody hears of (seen: the child went on with its
parent's locks, the parent never let another thread write again). So what must
happen is in C; the rest of it, in the child, is caught up with before anything
is done there.

A module that another thread is importing would be waited for in the child for
ever, as that thread is not there; so a fork waits for that, too.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, get_ident
from functools import partial
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

coming = False
"""Whether a thread of this process may be about to fork, be it this one."""

# How long a fork waits for what other threads are in the midst of, each kind of it.
PATIENCE = 2.0

_forker = 0
# The forking thread has it; that one may fork again meanwhile, in the handler of a signal.
_lock = RLock()
# One entry for each fork between this process and the one that imported the module.
_passed: list[None] = []
_caught_up = 0
# The process that has caught up.
_pid = os.getpid()
# The imports, by their locks, that have lasted longer than an earlier fork was willing to wait.
_outlasting: set[int] = set()
_before: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []


def at_fork(*, before: Callable[[], None] | None = None, in_child: Callable[[], None] | None = None) -> None:
    """Call ``before`` before every fork, ``in_child`` in every child before a store is used; again if interrupted."""
    if before is not None:
        _before.append(before)
    if in_child is not None:
        _in_child.append(in_child)


def generation() -> int:
    """How many forks lie between this process and the one that imported the module."""
    return len(_passed)


def settled() -> int:
    """The same, once all is done that has to be done in a new child."""
    global _pid
    if _pid != os.getpid():
        # Somebody's hook that runs before ours uses a store in the child, or no hook was called at all.
        if _caught_up == len(_passed):
            _passed.append(None)
        _pid = os.getpid()
    if _caught_up != len(_passed):
        _catch_up()
    return _caught_up


def is_mine() -> bool:
    """Whether it is this thread that is about to."""
    return _forker == get_ident()


def wait() -> None:
    """Let a fork that another thread has begun come to its end."""
    global coming
    with _lock:  # so there is none
        coming = False


def _prepare() -> None:
    global coming, _forker
    _lock.acquire()
    _forker = get_ident()
    coming = True
    for call in _before:
        call()
    _let_import()


def _let_import() -> None:
    """Wait until no other thread is importing; for an import that has outlasted a fork's patience only once.

    That none begins cannot be had: who holds the lock for that waits for ever
    for others' hooks, and for locks that are taken in the midst of an import.
    """
    global _outlasting
    deadline = monotonic() + PATIENCE
    while not (importing := _imported_elsewhere()) <= _outlasting and monotonic() < deadline:
        sleep(0.001)
    _outlasting = importing


def _imported_elsewhere() -> set[int]:
    # Of a module that is being imported, and of no other one, there is a lock.
    locks = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    found = [reference() for reference in list(locks.values())]
    return {id(lock) for lock in found if getattr(lock, "owner", None) not in (None, get_ident())}


def _catch_up() -> None:
    global _caught_up, _pid, coming
    with _lock:
        if _caught_up == len(_passed):
            return
        coming = False
        for call in _in_child:
            call()
        _pid, _caught_up = os.getpid(), len(_passed)


os.register_at_fork(
    before=_prepare,
    after_in_parent=_lock.release,
    after_in_child=_lock._at_fork_reinit,  # type: ignore[attr-defined]
)
os.register_at_fork(after_in_child=partial(_passed.append, None))
os.register_at_fork(after_in_child=_catch_up)
