"""Histories written by hand, for the tests of what checks them: by worker a, unless said."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.faults.histories.checker import STALE
from tests.faults.histories.recorder import OK, Call

# Times in these histories are small numbers; a ttl is 100 of them.
TTL = 100


def call(what: str, invoked: int, answered: int | None, outcome: str | None = OK, **facts: Any) -> Call:
    """A call of worker a, or of ``who``."""
    owner = facts.pop("who", "a")
    if answered is None:
        outcome = None
    if outcome == STALE:
        facts = {"reason": "superseded", "recorded": True, **facts}
    return Call(owner, what, invoked, answered, outcome, facts)


def granted(invoked: int, answered: int, token: int, what: str = "acquire", **facts: Any) -> Call:
    """An answered grant of scope s."""
    known = {"scope": "s", "ttl": TTL, "limit": 1, "slot": 0, "bound": False, **facts}
    return call(what, invoked, answered, token=token, **known)


def asked(invoked: int) -> Call:
    """A request for a lease whose caller was killed."""
    return call("acquire", invoked, None, scope="s", ttl=TTL, limit=1, bound=False)


def under(what: str, invoked: int, answered: int | None, token: int, outcome: str = OK, **facts: Any) -> Call:
    """A call that presents a lease of scope s."""
    return call(what, invoked, answered, outcome, **{"scope": "s", "token": token, **facts})


def put(invoked: int, answered: int | None, sequence: int, **facts: Any) -> Call:
    """A checkpoint; without an answer nobody knows its sequence."""
    known = {"workflow": "w", "scope": "s", "token": 1, "mark": sequence, **facts}
    return call("put", invoked, answered, OK, **known, **({} if answered is None else {"sequence": sequence}))


def looked(invoked: int, answered: int, sequence: int, **facts: Any) -> Call:
    """A read that saw a checkpoint of worker a."""
    known = {"workflow": "w", "sequence": sequence, "by": "a", "mark": sequence, **facts}
    return call("read", invoked, answered, OK, **known)


def one(violations: Iterable[str], words: str) -> None:
    """There is exactly one violation, with these words in it."""
    (found,) = violations
    assert words in found
