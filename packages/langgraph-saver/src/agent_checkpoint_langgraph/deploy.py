"""For ``langgraph.json``: the checkpointer of a LangGraph server."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agent_checkpoint.locate import locate
from agent_checkpoint_langgraph.saver import AgentCheckpointSaver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def create_checkpointer() -> AsyncIterator[AgentCheckpointSaver]:
    """The saver on the store that the command would use: AGENT_CHECKPOINT_DB, or ``.agent-checkpoint/state.db``.

    In ``langgraph.json``:
    ``{"checkpointer": {"path": "agent_checkpoint_langgraph.deploy:create_checkpointer"}}``.
    """
    async with AgentCheckpointSaver.from_conn_string(locate(None, os.environ)) as saver:
        await saver.asetup()
        yield saver
