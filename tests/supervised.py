"""A program for the tests: it supervises a command, under a lease that is only played.

    python supervised.py TOLD OPTIONS COMMAND ...

It appends what happens to the file TOLD as lines of JSON. OPTIONS is an object:
``grace``, ``on_lost``; ``ttl``, the seconds a heartbeat is good for; ``beats``,
whether there are heartbeats; ``adopting``, whether orphans can be adopted;
``body``, what to do in place of a plain run. The command's environment has
MARKER, by which everything it starts is known.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from agent_checkpoint.supervise import Ended, Supervisor, kernel

told, command = sys.argv[1], sys.argv[3:]
options = {"grace": 0.3, "on_lost": "term", "ttl": 60, "beats": False, "adopting": True, "body": ""}
options |= json.loads(sys.argv[2])
mark = os.path.basename(told)
environ = {**os.environ, "MARKER": os.environ.get("MARKER", "") + mark}


def tell(**facts: Any) -> None:
    with open(told, "a") as lines:
        lines.write(json.dumps({**facts, "by": os.getpid(), "at": time.time()}) + "\n")


def alive() -> list[int]:
    """Everybody that has the command's environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        try:
            with open(f"/proc/{name}/environ", "rb") as source:
                if mark.encode() in source.read():
                    found.append(int(name))
        except OSError:
            pass
    return found


def expire(token: str) -> None:
    tell(expired=token, alive=alive())


def make() -> Supervisor:
    return Supervisor(command, grace_seconds=options["grace"], on_lost=options["on_lost"], expire=expire)


def ahead() -> int:
    return time.monotonic_ns() + int(options["ttl"] * 1e9)


def prepare(supervisor: Supervisor) -> None:
    group = supervisor.prepare(environ, "token-1", ahead())
    tell(wrapper=os.getpid(), guard=supervisor.guard, group=group)


def beat(supervisor: Supervisor) -> None:
    while True:
        supervisor.extend(ahead())
        time.sleep(options["ttl"] / 10)


def run(supervisor: Supervisor) -> Ended:
    if options["beats"]:
        threading.Thread(target=beat, args=(supervisor,), daemon=True).start()
    began = time.monotonic()
    ended = supervisor.run()
    tell(ended=ended._asdict(), took=time.monotonic() - began, alive=alive())
    supervisor.close()
    return ended


def plain() -> None:
    supervisor = make()
    prepare(supervisor)
    os._exit(run(supervisor).status)


if not options["adopting"]:
    kernel._prctl = lambda *nothing: False
if options["body"]:
    exec(options["body"])
else:
    plain()
