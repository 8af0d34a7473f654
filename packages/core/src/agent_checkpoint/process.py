"""What the kernel says of a process."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def describe(pid: int) -> dict[str, Any]:
    """``{pid, command, stopped}``; command and stopped are None when the kernel does not tell."""
    command, stopped = None, None
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as source:
            # proc(5): pid (comm) state …; comm may hold spaces and parentheses.
            name, _, rest = source.read().partition("(")[2].rpartition(")")
        command, stopped = name, rest.split()[0] in ("T", "t")
    except (OSError, IndexError):
        pass
    return {"pid": pid, "command": command, "stopped": stopped}
