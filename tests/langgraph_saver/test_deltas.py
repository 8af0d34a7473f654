"""Differences between serialised values: what they make of the older value is the newer one, to the byte."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_checkpoint_langgraph.deltas import HUNK, WINDOWS, difference, restored

# Of few letters, so that equal parts are found and mistaken.
TEXT = st.text("ab\0", max_size=200).map(str.encode)
BYTES = st.one_of(TEXT, st.binary(max_size=200))
EDIT = st.tuples(st.floats(0, 1), st.floats(0, 1), BYTES)


def edited(value: bytes, edit: tuple[float, float, bytes]) -> bytes:
    """The value with a part of it replaced."""
    start, end = sorted(round(place * len(value)) for place in edit[:2])
    return value[:start] + edit[2] + value[end:]


def chained(states: list[bytes]) -> list[bytes]:
    """The states as they come back from a store that keeps differences wherever there is one."""
    full, differences, found = states[0], list[bytes](), [states[0]]
    for older, newer in pairwise(states):
        step = difference(older, newer)
        full, differences = (newer, []) if step is None else (full, [step, *differences])
        found.append(restored(full, differences))
    return found


@given(BYTES, BYTES)
def test_a_difference_makes_the_newer_of_the_older(old: bytes, new: bytes) -> None:
    step = difference(old, new)

    assert step is None or restored(old, [step]) == new
    assert step is None or len(step) <= len(new) + 4 + HUNK.size


@given(st.binary(max_size=2000), st.lists(EDIT, max_size=8))
def test_a_chain_of_edits_gives_back_each_state(value: bytes, edits: list[tuple[float, float, bytes]]) -> None:
    states = [value]
    for edit in edits:
        states.append(edited(states[-1], edit))

    assert chained(states) == states


@given(st.lists(st.lists(st.text(max_size=30), max_size=12), min_size=1, max_size=6))
def test_serialised_lists_of_every_kind_are_given_back(lists: list[list[str]]) -> None:
    states = [ormsgpack.packb(each) for each in lists]

    assert chained(states) == states


@given(st.integers(0, 2**32), st.integers(2, 30))
def test_a_list_that_grows_and_is_trimmed_is_given_back(seed: int, steps: int) -> None:
    random = Random(seed)
    items: list[Any] = []
    states = []
    for _ in range(steps):
        items = items[random.choice([0, 0, 0, 1, 5]) :]
        items = [*items, {"text": random.randbytes(random.choice([1, 50, 300])), "n": len(items)}]
        states.append(ormsgpack.packb(items))

    assert chained(states) == states


def test_no_difference_leaves_the_full_copy() -> None:
    assert restored(b"full", []) == b"full"


@pytest.mark.parametrize("kind", ["append", "prepend", "insert", "remove", "replace"])
def test_a_small_change_of_a_large_value_costs_little(kind: str) -> None:
    old, part = Random(1).randbytes(500_000), b"part" * 100
    middle = len(old) // 2
    new = {
        "append": old + part,
        "prepend": part + old,
        "insert": old[:middle] + part + old[middle:],
        "remove": old[:middle] + old[middle + 400 :],
        "replace": old[:middle] + part + old[middle + len(part) :],
    }[kind]

    step = difference(old, new)
    assert step is not None
    assert restored(old, [step]) == new
    assert len(step) < len(part) + 200


@pytest.mark.parametrize("count", [15, 16, 65_535, 65_536])
def test_a_list_whose_length_takes_more_bytes_than_before_costs_its_growth(count: int) -> None:
    old, new = (ormsgpack.packb(list(range(1000, 1000 + size))) for size in (count, count + 1))

    step = difference(old, new)
    assert step is not None
    assert restored(old, [step]) == new
    assert len(step) < 100


def test_what_differs_for_longer_than_is_looked_ahead_is_given_back() -> None:
    random = Random(2)
    old = random.randbytes(3 * WINDOWS[-1])
    new = old[:1000] + random.randbytes(WINDOWS[-1] + 500) + old[1000:]

    step = difference(old, new)
    assert step is None or restored(old, [step]) == new


def test_many_changes_are_another_value() -> None:
    old = bytes(4000)
    new = b"".join(b"x" + bytes(9) for _ in range(400))

    step = difference(old, new)
    assert step is None or restored(old, [step]) == new


def test_what_has_nothing_in_common_is_another_value() -> None:
    random = Random(3)

    assert difference(random.randbytes(1000), random.randbytes(1000)) is None
    assert difference(b"", random.randbytes(1000)) is None


def test_an_empty_value_is_another_value() -> None:
    assert difference(b"abc", b"") is None
    assert difference(b"", b"") is None


def test_a_long_chain_is_given_back() -> None:
    random = Random(4)
    states = [random.randbytes(200)]
    for _ in range(400):
        states.append(states[-1] + random.randbytes(20))

    assert chained(states) == states
