"""Small graphs, and the stories that are told with them on any saver, by synchronous calls or by awaited ones."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypedDict

from langgraph.channels import DeltaChannel
from langgraph.constants import END, START
from langgraph.func import entrypoint, task
from langgraph.graph import StateGraph
from langgraph.types import Command, Send, interrupt


class State(TypedDict, total=False):
    seen: Annotated[list[str], operator.add]
    answer: str


def extended(value: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*value, *(item for write in writes for item in write)]


class DeltaState(TypedDict, total=False):
    log: Annotated[list[str], DeltaChannel(extended, snapshot_frequency=3)]
    seen: Annotated[list[str], operator.add]


class Calls:
    """Calls a graph, and awaits nothing."""

    def __init__(self, durability: str) -> None:
        self.durability = durability

    def run(self, graph: Any, given: Any, config: Any) -> Any:
        return graph.invoke(given, config, durability=self.durability)

    def update(self, graph: Any, config: Any, values: Any, as_node: str | None = None) -> Any:
        return graph.update_state(config, values, as_node=as_node)

    def state(self, graph: Any, config: Any) -> Any:
        return graph.get_state(config, subgraphs=True)

    def history(self, graph: Any, config: Any) -> list[Any]:
        return list(graph.get_state_history(config))

    def tuples(self, saver: Any, config: Any) -> list[Any]:
        return list(saver.list(config))

    def close(self) -> None:
        """Nothing was opened."""


class AwaitedCalls(Calls):
    """The same, awaited on one event loop."""

    def __init__(self, durability: str) -> None:
        super().__init__(durability)
        self._loop = asyncio.new_event_loop()

    def run(self, graph: Any, given: Any, config: Any) -> Any:
        return self._loop.run_until_complete(graph.ainvoke(given, config, durability=self.durability))

    def update(self, graph: Any, config: Any, values: Any, as_node: str | None = None) -> Any:
        return self._loop.run_until_complete(graph.aupdate_state(config, values, as_node=as_node))

    def state(self, graph: Any, config: Any) -> Any:
        return self._loop.run_until_complete(graph.aget_state(config, subgraphs=True))

    def history(self, graph: Any, config: Any) -> list[Any]:
        return self._loop.run_until_complete(_all(graph.aget_state_history(config)))

    def tuples(self, saver: Any, config: Any) -> list[Any]:
        return self._loop.run_until_complete(_all(saver.alist(config)))

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _all(items: Any) -> list[Any]:
    return [item async for item in items]


# Graphs


def saying(*words: str) -> Callable[[Any], dict[str, list[str]]]:
    """A node that adds words."""

    def node(state: Any) -> dict[str, list[str]]:
        return {"seen": list(words)}

    return node


def chain(saver: Any, *nodes: Callable[..., Any], schema: Any = State, names: Sequence[str] = "abcdef") -> Any:
    """The nodes ``a``, ``b``, … one after the other."""
    builder = StateGraph(schema)
    named = dict(zip(names, nodes, strict=False))
    for name, node in named.items():
        builder.add_node(name, node)
    for before, after in zip([START, *named], [*named, END], strict=True):
        builder.add_edge(before, after)
    return builder.compile(checkpointer=saver)


def ask(state: Any) -> dict[str, Any]:
    return {"answer": interrupt("what now?"), "seen": ["asked"]}


def growing(name: str) -> Callable[[Any], dict[str, Any]]:
    """A node that adds to a channel that is saved as its changes, and to one that is saved whole."""

    def node(state: Any) -> dict[str, Any]:
        return {"log": [f"{name}{len(state.get('log', ()))}"], "seen": [name]}

    return node


def delta_graph(saver: Any) -> Any:
    return chain(saver, growing("a"), growing("b"), schema=DeltaState)


def fan_out(saver: Any) -> Any:
    """One node sends three tasks, whose answers a last one counts."""
    builder = StateGraph(State)
    builder.add_node("work", lambda sent: {"seen": [f"did {sent['answer']}"]})
    builder.add_node("count", lambda state: {"answer": str(len(state["seen"]))})
    builder.add_conditional_edges(START, lambda state: [Send("work", {"answer": name}) for name in "xyz"], ["work"])
    builder.add_edge("work", "count")
    builder.add_edge("count", END)
    return builder.compile(checkpointer=saver)


def beside(saver: Any, *nodes: Callable[..., Any]) -> Any:
    """The nodes ``a``, ``b``, … at once."""
    builder = StateGraph(State)
    for name, node in zip("abcdef", nodes, strict=False):
        builder.add_node(name, node)
        builder.add_edge(START, name)
    return builder.compile(checkpointer=saver)


def failing_once(word: str) -> Callable[[Any], dict[str, list[str]]]:
    """A node that fails the first time."""
    failed: list[bool] = []

    def node(state: Any) -> dict[str, list[str]]:
        if not failed:
            failed.append(True)
            raise ValueError("not yet")
        return {"seen": [word]}

    return node


# Stories: each gives the graph, and the threads that it left something in


Story = Callable[[Any, Calls], tuple[Any, list[str]]]


def thread(thread_id: str = "thread-1") -> Any:
    return {"configurable": {"thread_id": thread_id}}


def runs_twice(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = chain(saver, saying("one"), saying("two"))
    for word in ("hello", "again"):
        calls.run(graph, {"seen": [word], "answer": word}, thread())
    return graph, ["thread-1"]


def is_asked_and_answers(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = chain(saver, saying("before"), ask, saying("after"))
    calls.run(graph, {"seen": []}, thread())
    calls.run(graph, Command(resume="go on"), thread())
    calls.run(graph, {"seen": ["waits"]}, thread())
    return graph, ["thread-1"]


def two_ask_at_once(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = beside(saver, ask, saying("quick"), lambda state: {"seen": [interrupt("and now?")]})
    calls.run(graph, {"seen": []}, thread())
    asked = calls.state(graph, thread()).interrupts
    calls.run(graph, Command(resume={asked[0].id: "first"}), thread())
    return graph, ["thread-1"]


def has_a_subgraph(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    inner = chain(None, saying("inner"), ask)
    graph = chain(saver, inner, saying("outer"), names=("inner", "outer"))
    calls.run(graph, {"seen": ["start"]}, thread())
    calls.run(graph, Command(resume="go on"), thread())
    return graph, ["thread-1"]


def has_a_subgraph_with_a_memory(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    inner = chain(True, saying("inner"), ask)
    graph = chain(saver, inner, saying("outer"), names=("inner", "outer"))
    for _ in range(2):
        calls.run(graph, {"seen": ["start"]}, thread())
        calls.run(graph, Command(resume="go on"), thread())
    return graph, ["thread-1"]


def calls_a_graph_with_a_thread_of_its_own(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    inner = chain(saver, saying("inner"), saying("end"))

    def visit(state: Any) -> Any:
        return {"seen": inner.invoke({"seen": ["visit"]}, thread("inner-1"))["seen"]}

    graph = chain(saver, visit, saying("outer"))
    for _ in range(2):
        calls.run(graph, {"seen": ["start"]}, thread())
    return graph, ["thread-1", "inner-1"]


def is_forked(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = chain(saver, saying("one"), saying("two"), saying("three"))
    calls.run(graph, {"seen": ["start"]}, thread())
    past = calls.history(graph, thread())
    fork = calls.update(graph, past[min(2, len(past) - 1)].config, {"seen": ["forked"], "answer": "other"})
    calls.run(graph, None, fork)
    calls.update(graph, thread(), {"seen": ["late"]}, as_node="b")
    calls.run(graph, None, thread())
    return graph, ["thread-1"]


def travels_in_time(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = chain(saver, saying("one"), ask, saying("two"))
    calls.run(graph, {"seen": ["start"]}, thread())
    calls.run(graph, Command(resume="first"), thread())
    past = calls.history(graph, thread())
    calls.run(graph, None, past[-1].config)
    calls.run(graph, Command(resume="second"), thread())
    calls.run(graph, {"seen": ["anew"]}, past[len(past) // 2].config)
    return graph, ["thread-1"]


def keeps_changes(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = delta_graph(saver)
    for word in "pqrs":
        calls.run(graph, {"log": [word], "seen": [word]}, thread())
    return graph, ["thread-1"]


def keeps_changes_and_is_forked(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = delta_graph(saver)
    for word in "pq":
        calls.run(graph, {"log": [word]}, thread())
    past = calls.history(graph, thread())
    for state in past[:: max(1, len(past) // 3)]:
        fork = calls.update(graph, state.config, {"log": ["forked"], "seen": ["forked"]}, as_node="a")
        calls.run(graph, None, fork)
    calls.run(graph, {"log": ["r"]}, past[-1].config)
    calls.run(graph, {"log": ["s"]}, thread())
    return graph, ["thread-1"]


def fans_out(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = fan_out(saver)
    for _ in range(2):
        calls.run(graph, {"seen": []}, thread())
    return graph, ["thread-1"]


def fails_and_goes_on(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    graph = chain(saver, saying("one"), failing_once("two"), saying("three"))
    try:
        calls.run(graph, {"seen": ["start"]}, thread())
    except ValueError:
        calls.run(graph, None, thread())
    return graph, ["thread-1"]


def is_a_function(saver: Any, calls: Calls) -> tuple[Any, list[str]]:
    @task
    def double(number: int) -> int:
        return 2 * number

    @entrypoint(checkpointer=saver)
    def work(number: int, *, previous: int | None = None) -> Any:
        doubled = double(number).result()
        answer = interrupt({"doubled": doubled})
        return entrypoint.final(value=f"{answer} {previous}", save=doubled)

    for number in (3, 4):
        calls.run(work, number, thread())
        calls.run(work, Command(resume="yes"), thread())
    return work, ["thread-1"]


STORIES: list[Story] = [
    runs_twice,
    is_asked_and_answers,
    two_ask_at_once,
    has_a_subgraph,
    has_a_subgraph_with_a_memory,
    calls_a_graph_with_a_thread_of_its_own,
    is_forked,
    travels_in_time,
    keeps_changes,
    keeps_changes_and_is_forked,
    fans_out,
    fails_and_goes_on,
    is_a_function,
]

# Those whose nodes ask for the context that they run in.
ASKS = (
    is_asked_and_answers,
    two_ask_at_once,
    has_a_subgraph,
    has_a_subgraph_with_a_memory,
    travels_in_time,
    is_a_function,
)
