"""Noticing that this process is a forked child, in which the parent's handles must not be used."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

generation = 0
"""How many forks lie between this process and the one that imported the module."""

_forgetting: list[Callable[[], None]] = []


def in_child(forget: Callable[[], None]) -> None:
    """Call ``forget`` in every forked child, before anything else runs there."""
    _forgetting.append(forget)


def _forked() -> None:
    global generation
    generation += 1
    for forget in _forgetting:
        forget()


os.register_at_fork(after_in_child=_forked)
