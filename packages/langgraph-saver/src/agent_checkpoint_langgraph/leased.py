"""``leased(graph)``: a graph whose every run holds the lease of its thread."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable, ensure_config
from langchain_core.runnables.config import merge_configs

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph.mapping import address
from agent_checkpoint_langgraph.ownership import presenting
from agent_checkpoint_langgraph.saver import AgentCheckpointSaver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from langchain_core.runnables import RunnableConfig

    from agent_checkpoint_langgraph.ownership import ThreadLease


class LeasedGraph(Runnable[Any, Any]):
    """A graph that holds the lease of the thread from the first step of a run to its last.

    Everything that is not named here is the graph's own. Where the caller holds
    the thread's lease already, the run uses that one.
    """

    def __init__(self, graph: Any, options: dict[str, Any]) -> None:
        saver = getattr(graph, "checkpointer", None)
        if not isinstance(saver, AgentCheckpointSaver):
            raise InvalidInputError(
                "graph: has no AgentCheckpointSaver",
                hint="compile it with one: builder.compile(checkpointer=saver)",
                field="graph",
            )
        self.graph = graph
        self._saver = saver
        self._options = options

    def invoke(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Any:
        """The graph's ``invoke`` under a lease.

        Raises:
            LeaseHeldError: another run of the thread is under way.
            StaleLeaseError: the lease was lost; the run was stopped.
        """
        with self._lease(config) as lease:
            return self.graph.invoke(input, lease.config(config), **more)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Any:
        """See ``invoke``."""
        async with self._alease(config) as lease:
            return await self.graph.ainvoke(input, lease.config(config), **more)

    def stream(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Iterator[Any]:
        """The graph's ``stream`` under a lease, from the first item to the end of the iteration. See ``invoke``."""
        with self._lease(config) as lease:
            yield from self.graph.stream(input, lease.config(config), **more)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> AsyncIterator[Any]:
        """See ``stream``."""
        # The run is over before its lease is: also where the caller leaves the iteration early.
        async with self._alease(config) as lease:
            try:
                async with aclosing(self.graph.astream(input, lease.config(config), **more)) as items:
                    async for item in items:
                        yield item
            finally:
                await self._saver._settled()

    # An update's later supersteps, and the copy of a checkpoint, are written with configs that LangGraph made itself:
    # only the context carries the lease to them.

    def update_state(self, config: RunnableConfig, values: Any, *arguments: Any, **more: Any) -> RunnableConfig:
        """The graph's ``update_state`` under a lease. See ``invoke``."""
        with self._lease(config) as lease, presenting(lease):
            updated: RunnableConfig = self.graph.update_state(lease.config(config), values, *arguments, **more)
            return updated

    async def aupdate_state(self, config: RunnableConfig, values: Any, *arguments: Any, **more: Any) -> RunnableConfig:
        """See ``update_state``."""
        async with self._alease(config) as lease:
            with presenting(lease):
                leased = lease.config(config)
                updated: RunnableConfig = await self.graph.aupdate_state(leased, values, *arguments, **more)
                return updated

    def bulk_update_state(self, config: RunnableConfig, supersteps: Any) -> RunnableConfig:
        """The graph's ``bulk_update_state`` under a lease. See ``invoke``."""
        with self._lease(config) as lease, presenting(lease):
            updated: RunnableConfig = self.graph.bulk_update_state(lease.config(config), supersteps)
            return updated

    async def abulk_update_state(self, config: RunnableConfig, supersteps: Any) -> RunnableConfig:
        """See ``bulk_update_state``."""
        async with self._alease(config) as lease:
            with presenting(lease):
                updated: RunnableConfig = await self.graph.abulk_update_state(lease.config(config), supersteps)
                return updated

    def get_input_schema(self, config: RunnableConfig | None = None) -> Any:
        """The graph's own."""
        return self.graph.get_input_schema(config)

    def get_input_jsonschema(self, config: RunnableConfig | None = None, **more: Any) -> dict[str, Any]:
        """The graph's own."""
        schema: dict[str, Any] = self.graph.get_input_jsonschema(config, **more)
        return schema

    def get_output_jsonschema(self, config: RunnableConfig | None = None, **more: Any) -> dict[str, Any]:
        """The graph's own."""
        schema: dict[str, Any] = self.graph.get_output_jsonschema(config, **more)
        return schema

    def get_output_schema(self, config: RunnableConfig | None = None) -> Any:
        """The graph's own."""
        return self.graph.get_output_schema(config)

    def _thread(self, config: RunnableConfig | None) -> str:
        """The thread that the graph would run: of the config, the run around it, or what was set by ``with_config``."""
        return address(merge_configs(getattr(self.graph, "config", None), ensure_config(config))).thread_id

    @contextmanager
    def _lease(self, config: RunnableConfig | None) -> Iterator[ThreadLease]:
        thread_id = self._thread(config)
        held = self._saver.find_lease(config, thread_id)
        if held is not None:
            yield held
            return
        with self._saver.lease(thread_id, in_context=False, **self._options) as lease:
            yield lease

    @asynccontextmanager
    async def _alease(self, config: RunnableConfig | None) -> AsyncIterator[ThreadLease]:
        thread_id = self._thread(config)
        held = self._saver.find_lease(config, thread_id)
        if held is not None:
            yield held
            return
        async with self._saver.lease(thread_id, in_context=False, **self._options) as lease:
            yield lease

    def get_graph(self, config: RunnableConfig | None = None, **more: Any) -> Any:
        """The graph's own, to be drawn."""
        return self.graph.get_graph(config, **more)

    def get_name(self, suffix: str | None = None, *, name: str | None = None) -> str:
        """The graph's own."""
        return str(self.graph.get_name(suffix, name=name))

    def __getattr__(self, name: str) -> Any:
        if name == "graph":  # it is being copied, and has nothing yet
            raise AttributeError(name)
        return getattr(self.graph, name)


def leased(
    graph: Any,
    *,
    owner: str | None = None,
    ttl_seconds: float = 30,
    wait_seconds: float = 0,
    multitask_strategy: str = "reject",
) -> LeasedGraph:
    """A compiled graph whose every run holds the lease of its thread; it is used like the graph.

    ``owner`` labels who runs it (the host and process without one).
    ``wait_seconds`` is how long to queue for a thread that is being run.
    ``multitask_strategy`` says what a second run of a thread does: ``"reject"``
    raises ``LeaseHeldError`` (after ``wait_seconds``), ``"enqueue"`` waits for
    its turn, ``"interrupt"`` fences the run that is under way.

    Raises:
        InvalidInputError: the graph has no ``AgentCheckpointSaver``.
    """
    return LeasedGraph(
        graph,
        {
            "owner": owner,
            "ttl_seconds": ttl_seconds,
            "wait_seconds": wait_seconds,
            "multitask_strategy": multitask_strategy,
        },
    )
