"""The savers that are compared: how each is opened, driven, and how much room it takes.

All of them are handed the same steps of the same thread, in the shapes in which
LangGraph's loop hands them over: first what a task wrote on top of a
checkpoint, then the next checkpoint.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import string
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import aiosqlite
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, ChannelVersions, Checkpoint, CheckpointMetadata
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from agent_checkpoint_langgraph import AgentCheckpointSaver, ThreadLease

Saver = BaseCheckpointSaver[Any]

THREAD = "thread-1"
NODE = "agent"
TRIGGER = f"branch:to:{NODE}"
TASK_PATH = f"~__pregel_pull, {NODE}"
# The format of the checkpoints that LangGraph 1.x makes.
FORMAT = 4
MESSAGE_CHARACTERS = 1_000
OWNER = "worker-a"
# Longer than any run.
TTL_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Step:
    """What a superstep hands to the saver: the task's writes on top of ``config``, and the checkpoint after it."""

    config: RunnableConfig
    writes: list[tuple[str, Any]]
    task_id: str
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: ChannelVersions


def thread_config(thread_id: str, checkpoint_id: str | None = None) -> RunnableConfig:
    """The config of a thread, or of one of its checkpoints, as the loop passes it."""
    configurable = {"thread_id": thread_id, "checkpoint_ns": ""}
    if checkpoint_id is not None:
        configurable["checkpoint_id"] = checkpoint_id
    return {"configurable": configurable, "metadata": {"thread_id": thread_id}, "tags": [], "recursion_limit": 10_000}


def human_message(number: int) -> HumanMessage:
    """A message of about 1 KB, as an object."""
    return HumanMessage(content=_text(number), id=str(uuid.UUID(int=number)))


def plain_message(number: int) -> dict[str, str]:
    """A message of about 1 KB, as a dictionary."""
    return {"role": "user", "content": _text(number), "id": str(uuid.UUID(int=number))}


@cache
def _text(number: int) -> str:
    letters = random.Random(number).choices(string.ascii_letters + "     .,", k=MESSAGE_CHARACTERS)
    return "".join(letters)


def growing(steps: int, message: Callable[[int], Any]) -> Iterator[Step]:
    """The input, then so many steps of a thread that grows by one message in each."""
    messages: list[Any] = []
    versions: dict[str, str] = {}
    seen: dict[str, dict[str, str | int | float]] = {"__input__": {}}
    parent = thread_config(THREAD)
    for number in range(steps + 1):
        writes: list[tuple[str, Any]] = []
        if number:
            seen = {**seen, NODE: {TRIGGER: versions[TRIGGER]}}
            messages = [*messages, message(number)]
            writes = [("messages", [messages[-1]]), (TRIGGER, None)]
        new = dict.fromkeys(["messages", TRIGGER], f"{number + 1:032}.0.{random.Random(number).getrandbits(50)}")
        versions = {**versions, **new}
        checkpoint = Checkpoint(
            v=FORMAT,
            id=str(uuid6(clock_seq=number)),
            ts=datetime.now(timezone.utc).isoformat(),
            channel_values={"messages": messages, TRIGGER: None},
            channel_versions={**versions},
            versions_seen={**seen},
            updated_channels=sorted(new),
        )
        metadata = CheckpointMetadata(source="loop" if number else "input", step=number - 1, parents={})
        yield Step(parent, writes, str(uuid.UUID(int=number)), checkpoint, metadata, {**new})
        parent = thread_config(THREAD, checkpoint["id"])


class Driven:
    """An open saver, called from this thread. ``size``: the bytes it takes, where it keeps them outside of memory."""

    def __init__(self, saver: Saver, size: Callable[[], int] | None = None) -> None:
        self.saver = saver
        self.size = size

    def put(self, step: Step) -> float:
        """Save what a step hands over; the seconds that its checkpoint took."""
        if step.writes:
            self.saver.put_writes(step.config, step.writes, step.task_id, TASK_PATH)
        started = time.perf_counter()
        self.saver.put(step.config, step.checkpoint, step.metadata, step.new_versions)
        return time.perf_counter() - started

    def get(self) -> object:
        """Read the thread's latest checkpoint, as a run does when it begins."""
        return self.saver.get_tuple(thread_config(THREAD))

    def list(self, **options: Any) -> object:
        """Go through a list to its end."""
        return list(self.saver.list(thread_config(THREAD), **options))

    def warm(self) -> None:
        """Open what is opened on first use."""
        self.saver.get_tuple(thread_config("no-such-thread"))


class Awaited(Driven):
    """An open saver whose methods are awaited."""

    def __init__(self, saver: Saver, loop: asyncio.AbstractEventLoop, size: Callable[[], int] | None = None) -> None:
        super().__init__(saver, size)
        self.loop = loop

    def put(self, step: Step) -> float:
        """See ``Driven``."""
        return self.loop.run_until_complete(self._put(step))

    async def _put(self, step: Step) -> float:
        if step.writes:
            await self.saver.aput_writes(step.config, step.writes, step.task_id, TASK_PATH)
        started = time.perf_counter()
        await self.saver.aput(step.config, step.checkpoint, step.metadata, step.new_versions)
        return time.perf_counter() - started

    def get(self) -> object:
        """See ``Driven``."""
        return self.loop.run_until_complete(self.saver.aget_tuple(thread_config(THREAD)))

    def list(self, **options: Any) -> object:
        """See ``Driven``."""

        async def listed() -> object:
            return [each async for each in self.saver.alist(thread_config(THREAD), **options)]

        return self.loop.run_until_complete(listed())

    def warm(self) -> None:
        """See ``Driven``."""
        self.loop.run_until_complete(self.saver.aget_tuple(thread_config("no-such-thread")))


@contextmanager
def in_memory(_: Path) -> Iterator[Driven]:
    """LangGraph's saver in memory: what costs neither a disk nor a database."""
    yield Driven(InMemorySaver())


@contextmanager
def sqlite(path: Path) -> Iterator[Driven]:
    """LangGraph's saver on SQLite; a commit is synced, as ours is."""
    with SqliteSaver.from_conn_string(str(path)) as saver:
        saver.conn.execute("PRAGMA synchronous=FULL")
        yield Driven(saver, lambda: pages_size(path))


@contextmanager
def async_sqlite(path: Path) -> Iterator[Awaited]:
    """LangGraph's awaited saver on SQLite, likewise."""

    async def opened() -> AsyncSqliteSaver:
        connection = await aiosqlite.connect(path)
        await connection.execute("PRAGMA synchronous=FULL")
        return AsyncSqliteSaver(connection)

    with _loop() as loop:
        saver = loop.run_until_complete(opened())
        try:
            yield Awaited(saver, loop, lambda: pages_size(path))
        finally:
            loop.run_until_complete(saver.conn.close())


@contextmanager
def ours(path: Path) -> Iterator[Driven]:
    """Our saver, with a lease held: each write is fenced and leaves an audit event."""
    with AgentCheckpointSaver.from_conn_string(path) as saver, held(saver, THREAD) as lease:
        saver.bind(lease)
        yield Driven(saver, lambda: pages_size(path))


@contextmanager
def async_ours(path: Path) -> Iterator[Awaited]:
    """Our saver, awaited, likewise."""
    with _loop() as loop, ours(path) as driven:
        yield Awaited(driven.saver, loop, driven.size)


@contextmanager
def held(saver: AgentCheckpointSaver, thread_id: str) -> Iterator[ThreadLease]:
    """The lease of a thread; what writes under it is told so, by binding it or in its config."""
    with saver.lease(thread_id, owner=OWNER, ttl_seconds=TTL_SECONDS, in_context=False) as lease:
        yield lease


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def pages_size(path: Path) -> int:
    """What the database holds at the moment, the write-ahead log included: its size if it were closed now."""
    connection = sqlite3.connect(path)
    try:
        (pages,), (size,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        return int(pages) * int(size)
    finally:
        connection.close()


def files_size(path: Path) -> int:
    """The bytes of a database's files."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
