"""What happens to everybody: time, clocks that are set, lids that close, deaths, reboots."""

from __future__ import annotations

from random import Random

from tests.faults.model.base import SCOPES, Model

from agent_checkpoint.names import NS

PASSING = (1_000_000, 20_000_000, 50_000_000, 50_000_000, 100_000_000, 300_000_000, NS, 4 * NS, 11 * NS, 25 * NS)
STEPS = (NS, -NS, 10 * NS, -10 * NS, 3_600 * NS, -3_600 * NS)
SUSPENDED = (NS, 30 * NS, 86_400 * NS)
DOWN = (NS, 5 * NS, 60 * NS)
# How far a jump in time that is aimed at a deadline misses it, in nanoseconds.
MISSED_BY = (-1, 0, 1)


def time_passes(model: Model, dice: Random) -> None:
    """Some time passes."""
    model.world.pass_time(dice.choice(PASSING))


def a_deadline_comes(model: Model, dice: Random) -> None:
    """Time passes up to the end of a lease, to the nanosecond."""
    live = [each for scope in SCOPES for each in model.leases.in_time(scope)]
    if live:
        left, _ = dice.choice(live).left(model.world.now)
        model.world.pass_time(max(0, left + dice.choice(MISSED_BY)))


def the_wall_clock_steps(model: Model, dice: Random) -> None:
    """Somebody sets the wall clock, sometimes to the very end of a lease."""
    if model.world.by_server and model.persons:
        return  # who waits counts by its own clock, and in this world there is but one
    live = [each for scope in SCOPES for each in model.leases.in_time(scope)]
    if live and dice.randrange(2):
        model.world.step_wall(dice.choice(live).wall_end - model.world.now.wall + dice.choice(MISSED_BY))
    else:
        model.world.step_wall(dice.choice(STEPS))


def the_lid_is_closed(model: Model, dice: Random) -> None:
    """The machine sleeps: leases that count by its monotonic clock sleep too."""
    model.world.suspend(dice.choice(SUSPENDED))


def a_worker_dies(model: Model, dice: Random) -> None:
    """A worker is killed; its pid may be another's at once."""
    worker = dice.choice(model.workers)
    if not worker.process.ended:
        model.world.kill(worker.process, recycled=dice.randrange(2) == 0)


def a_process_is_hidden(model: Model, dice: Random) -> None:
    """Somebody's /proc does not show a process any more: nothing proves its death but a free pid."""
    if model.world.running:
        model.world.hide(dice.choice(list(model.world.running.values())))


def the_machine_reboots(model: Model, dice: Random) -> None:
    """All processes end. The new boot's id may not be known."""
    model.persons.clear()
    known = model.world.boots % 2 == 0 or dice.randrange(4) > 0
    model.world.reboot(known=known, down_ns=dice.choice(DOWN))
