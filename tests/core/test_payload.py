"""JSON in and out: what is taken comes back as it went in, the rest is refused by name and path."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_checkpoint import InvalidInputError, StateStore, payload

LARGEST = 10**4000 - 1
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-LARGEST, max_value=LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.characters(categories=["Cs"])
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


def same(one: Any, other: Any) -> bool:
    """Equal and of equal types, all the way down; -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


@given(values)
def test_any_json_value_comes_back_as_it_went_in(value: Any) -> None:
    stored = payload.encode("data", value)
    assert stored.isascii()
    assert same(payload.decode(stored), value)
    assert same(payload.parse("data", stored), value)


@settings(max_examples=25)
@given(value=values)
def test_any_json_value_survives_the_store(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with StateStore(tmp_path_factory.mktemp("payload") / "agents.db", synchronous="normal") as store:
        store.initialize()
        store.put_checkpoint("w", value)
        found = store.get_checkpoint("w")
    assert found is not None
    assert same(found.data, value)


@pytest.mark.parametrize(
    "value", ["\u0000", "é日本\U0001f600", LARGEST, -LARGEST, 1e308, 5e-324, -0.0, "\ud800", {"": []}, [[]] * 3, None]
)
def test_the_corners_come_back_as_they_went_in(store: StateStore, value: Any) -> None:
    store.put_checkpoint("w", value)
    found = store.get_checkpoint("w")
    assert found is not None
    assert same(found.data, value)


def nested(depth: int) -> Any:
    value: Any = "deep"
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (float("nan"), None),
        (float("inf"), None),
        ({"a": [0, {"b": -math.inf}]}, "/a/1/b"),
        ({"a~/b": {1: 2}}, "/a~0~1b/1"),
        ([1, LARGEST + 1], "/1"),
        ({"s": {1, 2}}, "/s"),
        ([b"bytes"], "/0"),
        (object(), None),
        (nested(201), "/k/0"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(value: Any, path: str | None) -> None:
    with pytest.raises(InvalidInputError) as refused:
        payload.encode("data", value)
    assert refused.value.field == "data"
    assert (refused.value.facts.get("path") or "").startswith(path or "")


def test_depth_200_is_taken() -> None:
    assert same(payload.decode(payload.encode("data", nested(200))), nested(200))


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidInputError):
        payload.encode("data", loop)


def test_a_subclass_that_would_come_back_as_another_type_is_refused() -> None:
    import enum

    class Colour(str, enum.Enum):
        RED = "red"

    with pytest.raises(InvalidInputError):
        payload.encode("data", {"colour": Colour.RED})


def test_tuples_are_taken_as_arrays() -> None:
    assert payload.decode(payload.encode("data", {"t": (1, (2,))})) == {"t": [1, [2]]}


def test_the_limit_is_of_encoded_bytes() -> None:
    assert payload.encode("data", "x" * 98, max_bytes=100)
    with pytest.raises(InvalidInputError) as refused:
        payload.encode("data", "é" * 17, max_bytes=100)
    assert "104" in str(refused.value)


def test_the_limit_of_a_store_can_be_set(tmp_path: Any) -> None:
    with StateStore(tmp_path / "agents.db", max_payload_bytes=10) as store:
        store.initialize()
        store.put_checkpoint("w", "x" * 8)
        with pytest.raises(InvalidInputError):
            store.put_checkpoint("w", "x" * 9)


def test_a_checkpoint_at_the_end_of_an_effect_has_the_store_s_limit_too(tmp_path: Any) -> None:
    with StateStore(tmp_path / "agents.db", max_payload_bytes=10) as store:
        store.initialize()
        lease = store.acquire("release", "worker-a", 30)
        with store.effect("publish", lease=lease) as effect:
            with pytest.raises(InvalidInputError, match="at most 10"):
                effect.done(7, workflow="deploy", data="12345678901")
            assert effect.done(7, workflow="deploy", data="12345678") is not None  # nothing was told yet


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "nul", "NaN", "[Infinity]", "-Infinity", "1e999", '{"a": -1e999}', "\ufeff{}", '{"a":1,"a":2}'),
        *('[{"a":1,"b":{"c":1,"c":1}}]', "[" * 10_000, '{"a":' * 10_000, "1" * 4001, "-" + "1" * 4001, "'single'"),
        *(b"\xff\xfe", b"\xef\xbb\xbf{}", "{} {}", "01", "1_000", "\uff11"),
    ],
)
def test_text_that_would_not_come_back_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidInputError) as refused:
        payload.parse("data", text)
    assert refused.value.field == "data"


@given(st.text() | st.binary())
def test_any_text_is_json_or_invalid_input(text: str | bytes) -> None:
    try:
        value = payload.parse("data", text)
    except InvalidInputError:
        return
    assert same(value, json.loads(text))
