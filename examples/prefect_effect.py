"""A Prefect flow refunds an order and is killed before it can say so; the run after it does not refund it again.

    python examples/prefect_effect.py

The same story is told twice, by real processes. With a lock alone the second
run refunds again. With ``lease.effect`` the store knows that somebody began to
refund; ``resolve`` asks the bank whether it happened, and it is not done again.

Needs Prefect, for which it starts a server of its own. Most of its time is the
start of the server.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# The environment of Prefect, set before its import, is that of the other example.
from prefect_publish_once import PATIENCE_SECONDS, processes, server

# isort: split
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from agent_checkpoint import Effect, Resolution
from agent_checkpoint_prefect import FencedLock, LeaseStore

ORDER = "order-42"


class Bank:
    """The system of somebody else: it refunds as often as it is told to, and says what it has done."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "refunds.txt"

    def refund(self, reference: str) -> str:
        with self._file.open("a") as refunds:
            refunds.write(f"{reference}\n")
        return f"transfer {self.refunds()}"

    def refunds(self, reference: str = "") -> int:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return sum(line.startswith(reference) for line in lines)


class Worker:
    """One process that runs the flow."""

    def __init__(self, folder: Path, *, dies: bool, records: bool) -> None:
        self._folder = folder
        self._dies = dies
        self._bank = Bank(folder)
        self._refund: Callable[[str], str] = self._refund_once if records else self._refund_under_a_lock
        self._lock = FencedLock(store=LeaseStore(path=folder / "agents.db"))

    def run(self) -> None:
        """Run the flow, and leave a file that says how it ended."""

        def refund(order: str) -> str:
            return self._refund(order)

        answer: str = flow(name="refund")(refund)(ORDER)
        (self._folder / "answer.txt").write_text(answer)

    def _refund_under_a_lock(self, order: str) -> str:
        with self._lock.lease(f"refund-{order}", timeout_seconds=PATIENCE_SECONDS):
            return self._pay(order)

    def _refund_once(self, order: str) -> str:
        with (
            self._lock.lease(f"refund-{order}", timeout_seconds=PATIENCE_SECONDS) as lease,
            lease.effect(f"refund {order}", resolve=self._look) as effect,
        ):
            if effect.fresh:
                effect.done(self._pay(effect.idempotency_key))
            return str(effect.result)

    def _pay(self, reference: str) -> str:
        transfer = self._bank.refund(reference)
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)  # refunded, and nobody knows
        return transfer

    def _look(self, effect: Effect) -> Resolution:
        found = self._bank.refunds(effect.idempotency_key)
        return Resolution(True, f"transfer {found}") if found else Resolution(False)


class Outcome(NamedTuple):
    """What happened in one telling; the fields are the rows of the table."""

    first: str
    second: str
    refunds: str


def tell(folder: Path, *, records: bool) -> Outcome:
    """Kill the first run in the midst of it, let another go on."""
    first = processes.Process(target=Worker(folder, dies=True, records=records).run)
    second = processes.Process(target=Worker(folder, dies=False, records=records).run)
    for worker in (first, second):
        worker.start()
        worker.join(PATIENCE_SECONDS)
    refunds = Bank(folder).refunds()
    return Outcome(
        "was killed" if first.exitcode == -signal.SIGKILL else "ended",
        f"has {(folder / 'answer.txt').read_text()}",
        "once" if refunds == 1 else f"{refunds} times",
    )


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes, a column for each telling."""
    rows = [
        ("", *outcomes),
        ("first run, refunded and killed", *(each.first for each in outcomes.values())),
        ("second run", *(each.second for each in outcomes.values())),
        ("the order was refunded", *(each.refunds for each in outcomes.values())),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> None:
    outcomes = {}
    with (
        tempfile.TemporaryDirectory(prefix="prefect-effect-") as home,
        server(Path(home)) as url,
        temporary_settings({PREFECT_API_URL: url, PREFECT_HOME: Path(home)}),
    ):
        for name, records in {"a lock alone": False, "lease.effect": True}.items():
            folder = Path(home) / name
            folder.mkdir()
            outcomes[name] = tell(folder, records=records)
    print(table(outcomes))  # noqa: T201 -- what a program is for


if __name__ == "__main__":
    main()
