"""What this package adds to the errors of core."""

from __future__ import annotations

from agent_checkpoint import ReentrancyError, StaleLeaseError


class LeaseReentrancyError(ReentrancyError):
    """The run asks for a name that it holds already, and would wait for itself.

    ``owner`` and ``token`` say who holds it.
    """


class LeaseLostError(StaleLeaseError):
    """The lease was lost while the code under it ran.

    An ordinary exception: a retry acquires again, with a new token.
    """

    def __init__(self, message: str = "the lease was lost while the code under it ran", **facts: object) -> None:
        # It may be raised by its class alone, into a thread that is running.
        facts.setdefault("reason", "expired")
        super().__init__(message, **facts)  # type: ignore[arg-type]
