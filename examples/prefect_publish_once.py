"""A Prefect flow publishes a release once: under a crash, a retry, and a twin that froze and wakes up.

    python examples/prefect_publish_once.py

The same story is told twice, by real processes. Worker A is killed in the
middle. Worker B runs the flow again: its first attempt fails, Prefect retries,
and it freezes. Worker C takes it for dead and runs the flow. Then B wakes up.

Each worker looks whether the release is published before it publishes. Without
a lock that does not help B, who looked too early. With FencedLock B's lease is
lost, its late write is refused, and its retry finds the release published.

Needs Prefect, for which it starts a server of its own, and a system that can
freeze processes (Linux, macOS). Most of its time is the start of the server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

os.environ |= {"PREFECT_LOGGING_LEVEL": "CRITICAL", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}

from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from agent_checkpoint_prefect import FencedLock, LeaseStore, current_lease

RELEASE = "1.0"
LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 120.0
# Forked, so that a worker need not import Prefect again.
processes = multiprocessing.get_context("fork")

TABLES = """
CREATE TABLE fences (name TEXT PRIMARY KEY, token INTEGER NOT NULL);
CREATE TABLE publications (release TEXT NOT NULL, worker TEXT NOT NULL, token INTEGER);
"""
# The condition of a write by token: equal is the same lease, lower one that was superseded.
ADVANCE_FENCE = """
INSERT INTO fences (name, token) VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE token <= excluded.token
"""
PUBLISH = "INSERT INTO publications (release, worker, token) VALUES (?, ?, ?)"
PUBLISHED = "SELECT worker, token FROM publications WHERE release = ?"


class SupersededError(Exception):
    """A write came with a token that is lower than one that was seen."""


class Site:
    """The database of somebody else, where a release is published: it knows of tokens, and of nothing else of ours."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def create(self) -> None:
        with self._opened() as connection:
            connection.executescript(TABLES)

    def published(self) -> list[tuple[str, int | None]]:
        """Who published the release, with which token; once for each time."""
        with self._opened() as connection:
            return list(connection.execute(PUBLISHED, (RELEASE,)))

    def publish(self, worker: str, token: int | None) -> None:
        """Publish the release. A token, where there is one, must not be lower than those before."""
        with self._opened() as connection, connection:
            if token is not None and connection.execute(ADVANCE_FENCE, (RELEASE, token)).rowcount == 0:
                raise SupersededError
            connection.execute(PUBLISH, (RELEASE, worker, token))

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file)) as connection:
            yield connection


class Worker:
    """One process that runs the flow."""

    def __init__(self, folder: Path, name: str, lock: FencedLock | None) -> None:
        self._folder = folder
        self._name = name
        self._lock = lock
        self._site = Site(folder / "site.db")
        self._attempts = 0

    def run(self) -> None:
        """Run the flow, and leave a file that says how it ended."""
        body: Callable[[str], str] = self._publish
        if self._lock is not None:
            body = self._lock.fenced("release-{release}", timeout_seconds=PATIENCE_SECONDS)(_function(body))
        answer: str = flow(name="publish", retries=3)(_function(body))(RELEASE)
        (self._folder / f"{self._name}.txt").write_text(answer)

    def _publish(self, release: str) -> str:
        if self._site.published():
            return f"found {release} published"
        self._prepare()
        lease = current_lease()
        if lease is not None:
            lease.check()  # before what cannot be undone
        self._site.publish(self._name, None if lease is None else lease.token)
        return f"published {release}"

    def _prepare(self) -> None:
        """What takes its time: A is killed here, B fails the first time and freezes the second time."""
        self._attempts += 1
        if (self._name, self._attempts) == ("B", 1):
            raise ConnectionError("the network is down")
        (self._folder / f"{self._name}-prepares").touch()
        if self._name != "C":
            wait_for(self._folder / "go-on")


def _function(method: Callable[[str], str]) -> Callable[[str], str]:
    """Flows are made of functions."""

    def publish(release: str) -> str:
        return method(release)

    return publish


class Outcome(NamedTuple):
    """What happened in one telling; the fields are the rows of the table."""

    worker_a: str
    worker_b: str
    worker_c: str
    published: str
    accepted: str


def tell(folder: Path, lock: FencedLock | None) -> Outcome:
    """Kill A, freeze B, let C finish, wake B."""
    site = Site(folder / "site.db")
    site.create()
    workers = {name: processes.Process(target=Worker(folder, name, lock).run) for name in "ABC"}
    try:
        workers["A"].start()
        wait_for(folder / "A-prepares")
        workers["A"].kill()
        workers["B"].start()
        wait_for(folder / "B-prepares")
        send(workers["B"], signal.SIGSTOP)
        workers["C"].start()  # with a lease it waits until B's has run out
        workers["C"].join(PATIENCE_SECONDS)
        (folder / "go-on").touch()
        send(workers["B"], signal.SIGCONT)
        workers["B"].join(PATIENCE_SECONDS)
    finally:
        for worker in workers.values():
            if worker.is_alive():
                worker.kill()
    published = site.published()
    return Outcome(
        "was killed" if not (folder / "A.txt").exists() else "ended",
        (folder / "B.txt").read_text(),
        (folder / "C.txt").read_text(),
        "once" if len(published) == 1 else f"{len(published)} times",
        ", ".join(f"by {worker}" if token is None else f"by {worker}, token {token}" for worker, token in published),
    )


@contextmanager
def server(home: Path) -> Iterator[str]:
    """A Prefect server for the length of the block; the URL of its API."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--no-services", "--port", str(port)]
    environment = {**os.environ, "PREFECT_HOME": str(home)}
    with (home / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603 -- a command of ours
    try:
        wait_until(lambda: listens(port), "the server")
        yield f"http://127.0.0.1:{port}/api"
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def wait_for(file: Path) -> None:
    wait_until(file.exists, file.name)


def wait_until(came: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not came():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} never came")
        time.sleep(0.01)


def send(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None:
        os.kill(process.pid, number)


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes, a column for each telling."""
    rows = [
        ("", *outcomes),
        ("worker A, killed", *(each.worker_a for each in outcomes.values())),
        ("worker B, failed, retried, frozen, woken", *(each.worker_b for each in outcomes.values())),
        ("worker C, took over", *(each.worker_c for each in outcomes.values())),
        ("the release was published", *(each.published for each in outcomes.values())),
        ("", *(each.accepted for each in outcomes.values())),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def no_lock(_: Path) -> None:
    pass


def fenced(folder: Path) -> FencedLock:
    return FencedLock(store=LeaseStore(path=folder / "agents.db"), ttl_seconds=LEASE_SECONDS)


def main() -> None:
    tellings: dict[str, Callable[[Path], FencedLock | None]] = {"without a lock": no_lock, "with FencedLock": fenced}
    outcomes = {}
    with (
        tempfile.TemporaryDirectory(prefix="prefect-publish-once-") as home,
        server(Path(home)) as url,
        temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: Path(home)}),
    ):
        for name, lock in tellings.items():
            folder = Path(home) / name
            folder.mkdir()
            outcomes[name] = tell(folder, lock(folder))
    print(table(outcomes))  # noqa: T201 -- what a program is for


if __name__ == "__main__":
    main()
