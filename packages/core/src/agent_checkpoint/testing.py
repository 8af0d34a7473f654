"""Time that tests turn by hand, for programs that use a store."""

from __future__ import annotations

from agent_checkpoint.clock import Clock
from agent_checkpoint.names import NS

# 2030-01-01T00:00:00Z: a wall clock that no test mistakes for today's.
EPOCH_NS = 1_893_456_000 * NS


class FakeClock(Clock):
    """A clock that stands still until it is turned; hand it to ``StateStore(clock=…)``.

    Processes that share a store need clocks that agree; this one is for tests
    within one process, whose stores can share it.
    """

    def __init__(self, *, wall_ns: int = EPOCH_NS, ticks_ns: int = 1_000 * NS, domain: str = "boot-1") -> None:
        self.now_wall_ns = wall_ns
        self.now_ticks_ns = ticks_ns
        self.domain = domain
        self.wall_ns = lambda: self.now_wall_ns
        self.ticks_ns = lambda: self.now_ticks_ns

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        self.now_wall_ns += round(seconds * NS)
        self.now_ticks_ns += round(seconds * NS)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an administrator or NTP does; no time passes."""
        self.now_wall_ns += round(seconds * NS)

    def reboot(self, *, domain: str, down_seconds: float = 30.0) -> None:
        """Start another boot: the monotonic clock begins anew, the wall clock goes on."""
        self.domain = domain
        self.now_wall_ns += round(down_seconds * NS)
        self.now_ticks_ns = NS
