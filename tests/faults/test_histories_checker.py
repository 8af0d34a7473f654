"""What checks histories, shown good ones, and for each rule bad ones that it must not let pass."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.histories import checker
from tests.faults.histories.checker import STALE, Leases
from tests.faults.histories.recorder import Call
from tests.faults.histories.written import TTL, asked, call, granted, looked, one, put, under


def test_a_good_history_has_no_violation() -> None:
    calls = [
        granted(0, 2, 1),
        looked(3, 5, 0, who="b"),
        put(3, 4, 1),
        under("beat", 60, 61, 1),
        call("acquire", 62, 63, "lease-held", who="b", scope="s", ttl=TTL, limit=1, bound=False),
        granted(64, 162, 2, who="b"),  # it waited until the ttl after the heartbeat was over
        under("put", 161, 164, 1, STALE, workflow="w", mark=2),
        put(163, 165, 2, who="b", token=2),
        looked(166, 167, 2, by="b"),
        under("release", 168, 169, 2, who="b"),
    ]
    assert list(checker.check(calls)) == []


# Answers


def test_an_answer_that_a_call_cannot_have_is_found() -> None:
    assert list(checker.answers([call("put", 0, 1, "storage-busy"), call("put", 2, None)])) == []
    one(checker.answers([call("read", 0, 1, "stale-lease")]), "makes no sense")
    one(checker.answers([call("put", 0, 1, "crashed")]), "makes no sense")
    one(checker.answers([call("put", 0, 1, "storage-corrupt")]), "makes no sense")


# Tokens


def test_tokens_may_come_in_any_order_that_real_time_allows() -> None:
    assert list(checker.tokens([granted(0, 10, 2), granted(1, 5, 1, who="b")])) == []


def test_a_token_that_comes_twice_is_found() -> None:
    one(checker.tokens([granted(0, 5, 1), granted(4, 7, 1, who="b")]), "came twice")


def test_a_token_below_that_of_an_earlier_grant_is_found() -> None:
    one(checker.tokens([granted(0, 1, 2), granted(2, 3, 1, who="b")]), "is higher than that of a later call")
    between = [granted(0, 1, 3), granted(0, 9, 2, who="b"), granted(2, 3, 1, who="c")]
    one(checker.tokens(between), "is higher than that of a later call")


def test_a_token_may_be_missing_for_each_call_without_an_answer_and_not_for_more() -> None:
    grants = [granted(0, 1, 1), granted(8, 9, 3)]
    assert list(checker.tokens([*grants, asked(3)])) == []
    one(checker.tokens(grants), "1 tokens of s are missing, 0 calls")
    one(checker.tokens([*grants, granted(9, 10, 5), asked(3)]), "2 tokens of s are missing, 1 calls")


# Leases that are live at once


def at_once(*calls: Call) -> list[str]:
    return list(checker.live_at_once(Leases(calls)))


def test_a_grant_while_another_lease_is_live_is_found() -> None:
    one(at_once(granted(0, 2, 1), granted(3, TTL - 1, 2, who="b")), "granted while 1 earlier leases were live")
    assert at_once(granted(0, 2, 1), granted(3, TTL + 1, 2, who="b")) == []


def test_a_heartbeat_makes_a_lease_live_longer() -> None:
    beaten = [granted(0, 2, 1), under("beat", 50, 51, 1)]
    one(at_once(*beaten, granted(3, TTL + 49, 2, who="b")), "granted while")
    assert at_once(*beaten, granted(3, TTL + 51, 2, who="b")) == []
    refused = under("beat", 50, 51, 1, STALE)
    assert at_once(granted(0, 2, 1), refused, granted(3, TTL + 1, 2, who="b")) == []


@pytest.mark.parametrize("end", [under("release", 10, 15, 1), under("release", 10, None, 1), under("leave", 10, 12, 1)])
def test_a_lease_is_over_when_its_holder_may_have_ended_it(end: Call) -> None:
    assert at_once(granted(0, 2, 1), end, granted(11, 14, 2, who="b")) == []
    one(at_once(granted(0, 2, 1), end, granted(5, 9, 2, who="b")), "granted while")


def test_a_release_that_did_nothing_ends_no_lease() -> None:
    for outcome in (STALE, "storage-busy"):
        end = under("release", 10, 11, 1, outcome)
        one(at_once(granted(0, 2, 1), end, granted(12, 14, 2, who="b")), "granted while")


def test_a_lease_that_is_bound_to_a_killed_process_is_over_and_another_is_not() -> None:
    kill = call("kill", 10, 11, who="nemesis", victim="a")
    assert at_once(granted(0, 2, 1, bound=True), kill, granted(12, 14, 2, who="b")) == []
    one(at_once(granted(0, 2, 1), kill, granted(12, 14, 2, who="b")), "granted while")


@pytest.mark.parametrize("what", ["force", "reclaim"])
def test_a_lease_that_somebody_ended_or_took_back_is_over(what: str) -> None:
    if what == "force":
        ended = [under("force", 10, 12, 1, who="c", victim="a"), granted(13, 14, 2, who="b")]
    else:
        ended = [granted(10, 12, 2, "reclaim", previous=1)]
    assert at_once(granted(0, 2, 1), *ended) == []
    one(accepted(granted(0, 2, 1), *ended, under("put", 15, 16, 1)), "accepted after its lease was")
    assert refused(granted(0, 2, 1), *ended, under("put", 13, 14, 1, STALE)) == []


def test_a_lease_that_was_taken_back_by_a_call_that_failed_is_live() -> None:
    failed = granted(10, 12, 2, "reclaim", previous=1)
    failed.outcome = "storage-busy"
    one(at_once(granted(0, 2, 1), failed, granted(13, 14, 2, who="b")), "granted while")


def test_more_live_leases_than_the_limit_allows_are_found() -> None:
    two = [granted(0, 2, 1, limit=2), granted(3, 4, 2, limit=2, slot=1, who="b")]
    assert at_once(*two) == []
    one(at_once(*two, granted(5, 6, 3, limit=2, who="c")), "granted while 2 earlier leases were live")


def test_a_clock_that_is_off_is_allowed_for() -> None:
    calls = [granted(0, 2, 1), granted(3, TTL - 1, 2, who="b")]
    assert list(checker.live_at_once(Leases(calls), slack_ns=5)) == []


# What is accepted and refused


def accepted(*calls: Call) -> list[str]:
    return list(checker.accepted_outside(Leases(calls)))


def refused(*calls: Call) -> list[str]:
    return list(checker.refused_inside(Leases(calls)))


@pytest.mark.parametrize("what", checker.JUDGED)
def test_what_is_accepted_after_a_later_grant_is_found(what: str) -> None:
    grants = [granted(0, 2, 1, "hold"), granted(3, 150, 2, who="b")]
    one(accepted(*grants, under(what, 151, 160, 1)), "accepted after its lease was superseded")
    # It may have been accepted before the other was granted.
    assert accepted(*grants, under(what, 149, 160, 1)) == []
    assert accepted(*grants, under(what, 151, 160, 1, STALE)) == []
    assert accepted(*grants, under(what, 151, None, 1)) == []


def test_the_grant_that_counts_is_the_first_answered_of_all_later_ones() -> None:
    grants = [granted(0, 2, 1, "hold"), granted(3, 300, 2, who="b"), granted(110, 120, 3, who="c")]
    one(accepted(*grants, under("put", 121, 122, 1)), "was superseded")


def test_a_later_grant_of_another_slot_supersedes_nobody() -> None:
    grants = [granted(0, 2, 1, limit=2), granted(3, 4, 2, limit=2, slot=1, who="b")]
    assert accepted(*grants, under("put", 5, 6, 1)) == []


def test_what_is_accepted_after_the_ttl_is_found() -> None:
    one(accepted(granted(0, 2, 1), under("put", TTL + 3, TTL + 4, 1)), "accepted after its lease was over")
    assert accepted(granted(0, 2, 1), under("put", TTL + 1, TTL + 4, 1)) == []
    beaten = [granted(0, 2, 1), under("beat", 50, 52, 1)]
    assert accepted(*beaten, under("put", TTL + 51, TTL + 60, 1)) == []
    one(accepted(*beaten, under("put", TTL + 53, TTL + 60, 1)), "accepted after its lease was over")
    # One that is held is renewed in the background.
    assert accepted(granted(0, 2, 1, "hold"), under("put", TTL + 53, TTL + 60, 1)) == []


def test_what_is_accepted_after_a_release_is_found() -> None:
    one(
        accepted(granted(0, 2, 1), under("release", 3, 4, 1), under("put", 5, 6, 1)),
        "accepted after its lease was over",
    )
    assert accepted(granted(0, 2, 1), under("release", 3, 4, 1), under("put", 5, 6, 1, STALE)) == []


@pytest.mark.parametrize("what", checker.JUDGED)
def test_what_is_refused_under_a_live_lease_is_found(what: str) -> None:
    one(refused(granted(0, 2, 1), under(what, 3, TTL - 1, 1, STALE)), "refused while its lease was live")
    assert refused(granted(0, 2, 1), under(what, 3, TTL + 1, 1, STALE)) == []
    assert refused(granted(0, 2, 1), under(what, 3, 4, 1, "storage-busy")) == []
    released = [granted(0, 2, 1), under("release", 3, 5, 1)]
    assert refused(*released, under(what, 6, 7, 1, STALE)) == []


# Sequences and reads


def test_a_sequence_that_comes_twice_or_out_of_turn_is_found() -> None:
    assert list(checker.sequences([put(0, 5, 2), put(1, 4, 1, who="b")])) == []
    one(checker.sequences([put(0, 2, 1), put(1, 4, 1, who="b")]), "came twice")
    one(checker.sequences([put(0, 2, 2), put(3, 4, 1, who="b")]), "is higher than that of a later call")
    assert list(checker.sequences([put(0, 2, 2), put(3, 4, 1, workflow="v")])) == []


def saw(*calls: Call) -> list[str]:
    return list(checker.reads(calls))


def test_a_read_sees_what_was_saved_before_it() -> None:
    assert saw(put(0, 2, 1), looked(3, 4, 1), looked(1, 2, 0), looked(3, 4, 2)) == []
    one(saw(put(0, 2, 1), looked(3, 4, 0)), "an old checkpoint was read")


def test_a_read_sees_nothing_that_is_saved_later_and_all_as_it_was_saved() -> None:
    one(saw(put(5, 6, 1), looked(3, 4, 1)), "before it was saved")
    one(saw(put(0, 2, 1), looked(3, 4, 1, mark=7)), "another checkpoint was read")


# Effects


def begun(invoked: int, fresh: bool, **facts: Any) -> Call:
    known = {"key": "k", "fresh": fresh, "result": None, **facts}
    return under("begin", invoked, invoked + 1, **{"token": 1, **known})


def acted(invoked: int, mark: int, **facts: Any) -> Call:
    return call("act", invoked, invoked + 1, key="k", mark=mark, **facts)


def test_an_effect_that_is_begun_or_done_twice_is_found() -> None:
    assert list(checker.effects([begun(0, True), acted(2, 7)])) == []
    one(checker.effects([begun(0, True), begun(4, True, who="b")]), "an effect was begun 2 times")
    twice = [begun(0, True), acted(2, 7), acted(4, 8, who="b")]
    one(checker.effects(twice), "an action was done 2 times")


@pytest.mark.parametrize("told", ["done", "resolve"])
def test_what_somebody_told_is_the_result(told: str) -> None:
    calls = [begun(0, True), call(told, 2, None, key="k", mark=7), begun(4, False, result=7, who="b")]
    assert list(checker.effects(calls)) == []


def test_an_effect_that_failed_may_be_begun_again() -> None:
    failed = call("fail", 2, 3, key="k", scope="s", token=1)
    assert list(checker.effects([begun(0, True), failed, begun(4, True, who="b")])) == []


def test_a_result_that_nobody_told_is_found() -> None:
    one(checker.effects([begun(0, True), acted(2, 7), begun(4, False, result=8, who="b")]), "that nobody told")
