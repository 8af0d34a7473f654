"""A call that is halted in the middle, so that something else comes between two of its steps.

It runs in a thread of its own, which a trace function halts before a line of a
package. Line after line, that is every place where another thread may come in;
chance would have to be lucky to hit them.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LONG = 60.0
# The steps of a loop are all alike; what is raised in a finaliser, Python prints and forgets.
LEFT_OUT = ("<genexpr>", "<listcomp>", "__del__")


def _place(code: ModuleType) -> str:
    """What the names of its files begin with: of a package's, or a module's."""
    assert code.__file__ is not None
    return code.__file__.removesuffix("__init__.py")


class _Traced(threading.Thread):
    """A call in a thread of its own, to which something happens before its n-th line in a package, or a module."""

    def __init__(self, call: Callable[[], object], code: ModuleType, line: int) -> None:
        super().__init__(daemon=True)
        self._place = _place(code)
        self._call = call
        self._left = line
        self.where = ""

    def _was_reached(self) -> bool:
        """Run it to its end; False where the call has fewer lines."""
        self.start()
        self.join(LONG)
        assert not self.is_alive(), f"hangs after {self.where}"
        return bool(self.where)

    def _is_of_it(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._place)

    def _is_it(self, frame: FrameType) -> bool:
        """Count a line; whether it is the one."""
        self._left -= 1
        if self._left == 0:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return self._left == 0


class Halted(_Traced):
    """A call that is halted before its n-th line in a package, or a module."""

    def __init__(self, call: Callable[[], object], code: ModuleType, line: int) -> None:
        super().__init__(call, code, line)
        self._at = threading.Event()
        self._go_on = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self._at.set()

    def halts(self) -> bool:
        """Run up to the line; False where the call has fewer."""
        self.start()
        assert self._at.wait(LONG)
        return bool(self.where)

    def ends(self) -> BaseException | None:
        """Run the rest; what the call raised."""
        self._go_on.set()
        self.join(LONG)
        assert not self.is_alive(), f"hangs after {self.where}"
        return self.error

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name in LEFT_OUT or not self._is_of_it(frame):
            return None
        if event == "line" and self._is_it(frame):
            self._at.set()
            self._go_on.wait(LONG)
        return self._trace


class Interrupted(_Traced):
    """A call that is interrupted before its n-th line in a package or module, as Ctrl-C does it.

    Lines that begin a ``with`` are left out: Python comes back to them at the
    end of the block, where no signal is heard before the lock is let go.
    """

    def __init__(
        self, call: Callable[[], object], code: ModuleType, line: int, then: Callable[[], object] | None = None
    ) -> None:
        super().__init__(call, code, line)
        self._then = then
        self.error: BaseException | None = None
        """What the handler of the interrupt met, which runs while its traceback is there."""

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call()
        except KeyboardInterrupt:
            sys.settrace(None)
            try:
                if self._then is not None:
                    self._then()
            except BaseException as error:
                self.error = error
        finally:
            sys.settrace(None)

    def was_interrupted(self) -> bool:
        """Run it to its end; False where the call has fewer lines."""
        return self._was_reached()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name, caller = frame.f_code.co_filename, frame.f_back
        if caller is not None and caller.f_code.co_name == "__del__":
            return None
        if frame.f_code.co_name in LEFT_OUT or not self._is_of_it(frame):
            return None
        begins_with = linecache.getline(name, frame.f_lineno).lstrip().startswith("with ")
        if event == "line" and not begins_with and self._is_it(frame):
            raise KeyboardInterrupt
        return self._trace


class Handled(_Traced):
    """A call before whose n-th line in a package or module a signal's handler runs another one, in the same thread."""

    def __init__(self, call: Callable[[], object], handler: Callable[[], object], code: ModuleType, line: int) -> None:
        super().__init__(call, code, line)
        self._handler = handler
        self.errors: list[Exception] = []

    def run(self) -> None:
        sys.settrace(self._trace)
        self._try(self._call)
        sys.settrace(None)

    def was_handled(self) -> bool:
        """Run it to its end; False where the call has fewer lines."""
        return self._was_reached()

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            self.errors.append(error)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._is_of_it(frame):
            return None
        if event == "line" and self._is_it(frame):
            self._try(self._handler)  # which is not traced, as this is a trace function
        return self._trace
