"""LangGraph's saver on PostgreSQL, where there is a server to ask, or one to start.

``AGENT_CHECKPOINT_BENCH_POSTGRES`` names a server; without it one is started on
loopback, in the folder that is measured, and stopped again. The Python packages
are optional, so they are imported by name.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.langgraph_sides import Driven

VARIABLE = "AGENT_CHECKPOINT_BENCH_POSTGRES"
PACKAGES = Path("/usr/lib/postgresql")
# PostgreSQL refuses to run as root; one of these runs it then.
ACCOUNTS = ("postgres", "nobody")
START_SECONDS = 30
STOP_SECONDS = 30
SIZE = (
    "SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0)::bigint FROM pg_class WHERE relnamespace = %s::regnamespace"
)


def missing() -> str | None:
    """What has to be installed to measure it; None where nothing is missing."""
    if any(find_spec(name) is None for name in ("psycopg", "langgraph.checkpoint.postgres")):
        return "install langgraph-checkpoint-postgres and psycopg[binary]"
    if VARIABLE not in os.environ and _program("initdb") is None:
        return f"install a PostgreSQL server, or set {VARIABLE} to the address of one"
    return None


def server(folder: Path) -> AbstractContextManager[str]:
    """The address of a server, which is stopped at the end if it was started here."""
    address = os.environ.get(VARIABLE)
    return _started(folder) if address is None else nullcontext(address)


@contextmanager
def postgres(address: str, _: Path) -> Iterator[Driven]:
    """LangGraph's saver on PostgreSQL, in a schema of its own that goes at the end."""
    psycopg: Any = import_module("psycopg")
    saver_class: Any = import_module("langgraph.checkpoint.postgres").PostgresSaver
    schema = f"benchmark_{uuid.uuid4().hex}"
    inside = psycopg.conninfo.make_conninfo(address, options=f"-c search_path={schema}")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
        try:
            with saver_class.from_conn_string(inside) as saver:
                saver.setup()
                yield Driven(saver, lambda: int(connection.execute(SIZE, (schema,)).fetchone()[0]))
        finally:
            connection.execute(f"DROP SCHEMA {schema} CASCADE")


@contextmanager
def _started(folder: Path) -> Iterator[str]:
    # For the account that runs the server, the way to its own folder.
    folder.chmod(0o711)
    with TemporaryDirectory(prefix="postgres-", dir=folder) as home:
        account = _account()
        as_account: dict[str, Any] = {"cwd": home, "stdin": subprocess.DEVNULL}
        if account is not None:
            os.chown(home, account.pw_uid, account.pw_gid)
            as_account |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        data = f"{home}/data"
        options = ("--no-sync", "--no-locale", "--encoding=UTF8", "--auth=trust", "--username=benchmark")
        subprocess.run(
            [_program("initdb") or "", *options, data], check=True, capture_output=True, text=True, **as_account
        )
        port = _free_port()
        with open(f"{home}/log", "wb") as log:
            process = subprocess.Popen(
                [_program("postgres") or "", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", ""],
                stdout=log,
                stderr=log,
                **as_account,
            )
        try:
            address = f"host=127.0.0.1 port={port} user=benchmark dbname=postgres"
            _wait_for(address, process, Path(f"{home}/log"))
            yield address
        finally:
            _stop(process)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    psycopg: Any = import_module("psycopg")
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(address).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text()}") from None
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # at once, its clients' sessions ended
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _program(name: str) -> str | None:
    packaged = sorted(PACKAGES.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3].split(".")[0]))
    return str(packaged[-1]) if packaged else shutil.which(name)


def _account() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    known = {each.pw_name: each for each in pwd.getpwall()}
    return next(known[name] for name in ACCOUNTS if name in known)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
