"""When a command is asked to end, and when it is killed: the rule alone, without clock or process.

Moments are nanoseconds of one monotonic clock. An ending that has begun is not
taken back by a heartbeat: who was told to end would not be found whole.
"""

from __future__ import annotations

from agent_checkpoint.supervise.channel import NEVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal


class Ending:
    """What is to be done to a command, and when; ``lost`` if that is because of the deadline."""

    def __init__(self, grace_ns: int, enforced: bool) -> None:
        self.lost = False
        self.killing = False
        self._grace_ns = grace_ns
        self._enforced = enforced
        self._cleaning = False
        self._kill_at = NEVER

    def kill(self) -> None:
        """Grant no more time."""
        self.killing = True

    def next_moment(self, deadline: int) -> int:
        """When ``step`` will have something to say, if nothing happens before."""
        limit = self._limit(deadline)
        return min(self._kill_at, limit if self.lost or self._cleaning else limit - self._grace_ns)

    def step(self, now: int, deadline: int, *, over: bool) -> Literal["ask", "ask-all", "kill"] | None:
        """What to do now: ask the command, ask all of them, or kill them.

        ``over``: the command itself has ended, what it started has not.
        """
        limit = self._limit(deadline)
        self.lost = self.lost or now >= limit
        if self.killing or now >= min(self._kill_at, limit):
            self.killing = True
            return "kill"
        if over and not self._cleaning:
            self._cleaning = True
            self._kill_at = min(self._kill_at, now + self._grace_ns)
            return "ask-all"
        if not over and not self.lost and now >= limit - self._grace_ns:
            self.lost = True
            self._kill_at = limit
            return "ask"
        return None

    def _limit(self, deadline: int) -> int:
        return deadline if self._enforced else NEVER
