"""When a command is asked to end and when it is killed: the rule, with moments that are turned."""

from __future__ import annotations

import pytest

from agent_checkpoint.supervise.channel import NEVER
from agent_checkpoint.supervise.ending import Ending

GRACE = 10
DEADLINE = 100


@pytest.fixture
def ending() -> Ending:
    return Ending(GRACE, enforced=True)


def test_nothing_is_done_while_the_deadline_is_further_away_than_the_grace(ending: Ending) -> None:
    assert ending.next_moment(DEADLINE) == DEADLINE - GRACE
    assert ending.step(DEADLINE - GRACE - 1, DEADLINE, over=False) is None
    assert not ending.lost


def test_it_is_asked_once_when_the_grace_begins_and_killed_at_the_deadline(ending: Ending) -> None:
    assert ending.step(DEADLINE - GRACE, DEADLINE, over=False) == "ask"
    assert ending.lost
    assert ending.next_moment(DEADLINE) == DEADLINE
    assert ending.step(DEADLINE - 1, DEADLINE, over=False) is None
    assert ending.step(DEADLINE, DEADLINE, over=False) == "kill"
    assert ending.step(DEADLINE + 1, DEADLINE, over=False) == "kill"


def test_who_wakes_past_the_deadline_kills_without_asking(ending: Ending) -> None:
    assert ending.step(DEADLINE + 1000, DEADLINE, over=False) == "kill"
    assert ending.lost


def test_a_heartbeat_moves_all_of_it(ending: Ending) -> None:
    assert ending.step(DEADLINE, 2 * DEADLINE, over=False) is None
    assert ending.next_moment(2 * DEADLINE) == 2 * DEADLINE - GRACE


def test_a_heartbeat_after_it_was_asked_gives_no_more_time(ending: Ending) -> None:
    ending.step(DEADLINE - GRACE, DEADLINE, over=False)
    assert ending.next_moment(9 * DEADLINE) == DEADLINE
    assert ending.step(DEADLINE, 9 * DEADLINE, over=False) == "kill"


def test_what_is_left_of_a_command_is_asked_once_and_killed_after_the_grace(ending: Ending) -> None:
    assert ending.step(20, DEADLINE, over=True) == "ask-all"
    assert ending.step(20, DEADLINE, over=True) is None
    assert ending.next_moment(DEADLINE) == 20 + GRACE
    assert ending.step(20 + GRACE, DEADLINE, over=True) == "kill"
    assert not ending.lost


def test_what_is_left_is_killed_at_the_deadline_at_the_latest(ending: Ending) -> None:
    late = DEADLINE - GRACE // 2
    assert ending.step(late, DEADLINE, over=True) == "ask-all"
    assert ending.next_moment(DEADLINE) == DEADLINE
    assert ending.step(DEADLINE, DEADLINE, over=True) == "kill"
    assert ending.lost


def test_what_a_command_that_was_asked_leaves_behind_has_no_more_time_than_it(ending: Ending) -> None:
    assert ending.step(DEADLINE - GRACE, DEADLINE, over=False) == "ask"
    assert ending.step(DEADLINE - 1, DEADLINE, over=True) == "ask-all"
    assert ending.next_moment(DEADLINE) == DEADLINE
    assert ending.step(DEADLINE, DEADLINE, over=True) == "kill"


def test_without_a_deadline_only_what_is_left_is_ended() -> None:
    ending = Ending(GRACE, enforced=False)
    assert ending.next_moment(DEADLINE) > NEVER // 2
    assert ending.step(9 * DEADLINE, DEADLINE, over=False) is None
    assert ending.step(9 * DEADLINE, DEADLINE, over=True) == "ask-all"
    assert ending.step(9 * DEADLINE + GRACE, DEADLINE, over=True) == "kill"
    assert not ending.lost


def test_kill_kills_whatever_the_time(ending: Ending) -> None:
    ending.kill()
    assert ending.step(1, DEADLINE, over=False) == "kill"
    assert not ending.lost


def test_without_grace_nothing_is_asked() -> None:
    ending = Ending(0, enforced=True)
    assert ending.step(DEADLINE - 1, DEADLINE, over=False) is None
    assert ending.step(DEADLINE, DEADLINE, over=False) == "kill"
