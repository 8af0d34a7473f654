"""Many workers in any order, against a second opinion of what must be true; and that it catches what is broken.

On PostgreSQL the server's clock decides: it is turned by hand here too, and all
that there is. What is left out there: boots and processes, of which a server
knows nothing, so that no lease or ticket ends with its process; a clock that
stops in suspend; backups and restores, which are the server's own. Those who
wait are not there while its clock is set back, for theirs is another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tests import postgres
from tests.faults.engine import Budget
from tests.faults.model import engine, machine

from agent_checkpoint import EffectUnknownError, StateStore, leases
from agent_checkpoint.testing import FakeClock, FakeProcesses

CAUGHT = (
    "no-fence-check",
    "check-in-another-transaction",
    "token-reset-on-release",
    "the-contenders-ttl",
    "wall-clock",
    "no-death-check",
    "refusal-before-its-commit",
    "pid-alone",
)
CALM = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
# Enough for each kind of operation to come many times. A step on a server takes several times as long.
ROUNDS = {"rules": 60, "sqlite": 30, "postgresql": 2}
EXAMPLES = {"rules": 60, "sqlite": 30, "postgresql": 4}
LONG = {"rules": 50, "sqlite": 30, "postgresql": 30}
SEED = 8
PLACES = [name for name in engine.PLACES if name != "postgresql" or postgres.is_installed()]


@pytest.mark.parametrize("place", PLACES)
def test_the_store_does_what_must_be_true_whatever_happens(place: str) -> None:
    reports = [engine.play(place, number) for number in range(ROUNDS[place])]
    assert [sentence for report in reports for sentence in report.violations] == []


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_the_store_does_what_must_be_true_whatever_happens_for_long(place: str) -> None:
    reports = [engine.play(place, number) for number in range(1_000, 1_000 + ROUNDS[place] * LONG[place])]
    assert [sentence for report in reports for sentence in report.violations] == []


def anything_in_any_order(place: str, examples: int, steps: int) -> None:
    """By Hypothesis: what fails comes out as the few steps that it needs."""
    laid = engine.PLACES[place]
    run_state_machine_as_test(
        machine.machine(laid.kinds, lambda dice: laid.lay(engine.world(place, dice))),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=CALM,
        ),
    )


@pytest.mark.parametrize("place", PLACES)
def test_no_few_steps_lead_to_what_must_not_be(place: str) -> None:
    anything_in_any_order(place, EXAMPLES[place], 30)


@pytest.mark.parametrize("variant", CAUGHT)
def test_a_broken_store_is_caught(variant: str) -> None:
    report = engine.run(Budget(60, SEED, stop_early=True), lambda _: None, variant)
    assert report.violations


def test_a_restore_does_not_forget_a_try_that_began_after_the_wall_clock_was_set_back(
    store: StateStore, clock: FakeClock, tmp_path: Path
) -> None:
    lease = store.acquire("refunds", "ada", ttl_seconds=10)
    with store.effect("refund-42", lease=lease) as first:
        first.failed()
    store.backup(tmp_path / "backup.db")
    clock.step_wall(-3600)
    store.effect("refund-42", lease=lease).__enter__()  # acts, and dies before it can tell
    clock.advance(10)

    store.restore(tmp_path / "backup.db")

    later = store.acquire("refunds", "bob")
    with pytest.raises(EffectUnknownError):
        store.effect("refund-42", lease=later).__enter__()


def test_who_slept_through_its_place_in_the_queue_does_not_wait_for_the_dead(path: Path, clock: FakeClock) -> None:
    processes = FakeProcesses()
    with StateStore(path, clock=clock, processes=processes) as store:
        store.initialize()
        held = store.acquire("release", "ada", ttl_seconds=600)
        sleeper = store._waiter(leases.valid_ask("release", "bob", 60, None), 15, processes)
        sleeper.step()
        clock.advance(12)  # longer than its ticket lives
        own, processes.pid = processes.pid, 77
        processes.start(77)
        store._waiter(leases.valid_ask("release", "cyd", 60, None), 15, clock).step()
        processes.pid = own
        processes.kill(77)
        clock.advance(3)
        store.release(*held.fence)

        assert sleeper.step().owner == "bob"
