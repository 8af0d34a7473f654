"""Every operation in any order: by Hypothesis, which makes what fails small, or by plain dice, which are faster."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.faults.model import acting, asking, ending, holders, keeping, nemesis, restoring, writing
from tests.faults.model.base import Ground, Model

Operation = Callable[[Model, Random], None]


class Kind(NamedTuple):
    """An operation, and how often it comes: of all the weights together."""

    weight: int
    operation: Operation


EVERYWHERE = (
    Kind(20, asking.acquire),
    Kind(16, asking.queue_up),
    Kind(16, asking.look_around),
    Kind(2, asking.leave),
    Kind(5, asking.freeze),
    Kind(3, asking.waiter_dies),
    Kind(6, holders.heartbeat),
    Kind(12, holders.release),
    Kind(2, holders.expire),
    Kind(3, holders.force_release),
    Kind(3, holders.set_limit),
    Kind(3, holders.sweep),
    Kind(5, holders.check_lease),
    Kind(16, writing.put_checkpoint),
    Kind(2, writing.read_checkpoint),
    Kind(10, acting.begin_effect),
    Kind(8, acting.end_effect),
    Kind(5, acting.resolve_effect),
    Kind(2, acting.read_effect),
    Kind(3, keeping.prune),
    Kind(14, nemesis.time_passes),
    Kind(8, nemesis.a_deadline_comes),
    Kind(4, nemesis.the_wall_clock_steps),
    Kind(2, nemesis.the_lid_is_closed),
    Kind(5, nemesis.a_worker_dies),
    Kind(1, nemesis.a_process_is_hidden),
    Kind(1, nemesis.the_machine_reboots),
)
WITH_FILES = (Kind(1, keeping.archive_events),)
WITH_COPIES = (*WITH_FILES, Kind(2, keeping.backup), Kind(2, restoring.restore))


# By what an operation's weight is multiplied, for a round: what hides in the usual mix comes to light in another.
MIX = (0, 0, 1, 1, 5)


class Driver:
    """Plain dice: many steps in little time, each round again by its number."""

    def __init__(self, kinds: tuple[Kind, ...], dice: Random) -> None:
        self._operations = [kind.operation for kind in kinds]
        self._weights = [kind.weight * dice.choice(MIX) for kind in kinds]

    def drive(self, model: Model, dice: Random, steps: int) -> None:
        """So many steps, then the end."""
        for operation in dice.choices(self._operations, self._weights, k=steps):
            # Whoever sleeps in a call of the store lets somebody else act.
            model.world.meanwhile = lambda: self.one(model, dice)
            operation(model, dice)
        ending.finish(model)

    def one(self, model: Model, dice: Random) -> None:
        """One step."""
        (operation,) = dice.choices(self._operations, self._weights)
        operation(model, dice)


def machine(kinds: tuple[Kind, ...], lay: Callable[[Random], Ground]) -> type[RuleBasedStateMachine]:
    """The same for Hypothesis, with a ground of its own for each try."""

    class Machine(RuleBasedStateMachine):
        ground: Ground | None = None

        @initialize(dice=st.randoms(use_true_random=False))
        def begin(self, dice: Random) -> None:
            self.ground = lay(dice)
            self.model = Model(self.ground)

        def teardown(self) -> None:
            if self.ground is None:
                return
            try:
                ending.finish(self.model)
            finally:
                self.model.close()
                self.ground.close()

    for kind in kinds:
        setattr(Machine, kind.operation.__name__, _rule(kind.operation))
    return Machine


def _rule(operation: Operation) -> object:
    def step(self: RuleBasedStateMachine, dice: Random) -> None:
        operation(self.model, dice)  # type: ignore[attr-defined]

    step.__name__ = operation.__name__
    return rule(dice=st.randoms(use_true_random=False))(step)
