"""The Python API: its methods called with what their signatures name, and with what nobody would."""

from __future__ import annotations

import inspect
from datetime import timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tests.faults.fuzz import values

from agent_checkpoint import AgentCheckpointError, Fence, StateStore

BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "scope": st.sampled_from(values.SCOPES),
    "lease_scope": st.sampled_from([None, *values.SCOPES]),
    "workflow": st.sampled_from(values.WORKFLOWS),
    "key": st.sampled_from(values.KEYS),
    "owner": st.sampled_from(values.OWNERS),
    "token": values.whole,
    "lease": st.one_of(
        st.none(),
        st.builds(Fence, st.sampled_from(values.SCOPES), st.sampled_from(values.OWNERS), values.whole),
        st.builds(Fence, values.anything, values.anything, values.anything),
    ),
    "ttl_seconds": values.numbers,
    # A wait has an end here.
    "wait_seconds": st.sampled_from([0, 0.001, -1, float("nan"), "1", None, True]),
    "data": values.documents,
    "metadata": st.dictionaries(values.odd_text, values.documents, max_size=3),
    "request": values.documents,
    "reason": values.odd_text,
    "by": values.odd_text,
    "done": values.documents,
    "value": values.documents,
    "before": st.datetimes(timezones=st.just(timezone.utc)),
    "after": values.cursors,
    "rule": st.sampled_from(["checkpoints.keep_last", "events.days", "holders", "langgraph.thread_days", "none"]),
    "lines": st.lists(st.one_of(values.json_texts, st.sampled_from(["{}", "[]"])), max_size=3),
}
FLAGS = ("include_expired", "reclaim", "rebind", "dry_run", "required", "retry")
METHODS = (
    *("acquire", "hold", "heartbeat", "release", "expire", "set_limit", "sweep", "wait_until_free", "check_lease"),
    *("check_scope", "get_lease", "list_leases", "force_release", "put_checkpoint", "get_checkpoint"),
    *("list_checkpoints", "checkpoint_history", "prune_checkpoints", "effect", "resolve_effect", "get_effect"),
    *("list_effects", "export_checkpoints", "import_checkpoints", "events", "archive_events", "retention"),
    *("set_retention", "apply_retention", "status", "doctor", "backup", "restore"),
)
# What is given as a callable is the program's own code, and a wait has to end here.
OWN_CODE = ("progress", "resolve", "on_lost", "pid", "self")
PATHS = ("to", "path")


class Call(NamedTuple):
    """One call of a store's method."""

    method: str
    options: dict[str, Any]


@cache
def _parameters(method: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(StateStore, method)).parameters.values())


def _value(parameter: inspect.Parameter) -> st.SearchStrategy[Any]:
    if parameter.name in PATHS:
        return st.sampled_from(values.FILES)
    if parameter.name == "wait_seconds":
        return BY_NAME["wait_seconds"]
    right = BY_NAME.get(parameter.name, st.booleans() if parameter.name in FLAGS else values.whole)
    # A rule's value may be a path, and must not be one that is made up.
    return right if parameter.name == "value" else st.one_of(right, right, right, values.anything)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """A method with all that it needs and some of what it may have."""
    method = draw(st.sampled_from(METHODS))
    options = {
        parameter.name: draw(_value(parameter))
        for parameter in _parameters(method)
        if parameter.name not in OWN_CODE
        and (parameter.default is parameter.empty or parameter.name == "wait_seconds" or draw(st.integers(0, 3)) == 0)
    }
    return Call(method, options)


def make(store: StateStore, call: Call) -> str | None:
    """Make the call, and use what it returns; what is wrong with how it failed, or None."""
    try:
        _use(getattr(store, call.method)(**call.options))
    except AgentCheckpointError as error:
        return None if type(error) is not AgentCheckpointError else f"an error of no kind: {error!r}"
    except Exception as error:
        return f"{type(error).__name__} is none of our errors: {error}"
    return None


def _use(answer: Any) -> None:
    if hasattr(answer, "__enter__"):
        with answer as entered:
            entered.check() if hasattr(entered, "check") else None
    elif hasattr(answer, "__next__"):
        list(answer)
    else:
        repr(answer)


def opened(folder: Path) -> StateStore:
    """The store of the folder; nothing of it is to survive a power cut."""
    return StateStore(folder / "agents.db", synchronous="normal", busy_timeout_seconds=2)
