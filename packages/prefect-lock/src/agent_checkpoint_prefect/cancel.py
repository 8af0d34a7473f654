"""Interrupting the code that runs under a lease which was lost.

By what works where it runs:

- an asyncio task is cancelled; it hears of it at its next ``await``;
- the main thread gets a signal (SIGURG), which also ends a blocking call;
- another thread gets an exception at its next line of Python: a call that
  blocks in C is not interrupted before it returns.

The block that holds the lease turns each of these into ``LeaseLostError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from agent_checkpoint_prefect.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[int, Any], Any] | int | None


# Where an interruption waits for the end of the block: the code that begins and ends it.
_HERE = os.path.dirname(__file__)
_OURS = frozenset([contextlib.__file__, *(os.path.join(_HERE, name) for name in os.listdir(_HERE))])


# How long the two sides of an interruption wait for one another.
LOCK_SECONDS = 1.0
# A signal that came at the beginning of the block is sent again after so long.
AGAIN_SECONDS = 0.02


class TaskInterrupter:
    """Cancels an asyncio task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._over = False
        self._others = False
        self.struck = False

    def strike(self) -> None:
        """Interrupt it; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to interrupt
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._over and self._task is not None:
            self.struck = True
            self._task.cancel()

    def over(self) -> None:
        """Interrupt it no more; called by the task itself."""
        if not self._over and self.struck and self._task is not None and hasattr(self._task, "uncancel"):
            self._others = self._task.uncancel() > 0
        self._over = True

    def caused(self, error: BaseException | None) -> bool:
        """Whether an exception is this interruption."""
        return self.struck and not self._others and isinstance(error, asyncio.CancelledError)


class ThreadInterrupter:
    """Raises ``LeaseLostError`` in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        # An interruption may come just where it was taken, and leave it taken by its own thread.
        self._lock = threading.RLock()
        self._over = self._raised = False
        self.struck = False
        self._before: Handler = None
        self._is_main = self._thread is threading.main_thread()
        if self._is_main:
            self._before = signal.signal(signal.SIGURG, self._on_signal)

    def strike(self) -> None:
        """Interrupt it; from any other thread, which waits until that has come about."""
        if self._is_main:
            self.struck = True
            while not (self._over or self._raised):
                signal.pthread_kill(self._thread.ident or 0, signal.SIGURG)
                time.sleep(AGAIN_SECONDS)
        elif self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                if not (self._over or self.struck):
                    self.struck = True
                    _raise_in(self._thread.ident or 0, LeaseLostError)
            finally:
                self._lock.release()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.struck and not (self._over or self._raised):
            if frame is not None and frame.f_code.co_filename in _OURS:
                return  # the block's own beginning or end: it comes again if the body runs
            self._raised = True
            raise LeaseLostError
        if callable(self._before):
            self._before(number, frame)

    def over(self) -> None:
        """Interrupt it no more; called by the thread itself."""
        self._over = True
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                if self.struck and not self._is_main:
                    _raise_in(self._thread.ident or 0, None)  # what has not been raised yet is taken back
            finally:
                self._lock.release()
        if self._is_main and threading.current_thread() is self._thread:
            signal.signal(signal.SIGURG, self._before if self._before is not None else signal.SIG_DFL)

    def caused(self, error: BaseException | None) -> bool:
        """Whether an exception is this interruption."""
        return self.struck and isinstance(error, LeaseLostError)


def interrupter() -> TaskInterrupter | ThreadInterrupter:
    """What can interrupt the calling code: its task, where an event loop runs in this thread, else the thread."""
    try:
        if asyncio.current_task() is not None:
            return TaskInterrupter()
    except RuntimeError:
        pass
    return ThreadInterrupter()


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), None if error is None else ctypes.py_object(error)
    )
