"""A folder with a store that has something of everything, made once and copied for each example."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_checkpoint import AgentCheckpointError, StateStore

Rows = dict[str, list[tuple[Any, ...]]]


@lru_cache(maxsize=1)
def _model() -> dict[str, bytes]:
    """The files of the folder, by name."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with StateStore(place / "agents.db", synchronous="normal") as store:
            store.initialize()
            _fill(store)
            store.archive_events(datetime.now(timezone.utc), place / "archive.jsonl")
            (place / "export.jsonl").write_text("".join(f"{line}\n" for line in store.export_checkpoints()))
            for scope in ("release", "slots"):
                store.acquire(scope, "worker-a", ttl_seconds=3600)
            store.backup(place / "copy.db")
        (place / "text.txt").write_bytes(b"no store, and no JSON \xff\n" * 100)
        return {each.name: each.read_bytes() for each in place.iterdir() if each.is_file()}


def _fill(store: StateStore) -> None:
    store.acquire("slots", "worker-a", limit=3)
    lease = store.acquire("release", "worker-a")
    for number in range(3):
        store.put_checkpoint("deploy-v2", {"number": number}, lease=lease)
        store.put_checkpoint("open", number)
    for key, tell in (("done", lambda effect: effect.done(1)), ("failed", lambda effect: effect.failed())):
        with store.effect(key, lease=lease) as effect:
            tell(effect)
    with suppress(ZeroDivisionError), store.effect("unknown", lease=lease):
        raise ZeroDivisionError
    for scope in ("release", "slots"):
        store.force_release(scope, reason="another try")
    with suppress(AgentCheckpointError):
        store.put_checkpoint("deploy-v2", {"late": True}, lease=lease)


@contextmanager
def place(root: Path) -> Iterator[Path]:
    """The folder as it was made, as the current one."""
    folder = Path(tempfile.mkdtemp(dir=root))
    for name, content in _model().items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("agents.db")
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def rows(path: Path) -> Rows:
    """Every row of every table."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in sorted(names)}


def unsound(path: Path) -> list[str]:
    """What is wrong with a store that only commands and calls have touched."""
    found = []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        if (said := connection.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
            found.append(f"integrity: {said}")
        tokens = connection.execute(
            "SELECT scope, token FROM events WHERE kind IN ('lease.acquired', 'lease.reclaimed') ORDER BY id"
        ).fetchall()
        sequences = connection.execute("SELECT workflow, sequence FROM checkpoints ORDER BY id").fetchall()
        saved = connection.execute(
            "SELECT workflow, sequence FROM events WHERE kind = 'checkpoint.saved' ORDER BY id"
        ).fetchall()
    found += [
        f"{what}: {pairs} do not grow" for what, pairs in (("tokens", tokens), ("events", saved)) if not _grow(pairs)
    ]
    if not _grow(sequences):
        found.append(f"sequences: {sequences} do not grow")
    return found


def _grow(pairs: list[tuple[str, int]]) -> bool:
    last: dict[str, int] = {}
    for name, number in pairs:
        if number <= last.get(name, 0):
            return False
        last[name] = number
    return True
