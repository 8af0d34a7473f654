"""What a flow does outside, it does once: under a lease of its lock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent_checkpoint import EffectRunningError, EffectUnknownError, Resolution, StaleLeaseError
from agent_checkpoint_prefect import FencedLock

from .conftest import in_loop, kinds
from .harness import WATCHDOG_SECONDS
from .losing import lose

EXAMPLE = Path(__file__).parents[2] / "examples/prefect_effect.py"


def test_a_flow_that_runs_again_gets_what_was_recorded(lock: FencedLock) -> None:
    refunds = []
    for _ in range(2):
        with lock.lease("orders") as lease, lease.effect("refund order-42", request={"amount": 10}) as effect:
            if effect.fresh:
                refunds.append(effect.idempotency_key)
                effect.done("transfer 1")
            assert effect.result == "transfer 1"

    assert len(refunds) == 1
    assert [kind for kind in kinds(lock) if kind.startswith("effect.")] == ["effect.begun", "effect.done"]


def test_a_coroutine_that_runs_again_gets_what_was_recorded(lock: FencedLock) -> None:
    async def run() -> list[bool]:
        fresh = []
        for _ in range(2):
            async with lock.alease("orders") as lease, lease.aeffect("refund order-42") as effect:
                fresh.append(effect.fresh)
                if effect.fresh:
                    await effect.done("transfer 1")
                assert effect.result == "transfer 1"
        return fresh

    assert in_loop(run()) == [True, False]


def test_what_a_flow_began_and_did_not_tell_is_for_somebody_to_look_at(lock: FencedLock) -> None:
    with pytest.raises(ConnectionError), lock.lease("orders") as lease, lease.effect("refund order-42"):
        with pytest.raises(EffectRunningError):
            lease.effect("refund order-42").__enter__()
        raise ConnectionError

    with pytest.raises(EffectUnknownError), lock.lease("orders") as lease:
        lease.effect("refund order-42").__enter__()
    with (
        lock.lease("orders") as lease,
        lease.effect("refund order-42", resolve=lambda _: Resolution(True, "transfer 1")) as effect,
    ):
        assert (effect.fresh, effect.result) == (False, "transfer 1")


def test_under_a_lost_lease_nothing_is_begun(lock: FencedLock) -> None:
    with pytest.raises(StaleLeaseError), lock.lease("orders") as lease:
        lose(lock, lease)
        with lease.effect("refund order-42"):
            pytest.fail("it was let in")
    assert "effect.begun" not in kinds(lock)


@pytest.mark.long  # it starts a Prefect API, which takes its time
def test_the_example_refunds_twice_under_a_lock_alone_and_once_with_an_effect(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [re.split(r" {3,}", line) for line in done.stdout.splitlines()] == [
        ["", "a lock alone", "lease.effect"],
        ["first run, refunded and killed", "was killed", "was killed"],
        ["second run", "has transfer 2", "has transfer 1"],
        ["the order was refunded", "2 times", "once"],
    ]
    assert list(tmp_path.iterdir()) == []  # it cleans up
