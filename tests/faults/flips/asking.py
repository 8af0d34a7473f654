"""Everything that a store can be asked, and the answers in a form that can be compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.flips.rich import EFFECTS, LIMITED, SCOPES, WORKFLOWS, open_at

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main
from agent_checkpoint.errors import AgentCheckpointError

Answers = dict[str, str]
"""By question: a hash of the answer, ``!status class`` for an error, ``crash …`` for what must never be."""

STORAGE = 74
MISSING = 66
EVENT_PAGE = 97
DOCTOR = "doctor"
# What the command is asked: what does not depend on its own clock.
COMMANDS = (
    ("checkpoint", "list"),
    ("checkpoint", "get", WORKFLOWS[1]),
    ("checkpoint", "history", WORKFLOWS[2]),
    ("effect", "list"),
    ("events", "--limit", "40"),
)


def ask(path: Path, thoroughly: bool) -> Answers:
    """Ask everything of the store at the path, what takes long only ``thoroughly``; it is written to at the end."""
    answers: Answers = {}
    store = open_at(path)
    with contextlib.closing(store):
        for name, question in _questions(store):
            answers[name] = _answer(question)
        if thoroughly:
            answers[DOCTOR] = _answer(lambda: [each.check for each in store.doctor() if each.verdict == "broken"])
            answers["backup"] = _answer(lambda: store.backup(path.with_name("backup.db")) and None)
            for words in COMMANDS:
                answers[" ".join(words)] = _command([*words, "--db", str(path)])
        for name, change in _changes(store):
            answers[name] = _answer(change)
    return answers


def _questions(store: StateStore) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "status", lambda: _without_path(store.status())
    yield "leases", lambda: store.list_leases(include_expired=True)
    yield "live leases", store.list_leases
    for scope in [*SCOPES, LIMITED]:
        yield f"lease {scope}", lambda scope=scope: store.get_lease(scope, True)
    for scope in [*SCOPES[:8], LIMITED]:
        yield f"check {scope}", lambda scope=scope: store.check_lease(scope, "keeper", 4)
        yield f"guard {scope}", lambda scope=scope: store.check_scope(scope)
    yield "checkpoints", store.list_checkpoints
    for workflow in WORKFLOWS:
        yield f"latest {workflow}", lambda workflow=workflow: store.get_checkpoint(workflow)
        yield f"history {workflow}", lambda workflow=workflow: store.checkpoint_history(workflow)
        for sequence in range(1, 5):
            yield (
                f"checkpoint {workflow} {sequence}",
                lambda workflow=workflow, sequence=sequence: store.get_checkpoint(workflow, sequence=sequence),
            )
    yield "effects", store.list_effects
    for key in EFFECTS:
        yield f"effect {key}", lambda key=key: store.get_effect(key)
    yield "log", lambda: _log(store)
    yield "end of the log", lambda: store.events(20)
    yield "log of a scope", lambda: store.events(50, scope=SCOPES[1])
    yield "log of a workflow", lambda: store.events(50, workflow=WORKFLOWS[2], after="start")
    yield "log of a kind", lambda: store.events(50, kind="write.refused")
    yield "retention", store.retention
    yield "export", lambda: _without_hashes(store.export_checkpoints())


def _changes(store: StateStore) -> Iterator[tuple[str, Callable[[], object]]]:
    for scope in [*SCOPES, LIMITED, "never/asked"]:
        yield f"acquire {scope}", lambda scope=scope: store.acquire(scope, "asker", 60)
    for workflow in WORKFLOWS:
        yield f"put {workflow}", lambda workflow=workflow: store.put_checkpoint(workflow, 1, rebind=True).sequence


def _log(store: StateStore) -> list[Any]:
    """The whole log, page by page."""
    found, cursor = [], "start"
    while page := store.events(EVENT_PAGE, after=cursor):
        found += page
        cursor = page[-1].cursor
    return found


def _without_hashes(lines: Iterator[str]) -> list[Any]:
    """What is exported: the hashes begin with the path of the store."""
    return [{**json.loads(line), "sha256": "", "store": ""} for line in lines]


def _without_path(status: Any) -> Any:
    return status._replace(database="")


def _answer(question: Callable[[], object]) -> str:
    try:
        value = question()
        return _hash(json.dumps(_plain(value), sort_keys=True))
    except AgentCheckpointError as error:
        if error.exit_status == STORAGE or (error.exit_status == MISSING and "database" in error.facts):
            return f"!{error.exit_status} {type(error).__name__}"
        return _hash(f"{error.code} {sorted(error.facts.items(), key=repr)}")
    except Exception as error:
        return f"crash {type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """A value of ours as JSON has it."""
    if hasattr(value, "asdict"):
        return _plain(value.asdict())
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _command(words: list[str]) -> str:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
    except BaseException as error:
        return f"crash {type(error).__name__}: {error}"
    if status in (STORAGE, MISSING) and not out.getvalue():
        return f"!{status}"
    if "Traceback" in err.getvalue() or status == 1:
        return f"crash {status}: {err.getvalue()[-200:]}"
    return _hash(f"{status} {out.getvalue()}")
