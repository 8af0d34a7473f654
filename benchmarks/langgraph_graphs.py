"""Whole runs of small graphs: what a saver adds to them, and what a lease does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AnyMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from agent_checkpoint_langgraph import AgentCheckpointSaver
from benchmarks import langgraph_sides
from benchmarks.harness import Plan, Row, Side, in_turn, timed
from benchmarks.langgraph_sides import NODE, Saver, held, human_message, thread_config

# Supersteps of a run whose node does next to nothing, and messages of one that grows.
STEPS = 100
MESSAGES = 200
QUICK_STEPS = 20
STEP_ROUNDS = 10
MESSAGE_ROUNDS = 3
OURS, NO_LEASE, ASYNC_SQLITE = "ours", "ours, no lease", "AsyncSqliteSaver"

_numbers = itertools.count()


class Count(TypedDict):
    """How many supersteps there were."""

    count: int


class Talk(TypedDict):
    """A conversation."""

    messages: Annotated[list[AnyMessage], add_messages]


def measure(plan: Plan, place: str, folder: Path) -> Iterator[Row]:
    """Seconds a superstep of a run that does nothing else, and seconds of a run that is a conversation."""
    steps, messages = (QUICK_STEPS, QUICK_STEPS) if plan.quick else (STEPS, MESSAGES)
    talk, talk_rounds = f"run of {messages} messages, {place}", plan.rounds(MESSAGE_ROUNDS)
    with ExitStack() as stack:
        mine = stack.enter_context(AgentCheckpointSaver.from_conn_string(folder / "graphs.db"))
        sqlite = stack.enter_context(langgraph_sides.sqlite(folder / "graphs-sqlite.db"))
        awaited = stack.enter_context(langgraph_sides.async_sqlite(folder / "graphs-async-sqlite.db"))
        memory = stack.enter_context(langgraph_sides.in_memory(folder))
        savers: dict[str, Saver | None] = {
            OURS: mine,
            "SqliteSaver": sqlite.saver,
            NO_LEASE: mine,
            "InMemorySaver": memory.saver,
            "no saver": None,
        }
        counts = {name: timed(partial(_run, name, counting(saver, steps))) for name, saver in savers.items()}
        yield from _rows(f"superstep, {place}", counts, plan.rounds(STEP_ROUNDS), steps)
        talks = {name: timed(partial(_run, name, talking(saver, messages))) for name, saver in savers.items()}
        yield from _rows(talk, talks, talk_rounds)

        def in_loop(name: str, graph: Any) -> Side:
            return timed(lambda: awaited.loop.run_until_complete(_arun(name, graph)))

        both = {
            OURS: in_loop(OURS, talking(mine, messages)),
            ASYNC_SQLITE: in_loop(ASYNC_SQLITE, talking(awaited.saver, messages)),
        }
        yield from _rows(talk, both, talk_rounds)


def counting(saver: Saver | None, steps: int) -> Any:
    """A graph of one node that counts so many supersteps."""
    builder = StateGraph(Count)
    builder.add_node(NODE, lambda state: {"count": state.get("count", 0) + 1})
    builder.add_edge(START, NODE)
    builder.add_conditional_edges(NODE, lambda state: END if state["count"] >= steps else NODE)
    return builder.compile(checkpointer=saver)


def talking(saver: Saver | None, messages: int) -> Any:
    """A graph of one node that adds a message of 1 KB in each superstep, so many in all."""
    builder = StateGraph(Talk)
    builder.add_node(NODE, lambda state: {"messages": [human_message(len(state["messages"]))]})
    builder.add_edge(START, NODE)
    builder.add_conditional_edges(NODE, lambda state: END if len(state["messages"]) >= messages else NODE)
    return builder.compile(checkpointer=saver)


def _run(name: str, graph: Any) -> None:
    """A run of a new thread; ours takes its lease, holds it, and releases it."""
    config = _new_thread()
    if name == OURS:
        with held(graph.checkpointer, config["configurable"]["thread_id"]) as lease:
            graph.invoke(INPUT, lease.config(config))
    else:
        graph.invoke(INPUT, config)


async def _arun(name: str, graph: Any) -> None:
    config = _new_thread()
    if name == OURS:
        async with graph.checkpointer.lease(config["configurable"]["thread_id"]) as lease:
            await graph.ainvoke(INPUT, lease.config(config))
    else:
        await graph.ainvoke(INPUT, config)


# Enough for either graph to begin with.
INPUT: dict[str, Any] = {"count": 0, "messages": []}


def _new_thread() -> RunnableConfig:
    return thread_config(f"run-{next(_numbers)}")


def _rows(case: str, runs: Mapping[str, Side], rounds: int, steps: int = 1) -> Iterator[Row]:
    figures = {name: tuple(each / steps for each in found) for name, found in in_turn(runs, rounds).items()}
    for peer in figures:
        if peer != OURS:
            yield Row("langgraph", case, "s", peer, figures[OURS], figures[peer])
