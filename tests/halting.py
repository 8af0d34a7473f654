"""A call that is halted in the middle, so that something else comes between two of its steps.

It runs in a thread of its own, which a trace function halts before a line of a
package. Line after line, that is every place where another thread may come in;
chance would have to be lucky to hit them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

LONG = 60.0


class Halted(threading.Thread):
    """A call that is halted before its n-th line in a package."""

    def __init__(self, call: Callable[[], object], package: ModuleType, line: int) -> None:
        super().__init__(daemon=True)
        assert package.__file__ is not None
        self._folder = str(Path(package.__file__).parent)
        self._call = call
        self._left = line
        self._at = threading.Event()
        self._go_on = threading.Event()
        self.where = ""
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
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self._at.set()
                self._go_on.wait(LONG)
        return self._trace
