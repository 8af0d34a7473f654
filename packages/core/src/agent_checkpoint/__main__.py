"""``python -m agent_checkpoint``: the command, where its script is not on the path."""

from __future__ import annotations

from agent_checkpoint.cli import script

if __name__ == "__main__":
    script()
