"""A Redis to compare with: the one that is named, one that answers on this machine, or one of the benchmark's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VARIABLE = "AGENT_CHECKPOINT_BENCH_REDIS"
USUAL = "redis://localhost:6379/0"
PROGRAM = "redis-server"
START_SECONDS = 10.0
STOP_SECONDS = 10.0


def missing() -> str | None:
    """What has to be there to measure it; None where nothing is missing."""
    if find_spec("redis") is None:
        return "the Redis client is not installed"
    if VARIABLE not in os.environ and not _answers(USUAL) and shutil.which(PROGRAM) is None:
        return f"no Redis is reachable: set {VARIABLE} to the URL of one, or install {PROGRAM} (it is started here)"
    return None


@contextmanager
def server(folder: Path, synced: bool) -> Iterator[str]:
    """The URL of a Redis. One that is started here syncs each write to its file, or has none."""
    url = os.environ.get(VARIABLE) or (USUAL if _answers(USUAL) else None)
    if url is not None:
        yield url
        return
    with TemporaryDirectory(prefix="redis-", dir=folder) as home:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        files = ("--appendonly", "yes", "--appendfsync", "always") if synced else ("--appendonly", "no")
        command = [PROGRAM, "--bind", "127.0.0.1", "--port", str(port), "--dir", home, "--save", "", *files]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        try:
            _wait_for(url := f"redis://127.0.0.1:{port}/0", process)
            yield url
        finally:
            process.terminate()
            process.wait(STOP_SECONDS)


def client(url: str) -> Any:
    """A connected client."""
    redis: Any = import_module("redis")
    return redis.StrictRedis.from_url(url)


def version(url: str) -> str:
    """What is measured: the server's version, and how it keeps what it is told."""
    connection = client(url)
    try:
        kept = connection.config_get("append*")
        synced = f"appendfsync {kept['appendfsync']}" if kept.get("appendonly") == "yes" else "no append-only file"
        return f"Redis {connection.info('server')['redis_version']}, {synced}"
    finally:
        connection.close()


def _answers(url: str) -> bool:
    redis: Any = import_module("redis")
    try:
        connection = client(url)
        connection.ping()
        connection.close()
    except redis.RedisError:
        return False
    return True


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the Redis of the benchmark does not start")
        time.sleep(0.02)
