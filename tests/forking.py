"""Programs that fork while they have a store open, played in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent_checkpoint import StateStore

# Longer than anything here takes: only a hang reaches it.
LONG = 60.0

PRELUDE = """
import json, os, subprocess, sys, threading, time, warnings
from agent_checkpoint import ReentrancyError, StateStore, StorageError

# Python 3.12 and later warn of any fork beside threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
path = sys.argv[1]
# What this starts runs nothing that is not measured elsewhere.
os.environ.pop("COVERAGE_PROCESS_CONFIG", None)

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())  # one write: whole lines, also from children

def put(store, who):
    say(by=who, sequence=store.put_checkpoint("deploy", {"by": who}).sequence)

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

class Signal:
    "One process tells the other that it is so far; a process that has died counts as having told."
    def __init__(self):
        self.reading, self.writing = os.pipe()
    def tell(self):
        os.write(self.writing, b"!")
    def wait(self):
        os.close(self.writing)
        os.read(self.reading, 1)

def elsewhere(source):
    "Run another program on the store, not a child of fork."
    return subprocess.check_output([sys.executable, "-c", source, path], text=True).strip()

VISIT = '''
import sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1]) as store:
    print(store.put_checkpoint("deploy", {"by": "visitor"}).sequence)
'''

TRY = '''
import sys
from agent_checkpoint import StateStore, StorageBusyError
with StateStore(sys.argv[1], busy_timeout_seconds=0.1) as store:
    try:
        store.put_checkpoint("deploy", {"by": "visitor"})
        print("written")
    except StorageBusyError:
        print("busy")
'''

def visit():
    say(by="visitor", sequence=int(elsewhere(VISIT)))
"""


def play(path: Path, program: str, *, before: str = "", noise: str = "") -> list[dict[str, Any]]:
    """Run the program to its end; what it and its children said. ``noise``, and only it, must be found on stderr."""
    ended = subprocess.run(
        [sys.executable, "-c", before + PRELUDE + program, str(path)], capture_output=True, text=True, timeout=LONG
    )
    assert ended.returncode == 0, ended.stderr
    assert noise in ended.stderr if noise else not ended.stderr, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def saved(path: Path) -> list[dict[str, Any]]:
    """Every checkpoint that is there, as the programs report theirs."""
    with StateStore(path) as store:
        found = []
        for info in reversed(store.checkpoint_history("deploy")):
            checkpoint = store.get_checkpoint("deploy", sequence=info.sequence)
            assert checkpoint is not None
            found.append({"by": checkpoint.data["by"], "sequence": info.sequence})
        assert {check.value for check in store.doctor() if check.check == "integrity"} == {"ok"}
        return found


def reported(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((line for line in said if "sequence" in line), key=lambda line: int(line["sequence"]))
