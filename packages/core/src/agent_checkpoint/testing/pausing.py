"""Where an agent says that it may be frozen now: a place that it does not leave before it is woken."""

from __future__ import annotations

import os
import time
from pathlib import Path

# The folder in which a test and its agent meet.
PAUSE = "AGENT_CHECKPOINT_PAUSE"
PAUSED, GO_ON = "paused", "go-on"
LOOK_SECONDS = 0.005


def pause_here() -> None:
    """Wait here until ``zombie`` has frozen this process, superseded and woken it; elsewhere do nothing.

    For a step of the agent under test, with ``zombie(…, freeze_when="paused")``.
    Of several pauses only the first waits.
    """
    folder = os.environ.get(PAUSE)
    if not folder or not os.path.isdir(folder):
        return
    Path(folder, PAUSED).touch()
    while os.path.isdir(folder) and not os.path.exists(os.path.join(folder, GO_ON)):
        time.sleep(LOOK_SECONDS)
