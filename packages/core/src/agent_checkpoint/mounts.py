"""Which filesystem a path is on, by the longest mount prefix.

Where the system has no ``/proc/self/mountinfo`` the answer is "": unknown.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Filesystems that at most one running kernel has open read-write.
LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "apfs", "overlay"))


def mounts() -> list[tuple[str, str]]:
    """Every mount as (mount point, filesystem type), later mounts last; [] when unknown."""
    return [(point, kind) for point, kind, _ in _table()]


def inside_of(path: str) -> tuple[str, str]:
    """The filesystem type under ``path``, and the path within that filesystem; ("", "") when unknown.

    Over a path of ``/proc`` another file of ``/proc`` may be mounted: then the
    type is as expected, and the path within is not.
    """
    best, found = -1, ("", "")
    for point, kind, root in _table():
        if len(point) >= best and _is_under(path, point):
            below = path[len(point) :] if point != "/" else path
            best, found = len(point), (kind, (root.rstrip("/") + below) or "/")
    return found


def _table() -> Iterator[tuple[str, str, str]]:
    """Every mount: its point, its type, and which folder of its filesystem it shows."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            lines = table.readlines()
    except OSError:
        return
    for line in lines:
        # proc(5): id parent major:minor root mount-point options [optional…] - type source …
        left, _, right = line.partition(" - ")
        fields = left.split(" ", 5)
        if len(fields) > 4 and right:
            yield _unescape(fields[4]), right.split(" ", 1)[0], _unescape(fields[3])


def filesystem_of(path: str, table: list[tuple[str, str]] | None = None) -> str:
    """The filesystem type under ``path``; "" when unknown."""
    path = os.path.realpath(path)
    best, kind = -1, ""
    for point, filesystem in mounts() if table is None else table:
        if len(point) >= best and _is_under(path, point):
            best, kind = len(point), filesystem
    return kind


def _is_under(path: str, point: str) -> bool:
    return path == point or path.startswith(point if point.endswith("/") else point + "/")


def _unescape(field: str) -> str:
    if "\\" not in field:
        return field
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, character)
    return field
