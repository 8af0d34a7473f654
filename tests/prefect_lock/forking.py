"""Running something in a forked child of the tests: a process of its own that need not import Prefect again."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import WATCHDOG_SECONDS

needs_fork = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_fork(body: Callable[[], Any]) -> Any:
    """What it answers, or raises, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(WATCHDOG_SECONDS)  # what another thread had locked at the fork stays locked in the child
        status = 1
        try:
            try:
                answer: Any = ("answered", body())
            except BaseException as error:
                answer = ("raised", repr(error))
            os.write(writer, pickle.dumps(answer))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        said = source.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    kind, value = pickle.loads(said)
    assert kind == "answered", value
    return value


def crash_in_fork(body: Callable[[], Any]) -> None:
    """Call it in a forked child, which is killed when it has returned."""
    child = os.fork()
    if child == 0:
        signal.alarm(WATCHDOG_SECONDS)
        try:
            body()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
