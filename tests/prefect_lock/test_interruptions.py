"""The moment of a loss is nobody's choice: it is tried at every line that a block runs at its end.

A block of a thread ends in Python, a line after the other, and the interruption
may come between any two. So a trace function counts the lines that run once the
body is over, and a lease is lost at the first, the second, … of them.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from agent_checkpoint_prefect import (
    FencedLease,
    FencedLock,
    LeaseLostError,
    LeaseStore,
    cancel,
    context,
    current_lease,
    holding,
    leases,
)

from .conftest import elsewhere
from .losing import hear

# Our lines, and those of the standard library that run around them.
OURS = (holding.__file__, cancel.__file__, context.__file__, leases.__file__)
AROUND = (contextlib.__file__,)
# More than there are.
MOST_LINES = 300
# How long the one who interrupts is waited for, who may wait for a lock of the one who is interrupted.
UNDER_A_LOCK_SECONDS = 0.01


class Case(NamedTuple):
    """Where it is tried: at the lines of which files; whether in a block within the one that is lost, which raises."""

    files: tuple[str, ...]
    within: bool
    raises: bool
    vague: bool
    """The error need not say which lease was lost: another thread is interrupted before a line of ours could know."""


class Strike:
    """Loses a lease at the nth line that runs in some files after the body."""

    def __init__(self, files: tuple[str, ...], number: int) -> None:
        self._files = files
        self._left = number
        self.lease: FencedLease | None = None
        self.at: tuple[str, int] | None = None

    def begin(self, lease: FencedLease) -> None:
        """The body is over: count from here."""
        self.lease = lease
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                frame.f_trace = self._trace
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.at = (frame.f_code.co_name, frame.f_lineno)
                self._lose(frame)
        return self._trace

    def _lose(self, frame: FrameType) -> None:
        """Have it lost, and wait in plain Python: what interrupts may come in the middle of anything that is called."""
        threading.Thread(target=hear, args=(self.lease, "expired"), daemon=True).start()
        until = time.monotonic() + UNDER_A_LOCK_SECONDS
        gate = cancel._here.gate
        while not any(block.wanted for block in gate.blocks) and time.monotonic() < until:
            pass
        handler = signal.getsignal(signal.SIGURG)
        if gate.is_main and callable(handler):
            handler(signal.SIGURG, frame)  # as it interrupts this frame, not ours


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """The signal does not come by itself: in a trace function it would interrupt that one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def body(strike: Strike, lost: FencedLease, raises: bool) -> None:
    """The last that a block runs; a lease is lost after it."""
    strike.begin(lost)
    if raises:
        raise ZeroDivisionError


def end_of_blocks(lock: FencedLock, strike: Strike, case: Case, number: int) -> tuple[str, dict[str, Any]]:
    """What a block raises, maybe with another one in it, whose lease is lost at the end."""
    try:
        with lock.lease(f"orders-{number}") as lease:
            if case.within:
                with lock.lease(f"inner-{number}"):
                    body(strike, lease, case.raises)
            else:
                body(strike, lease, case.raises)
    except BaseException as error:
        return type(error).__name__, getattr(error, "facts", {})
    finally:
        sys.settrace(None)
    return "", {}


def faults_after(lock: FencedLock, case: Case, raised: str, facts: dict[str, Any], late: bool) -> Iterator[str]:
    """What is wrong after the blocks, once nobody has their error any more."""
    if current_lease() is not None:
        yield "the run still holds a lease"
    if lock.list_leases():
        yield "a lease was not given back"
    if raised not in ("", "LeaseLostError", "ZeroDivisionError"):
        yield f"it raised {raised}"
    if raised == "LeaseLostError" and "token" not in facts and not case.vague:
        yield "the error does not say which lease"
    if late:
        yield "it came late"


def try_once(lock: FencedLock, case: Case, number: int) -> tuple[Any, list[str]]:
    """Where the lease was lost, None for nowhere, and what was wrong then."""
    handler = signal.getsignal(signal.SIGURG)
    strike, late = Strike(case.files, number), False
    raised, facts = "", {}
    with unheard():
        try:
            raised, facts = end_of_blocks(lock, strike, case, number)
            for _ in range(1000):  # what comes late, comes here
                pass
        except LeaseLostError:
            late = True
    faults = list(faults_after(lock, case, raised, facts, late))
    if signal.getsignal(signal.SIGURG) is not handler:
        faults.append("the signal's handler is not the one of before")
        signal.signal(signal.SIGURG, handler)
    return strike.at, faults


def try_everywhere(lock: FencedLock, case: Case) -> list[str]:
    """What went wrong, and at which lines."""
    found = []
    for number in range(1, MOST_LINES):
        at, faults = try_once(lock, case, number)
        if at is None:
            assert number > 1  # it was tried at all
            return found
        if faults:
            found.append(f"lost at {at[0]}:{at[1]}: {', '.join(faults)}")
    pytest.fail("there are more lines than expected")


def at_home(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in this thread, the main one."""
    return call(*arguments)


@pytest.mark.parametrize(
    ("within", "raises"),
    [(False, False), (False, True), (True, False)],
    ids=["its body ends", "its body raises", "a body inside ends"],
)
@pytest.mark.parametrize("files", [OURS, AROUND], ids=["ours", "around"])
@pytest.mark.parametrize("where", [at_home, elsewhere], ids=["main", "thread"])
def test_a_loss_at_any_line_of_the_end_leaves_nothing_behind(
    path: Path, where: Callable[..., Any], files: tuple[str, ...], within: bool, raises: bool
) -> None:
    lock = FencedLock(store=LeaseStore(path=path, synchronous="normal"))
    with lock.lease("warm-up"):
        pass
    case = Case(files, within, raises, vague=files is AROUND and where is elsewhere)
    assert where(try_everywhere, lock, case) == []
    lock.store.open().close()
