"""A checkpoint that was stored in one piece: its pieces load as what it was, and no object is made on the way."""

from __future__ import annotations

import base64
import json
import sys
import types
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph import AgentCheckpointSaver, StrictSerializer
from agent_checkpoint_langgraph.importer import import_threads
from agent_checkpoint_langgraph.pieces import Cutter

from .conftest import Line, at, checkpoint, raised, rows, values
from .old_files import assert_same, encrypting, relabelled, stock

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text("abc\0é"), inner, max_size=20),
    max_leaves=40,
)
OBJECTS: list[Any] = [
    HumanMessage("hello", id="m"),
    Send("node", {"a": 1}),
    UUID(int=7),
    datetime(2030, 1, 1, tzinfo=timezone.utc),
    {1, 2},
    (1, [2]),
    {1: "a", 2.5: "b", (1, 2): "c"},
    "x" * 70_000,
    b"y" * 70_000,
    list(range(70_000)),
    {str(number): number for number in range(70_000)},
]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old.sqlite"


def assert_cut_like_alone(value: Any) -> None:
    """The piece of a channel is what the serializer makes of its value alone; the body is the rest."""
    serde = JsonPlusSerializer()
    whole = checkpoint("id-1", {"a": value, "b": 1}, "7", pending_sends=[Send("node", value)])
    found = Cutter(serde).pieces(*serde.dumps_typed(whole))

    assert found.values == {"a": serde.dumps_typed(value), "b": serde.dumps_typed(1)}
    assert found.versions == {"a": "7", "b": "7"}
    assert found.format == 4
    del whole["channel_values"]
    assert found.body == serde.dumps_typed(whole)


@given(VALUES)
def test_the_piece_of_a_channel_is_its_value_serialised_alone(value: Any) -> None:
    assert_cut_like_alone(value)


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_so_is_that_of_an_object_or_of_something_large(value: Any) -> None:
    assert_cut_like_alone(value)


def test_a_dictionary_of_more_than_fifteen_entries_is_cut_too() -> None:
    serde = JsonPlusSerializer()
    whole = checkpoint("id-1", {"a": 1}, "1", **{f"extra_{number}": number for number in range(20)})
    found = Cutter(serde).pieces(*serde.dumps_typed(whole))

    del whole["channel_values"]
    assert serde.loads_typed(found.body) == whole


def test_a_value_as_deep_as_the_serializer_allows_is_cut() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert_cut_like_alone(deep)


@dataclass
class Owned:
    """In a module that the test takes away."""

    name: str
    parts: list[str] = field(default_factory=list)


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("vanishing_module")
    module.Owned = Owned  # type: ignore[attr-defined]
    monkeypatch.setattr(Owned, "__module__", "vanishing_module")
    monkeypatch.setitem(sys.modules, "vanishing_module", module)
    return module


def test_an_import_needs_none_of_the_classes_in_the_state(
    old: Path, saver: AgentCheckpointSaver, vanishing: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        line.put({"owned": Owned("first", ["a"])})
        theirs.put_writes(line.head, [("owned", Owned("second"))], "task")
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "vanishing_module")
        import_threads(saver, old)
        assert "vanishing_module" not in sys.modules

    raised(InvalidInputError, lambda: saver.get_tuple(at()))
    trusting = saver.with_allowlist([("vanishing_module", "Owned")])
    found = trusting.get_tuple(at())
    assert values(found) == {"owned": Owned("first", ["a"])}
    assert found is not None
    assert found.pending_writes == [("task", "owned", Owned("second"))]


def test_a_checkpoint_of_the_json_days_is_taken_apart(old: Path, saver: AgentCheckpointSaver, path: Path) -> None:
    message = {"lc": 2, "type": "constructor", "id": ["uuid", "UUID"], "kwargs": {"hex": "0" * 31 + "7"}}
    with stock(old) as theirs:
        line = Line(theirs)
        for number in range(2):
            line.put({"n": number}, checkpoint_id=f"id-{number}")
            whole = checkpoint(f"id-{number}", {"stays": ["s"], "n": number, "odd": message, "é": "\ud800"}, "1", v=1)
            relabelled(old, "json", json.dumps(whole).encode(), "thread-1", f"id-{number}")
    import_threads(saver, old)

    assert rows(path, "SELECT COUNT(*) FROM langgraph_values WHERE channel = 'stays'") == [(1,)]
    assert_same(old, saver)


# Serializers


def test_an_encrypted_file_stays_encrypted_and_a_value_that_stays_is_stored_once(old: Path, path: Path) -> None:
    with stock(old, encrypting()) as theirs:
        line = Line(theirs)
        first = line.put({"secret": "the word", "n": 0})
        second = checkpoint("id-2", {"secret": "the word", "n": 1}, "9")
        second["channel_versions"]["secret"] = theirs.get_tuple(first).checkpoint["channel_versions"]["secret"]  # type: ignore[union-attr]
        config = theirs.put(first, second, {"step": 2}, {"n": "9"})
        theirs.put_writes(config, [("secret", "the word")], "task")
    with AgentCheckpointSaver.from_conn_string(path, serde=encrypting()) as saver:
        import_threads(saver, old)
        import_threads(saver, old)
        assert_same(old, saver, encrypting())
        assert {kind for (kind,) in rows(path, "SELECT kind FROM langgraph_values")} == {"msgpack+xor"}
        assert rows(path, "SELECT COUNT(*) FROM langgraph_values WHERE channel = 'secret'") == [(1,)]


def test_a_plain_file_is_encrypted_on_its_way_into_an_encrypting_saver(old: Path, path: Path) -> None:
    with stock(old) as theirs:
        line = Line(theirs)
        line.put({"secret": "the word", "none": None})
        theirs.put_writes(line.head, [("secret", "the word")], "task")
    with AgentCheckpointSaver.from_conn_string(path, serde=encrypting()) as saver:
        import_threads(saver, old)
        assert_same(old, saver)
    everywhere = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    assert b"thread-1" in everywhere
    assert b"the word" not in everywhere


class Base64Serializer:
    """Somebody's own: JSON in base 64."""

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        return "base64", base64.b64encode(json.dumps(obj).encode())

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        assert data[0] == "base64"
        return json.loads(base64.b64decode(data[1]))


def test_what_somebodys_own_serializer_wrote_is_taken_apart_by_it(old: Path, path: Path) -> None:
    with stock(old, Base64Serializer()) as theirs:
        line = Line(theirs)
        line.put({"n": 1, "none": None})
        theirs.put_writes(line.head, [("n", [1])], "task")
    with AgentCheckpointSaver.from_conn_string(path, serde=Base64Serializer()) as saver:
        import_threads(saver, old)
        assert_same(old, saver, Base64Serializer())


def test_a_strict_serializer_takes_apart_what_it_would_not_load() -> None:
    checkpoint = {"v": 4, "channel_versions": {"a": 1}, "channel_values": {"a": Owned("x")}}
    kind, data = JsonPlusSerializer().dumps_typed(checkpoint)

    assert Cutter(StrictSerializer()).pieces(kind, data).values["a"][0] == "msgpack"
