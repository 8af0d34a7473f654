"""Histories: eight processes on one store under a nemesis, round after round, each checked to the last call."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

from tests.faults.engine import Budget, Report, Tell
from tests.faults.histories import recorder
from tests.faults.histories.audit import Ledger, audit, ledger_of
from tests.faults.histories.checker import check
from tests.faults.histories.control import Control
from tests.faults.histories.lockset import SETS, lost
from tests.faults.histories.nemesis import Nemesis, Temper
from tests.faults.histories.nursery import Nursery
from tests.faults.histories.recorder import Call

from agent_checkpoint import StateStore

WORKERS = 8
MEMORY = Path("/dev/shm")
# A round is checked as a whole. What need only be broken is broken sooner by short and fierce ones; workers of
# a server take longer to begin.
ROUND_SECONDS = 8.0
SHORT_ROUND_SECONDS = 2.0
ORDINARY = Temper(pauses=(0.04, 0.25), steps=True)
FIERCE = Temper(pauses=(0.02, 0.14), steps=True)
PATIENT = Temper(pauses=(0.1, 0.5), steps=False)
# Round after round: mostly everything, then the lock-set.
KINDS = ("mixed", "lock-set", "mixed")
# Two clocks of one machine that are set right may differ by so much meanwhile.
SERVER_SLACK_NS = 50_000_000
# What is noted beside the calls to the store.
NO_CALLS = ("kill", "sleep", "act")
# A round that goes wrong does so many times over, and in many ways.
MOST_OF_A_KIND = 3
MOST_TOLD = 20


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """On SQLite, with the files in memory where there is such a folder."""
    return run_on(budget, tell, variant, folder=MEMORY if MEMORY.is_dir() else None)


def run_on(
    budget: Budget,
    tell: Tell,
    variant: str | None = None,
    *,
    folder: Path | None = None,
    server: Callable[[str], str] | None = None,
    kinds: Sequence[str] = KINDS,
) -> Report:
    """With the files in a folder, None for the disk; or on a server, whose ``server(schema)`` is a store's URL."""
    report = Report()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        preload = "" if server is None else "agent_checkpoint_postgres"
        nursery = stack.enter_context(Nursery(variant, place / "errors.txt", preload))
        temper = PATIENT if server is not None else FIERCE if budget.stop_early else ORDINARY
        number = 0
        while budget.goes_on(report):
            seconds = min(SHORT_ROUND_SECONDS if budget.stop_early else ROUND_SECONDS, max(budget.left(), 1.0))
            address = None if server is None else server(f"histories_{budget.seed}_{number}")
            kind = kinds[number % len(kinds)]
            with _round(place, nursery, kind, budget.random, temper, address) as one:
                one.rage(seconds)
                report.add(found := one.report())
                if found.violations and not budget.stop_early:
                    report.notes.append(f"the {kind} history that is wrong is kept in {_kept(one.folder)}")
            number += 1
            tell(report)
    return report


class Round:
    """One store, its workers, and what became of them."""

    def __init__(
        self, folder: Path, nursery: Nursery, kind: str, random: Random, temper: Temper, address: str | None
    ) -> None:
        self.folder = folder
        self.address = address or str(folder / "agents.db")
        self.kind = kind
        self.is_file = address is None
        Control(folder / "control")
        with StateStore(self.address) as store:
            store.initialize()

        def hire(owner: str, seed: int) -> int:
            return nursery.start(kind, self.address, folder, owner, seed)

        self.nemesis = Nemesis(nursery, folder, hire, random, temper)

    def rage(self, seconds: float) -> None:
        """Let them all at it, the nemesis too."""
        self.nemesis.rage(WORKERS, seconds)

    def report(self) -> Report:
        """What was done, and everything that is wrong with it."""
        calls = recorder.read(self.folder)
        with StateStore(self.address) as store:
            ledger = ledger_of(store)
            latest = {name: store.get_checkpoint(name) for name in SETS}
        sets = {name: found.data["numbers"] for name, found in latest.items() if found is not None}
        wrong = [*self.nemesis.wrong, *lost(calls, sets), *self._contradictions(calls, ledger)]
        where = f"{self.kind} on {'SQLite' if self.is_file else 'a server'}"
        told = [f"{where}: {each}" for each in _some_of_each_kind(wrong)]
        answered = sum(call.answered is not None and call.what not in NO_CALLS for call in calls)
        return Report(answered, self._faults(calls), told)

    def _contradictions(self, calls: Sequence[Call], ledger: Ledger) -> Iterator[str]:
        yield from check(calls, 0 if self.is_file else SERVER_SLACK_NS)
        yield from audit(calls, ledger)

    def _faults(self, calls: Sequence[Call]) -> Counter[str]:
        faults = self.nemesis.faults.copy()
        faults["stop-in-the-lock"] = sum(call.what == "write" and bool(call.facts["stops"]) for call in calls)
        faults["stop-before-a-write"] = sum(call.what == "sleep" for call in calls)
        return +faults


def _some_of_each_kind(wrong: Iterable[str]) -> list[str]:
    """The first few sentences of each kind, as they begin, and not too many in all."""
    kinds: dict[str, list[str]] = {}
    for each in wrong:
        kinds.setdefault(each.partition(":")[0], []).append(each)
    return [each for kind in kinds.values() for each in kind[:MOST_OF_A_KIND]][:MOST_TOLD]


def _kept(folder: Path) -> Path:
    """A copy of a round's files, for who wants to know how it came about."""
    copy = Path(tempfile.mkdtemp(prefix="agent-checkpoint-history-"))
    return Path(shutil.copytree(folder, copy, dirs_exist_ok=True))


@contextmanager
def _round(
    place: Path, nursery: Nursery, kind: str, random: Random, temper: Temper, address: str | None
) -> Iterator[Round]:
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        yield Round(folder, nursery, kind, random, temper, address)
    finally:
        shutil.rmtree(folder)
