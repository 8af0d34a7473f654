"""What a rule answers: granted or refused, with the row and the events to write."""

from __future__ import annotations

from agent_checkpoint.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.errors import AgentCheckpointError
    from agent_checkpoint.records import Happened, LeaseRow, Write


class Granted(Record):
    """Yes: write ``row`` and ``events``; ``row`` is also the answer.

    ``limit`` is the scope's new one, None where it stays. ``passed`` and
    ``gone`` are the tickets that were passed over and those to remove.
    """

    row: LeaseRow
    events: tuple[Happened, ...]
    limit: int | None = None
    passed: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


class Refused(Record):
    """No, because of ``error``; ``rows`` and ``events`` are written all the same.

    ``write`` is the protected write that is refused, for the audit log; None
    where a refusal is the ordinary answer to a question (a lease is held).
    """

    error: AgentCheckpointError
    write: Write | None = None
    rows: tuple[LeaseRow, ...] = ()
    events: tuple[Happened, ...] = ()
