"""A LangGraph worker charges a customer and is killed before anybody hears of it; another one goes on with the thread.

    python examples/langgraph_effect.py

The same story is told twice, by real processes. With the thread's lease alone
the second worker runs the node again, and the customer is charged again. With
``lease.effect`` the store knows that somebody began to charge; ``resolve`` asks
the payment system whether it happened, and it is not done again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from agent_checkpoint import Effect, Resolution
from agent_checkpoint_langgraph import AgentCheckpointSaver, ThreadLease, current_lease

ORDER = "order-42"
CONFIG: RunnableConfig = {"configurable": {"thread_id": ORDER}}
PATIENCE_SECONDS = 30.0
# Forked, so that a worker need not import LangGraph again.
processes = multiprocessing.get_context("fork")


class Order(TypedDict):
    receipt: str


class Payments:
    """The system of somebody else: it charges as often as it is told to, and says what it has done."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "charges.txt"

    def charge(self, reference: str) -> str:
        with self._file.open("a") as charges:
            charges.write(f"{reference}\n")
        return f"receipt {self.charges()}"

    def charges(self, reference: str = "") -> int:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return sum(line.startswith(reference) for line in lines)


class Worker:
    """One process that runs the order's graph: it charges, and that is all."""

    def __init__(self, folder: Path, *, dies: bool, records: bool) -> None:
        self._folder = folder
        self._dies = dies
        self._records = records
        self._payments = Payments(folder)

    def run(self) -> None:
        with AgentCheckpointSaver.from_conn_string(str(self._folder / "orders.db")) as saver:
            builder = StateGraph(Order)
            builder.add_node("charge", self._charge)
            builder.add_edge(START, "charge")
            builder.add_edge("charge", END)
            graph = builder.compile(checkpointer=saver)
            with saver.lease(ORDER, wait_seconds=PATIENCE_SECONDS) as lease:
                begun = graph.get_state(CONFIG).created_at
                final = graph.invoke(None if begun else {"receipt": ""}, lease.config(CONFIG), durability="sync")
        (self._folder / "receipt.txt").write_text(final["receipt"])

    def _charge(self, _: Order) -> Order:
        lease = current_lease()
        if lease is None or not self._records:
            return {"receipt": self._pay(ORDER)}
        return {"receipt": self._pay_once(lease)}

    def _pay_once(self, lease: ThreadLease) -> str:
        with lease.effect(f"charge {ORDER}", resolve=self._look) as effect:
            if effect.fresh:
                effect.done(self._pay(effect.idempotency_key))
            return str(effect.result)

    def _pay(self, reference: str) -> str:
        receipt = self._payments.charge(reference)
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)  # charged, and nobody knows
        return receipt

    def _look(self, effect: Effect) -> Resolution:
        found = self._payments.charges(effect.idempotency_key)
        return Resolution(True, f"receipt {found}") if found else Resolution(False)


class Outcome(NamedTuple):
    """What happened in one telling; the fields are the rows of the table."""

    worker_a: str
    worker_b: str
    charges: str


def tell(folder: Path, *, records: bool) -> Outcome:
    """Kill A in the midst of it, let B go on."""
    first = processes.Process(target=Worker(folder, dies=True, records=records).run)
    second = processes.Process(target=Worker(folder, dies=False, records=records).run)
    for worker in (first, second):
        worker.start()
        worker.join(PATIENCE_SECONDS)
    charges = Payments(folder).charges()
    return Outcome(
        "was killed" if first.exitcode == -signal.SIGKILL else "ended",
        f"has {(folder / 'receipt.txt').read_text()}",
        "once" if charges == 1 else f"{charges} times",
    )


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes, a column for each telling."""
    rows = [
        ("", *outcomes),
        ("worker A, charged and killed", *(each.worker_a for each in outcomes.values())),
        ("worker B, went on", *(each.worker_b for each in outcomes.values())),
        ("the customer was charged", *(each.charges for each in outcomes.values())),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    outcomes = {}
    for name, records in {"a lease alone": False, "lease.effect": True}.items():
        with tempfile.TemporaryDirectory(prefix="langgraph-effect-") as folder:
            outcomes[name] = tell(Path(folder), records=records)
    print(table(outcomes))  # noqa: T201 -- what a program is for


if __name__ == "__main__":
    main()
