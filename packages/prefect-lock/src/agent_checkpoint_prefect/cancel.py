"""Interrupting the code that runs under a lease which was lost.

By what works where it runs:

- an asyncio task is cancelled; it hears of it at its next ``await``;
- the main thread gets a signal (SIGURG), which also ends a blocking call;
- another thread gets an exception at its next line of Python: a call that
  blocks in C is not interrupted before it returns.

The block that holds the lease turns each of these into ``LeaseLostError``. A
thread is not interrupted in the midst of the beginning or end of a block: what
comes then is tried again, until the block of the lost lease is over. Before it
is, the thread itself closes its gate, and takes what is under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from agent_checkpoint_prefect.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    Handler = Callable[[int, FrameType | None], Any] | int | None

# An interruption that cannot be made now is tried again after so long.
AGAIN_SECONDS = 0.02
# The code that begins and ends blocks: where it runs, nothing is interrupted.
_OURS = (os.path.join(os.path.dirname(__file__), ""), contextlib.__file__)
# Neither is a thread that starts another one: until that one runs, Python takes it for the one that starts it, and
# raises the exception there; then its start is waited for in vain.
_STARTS = threading.Thread.start.__code__
# Nor one that drops an object: what is raised in a finaliser, Python prints and forgets.
_FINALISES = "__del__"
_DROPS = (weakref.__file__, weakref.WeakSet.__init__.__code__.co_filename)


class TaskInterrupter:
    """Cancels an asyncio task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._over = False
        self._others = False
        self.struck = False

    @property
    def here(self) -> bool:
        """Whether it is the calling task that it interrupts."""
        try:
            return asyncio.current_task() is self._task
        except RuntimeError:  # no event loop runs here
            return False

    def begin(self) -> None:
        """The block begins; called by the task itself."""

    def strike(self) -> None:
        """Interrupt it; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to interrupt
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._over and self._task is not None:
            self.struck = True
            self._task.cancel()

    def close(self) -> None:
        """Interrupt it no more; called by the task itself, any number of times."""
        if not self._over and self.struck and self._task is not None and hasattr(self._task, "uncancel"):
            self._others = self._task.uncancel() > 0
        self._over = True

    def end(self) -> None:
        """The lease was given back; called by the task itself."""

    def caused(self, error: BaseException | None) -> bool:
        """Whether an exception is this interruption."""
        return self.struck and not self._others and isinstance(error, asyncio.CancelledError)


class Gate:
    """Whether a thread may be interrupted now; its blocks share it, and one interruption is under way at a time."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.is_main = self.thread is threading.main_thread()
        self.lock = threading.Lock()
        """Whoever interrupts the thread has it for that moment."""
        self.closed = False
        self.struck = False
        """Whether it was interrupted, and no block has begun or ended since."""
        self.blocks: list[ThreadInterrupter] = []
        self._before: Handler = None

    @property
    def here(self) -> bool:
        """Whether it is the gate of the calling thread."""
        return threading.get_ident() == self.thread.ident

    def is_open(self, frame: FrameType | None) -> bool:
        """Whether the thread may be interrupted in a frame."""
        if self.closed or self.struck or frame is None or frame.f_code.co_filename.startswith(_OURS):
            return False
        while frame is not None and not _must_not_be_left(frame.f_code):
            frame = frame.f_back
        return frame is None

    def enter(self, block: ThreadInterrupter) -> None:
        """A block begins."""
        self.struck = False
        self.blocks.append(block)
        if self.is_main and not self.hears():
            self._before = signal.signal(signal.SIGURG, self._on_signal)

    def leave(self, block: ThreadInterrupter) -> None:
        """A block is over."""
        if block.wanted:
            signal.sigpending()  # a system call: by its end the last signal that was sent has come
        if block in self.blocks:
            self.blocks.remove(block)
        if not self.here:
            return  # an interrupted block that somebody else has dropped
        if self.is_main and not self.blocks and self.hears():
            signal.signal(signal.SIGURG, self._before if self._before is not None else signal.SIG_DFL)
        self.closed = self.struck = False

    def hears(self) -> bool:
        """Whether the signal is ours; the code in a block may have taken it for itself."""
        return signal.getsignal(signal.SIGURG) == self._on_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        wanted = [block for block in self.blocks if block.wanted]
        if not wanted:
            if callable(self._before):
                self._before(number, frame)
            return
        for block in wanted:
            if not block.struck and self.is_open(frame):
                block.struck = self.struck = True
                raise LeaseLostError


class _Here(threading.local):
    def __init__(self) -> None:
        self.gate = Gate()


_here = _Here()


class ThreadInterrupter:
    """Raises ``LeaseLostError`` in the thread that made it."""

    def __init__(self) -> None:
        self._gate = _here.gate
        self._over = False
        self.wanted = self.struck = False

    @property
    def here(self) -> bool:
        """Whether it is the calling thread that it interrupts."""
        return self._gate.here

    def begin(self) -> None:
        """The block begins; called by the thread itself."""
        self._gate.enter(self)

    def strike(self) -> None:
        """Interrupt it; from any thread, which stays in here until it has come about or the block is over."""
        if self.here and not self._over:  # lost before the body has begun
            self.struck = True
            raise LeaseLostError
        while not self._tried():
            time.sleep(AGAIN_SECONDS)

    def _tried(self) -> bool:
        """Try it; whether there is nothing more to be done."""
        gate = self._gate
        ident = gate.thread.ident or 0
        with gate.lock:
            time.sleep(0)  # who has just got the interpreter keeps it for some milliseconds: what it looks at, stays
            if self._over or self.struck or not gate.thread.is_alive():
                return True
            if gate.is_main:
                self.wanted = True
                if gate.hears() and not (gate.closed or gate.struck):
                    signal.pthread_kill(ident, signal.SIGURG)
            elif gate.is_open(sys._current_frames().get(ident)):
                self.struck = gate.struck = True
                _raise_in(ident, LeaseLostError)
        return False

    def close(self) -> None:
        """Interrupt it no more; called by the thread itself, any number of times.

        Raises:
            LeaseLostError: it was interrupted just now.
        """
        if self.here:
            self._gate.closed = True
        with self._gate.lock:  # what was under way has struck by the time that it is given back
            self._over = True

    def end(self) -> None:
        """The lease was given back: blocks around this one may be interrupted again."""
        self._gate.leave(self)

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


def _must_not_be_left(code: CodeType) -> bool:
    return code is _STARTS or code.co_name == _FINALISES or code.co_filename in _DROPS


def _raise_in(ident: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(error))


def _begin_in_child() -> None:
    _here.gate.lock = threading.Lock()  # whoever interrupted the parent is not here to give it back


os.register_at_fork(after_in_child=_begin_in_child)
