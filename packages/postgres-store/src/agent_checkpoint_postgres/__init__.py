"""Agent Checkpoint on PostgreSQL: the same control plane for several machines.

Nothing here is called by hand: ``StateStore("postgresql://…")``, ``--db
postgresql://…`` and the adapters find it by the scheme of the URL.
"""

from agent_checkpoint_postgres.database import PostgresDatabase, open_database

__all__ = ["PostgresDatabase", "open_database"]
