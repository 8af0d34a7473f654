"""A LangGraph checkpoint saver that refuses superseded workers.

>>> from agent_checkpoint_langgraph import AgentCheckpointSaver
>>> with AgentCheckpointSaver.from_conn_string("agents.db") as saver:
...     graph = builder.compile(checkpointer=saver)
...     with saver.lease("thread-1", owner="worker-a") as lease:
...         graph.invoke({"messages": []}, lease.config())
"""

from __future__ import annotations

from agent_checkpoint_langgraph.deploy import create_checkpointer
from agent_checkpoint_langgraph.leased import LeasedGraph, leased
from agent_checkpoint_langgraph.ownership import ThreadLease, current_lease
from agent_checkpoint_langgraph.reading import ThreadInfo
from agent_checkpoint_langgraph.saver import AgentCheckpointSaver
from agent_checkpoint_langgraph.serde import StrictSerializer

__all__ = [
    "AgentCheckpointSaver",
    "LeasedGraph",
    "StrictSerializer",
    "ThreadInfo",
    "ThreadLease",
    "create_checkpointer",
    "current_lease",
    "leased",
]
