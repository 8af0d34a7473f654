"""Workers that write one thread at once without a lease, as real processes: forked, since importing takes seconds.

``python writing_worker.py STORE WORKERS TURNS [save]``: in its turns each saves,
copies, prunes and deletes, or only saves. The status is 1 where one met an error.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import traceback
from collections.abc import Callable
from typing import Any

from agent_checkpoint_langgraph import AgentCheckpointSaver

THREAD, COPY = "shared", "copy"
# More than this, and a message is dropped at the front.
MESSAGES = 40


def at(thread_id: str, checkpoint_id: str | None = None) -> Any:
    named = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": "", **named}}


def digest(messages: list[str]) -> str:
    return hashlib.sha256("".join(messages).encode()).hexdigest()


class Writer:
    """One of the workers."""

    def __init__(self, saver: AgentCheckpointSaver, number: int, only_saves: bool) -> None:
        self._saver = saver
        self._number = number
        self._random = random.Random(number)
        self._saved = 0
        self._removals = 0 if only_saves else 1

    def turn(self) -> None:
        """Do something: mostly what a run does."""
        acts: list[Callable[[], object]] = [self.save, self.copy, self.prune, self.delete, self.delete_run]
        weights = [16, *(self._removals * weight for weight in (2, 2, 1, 1))]
        self._random.choices(acts, weights)[0]()

    def save(self) -> None:
        """Go on from the latest checkpoint, whoever saved it."""
        found = self._saver.get_tuple(at(THREAD))
        before = found.checkpoint["channel_values"]["messages"] if found else []
        messages = [*before[-MESSAGES:], f"{self._number} {self._random.randbytes(150).hex()}"]
        values = {"messages": messages, "digest": digest(messages), "same": "x" * 300}
        self._saved += 1
        name = f"{self._number:02}-{self._saved:04}"
        versions = {channel: self._saver.get_next_version(None, None) for channel in values}
        made: Any = {
            "v": 4,
            "id": name,
            "ts": "",
            "channel_values": values,
            "channel_versions": versions,
            "versions_seen": {},
        }
        metadata: Any = {"source": "loop", "step": self._saved, "run_id": f"run-{self._number}"}
        saved = self._saver.put(found.config if found else at(THREAD), made, metadata, dict(versions))
        self._saver.put_writes(saved, [("messages", [name]), ("__error__", name)], f"task-{self._number}")

    def copy(self) -> None:
        self._saver.copy_thread(THREAD, COPY)

    def prune(self) -> None:
        self._saver.prune([THREAD, COPY], keep_last=3)

    def delete(self) -> None:
        self._saver.delete_thread(self._random.choice([THREAD, COPY]))

    def delete_run(self) -> None:
        self._saver.delete_for_runs([f"run-{self._random.randrange(4)}"])


def work(store: str, number: int, turns: int, only_saves: bool) -> int:
    try:
        with AgentCheckpointSaver.from_conn_string(store, synchronous="normal", busy_timeout_seconds=60) as saver:
            writer = Writer(saver, number, only_saves)
            for _ in range(turns):
                writer.turn()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main(store: str, workers: str, turns: str, *only: str) -> int:
    pids = []
    for number in range(int(workers)):
        pid = os.fork()
        if pid == 0:
            os._exit(work(store, number, int(turns), only == ("save",)))
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
