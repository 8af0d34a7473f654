"""A difference is a JSON patch: applied to the old value it gives the new one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_checkpoint.diff import difference

KEYS = st.text(max_size=3) | st.sampled_from(["a", "b", "", "/", "~", "~1", "a/b", "m~n", "0", "1", "-"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, -1, 0.0, 1.0, -0.0, 1e308])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def as_json(value: Any) -> str:
    """The text of a value: true is not 1, 1 is not 1.0, and the order of keys means nothing."""
    return json.dumps(value, sort_keys=True)


def applied(value: Any, operations: list[dict[str, Any]]) -> Any:
    """A value after a JSON patch (RFC 6902), each ``old`` checked on the way."""
    root = {"": copy.deepcopy(value)}
    for operation in operations:
        parent, key = _place(root, operation["path"])
        if operation["op"] == "add":
            assert operation.keys() == {"op", "path", "new"}
            if isinstance(parent, list):
                parent.insert(int(key), operation["new"])
            else:
                assert key not in parent
                parent[key] = operation["new"]
            continue
        place = int(key) if isinstance(parent, list) else key
        assert as_json(parent[place]) == as_json(operation["old"])
        if operation["op"] == "remove":
            assert operation.keys() == {"op", "path", "old"}
            del parent[place]
        else:
            assert operation["op"] == "replace"
            assert operation.keys() == {"op", "path", "old", "new"}
            parent[place] = operation["new"]
    return root[""]


def _place(root: dict[str, Any], path: str) -> tuple[Any, str]:
    """The container that an RFC 6901 pointer ends in, and the last key."""
    *before, last = ["", *(part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])]
    parent: Any = root
    for part in before:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    return parent, last


@given(VALUES, VALUES)
def test_the_operations_applied_to_the_old_value_give_the_new_one(old: Any, new: Any) -> None:
    operations = list(difference(old, new))

    assert as_json(applied(old, operations)) == as_json(new)


@given(VALUES, VALUES)
def test_a_change_deep_inside_touches_nothing_beside_it(old: Any, new: Any) -> None:
    whole = {"beside": [1, {"x": None}], "deep": [0, {"inside": old}]}
    changed = {"beside": [1, {"x": None}], "deep": [0, {"inside": new}]}

    paths = [operation["path"] for operation in difference(whole, changed)]

    assert all(path == "/deep/1/inside" or path.startswith("/deep/1/inside/") for path in paths)


@given(VALUES)
def test_a_value_does_not_differ_from_its_copy(value: Any) -> None:
    assert list(difference(value, json.loads(json.dumps(value)))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [(True, 1), (1, True), (False, 0), (1, 1.0), (0.0, -0.0), (None, False), ("1", 1), ([], {}), ("", None)],
)
def test_values_that_python_takes_for_alike_differ_when_their_json_does(old: Any, new: Any) -> None:
    assert list(difference({"a": old}, {"a": new})) == [{"op": "replace", "path": "/a", "old": old, "new": new}]


def test_the_order_of_keys_is_no_difference() -> None:
    assert list(difference({"a": 1, "b": [{"c": 1, "d": 2}]}, {"b": [{"d": 2, "c": 1}], "a": 1})) == []


@pytest.mark.parametrize(
    ("key", "path"),
    [("a/b", "/a~1b"), ("m~n", "/m~0n"), ("~1", "/~01"), ("", "/"), (" ", "/ "), ('"', '/"'), ("é", "/é")],
)
def test_keys_are_escaped_as_rfc_6901_says(key: str, path: str) -> None:
    assert list(difference({}, {key: 1})) == [{"op": "add", "path": path, "new": 1}]


def test_the_whole_value_has_the_empty_path() -> None:
    assert list(difference(1, [1])) == [{"op": "replace", "path": "", "old": 1, "new": [1]}]


def test_surplus_parts_of_an_array_go_from_its_end() -> None:
    assert list(difference([1, 2, 3, 4], [1, 5])) == [
        {"op": "replace", "path": "/1", "old": 2, "new": 5},
        {"op": "remove", "path": "/3", "old": 4},
        {"op": "remove", "path": "/2", "old": 3},
    ]


def test_new_parts_of_an_array_come_in_order() -> None:
    assert list(difference([1], [1, 2, 3])) == [
        {"op": "add", "path": "/1", "new": 2},
        {"op": "add", "path": "/2", "new": 3},
    ]


def test_a_difference_at_the_deepest_level_is_found() -> None:
    old, new = json.loads("[" * 199 + "1" + "]" * 199), json.loads("[" * 199 + "2" + "]" * 199)

    assert list(difference(old, new)) == [{"op": "replace", "path": "/0" * 199, "old": 1, "new": 2}]
