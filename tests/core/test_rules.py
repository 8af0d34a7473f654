"""The rules alone: no database, no clock, only rows and a moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_checkpoint.names import NS, ttl_ns
from agent_checkpoint.records import Fence, LeaseRow, Moment
from agent_checkpoint.rules import expiry, fence, grant, present
from agent_checkpoint.rules.decision import Granted, Refused

WALL = 1_900_000_000 * NS
TICKS = 5_000 * NS


def row(*, domain: str = "boot-1", ttl: float = 30, beat: int = TICKS, wall: int = WALL, **changes: object) -> LeaseRow:
    lasts = round(ttl * NS)
    made = LeaseRow("s", 0, "a", 1, "live", lasts, wall, wall, wall + lasts, domain, beat, "{}")
    return made._replace(**changes)  # type: ignore[arg-type]


def now(*, ticks: float = 0, wall: float = 0, domain: str = "boot-1", one_kernel: bool = True) -> Moment:
    return Moment(WALL + round(wall * NS), TICKS + round(ticks * NS), domain, one_kernel)


def left(lease: LeaseRow, moment: Moment) -> tuple[float, str, bool]:
    found = expiry.remaining(lease, moment)
    return found.ns / NS, found.reason, found.clamp


def test_in_one_domain_the_monotonic_clock_decides_whatever_the_wall_clock_says() -> None:
    for wall in (-3600, 0, 3600):
        assert left(row(), now(ticks=10, wall=wall)) == (20.0, "ttl", False)
        assert left(row(), now(ticks=30, wall=wall)) == (0.0, "ttl", False)


def test_a_lease_of_another_boot_of_the_only_kernel_is_over() -> None:
    assert left(row(domain="boot-0"), now(ticks=1)) == (0.0, "reboot", False)


def test_a_grant_from_the_future_was_made_under_another_boot() -> None:
    assert left(row(), now(ticks=-1)) == (30.0, "ttl", False)
    assert left(row(), now(ticks=-1.1)) == (0.0, "reboot", False)
    assert left(row(), now(ticks=-1.1, wall=10, one_kernel=False)) == (20.0, "ttl", False)


def test_another_boot_where_several_kernels_may_write_is_judged_by_the_wall_clock() -> None:
    assert left(row(domain="boot-0"), now(wall=10, one_kernel=False)) == (20.0, "ttl", False)


@pytest.mark.parametrize(("mine", "theirs"), [("", "boot-1"), ("boot-1", ""), ("", "")])
def test_an_unknown_domain_on_either_side_is_judged_by_the_wall_clock(mine: str, theirs: str) -> None:
    assert left(row(domain=theirs), now(ticks=1000, wall=10, domain=mine)) == (20.0, "ttl", False)
    assert left(row(domain=theirs), now(ticks=0, wall=30, domain=mine)) == (0.0, "ttl", False)


def test_a_wall_clock_that_stepped_back_cannot_block_for_longer_than_one_ttl() -> None:
    lease, moment = row(domain=""), now(wall=-3600)
    assert left(lease, moment) == (30.0, "ttl", True)

    decision = grant.acquire(grant.Standing([lease]), grant.Ask("s", "b", NS, "{}", False), moment)

    assert isinstance(decision, Refused)
    (clamped,) = decision.rows
    assert left(clamped, moment) == (30.0, "ttl", False)
    assert left(clamped, now(wall=-3570)) == (0.0, "ttl", False)
    assert [event.kind for event in decision.events] == ["lease.clamped"]


@given(
    st.builds(
        row,
        domain=st.sampled_from(["", "boot-0", "boot-1"]),
        ttl=st.floats(0.1, 2_592_000),
        beat=st.integers(0, 2**62),
        wall=st.integers(0, 2**61),
    ),
    st.builds(
        Moment,
        st.integers(0, 2**61),
        st.integers(0, 2**62),
        st.sampled_from(["", "boot-0", "boot-1"]),
        st.booleans(),
    ),
)
def test_no_lease_ever_has_more_than_one_ttl_to_live(lease: LeaseRow, moment: Moment) -> None:
    assert 0 <= expiry.remaining(lease, moment).ns <= lease.ttl_ns


@given(st.floats(0.1, 2_592_000))
def test_a_ttl_is_rounded_up_to_a_whole_nanosecond(seconds: float) -> None:
    assert 0 <= ttl_ns(seconds) - seconds * NS <= 1


def test_a_grant_takes_the_next_token_whatever_ended_the_last_one() -> None:
    ask = grant.Ask("s", "b", NS, "{}", False)
    for state in ("released", "force-released", "expired"):
        decision = grant.acquire(grant.Standing([row(state=state, token=41)]), ask, now())
        assert isinstance(decision, Granted)
        assert decision.row.token == 42
        assert [event.kind for event in decision.events] == ["lease.acquired"]


def test_a_scope_that_used_up_its_tokens_says_so() -> None:
    with pytest.raises(ValueError, match="used up"):
        grant.acquire(
            grant.Standing([row(state="released", token=2**63 - 1)]), grant.Ask("s", "b", NS, "{}", False), now()
        )


def test_a_swept_lease_is_expired_and_a_forced_one_released() -> None:
    for state, reason in (("expired", "expired"), ("force-released", "released"), ("released", "released")):
        found = fence.live([row(state=state)], Fence("s", "a", 1), now())
        assert not isinstance(found, LeaseRow)
        assert found.reason == reason


def test_the_end_that_people_see_follows_the_clock_that_decides() -> None:
    lease = row()
    assert present.lease(lease, now(ticks=10, wall=10.2), {}).expires_at == present.settled(lease).expires_at
    stepped = present.lease(lease, now(ticks=10, wall=3610), {})
    assert (stepped.expires_at - present.settled(lease).expires_at).total_seconds() == 3600
    assert stepped.remaining_seconds == 20.0
