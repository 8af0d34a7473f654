"""Messages between two processes: none blocks, none is cut, and an end is seen."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from agent_checkpoint.supervise.channel import NEVER, Channel, Deadline, channels, pipe, wait


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    mine, others = channels()
    yield mine, others
    mine.close()
    others.close()


def test_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    mine, others = ends
    mine.send("one", 1, None)
    mine.send("two", {"a": "\udcff\n"})
    assert others.receive() == ["one", 1, None]
    assert others.receive() == ["two", {"a": "\udcff\n"}]
    assert others.receive() is None
    assert not others.closed


def test_sending_to_somebody_who_does_not_read_does_not_block_and_nothing_is_lost(
    ends: tuple[Channel, Channel],
) -> None:
    mine, others = ends
    big = "x" * 300_000
    mine.send(big)
    mine.send("after")
    assert others.receive() is None
    got = []
    while len(got) < 2:
        mine.wait(time.monotonic_ns() + 10**9)
        message = others.receive()
        if message is not None:
            got.append(message)
    assert got == [[big], ["after"]]


def test_the_end_of_the_other_is_seen_after_its_last_message() -> None:
    mine, others = channels()
    others.send("last")
    others.close()
    assert mine.receive() == ["last"]
    assert mine.receive() is None
    assert mine.closed
    mine.send("to nobody")
    began = time.monotonic()
    mine.wait(time.monotonic_ns() + 50 * 10**6)  # nothing to wait for but the moment
    assert time.monotonic() - began >= 0.05
    mine.close()


def test_pipes_are_neither_inherited_nor_standard_files() -> None:
    fds = pipe()
    for fd in fds:
        assert fd > 2
        assert not os.get_inheritable(fd)
        assert not os.get_blocking(fd)
        os.close(fd)


def test_wait_ends_when_a_pipe_is_ready_and_takes_any_moment() -> None:
    reading, writing = pipe()
    threading.Timer(0.02, os.write, (writing, b"!")).start()
    wait(NEVER, [reading])
    assert os.read(reading, 1) == b"!"
    wait(0, [reading])
    os.close(reading)
    os.close(writing)


def test_a_deadline_holds_any_moment() -> None:
    deadline = Deadline()
    assert deadline.get() == NEVER
    deadline.set(2**62 + 1)
    assert deadline.get() == 2**62 + 1
