"""The engine: round after round of many workers, on the rules alone, on SQLite, and where there is time on a server."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from random import Random
from typing import NamedTuple

from tests import postgres
from tests.faults import variants
from tests.faults.engine import Budget, Report, Tell
from tests.faults.model import machine
from tests.faults.model.base import Ground, Model
from tests.faults.model.grounds import OnPostgres, OnSqlite
from tests.faults.model.rules import OnRules
from tests.faults.model.shadow import BrokenPromiseError
from tests.faults.model.world import ServedWorld, World

STEPS = 250
# Less is not worth the seconds that a server takes to start.
WORTH_A_SERVER_SECONDS = 60
# Of so many rounds one is on a server, where a step takes some ten times as long.
ON_A_SERVER = 25
# In one world of so many nobody can tell the boot, and the wall clock has to decide.
WITHOUT_A_BOOT = 4
# A sentence in a report, not a whole log.
LONGEST = 1_500


class Place(NamedTuple):
    """Where rounds are played: what lays the ground, and what can be done there."""

    lay: Callable[[World], Ground]
    kinds: tuple[machine.Kind, ...]
    served: bool = False


PLACES = {
    "rules": Place(OnRules, machine.EVERYWHERE),
    "sqlite": Place(OnSqlite, (*machine.EVERYWHERE, *machine.WITH_COPIES)),
    "postgresql": Place(OnPostgres, (*machine.EVERYWHERE, *machine.WITH_FILES), served=True),
}


def world(place: str, dice: Random) -> World:
    """A world for a place."""
    if PLACES[place].served:
        return ServedWorld()
    return World(domain="" if dice.randrange(WITHOUT_A_BOOT) == 0 else "boot-1", one_kernel=dice.randrange(2) == 0)


def play(place: str, number: int, steps: int = STEPS) -> Report:
    """One round, which is the same each time it is played with its number."""
    dice = Random(number)
    with _laid(place, dice) as ground:
        model, report = Model(ground), Report()
        try:
            with ground.world.slept_in(dice):
                machine.Driver(PLACES[place].kinds, dice).drive(model, dice, steps)
        except Exception as error:
            what = str(error) if isinstance(error, BrokenPromiseError) else f"{type(error).__name__}: {error}"
            again = f"(again: tests.faults.model.engine.play({place!r}, {number}, {steps}))"
            report.violations.append(f"model on {place}: {what[:LONGEST]} {again}")
        finally:
            report.operations, report.faults = model.operations, ground.world.faults
            model.close()
    return report


@contextmanager
def _laid(place: str, dice: Random) -> Iterator[Ground]:
    ground = PLACES[place].lay(world(place, dice))
    try:
        yield ground
    finally:
        ground.close()


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """Play rounds until the time is over; with a broken store on SQLite, where every part is that may be broken."""
    report, rounds = Report(), Counter[str]()
    places = itertools.cycle(("sqlite",) if variant else _order(budget))
    numbers = itertools.count(budget.seed)
    with variants.broken(variant):
        while budget.goes_on(report):
            place = next(places)
            report.add(play(place, next(numbers)))
            rounds[place] += 1
            tell(report)
    # Who has no server, or little time, must not take it for tried.
    report.notes.append("rounds: " + ", ".join(f"{rounds[place]:,} on {place}" for place in PLACES))
    return report


def _order(budget: Budget) -> list[str]:
    places = ["rules", "sqlite"] * (ON_A_SERVER // 2)
    has_server = postgres.is_installed() and find_spec(postgres.PACKAGE) is not None
    return [*places, "postgresql"] if has_server and budget.seconds >= WORTH_A_SERVER_SECONDS else places
