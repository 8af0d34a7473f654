"""A table of who holds what, as a Prefect artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agent_checkpoint import Lease

DESCRIPTION = "Who holds which fenced lock."


def rows(leases: Iterable[Lease]) -> list[dict[str, Any]]:
    """One row a lease."""
    return [
        {
            "scope": lease.scope,
            "slot": lease.slot,
            "owner": lease.owner,
            "token": lease.token,
            "flow run": lease.metadata.get("flow_run_name", ""),
            "since": lease.acquired_at.isoformat(),
            "remaining seconds": round(lease.remaining_seconds, 1),
        }
        for lease in leases
    ]


def publish(key: str, leases: Iterable[Lease]) -> Any:
    """Publish the table; the artifact's id."""
    from prefect.artifacts import create_table_artifact

    # The wrapper that Prefect puts around it takes _sync, and does not guess then.
    create: Any = create_table_artifact
    return create(table=rows(leases), key=key, description=DESCRIPTION, _sync=True)


async def apublish(key: str, leases: Iterable[Lease]) -> Any:
    """See ``publish``."""
    from prefect.artifacts import acreate_table_artifact

    return await acreate_table_artifact(table=rows(leases), key=key, description=DESCRIPTION)
