"""Values that people, programs and accidents hand to a store: good ones, near misses, and nonsense."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

SCOPES = ("release", "slots", "free")
WORKFLOWS = ("deploy-v2", "open", "new")
KEYS = ("done", "unknown", "failed", "new")
OWNERS = ("worker-a", "worker-b")
# Files in the folder of each run; what is no store, what is not there, what is no file.
FILES = ("agents.db", "copy.db", "archive.jsonl", "export.jsonl", "text.txt", "missing", "folder", "link", "", "a\nb")

# No slash: a file that is made up must not be somewhere else.
text = st.text(st.characters(exclude_characters="/\0"), max_size=40)
# Bytes of an argument that are not UTF-8 arrive as lone surrogates.
odd_text = st.one_of(
    text,
    st.sampled_from(["", " ", "-", "--", "-x", "é" * 300, "x" * 513, "a\tb", "\x1b[31m", "\udcff", "０", "null", "@x"]),
)
names = st.one_of(st.sampled_from(SCOPES + WORKFLOWS + KEYS + OWNERS), odd_text)

whole = st.one_of(
    st.integers(-2, 4), st.sampled_from([10_000, 10_001, 2**31, 2**63 - 1, 2**63, 10**40, -(10**30)]), st.integers()
)
real = st.one_of(
    st.floats(), st.sampled_from([0.1, 0.099, 60.0, 2_592_000.0, 2_592_001.0, 1e-300, float("nan"), float("inf"), -1.0])
)
numbers = st.one_of(whole, real)
odd_numbers = st.sampled_from(["", "x", "1e9999", "0x10", "1_000", " 1", "1.0", "nan", "forever", "-0", "+1", "١"])

# JSON as Python has it: now and then what JSON has no word for.
scalars = st.one_of(st.none(), st.booleans(), whole, real, odd_text)
documents = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(odd_text, whole), inner, max_size=4)
    ),
    max_leaves=12,
)
json_texts = st.one_of(
    documents.map(lambda value: json.dumps(value, default=str)),
    st.sampled_from(["{", "[1,]", "{'a': 1}", "NaN", "[" * 300 + "]" * 300, '{"a": 1, "a": 2}', "1 2", "\ufeff1", ""]),
    odd_text,
)

times = st.sampled_from(
    [
        "2000-01-01",
        "2100-01-01",
        "2031-05-04T10:20Z",
        "2031-13-01",
        "yesterday",
        "9999-12-31T23:59:59+14:00",
        "0001-01-01",
    ]
)
cursors = st.one_of(
    st.sampled_from(["start", "0-0-1", "0-0-0", "0-0-99999999999999999999", "0-1-1", "1-0-1"]), odd_text
)


class Odd:
    """An object that is nothing in particular."""


# What a program may hand over by mistake, whatever was asked for.
wrong = st.one_of(
    st.none(),
    st.booleans(),
    st.binary(max_size=8),
    st.builds(Odd),
    st.just(Decimal("1.5")),
    st.just(datetime(2031, 5, 4)),
    st.just(datetime(2031, 5, 4, tzinfo=timezone.utc)),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(text, st.integers(), max_size=2),
    st.complex_numbers(),
)
anything: st.SearchStrategy[Any] = st.one_of(names, numbers, documents, wrong)
