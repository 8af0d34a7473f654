"""Metadata: no run fails for it, and what looks like a credential stays out of the file."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import pytest
from langgraph.checkpoint.base import EXCLUDED_METADATA_KEYS

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import WATCHDOG_SECONDS, Line, at, checkpoint, ids
from .graphs import chain, saying

SECRET = "s3cr3t-value"  # what must not be found


class Silent:
    """What nothing can be said about."""

    def __repr__(self) -> NoReturn:
        raise RuntimeError("no")


class Nameless(Silent):
    __str__ = Silent.__repr__
    __hash__ = object.__hash__


@dataclasses.dataclass
class Unlisted:
    """A type of the user's: it can be saved, and is on no allowlist."""

    number: int = 1


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    return value


def deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD: dict[str, Callable[[], Any]] = {
    "object": object,
    "silent object": Silent,
    "unlisted type": Unlisted,
    "set": lambda: {1, "a"},
    "set of objects": lambda: {object()},
    "bytes": lambda: b"\x00\xff",
    "uuid": lambda: UUID(int=7),
    "time": lambda: datetime(2030, 1, 1, tzinfo=timezone.utc),
    "path": lambda: Path("a"),
    "circular": circular,
    "deep": lambda: deep(5_000),
    "lambda": lambda: lambda: None,
    "type": lambda: Unlisted,
    "huge number": lambda: 2**70,
    "number that Python does not print": lambda: 10**5000,
    "numbers with it in a list of objects": lambda: [10**5000, object()],
    "half a surrogate pair": lambda: "\ud800",
    "half a surrogate pair in bad company": lambda: ["\ud800", object()],
    "NUL": lambda: "a\0b",
    "number as a key": lambda: {1: 2},
    "tuple as a key": lambda: {(1, 2): 3},
    "silent key": lambda: {Nameless(): 1},
    "exception": lambda: ValueError("x"),
    "generator": lambda: (number for number in range(3)),
}


@pytest.fixture(params=ODD.values(), ids=list(ODD))
def odd(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_what_json_cannot_hold_fails_no_save_and_no_later_look(saver: AgentCheckpointSaver, odd: Any) -> None:
    line = Line(saver)
    line.put({"n": 1}, odd=odd, user="ann")
    line.put({"n": 2}, user="ann")

    assert ids(saver.list(at(), filter={"user": "ann", "odd": None})) == ["id-0002"]
    assert ids(saver.list(None, filter={"user": "ann"})) == ["id-0002", "id-0001"]
    first = saver.get_tuple(at(checkpoint_id="id-0001"))
    assert first is not None
    assert first.metadata["step"] == 1
    assert "odd" in first.metadata


def test_what_json_cannot_hold_keeps_no_checkpoint_from_being_copied_or_pruned(
    saver: AgentCheckpointSaver, odd: Any
) -> None:
    line = Line(saver)
    for number in range(3):
        line.put({"n": number}, odd=odd)
    saver.copy_thread("thread-1", "copy")
    saver.prune(["copy"], strategy="keep_latest")

    assert ids(saver.list(at("copy"))) == ["id-0003"]


@pytest.mark.parametrize("key", ["run_id", "source", "step", "parents"])
def test_what_json_cannot_hold_may_stand_where_langgraph_has_its_own(
    saver: AgentCheckpointSaver, odd: Any, key: str
) -> None:
    Line(saver).put({"n": 1}, **{key: odd})

    assert ids(saver.list(at())) == ["id-0001"]


def test_a_key_may_be_of_any_type(saver: AgentCheckpointSaver) -> None:
    saver.put(at(), checkpoint("id-1", {}, "1.x"), {"step": 1, 5: "five"}, {})  # type: ignore[arg-type, misc]

    found = saver.get_tuple(at())
    assert found is not None
    assert "five" in found.metadata.values()


def test_what_refers_to_itself_many_times_is_no_endless_work(path: Path, unmeasured: None) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from agent_checkpoint_langgraph import AgentCheckpointSaver
value = []
value += [value] * 4 + [object()]
made = {{"v": 4, "id": "1", "ts": "t", "channel_values": {{}}, "channel_versions": {{}}, "versions_seen": {{}}}}
with AgentCheckpointSaver.from_conn_string({str(path)!r}) as saver:
    saver.put({{"configurable": {{"thread_id": "t", "checkpoint_ns": ""}}}}, made, {{"odd": value}}, {{}})
    print(saver.list_threads()[0].checkpoints)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WATCHDOG_SECONDS / 3, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_metadata_is_what_it_was_when_it_was_saved(saver: AgentCheckpointSaver) -> None:
    tags = ["early"]
    Line(saver).put({"n": 1}, tags=tags)
    tags.append("late")

    assert ids(saver.list(at(), filter={"tags": ["early"]})) == ["id-0001"]


def test_plain_metadata_comes_back_as_it_was(saver: AgentCheckpointSaver) -> None:
    plain = {"a": [1, 2.5, None, True, "ä🙂"], "b": {"c": {"d": []}}, "": 0}
    Line(saver).put({"n": 1}, **plain)

    found = saver.get_tuple(at())
    assert found is not None
    assert found.metadata == {"source": "loop", "step": 1, "parents": {}, **plain}


def test_a_run_with_odd_metadata_ends_and_can_be_gone_on_with(saver: AgentCheckpointSaver, odd: Any) -> None:
    graph = chain(saver, saying("one"))
    config = {"configurable": {"thread_id": "thread-1", "user": odd}, "metadata": {"odd": odd, "user": "ann"}}
    for _ in range(2):
        graph.invoke({"seen": ["start"]}, config)

    assert len(graph.get_state({"configurable": {"thread_id": "thread-1"}}).values["seen"]) == 4
    assert len(list(saver.list(None, filter={"user": "ann"}))) > 0


# Credentials


SECRET_KEYS = [
    *("openai_api_key", "api_key", "apiKey", "OPENAI_API_KEY", "x-api-key", "apikey", "ANTHROPIC_APIKEY"),
    *("password", "db_passwd", "client_secret", "clientSecret", "secret", "secret_key", "AWS_SECRET_ACCESS_KEY"),
    *("token", "access_token", "accessToken", "auth_token", "Authorization", "auth", "credentials", "private_key"),
]
HARMLESS_KEYS = [
    "max_tokens",
    "total_tokens",
    "author",
    "secretary",
    "tokenizer",
    "keyboard",
    "authority",
    "api",
    "key",
]


@pytest.fixture
def stored(saver: AgentCheckpointSaver, path: Path) -> Callable[[], bytes]:
    """All bytes of the file and of what lies beside it."""

    def read() -> bytes:
        saver.close()
        return b"".join(each.read_bytes() for each in sorted(path.parent.iterdir()) if each.is_file())

    return read


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_what_looks_like_a_credential_is_not_stored(
    saver: AgentCheckpointSaver, stored: Callable[[], bytes], key: str
) -> None:
    config = {"configurable": {"thread_id": "thread-1", key: SECRET}, "metadata": {f"other-{key}": SECRET}}
    chain(saver, saying("one")).invoke({"seen": ["start"]}, config)
    Line(saver, "thread-2").put({"n": 1}, **{key: SECRET})

    assert SECRET.encode() not in stored()


@pytest.mark.parametrize("key", HARMLESS_KEYS)
def test_what_only_resembles_one_is_stored(saver: AgentCheckpointSaver, key: str) -> None:
    Line(saver).put({"n": 1}, **{key: "kept"})

    assert ids(saver.list(at(), filter={key: "kept"})) == ["id-0001"]


def test_a_key_that_begins_with_two_underscores_is_not_stored(
    saver: AgentCheckpointSaver, stored: Callable[[], bytes]
) -> None:
    config = {"configurable": {"thread_id": "thread-1", "__mine": SECRET}}
    chain(saver, saying("one")).invoke({"seen": ["start"]}, config)

    assert SECRET.encode() not in stored()


@pytest.mark.parametrize("deny", [["mine"], lambda key: key == "mine", {"mine": 1}], ids=["names", "function", "dict"])
def test_what_is_denied_is_said_by_names_or_by_a_function(path: Path, deny: Any) -> None:
    with AgentCheckpointSaver.from_conn_string(path, metadata_deny=deny) as saver:
        Line(saver).put({"n": 1}, mine=1, api_key=2)
        found = saver.get_tuple(at())

    assert found is not None
    assert "mine" not in found.metadata
    assert found.metadata["api_key"] == 2  # type: ignore[typeddict-item]


def test_what_langgraph_needs_cannot_be_denied(path: Path) -> None:
    with AgentCheckpointSaver.from_conn_string(path, metadata_deny=lambda key: True) as saver:
        Line(saver).put({"n": 1}, user="ann")
        found = saver.get_tuple(at())

    assert found is not None
    assert found.metadata == {"source": "loop", "step": 1, "parents": {}}


def test_the_address_of_a_checkpoint_is_not_repeated_in_its_metadata(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    line.put_many(2)
    found = saver.get_tuple(at())

    assert found is not None
    assert not EXCLUDED_METADATA_KEYS & set(found.metadata)
