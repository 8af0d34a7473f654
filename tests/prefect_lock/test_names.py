"""Names, keys and namespaces of any shape: what differs is never one lock."""

from __future__ import annotations

import hashlib
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agent_checkpoint.names import name as valid_name
from agent_checkpoint_prefect import FencedLock
from agent_checkpoint_prefect.names import scope_of_name, scope_of_record

from .conftest import Locks, elsewhere

SHAPES = {
    "plain": "orders",
    "slash": "a/b",
    "upwards": "../x",
    "upwards, resolved": "x",
    "suffix 1": "model.v1",
    "suffix 2": "model.v2",
    "no suffix": "model",
    "300": "k" * 300,
    "301": "k" * 301,
    "2,000": "k" * 2000,
    "2,000 and another end": "k" * 1999 + "j",
    "Cyrillic": "заказы",
    "Cyrillic, long": "заказы" * 200,
    "NUL": "a\0b",
    "no NUL": "ab",
    "newline": "a\nb",
    "lone surrogate": "a\ud800",
    "another surrogate": "a\udfff",
    "what surrogates are replaced with": "a?",
    "empty": "",
    "space": " ",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "upper case": "ORDERS",
    "the name that stands for a long one": "sha256:" + hashlib.sha256(b"k" * 2000).hexdigest(),
    "the name that stands for the empty one": "sha256:" + hashlib.sha256(b"").hexdigest(),
    "the scope of another": "prefect/default/orders",
}

# Anything that is a str: surrogates and control characters too.
TEXT = st.text(st.characters(exclude_categories=()), max_size=700)
NAMESPACE = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=64)


@pytest.mark.parametrize("name", SHAPES.values(), ids=SHAPES)
def test_a_name_of_any_shape_is_held_once(lock: FencedLock, name: str) -> None:
    with lock.lease(name) as lease:
        held = lock.inspect(name)
        assert held is not None
        assert held.token == lease.token
        assert lease.name == name
    assert lock.inspect(name) is None


@pytest.mark.parametrize("key", SHAPES.values(), ids=SHAPES)
def test_a_key_of_any_shape_is_locked_once(lock: FencedLock, key: str) -> None:
    assert lock.acquire_lock(key, "one", acquire_timeout=0)
    assert not lock.acquire_lock(key, "two", acquire_timeout=0)
    assert lock.is_locked(key)
    assert lock.is_lock_holder(key, "one")
    lock.release_lock(key, "one")
    assert not lock.is_locked(key)


def test_names_that_differ_are_all_held_at_once(lock: FencedLock) -> None:
    leases = {shape: elsewhere(lock.try_acquire, name) for shape, name in SHAPES.items()}
    assert [shape for shape, lease in leases.items() if lease is None] == []
    assert len(lock.list_leases()) == len(SHAPES)


def test_keys_that_differ_are_all_locked_at_once(lock: FencedLock) -> None:
    # Each by a holder of its own: the same one may have one key twice.
    locked = {shape: lock.acquire_lock(key, shape, acquire_timeout=0) for shape, key in SHAPES.items()}
    assert [shape for shape, granted in locked.items() if not granted] == []
    assert len(lock.list_leases()) == len(SHAPES)


def test_a_name_and_the_key_of_a_result_record_are_never_one_lock(lock: FencedLock) -> None:
    with lock.lease("orders"):
        assert not lock.is_locked("orders")
        assert lock.acquire_lock("orders", "holder", acquire_timeout=0)


def test_namespaces_are_never_one_lock(locks: Locks) -> None:
    namespaces = ["default", "a", "a b", "..", "заказы", "sha256:", "A"]
    leases = [locks(namespace=namespace).try_acquire("orders") for namespace in namespaces]
    assert all(leases)
    assert len({lease.scope for lease in leases if lease is not None}) == len(namespaces)


@pytest.mark.parametrize("namespace", ["", "a/b", "a\0", "a\n", "a\ud800", "n" * 65])
def test_a_namespace_that_could_be_part_of_a_name_is_refused(locks: Locks, namespace: str) -> None:
    with pytest.raises(ValidationError):
        locks(namespace=namespace)


@given(NAMESPACE, TEXT)
def test_any_text_makes_a_scope_that_core_takes(namespace: str, name: str) -> None:
    for scope_of in (scope_of_name, scope_of_record):
        scope = scope_of(namespace, name)
        assert valid_name("scope", scope) == scope


@given(st.lists(st.tuples(NAMESPACE, TEXT), unique=True, min_size=2, max_size=6))
def test_any_two_texts_make_two_scopes(asked: list[tuple[str, str]]) -> None:
    scopes = [scope_of(*each) for scope_of in (scope_of_name, scope_of_record) for each in asked]
    assert all(one != other for one, other in combinations(scopes, 2))
