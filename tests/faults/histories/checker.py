"""What must be true of every history, whatever happened: pure functions from recorded calls to violations.

A call did what it did between its invocation and its answer. So of two calls
the one that was answered before the other was invoked came first, and a lease
that was granted is live from the answer at the latest until its ttl after the
invocation at the earliest. Each check reports only what no order of the calls
in between could explain. Times are nanoseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from tests.faults.histories.recorder import Call

GRANTS = ("acquire", "hold", "reclaim")
# What a fence lets pass or refuses, by the store's own judgement: not by the
# deadline of a holder, which is stricter.
JUDGED = ("put", "beat", "check", "write", "begin", "release")
# What ends a lease, by somebody's will.
ENDS = ("release", "leave", "force")
STALE = "stale-lease"
HELD = ("lease-held", "wait-timeout", "reentrancy")
# What each kind of call may answer, beside ok and that the store is busy.
ANSWERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GRANTS, HELD),
    **dict.fromkeys((*JUDGED, "leave", "done", "fail"), (STALE,)),
    "force": (STALE, "not-found"),
    "resolve": ("effect-running", "invalid-input", "not-found"),
    "begin": (STALE, "effect-running", "effect-unknown"),
}
ANYTIME = ("ok", "storage-busy", None, "storage-outcome-unknown")

Lease = tuple[str, int]
"""A scope and a token."""


def check(calls: Sequence[Call], slack_ns: int = 0) -> Iterator[str]:
    """Every violation in a history, a sentence each; ``slack_ns`` is how far the store's clock is off ours."""
    leases = Leases(calls)
    yield from answers(calls)
    yield from tokens(calls)
    yield from live_at_once(leases, slack_ns)
    yield from accepted_outside(leases, slack_ns)
    yield from refused_inside(leases, slack_ns)
    yield from sequences(calls)
    yield from reads(calls)
    yield from effects(calls)


def answers(calls: Iterable[Call]) -> Iterator[str]:
    """No call is answered by what it cannot mean, or by a crash."""
    for call in calls:
        if call.outcome not in ANYTIME and call.outcome not in ANSWERS.get(call.what, ()):
            yield f"an answer that makes no sense: {call}"


def tokens(calls: Sequence[Call]) -> Iterator[str]:
    """No token twice, none left out but for calls without an answer, all in the order of real time."""
    granted: dict[str, list[Call]] = defaultdict(list)
    unsure = Counter(call.scope for call in calls if call.what in GRANTS and call.unsure)
    for call in calls:
        if call.what in GRANTS and call.ok:
            granted[call.scope].append(call)
    for scope, grants in granted.items():
        yield from in_real_time(grants, lambda call: call.token, f"token of {scope}")
        found = {call.token for call in grants}
        missing = max(found) - len(found)
        if min(found) < 1 or missing > unsure[scope]:
            yield f"{missing} tokens of {scope} are missing, {unsure[scope]} calls have no answer"


def in_real_time(calls: Iterable[Call], number: Callable[[Call], int], name: str) -> Iterator[str]:
    """Who was answered before another asked has the smaller number; no number comes twice."""
    last: Call | None = None
    latest: Call | None = None  # the one that asked last, of those with smaller numbers
    for call in sorted(calls, key=number):
        if last is not None and number(last) == number(call):
            yield f"a {name} came twice: {last}; {call}"
        if latest is not None and call.ended < latest.invoked:
            yield f"a {name} is higher than that of a later call: {call}; {latest}"
        if latest is None or call.invoked > latest.invoked:
            latest = call
        last = call


class Leases:
    """The granted leases of a history, and what was done under each, in order."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.grants: dict[Lease, Call] = {}
        self.under: dict[Lease, list[Call]] = defaultdict(list)
        self.killed: dict[str, int] = {}
        for call in calls:
            if call.what == "kill":
                self.killed[call.facts["victim"]] = call.invoked
            elif call.what in GRANTS:
                if call.ok:
                    self.grants.setdefault((call.scope, call.token), call)
                if call.what == "reclaim":
                    self.under[call.scope, call.facts["previous"]].append(call)
            elif call.what in JUDGED or call.what in ENDS:
                self.under[call.scope, call.token].append(call)

    def surely_live_until(self, lease: Lease) -> int:
        """Until when nobody else can have been granted it: its ttl since it was last extended, or its end."""
        grant = self.grants[lease]
        until = grant.invoked + int(grant.facts["ttl"])
        for call in self.under[lease]:
            if call.what == "beat" and call.ok:
                until = max(until, call.invoked + int(grant.facts["ttl"]))
        for call in self.under[lease]:
            if _may_end(call):
                until = min(until, call.invoked)
        if grant.facts.get("bound"):
            until = min(until, self.killed.get(grant.owner, until))
        return until

    def surely_over_at(self, lease: Lease) -> float:
        """From when on it must be refused: its ttl since the last answer that extended it, or its answered end.

        Infinity for one that is renewed in the background, or perhaps by a call without an answer.
        """
        grant = self.grants[lease]
        over: float = math.inf if grant.what == "hold" else grant.ended + int(grant.facts["ttl"])
        for call in self.under[lease]:
            if call.what == "beat" and (call.ok or call.unsure):
                over = max(over, math.inf if call.unsure else call.ended + int(grant.facts["ttl"]))
        ended = [call.ended for call in self.under[lease] if call.what in (*ENDS, "reclaim") and call.ok]
        return min([over, *ended])

    def by_scope(self, slots: bool) -> Iterable[list[tuple[int, Call]]]:
        """The grants of each scope, or of each of its slots, by token."""
        found: dict[Hashable, list[tuple[int, Call]]] = defaultdict(list)
        for (scope, token), grant in sorted(self.grants.items()):
            found[scope, grant.facts["slot"] if slots else None].append((token, grant))
        return found.values()


def _may_end(call: Call) -> bool:
    """Whether a lease may have ended by that call; leaving a block may end it whatever the block is told."""
    if call.what == "leave":
        return call.outcome != "storage-busy"
    return call.what in (*ENDS, "reclaim") and (call.ok or call.unsure)


def live_at_once(leases: Leases, slack_ns: int = 0) -> Iterator[str]:
    """Nobody is granted what as many others as the limit allows hold at that moment."""
    for grants in leases.by_scope(slots=False):
        ends: list[int] = []
        for token, grant in grants:
            live = len(ends) - bisect_left(ends, grant.ended + slack_ns)
            if live >= int(grant.facts["limit"]):
                yield f"granted while {live} earlier leases were live: {grant}"
            insort(ends, leases.surely_live_until((grant.scope, token)))


def accepted_outside(leases: Leases, slack_ns: int = 0) -> Iterator[str]:
    """Nothing is accepted under a lease after a later grant of its slot was answered, or after it was over."""
    for grants in leases.by_scope(slots=True):
        successor: Call | None = None  # the one that was answered first, of those with higher tokens
        for token, grant in reversed(grants):
            over = leases.surely_over_at((grant.scope, token)) + slack_ns
            for call in leases.under[grant.scope, token]:
                if not call.ok or call.what == "reclaim":
                    continue
                if successor is not None and call.invoked > successor.ended:
                    yield f"accepted after its lease was superseded: {call}; by {successor}"
                elif call.invoked > over:
                    yield f"accepted after its lease was over: {call}; granted by {grant}"
            if successor is None or grant.ended < successor.ended:
                successor = grant


def refused_inside(leases: Leases, slack_ns: int = 0) -> Iterator[str]:
    """Nothing is refused as stale while its lease is surely live."""
    for lease, grant in leases.grants.items():
        refused = [call for call in leases.under[lease] if call.what in JUDGED and call.outcome == STALE]
        until = leases.surely_live_until(lease) - slack_ns if refused else 0
        for call in refused:
            if call.ended <= until:
                yield f"refused while its lease was live: {call}; granted by {grant}"


def saves(calls: Iterable[Call]) -> Iterator[Call]:
    """The calls that were answered that they saved a checkpoint."""
    return (call for call in calls if call.ok and call.what in ("put", "bare", "done") and "sequence" in call.facts)


def sequences(calls: Sequence[Call]) -> Iterator[str]:
    """No sequence of a workflow twice, all in the order of real time."""
    saved: dict[str, list[Call]] = defaultdict(list)
    for call in saves(calls):
        saved[call.facts["workflow"]].append(call)
    for workflow, of_one in saved.items():
        yield from in_real_time(of_one, lambda call: int(call.facts["sequence"]), f"sequence of {workflow}")


def reads(calls: Sequence[Call]) -> Iterator[str]:
    """Who reads sees what was saved before it asked, or later; and as it was saved, not before somebody did."""
    saved: dict[str, list[Call]] = defaultdict(list)
    for call in saves(calls):
        saved[call.facts["workflow"]].append(call)
    read: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        if call.what == "read" and call.ok:
            read[call.facts["workflow"]].append(call)
    for workflow, of_one in read.items():
        yield from _reads(of_one, sorted(saved[workflow], key=lambda call: call.ended))


def _reads(read: Iterable[Call], saved: Sequence[Call]) -> Iterator[str]:
    ended = [call.ended for call in saved]
    highest = [0]
    for call in saved:
        highest.append(max(highest[-1], int(call.facts["sequence"])))
    by_sequence = {call.facts["sequence"]: call for call in saved}
    for call in read:
        sequence = int(call.facts["sequence"])
        known = highest[bisect_left(ended, call.invoked)]
        if sequence < known:
            yield f"an old checkpoint was read, where {known} was saved: {call}"
        put = by_sequence.get(sequence)
        if put is not None and (put.owner, put.facts["mark"]) != (call.facts["by"], call.facts["mark"]):
            yield f"another checkpoint was read than was saved: {call}; {put}"
        if put is not None and put.invoked > call.ended:
            yield f"a checkpoint was read before it was saved: {call}; {put}"


def effects(calls: Sequence[Call]) -> Iterator[str]:
    """What must not happen twice does not, and who comes later hears what was told."""
    begun = _by_key(call for call in calls if call.what == "begin" and call.ok)
    acts = _by_key(call for call in calls if call.what == "act")
    failed = _by_key(call for call in calls if call.what == "fail" and (call.ok or call.unsure))
    told = _by_key(call for call in calls if call.what in ("done", "resolve"))
    for key, begins in begun.items():
        fresh = [call for call in begins if call.facts["fresh"]]
        if len(fresh) > 1 + len(failed[key]):
            yield f"an effect was begun {len(fresh)} times, and failed {len(failed[key])} times: {fresh[-1]}"
        if len(acts[key]) > 1:
            yield f"an action was done {len(acts[key])} times: {acts[key][-1]}"
        results = {call.facts["mark"] for call in told[key]}
        for call in begins:
            if not call.facts["fresh"] and call.facts["result"] not in results:
                yield f"an effect has a result that nobody told: {call}"


def _by_key(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.facts["key"]].append(call)
    return found
