"""The stores that this process has open: one for each place, shared by all blocks that name it."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any, Literal

from agent_checkpoint import StateStore
from agent_checkpoint.aio import AsyncStateStore

Key = tuple[str, str]

_stores: dict[Key, StateStore] = {}
# By the names that were asked for: to follow a path through its links takes as long as a commit.
_named: dict[Key, StateStore] = {}
_awaited: dict[int, AsyncStateStore] = {}
_lock = Lock()


def store_at(place: str, synchronous: Literal["full", "normal"]) -> StateStore:
    """The store at a path or URL; created on first use."""
    is_url = "://" in place
    named = (place if is_url or os.path.isabs(place) else os.path.abspath(place), synchronous)
    store = _named.get(named)
    if store is not None:
        return store
    key = (place if is_url else os.path.realpath(place), synchronous)
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = StateStore(place, synchronous=synchronous)
            store.initialize()
            _stores[key] = store
        _named[named] = store
        return store


def awaited(store: StateStore) -> AsyncStateStore:
    """The awaited door to one of these stores."""
    with _lock:
        door = _awaited.get(id(store))
        if door is None:
            door = _awaited[id(store)] = AsyncStateStore.of(store)
        return door


def blocking(hold: Any) -> Any:
    """The hold that sync code leaves: itself, or the one inside of that of ``async with``."""
    return getattr(hold, "_hold", hold)


def _begin_in_child() -> None:
    global _lock
    _lock = Lock()


os.register_at_fork(after_in_child=_begin_in_child)
