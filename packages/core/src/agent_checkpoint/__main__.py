"""``python -m agent_checkpoint``: the command, where its script is not on the path."""

from __future__ import annotations

import sys

from agent_checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
