"""What became of a zombie, judged by the audit log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from agent_checkpoint.errors import StaleLeaseError

if TYPE_CHECKING:
    from agent_checkpoint.records import Event
    from agent_checkpoint.testing.agents import Ended

# What keeps the house, or is granted by the store: no write of an agent's work.
OF_THE_STORE = ("events.", "lease.", "store.", "zombie.")
GIVING_BACK = "lease.release"
# How much of what an agent printed a message repeats.
SHOWN = 2_000

WRITES = """\
Let each write present the lease it was made under: store.put_checkpoint(…, lease=lease), checkpoint put
--lease-scope SCOPE --owner OWNER --token TOKEN (under agent-checkpoint run the environment does it), a leased
graph in LangGraph, @fenced in Prefect."""
ACTS = """\
Call lease.check() (held.check(), agent-checkpoint lease check) right before each action outside, and hand the
token to the target, if it can refuse a smaller one."""
VAIN = """\
Either it was frozen after its last write, and proved nothing: call pause_here() in an earlier step and give
freeze_when="paused". Or it presents its lease to nobody: call lease.check() before each action outside, and
let each write present the lease. An agent that stops quietly is judged by assert_nothing_late()."""


class ZombieOutcome(NamedTuple):
    """What an agent did that was frozen with ``token``, superseded by ``successor_token``, and woken.

    ``refused`` are the ``write.refused`` events of its token, and of writes
    without a lease after it woke. ``late_writes`` are all other events of its
    token behind the successor's grant, and what was written without a lease
    after it woke. ``late_acts`` is by how much ``acts()`` grew after it woke.
    ``ended`` and ``successor`` are how the two ended; the second is None for
    the successor that is there by default.
    """

    scope: str
    token: int
    successor_token: int
    refused: list[Event]
    late_writes: list[Event]
    late_acts: int
    ended: Ended
    successor: Ended | None

    @property
    def returncode(self) -> int:
        """The exit status of the agent; -n for signal n."""
        return self.ended.returncode

    @property
    def exception(self) -> BaseException | None:
        """What the agent raised, if it is a function."""
        return self.ended.exception

    @property
    def stdout(self) -> str:
        """What the agent printed."""
        return self.ended.stdout

    @property
    def stderr(self) -> str:
        """What the agent printed there, its traceback included."""
        return self.ended.stderr

    @property
    def noticed(self) -> bool:
        """Whether the agent learned that it is stale: a write of it was refused, or it said so at its end.

        That it could not give its lease back is none: that comes when all is done.
        """
        return any(event.detail.get("action") != GIVING_BACK for event in self.refused) or self._says_so

    @property
    def _says_so(self) -> bool:
        return self.returncode != 0 and (
            isinstance(self.exception, StaleLeaseError)
            or self.returncode == StaleLeaseError.exit_status
            or re.search(rf"\b(StaleLeaseError|{StaleLeaseError.code})\b", self.stderr) is not None
        )

    def assert_nothing_late(self) -> None:
        """Fail, saying what landed, if the agent wrote or acted after it was superseded."""
        __tracebackhide__ = True
        advice = "\n".join([WRITES] * bool(self.late_writes) + [ACTS] * (self.late_acts > 0))
        if advice:
            late = [_described(event) for event in self.late_writes]
            if self.late_acts > 0:
                late.append(f"acted {self.late_acts} times outside" if self.late_acts > 1 else "acted outside")
            lines = "".join(f"  - {line}\n" for line in late)
            raise AssertionError(f"{self._who()}\nAfter that it still\n{lines}{advice}")

    def assert_refused(self) -> None:
        """Fail if the agent wrote or acted late, if nothing told it that it is stale, or if another error ended it."""
        __tracebackhide__ = True
        self.assert_nothing_late()
        if self.exception is not None and not self._says_so:
            how = f"It ended with {type(self.exception).__name__}, which may be all that kept it from writing late."
            raise AssertionError(f"{self._who()}\n{how}{shown(self.ended)}")
        if not self.noticed:
            how = f"It ended with status {self.returncode}, nothing that it did was refused, and it raised no"
            raise AssertionError(f"{self._who()}\n{how} StaleLeaseError.\n{VAIN}{shown(self.ended)}")

    def _who(self) -> str:
        superseded = f"the agent woke with token {self.token} of {self.scope!r}"
        return f"{superseded}, which token {self.successor_token} had superseded."


def shown(ended: Ended) -> str:
    """What somebody printed, for the end of a message."""
    return "".join(
        f"\nIts {name}:\n{text[-SHOWN:]}" for name, text in (("stdout", ended.stdout), ("stderr", ended.stderr)) if text
    )


def _described(event: Event) -> str:
    what = "" if event.workflow is None else f" to {event.workflow!r}"
    number = "" if event.sequence is None else f", sequence {event.sequence}"
    fence = "without a lease" if event.token is None else f"with the stale token {event.token}"
    return f"wrote {event.kind}{what}{number}, {fence}"


def is_mark(event: Event, kind: str, scope: str, token: int) -> bool:
    """Whether this is what the story of that token left in the log; there may be others in it."""
    return event.kind == kind and (event.detail["scope"], event.detail["token"]) == (scope, token)


def judged(events: list[Event], scope: str, token: int, successor_token: int) -> tuple[list[Event], list[Event]]:
    """The refusals, and what landed late. ``events`` are those of the whole story, its marks included."""
    refused, late = [], []
    succeeded = woken = False
    for event in events:
        is_own = (event.scope, event.token) == (scope, token)
        is_unfenced = event.token is None and woken and not event.kind.startswith(OF_THE_STORE)
        if is_mark(event, "zombie.woken", scope, token):
            woken = True
        elif event.kind in ("lease.acquired", "lease.reclaimed") and event.scope == scope:
            succeeded = succeeded or event.token == successor_token
        elif event.kind == "write.refused":
            if is_own or is_unfenced:
                refused.append(event)
        # That an effect was done is a fact, which may be told late (docs/effects.md).
        elif (is_own and succeeded and not event.detail.get("late")) or is_unfenced:
            late.append(event)
    return refused, late
