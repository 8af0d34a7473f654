"""What changed between two JSON values, as a list of operations."""

from __future__ import annotations

from agent_checkpoint.payload import dump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def difference(old: Any, new: Any, path: str = "") -> Iterator[dict[str, Any]]:
    """Operations {op: add·remove·replace, path, old, new} that lead from ``old`` to ``new``.

    ``path`` is a JSON pointer (RFC 6901). Arrays are compared place by place,
    and their surplus is removed from the end: applied in order, the operations
    are a JSON patch (RFC 6902).
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _member(old, new, key, f"{path}/{_escape(key)}")
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(min(len(old), len(new))):
            yield from difference(old[index], new[index], f"{path}/{index}")
        for index in range(len(old) - 1, len(new) - 1, -1):
            yield {"op": "remove", "path": f"{path}/{index}", "old": old[index]}
        for index in range(len(old), len(new)):
            yield {"op": "add", "path": f"{path}/{index}", "new": new[index]}
    elif dump(old) != dump(new):  # as JSON: true is not 1, and 1 is not 1.0
        yield {"op": "replace", "path": path, "old": old, "new": new}


def _member(old: dict[str, Any], new: dict[str, Any], key: str, path: str) -> Iterator[dict[str, Any]]:
    if key not in new:
        yield {"op": "remove", "path": path, "old": old[key]}
    elif key not in old:
        yield {"op": "add", "path": path, "new": new[key]}
    else:
        yield from difference(old[key], new[key], path)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
