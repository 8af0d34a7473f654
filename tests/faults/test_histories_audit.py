"""The audit of a store against its history, shown what it must not let pass; the record itself; a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.faults.histories import audit
from tests.faults.histories.audit import Happened, Ledger, ledger_of
from tests.faults.histories.checker import STALE
from tests.faults.histories.lockset import lost
from tests.faults.histories.recorder import OK, Recorder, read
from tests.faults.histories.written import TTL, call, granted, one, put, under

from agent_checkpoint import LeaseHeldError, StaleLeaseError, StateStore
from agent_checkpoint.testing import FakeClock

# The audit log and the rows

ACQUIRED = Happened("lease.acquired", "s", "a", 1, detail={"slot": 0})
SAVED = Happened("checkpoint.saved", "s", "a", 1, "w", 1)
RELEASED = Happened("lease.released", "s", "a", 1)
TWO_SLOTS = Happened("lease.limit-set", "s", None, None, detail={"limit": 2})
AFTER = Happened("lease.acquired", "s", "b", 2, detail={"slot": 0})


def test_a_good_log_replays() -> None:
    other_slot = Happened("lease.acquired", "s", "b", 2, detail={"slot": 1})
    assert list(audit.replay([ACQUIRED, SAVED, RELEASED, AFTER])) == []
    assert list(audit.replay([TWO_SLOTS, ACQUIRED, other_slot, SAVED])) == []


@pytest.mark.parametrize("kind", audit.UNDER_A_LEASE)
def test_what_was_committed_after_the_end_of_its_lease_is_found(kind: str) -> None:
    late = Happened(kind, "s", "a", 1, "w", 1)
    one(audit.replay([ACQUIRED, RELEASED, late]), "written under a lease that was over")
    one(audit.replay([ACQUIRED, RELEASED, AFTER, late]), "written under a lease that was over; live were [2]")


def test_a_grant_out_of_turn_is_found() -> None:
    one(audit.replay([ACQUIRED, AFTER]), "granted out of turn")  # the first one has not ended
    one(audit.replay([ACQUIRED, RELEASED, ACQUIRED]), "granted out of turn")
    one(audit.replay([AFTER]), "granted out of turn")
    beyond = [Happened("lease.acquired", "s", "b", token, detail={"slot": token - 1}) for token in (2, 3)]
    one(audit.replay([TWO_SLOTS, ACQUIRED, *beyond]), "granted out of turn")


def test_a_lease_that_is_taken_back_must_have_been_held() -> None:
    again = Happened("lease.reclaimed", "s", "a", 2, detail={"slot": 0})
    assert list(audit.replay([ACQUIRED, again])) == []
    one(audit.replay([ACQUIRED, again, SAVED]), "written under a lease that was over; live were [2]")
    one(audit.replay([ACQUIRED, RELEASED, again]), "taken back without being held")
    taken_back = [granted(0, 1, 1), granted(2, 3, 2, "reclaim", previous=1)]
    assert list(audit.answered_and_on_record(taken_back, [ACQUIRED, again])) == []


def test_a_lease_that_ends_twice_is_found() -> None:
    one(audit.replay([ACQUIRED, RELEASED, RELEASED]), "written under a lease that was over")


def test_a_sequence_out_of_turn_in_the_log_is_found() -> None:
    one(audit.replay([ACQUIRED, SAVED, SAVED]), "a sequence out of turn, not 2")


def test_what_was_answered_and_is_not_on_record_is_found() -> None:
    calls = [granted(0, 1, 1), put(2, 3, 1), under("release", 4, 5, 1)]
    events = [ACQUIRED, SAVED, RELEASED]
    assert list(audit.answered_and_on_record(calls, events)) == []
    for event in events:
        one(audit.answered_and_on_record(calls, [each for each in events if each is not event]), "but not on record")


def test_what_is_on_record_and_was_not_answered_needs_a_call_without_an_answer() -> None:
    calls, events = [granted(0, 1, 1)], [ACQUIRED, SAVED]
    one(audit.answered_and_on_record(calls, events), "1 times on record, but not answered, with 0 calls")
    assert list(audit.answered_and_on_record([*calls, put(2, None, 0)], events)) == []
    # Not one by another.
    one(audit.answered_and_on_record([*calls, put(2, None, 0, who="b")], events), "on record, but not answered")


def test_a_checkpoint_without_a_lease_is_on_record_as_nobodys() -> None:
    bare = call("bare", 0, 1, workflow="w", sequence=1, mark=1)
    nobodys = Happened("checkpoint.saved", None, None, None, "w", 1)
    assert list(audit.answered_and_on_record([bare], [nobodys])) == []
    one(audit.answered_and_on_record([bare], []), "but not on record")
    assert list(audit.checkpoints([bare], Ledger([], [("w", 1, {"by": "a", "mark": 1}, None, None)], {}))) == []


def test_a_heartbeat_in_the_background_needs_no_answer() -> None:
    summary = Happened("lease.heartbeat", "s", "a", 1, detail={"count": 3})
    told = Happened("lease.heartbeat", "s", "a", 1, detail={})
    assert list(audit.answered_and_on_record([granted(0, 1, 1)], [ACQUIRED, summary])) == []
    one(audit.answered_and_on_record([granted(0, 1, 1)], [ACQUIRED, told]), "on record, but not answered")


def test_a_refusal_that_is_not_on_record_is_found() -> None:
    late = under("put", 2, 3, 1, STALE)
    on_record = Happened("write.refused", "s", "a", 1, "w", None, {"action": "checkpoint.put"})
    assert list(audit.refusals_on_record([late], [on_record])) == []
    one(audit.refusals_on_record([late], []), "a refusal is not on record")
    one(audit.refusals_on_record([under("beat", 2, 3, 1, STALE)], [on_record]), "a refusal is not on record")
    assert list(audit.refusals_on_record([under("put", 2, 3, 1, STALE, recorded=False)], [])) == []


def test_an_acknowledged_checkpoint_that_is_gone_or_another_is_found() -> None:
    def with_rows(*rows: tuple[str, int, dict[str, Any], str | None, int | None]) -> list[str]:
        return list(audit.checkpoints([put(0, 1, 1)], Ledger([], rows, {})))

    assert with_rows(("w", 1, {"by": "a", "mark": 1}, "a", 1)) == []
    one(with_rows(), "is not there, but None")
    one(with_rows(("w", 1, {"by": "b", "mark": 1}, "b", 1)), "is not there, but ('b'")
    one(with_rows(("w", 1, {"by": "a", "mark": 1}, "a", 1), ("w", 3, {"by": "a", "mark": 3}, "a", 1)), "has sequence 3")


def test_what_was_pruned_need_not_be_there_and_nothing_else_may_be_gone() -> None:
    calls = [put(0, 1, 1), put(2, 3, 2)]
    pruned = [Happened("checkpoint.pruned", None, None, None, "w", detail={"to_sequence": 1})]
    last = ("w", 2, {"by": "a", "mark": 2}, "a", 1)
    assert list(audit.checkpoints(calls, Ledger(pruned, [last], {}))) == []
    one(audit.checkpoints(calls, Ledger(pruned, [], {})), "is not there, but None")
    assert len(list(audit.checkpoints(calls, Ledger([], [last], {})))) == 2


def test_a_lease_that_was_ended_by_force_is_on_record_as_its_owners() -> None:
    forced = Happened("lease.force-released", "s", "a", 1)
    ended = under("force", 2, 3, 1, who="b", victim="a")
    assert list(audit.answered_and_on_record([granted(0, 1, 1), ended], [ACQUIRED, forced])) == []
    one(audit.answered_and_on_record([granted(0, 1, 1)], [ACQUIRED, forced]), "on record, but not answered")


def test_an_action_that_was_told_of_and_is_not_on_record_is_found() -> None:
    done = under("done", 0, 1, 1, key="k", mark=7)
    assert list(audit.effects([done], Ledger([], [], {"k": ("done", 7)}))) == []
    one(audit.effects([done], Ledger([], [], {"k": ("begun", None)})), "is not on record, but ('begun'")
    one(audit.effects([done], Ledger([], [], {})), "is not on record, but None")


def test_what_the_doctor_finds_is_a_violation() -> None:
    one(audit.audit([], Ledger([], [], {}, ["integrity: row 3 is missing"])), "the doctor finds: integrity")


# The lock-set


def test_a_number_that_was_added_and_is_gone_is_found() -> None:
    added = [put(0, 1, 1, number="a:1"), put(2, 3, 2, number="a:2"), put(4, None, 3, number="a:3")]
    assert list(lost(added, {"w": ["a:1", "a:2"]})) == []
    assert list(lost(added, {"w": ["a:1", "a:2", "a:3"]})) == []
    one(lost(added, {"w": ["a:2"]}), "an acknowledged number is in no set")
    one(lost(added, {"w": ["a:1", "a:2", "b:1"]}), "that nobody added")
    one(lost(added, {"w": ["a:1", "a:2", "a:2"]}), "twice")


# The recorder, and a real store


def test_a_record_tells_each_call_and_its_answer_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "a")
    recorder.call("acquire", lambda: 5, lambda token: {"token": token}, scope="s")
    recorder.call("put", lambda: _raise(StaleLeaseError("late", reason="expired")), token=5)
    recorder.call("acquire", lambda: _raise(LeaseHeldError("held")), scope="s")
    with pytest.raises(ZeroDivisionError):
        recorder.call("read", lambda: 1 // 0)
    recorder.close()
    with (tmp_path / "a.calls").open("a") as file:
        file.write('[9000,"beat",{"token":5}]\n[9001,"ok",{"tok')

    calls = read(tmp_path)
    assert [(each.what, each.outcome, each.owner) for each in calls if each.what != "beat"] == [
        ("acquire", OK, "a"),
        ("put", STALE, "a"),
        ("acquire", "lease-held", "a"),
        ("read", "crashed", "a"),
    ]
    assert calls[1 if calls[0].what == "beat" else 0].facts == {"scope": "s", "token": 5}
    (cut,) = [each for each in calls if each.what == "beat"]
    assert (cut.unsure, cut.answered, cut.facts) == (True, None, {"token": 5})
    assert all(each.invoked <= each.ended for each in calls if each.answered is not None)


def _raise(error: Exception) -> int:
    raise error


def test_what_a_real_store_did_agrees_with_what_it_answered(
    tmp_path: Path, store: StateStore, clock: FakeClock
) -> None:
    recorder = Recorder(tmp_path, "a")
    late = work(recorder, store)
    clock.advance(TTL)
    recorder.call("acquire", lambda: store.acquire("s", "a", TTL), lambda n: {"token": n.token, "slot": 0}, **ASKED)
    recorder.call("put", lambda: store.put_checkpoint("w", {}, lease=late), scope="s", token=1)
    recorder.close()
    calls, ledger = read(tmp_path), ledger_of(store)

    assert {each.outcome for each in calls} == {OK, STALE}
    assert list(audit.audit(calls, ledger)) == []
    # And of a store that forgot something it would have been noticed.
    for number, event in enumerate(ledger.events):
        if event.kind not in ("store.initialized", "lease.expired"):
            events = [*ledger.events[:number], *ledger.events[number + 1 :]]
            assert list(audit.audit(calls, Ledger(events, ledger.checkpoints, ledger.effects))), event
    assert list(audit.audit(calls, Ledger(ledger.events, [], ledger.effects)))
    assert list(audit.audit(calls, Ledger(ledger.events, ledger.checkpoints, {})))


ASKED: dict[str, Any] = {"scope": "s", "ttl": TTL, "limit": 1, "bound": False}


def work(recorder: Recorder, store: StateStore) -> Any:
    """A grant, a heartbeat, a checkpoint and an effect, each written down; the lease."""
    lease = recorder.call(
        "acquire", lambda: store.acquire("s", "a", TTL), lambda lease: {"token": lease.token, "slot": 0}, **ASKED
    )
    assert lease is not None
    named: dict[str, Any] = {"scope": "s", "token": lease.token}
    recorder.call("beat", lambda: store.heartbeat(*lease.fence), **named)
    data = {"by": "a", "mark": 1}
    recorder.call(
        "put",
        lambda: store.put_checkpoint("w", data, lease=lease),
        lambda saved: {"sequence": saved.sequence},
        workflow="w",
        mark=1,
        **named,
    )
    acting = store.effect("k", lease=lease)
    recorder.call("begin", acting.__enter__, lambda begun: {"fresh": begun.fresh, "result": None}, key="k", **named)
    recorder.call("done", lambda: acting.done(2), key="k", mark=2, **named)
    return lease
