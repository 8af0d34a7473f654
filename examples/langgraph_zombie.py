"""A worker freezes in the middle of a LangGraph run, another one takes over, and the first wakes up.

    python examples/langgraph_zombie.py

The same story is told twice, by real processes: with LangGraph's SqliteSaver,
where both workers charge the customer and the late one has the last word, and
with AgentCheckpointSaver under a lease, where the late one is refused.

Needs langgraph-checkpoint-sqlite, and a system that can freeze processes (Linux, macOS).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from agent_checkpoint import StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver, current_lease

THREAD = "order-42"
CONFIG: RunnableConfig = {"configurable": {"thread_id": THREAD}}
SAVERS: dict[str, Any] = {"SqliteSaver": SqliteSaver, "AgentCheckpointSaver": AgentCheckpointSaver}
LEASE_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
# Forked, so that a worker need not import LangGraph again.
processes = multiprocessing.get_context("fork")


class Order(TypedDict):
    quoted_by: str
    charged_by: str


class Outcome(NamedTuple):
    """What happened with one saver; the fields are the rows of the table."""

    worker_a: str
    worker_b: str
    charges: str
    state: str


class Worker:
    """One process that runs the order's graph: quote, then charge."""

    def __init__(self, saver: str, folder: Path, name: str) -> None:
        self._saver = saver
        self._folder = folder
        self._name = name

    def run(self) -> None:
        """Begin the order or go on with it; leave a file that says how it ended."""
        try:
            self._run()
        except StaleLeaseError:
            answer = "was refused (StaleLeaseError)"
        else:
            answer = "reports success"
        (self._folder / f"{self._name}.txt").write_text(answer)

    def _run(self) -> None:
        with ExitStack() as stack:
            saver = stack.enter_context(SAVERS[self._saver].from_conn_string(str(self._folder / "orders.db")))
            graph = self._graph(saver)
            config = CONFIG
            if isinstance(saver, AgentCheckpointSaver):
                lease = stack.enter_context(
                    saver.lease(THREAD, owner=self._name, ttl_seconds=LEASE_SECONDS, wait_seconds=PATIENCE_SECONDS)
                )
                config = lease.config(CONFIG)
            begun = graph.get_state(CONFIG).created_at
            graph.invoke(None if begun else {"quoted_by": "", "charged_by": ""}, config, durability="sync")

    def _graph(self, saver: Any) -> Any:
        builder = StateGraph(Order)
        builder.add_node("quote", self._quote)
        builder.add_node("charge", self._charge)
        builder.add_edge(START, "quote")
        builder.add_edge("quote", "charge")
        builder.add_edge("charge", END)
        return builder.compile(checkpointer=saver)

    def _quote(self, _: Order) -> dict[str, str]:
        if self._name == "A":  # it takes its time, and is frozen here
            (self._folder / "quoting").touch()
            wait_for(self._folder / "go-on")
        return {"quoted_by": self._name}

    def _charge(self, _: Order) -> dict[str, str]:
        lease = current_lease()
        if lease is not None:
            lease.check()  # before what cannot be undone
        with (self._folder / "charges.txt").open("a") as charges:
            charges.write(f"charged by {self._name}\n")
        return {"charged_by": self._name}


def tell(saver: str, folder: Path) -> Outcome:
    """Freeze A, let B take over and finish, wake A."""
    first = processes.Process(target=Worker(saver, folder, "A").run)
    second = processes.Process(target=Worker(saver, folder, "B").run)
    try:
        first.start()
        wait_for(folder / "quoting")
        send(first, signal.SIGSTOP)
        second.start()  # with a lease it waits until A's has run out
        second.join(PATIENCE_SECONDS)
        (folder / "go-on").touch()
        send(first, signal.SIGCONT)
        first.join(PATIENCE_SECONDS)
    finally:
        for worker in (first, second):
            if worker.is_alive():
                worker.kill()
    charges = len((folder / "charges.txt").read_text().splitlines())
    with SAVERS[saver].from_conn_string(str(folder / "orders.db")) as opened:
        state = opened.get_tuple(CONFIG).checkpoint["channel_values"]
    return Outcome(
        (folder / "A.txt").read_text(),
        (folder / "B.txt").read_text(),
        "once" if charges == 1 else f"{charges} times",
        f"quoted by {state['quoted_by']}, charged by {state['charged_by']}",
    )


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} never came")
        time.sleep(0.01)


def send(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None:
        os.kill(process.pid, number)


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes, a column for each saver."""
    rows = [
        ("", *outcomes),
        ("worker A, frozen and woken", *(each.worker_a for each in outcomes.values())),
        ("worker B, which took over", *(each.worker_b for each in outcomes.values())),
        ("the customer was charged", *(each.charges for each in outcomes.values())),
        ("the final state", *(each.state for each in outcomes.values())),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    outcomes = {}
    for saver in SAVERS:
        with tempfile.TemporaryDirectory(prefix="langgraph-zombie-") as folder:
            outcomes[saver] = tell(saver, Path(folder))
    print(table(outcomes))  # noqa: T201 -- what a program is for


if __name__ == "__main__":
    main()
