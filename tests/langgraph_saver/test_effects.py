"""What a node does outside, it does once: under the lease of its thread."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.constants import START
from langgraph.graph import StateGraph

from agent_checkpoint import Effect, EffectUnknownError, Resolution, StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver, current_lease

from .conftest import WATCHDOG_SECONDS
from .graphs import State

EXAMPLE = Path(__file__).parents[2] / "examples/langgraph_effect.py"


class Charging:
    """A graph of one node that charges, and may raise before it has told."""

    def __init__(self, saver: AgentCheckpointSaver, fails: bool = False) -> None:
        self.fails = fails
        self.charges: list[str] = []
        self.resolve: Any = None
        self.sync, self.awaited = (self._graph(saver, node) for node in (self._charge, self._acharge))

    def _graph(self, saver: AgentCheckpointSaver, node: Any) -> Any:
        builder = StateGraph(State)
        builder.add_node("charge", node)
        builder.add_edge(START, "charge")
        return builder.compile(checkpointer=saver)

    def _act(self, reference: str) -> str:
        self.charges.append(reference)
        if self.fails:
            raise ConnectionError
        return f"receipt {len(self.charges)}"

    def _charge(self, state: State) -> State:
        lease = current_lease()
        assert lease is not None
        with lease.effect("charge order-42", request={"amount": 10}, resolve=self.resolve) as effect:
            if effect.fresh:
                effect.done(self._act(effect.idempotency_key))
            return {"answer": effect.result}

    async def _acharge(self, state: State, config: RunnableConfig) -> State:
        lease = current_lease(config)
        assert lease is not None
        async with lease.aeffect("charge order-42", request={"amount": 10}, resolve=self.resolve) as effect:
            if effect.fresh:
                await effect.done(self._act(effect.idempotency_key))
            return {"answer": effect.result}


def test_a_node_that_runs_again_gets_what_was_recorded(saver: AgentCheckpointSaver) -> None:
    charging = Charging(saver)
    for _ in range(2):
        with saver.lease("thread-1") as lease:
            assert charging.sync.invoke({"seen": []}, lease.config())["answer"] == "receipt 1"

    assert len(charging.charges) == 1
    found = saver.store.get_effect("charge order-42")
    assert found is not None
    assert (found.state, found.scope, found.token) == ("done", "langgraph/thread-1", 1)


def test_an_async_node_that_runs_again_gets_what_was_recorded(saver: AgentCheckpointSaver) -> None:
    charging = Charging(saver)

    async def run() -> None:
        for _ in range(2):
            async with saver.lease("thread-1") as lease:
                final = await charging.awaited.ainvoke({"seen": []}, lease.config())
                assert final["answer"] == "receipt 1"

    asyncio.run(run())
    assert len(charging.charges) == 1


def test_a_node_that_failed_halfway_is_not_run_again_before_somebody_has_looked(saver: AgentCheckpointSaver) -> None:
    charging = Charging(saver, fails=True)
    with pytest.raises(ConnectionError), saver.lease("thread-1") as lease:
        charging.sync.invoke({"seen": []}, lease.config())
    charging.fails = False

    with pytest.raises(EffectUnknownError), saver.lease("thread-1") as lease:
        charging.sync.invoke(None, lease.config())
    assert len(charging.charges) == 1

    seen: list[Effect] = []
    charging.resolve = lambda effect: seen.append(effect) or Resolution(True, "receipt 1")
    with saver.lease("thread-1") as lease:
        assert charging.sync.invoke(None, lease.config())["answer"] == "receipt 1"
    assert [effect.idempotency_key for effect in seen] == charging.charges


def test_under_a_lost_lease_nothing_is_begun(saver: AgentCheckpointSaver) -> None:
    saver.setup()
    granted = saver.store.acquire("langgraph/thread-1", "worker-a")
    lease = saver.bind(granted)
    saver.store.release(*granted.fence)

    async def abegin() -> None:
        async with lease.aeffect("charge"):
            pytest.fail("it was let in")

    with pytest.raises(StaleLeaseError), lease.effect("charge"):
        pytest.fail("it was let in")
    with pytest.raises(StaleLeaseError):
        asyncio.run(abegin())
    assert saver.store.list_effects() == []


def test_the_example_charges_twice_under_a_lease_alone_and_once_with_an_effect(
    tmp_path: Path, unmeasured: None
) -> None:
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
        ["", "a lease alone", "lease.effect"],
        ["worker A, charged and killed", "was killed", "was killed"],
        ["worker B, went on", "has receipt 2", "has receipt 1"],
        ["the customer was charged", "2 times", "once"],
    ]
    assert list(tmp_path.iterdir()) == []  # it cleans up
