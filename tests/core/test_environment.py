"""The leases that a process was given, as its environment carries them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from agent_checkpoint import Fence, InvalidInputError, Lease, NotFoundError, StaleLeaseError, StateStore
from agent_checkpoint.environment import PREFIX, carried, variables

DB = "/srv/agents.db"
OUTER = Fence("release", "worker-a", 7)
INNER = Fence("deploy", "worker-b", 2**63 - 1)

Carry = Callable[..., None]


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Carry:
    """``carry(DB=…, SCOPE=…)``: let the environment carry these variables of ours, and no others."""

    def set_all(**values: str) -> None:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(PREFIX + name, value)

    set_all()
    return set_all


def lease_of(fence: Fence) -> dict[str, str]:
    return {"SCOPE": fence.scope, "OWNER": fence.owner, "TOKEN": str(fence.token)}


def test_the_lease_of_three_variables(carry: Carry) -> None:
    carry(DB=DB, **lease_of(OUTER))
    assert Lease.from_env() == Lease.from_env("release") == OUTER
    assert isinstance(Lease.from_env(), Fence)


def test_the_innermost_of_several_and_the_one_on_a_scope(carry: Carry, monkeypatch: pytest.MonkeyPatch) -> None:
    carry()
    for name, value in variables(DB, INNER, [OUTER]).items():
        monkeypatch.setenv(name, value)
    assert Lease.from_env() == INNER
    assert Lease.from_env("release") == OUTER
    assert Lease.from_env("deploy") == INNER
    assert carried(os.environ) == [OUTER, INNER]


def test_what_is_carried_can_be_carried_on(carry: Carry) -> None:
    names = [Fence("a b", "'; DROP TABLE leases; --", 1), Fence("日本", "\U0001f600", 2), OUTER]
    environ: dict[str, str] = {}
    for fence in names:
        environ.update(variables(DB, fence, carried(environ)))
    assert carried(environ) == names
    assert {name.removeprefix(PREFIX) for name in environ} == {"DB", "SCOPE", "OWNER", "TOKEN", "LEASES"}
    assert (environ[PREFIX + "DB"], environ[PREFIX + "TOKEN"]) == (DB, "7")


def test_a_newer_lease_on_a_scope_takes_the_place_of_the_older_one(carry: Carry) -> None:
    environ = variables(DB, OUTER, [])
    environ.update(variables(DB, INNER, carried(environ)))
    again = OUTER._replace(token=8)
    environ.update(variables(DB, again, carried(environ)))
    assert carried(environ) == [INNER, again]


def test_an_environment_without_a_lease_is_told_so(carry: Carry) -> None:
    for values in ({}, {"DB": DB}, {"DB": DB, "LEASES": "[]"}, {"DB": DB, "SCOPE": "", "OWNER": "", "TOKEN": ""}):
        carry(**values)
        with pytest.raises(NotFoundError) as missing:
            Lease.from_env()
        assert "agent-checkpoint run" in missing.value.hint


def test_an_environment_without_a_lease_on_the_scope_names_it(carry: Carry) -> None:
    carry(DB=DB, **lease_of(OUTER))
    with pytest.raises(NotFoundError) as missing:
        Lease.from_env("deploy")
    assert "'deploy'" in str(missing.value)
    assert missing.value.facts["scope"] == "deploy"


ONE = lease_of(OUTER)

MALFORMED: dict[str, dict[str, str]] = {
    "no database": ONE,
    "an empty database": {"DB": "", **ONE},
    "no database beside several": {"LEASES": "[]"},
    "no database beside a part": {"TOKEN": "7"},
    **{f"only {name}": {"DB": DB, name: ONE[name]} for name in ONE},
    **{f"no {name}": {"DB": DB, **{other: ONE[other] for other in ONE if other != name}} for name in ONE},
    **{f"an empty {name}": {"DB": DB, **ONE, name: ""} for name in ONE},
    **{
        f"the token {token!r}": {"DB": DB, **ONE, "TOKEN": token}
        for token in ("0", "-1", "+7", "7.0", " 7", "7 ", "0x7", "1_0", "seven", "٧", "²", "1" * 20, str(2**63))
    },
    **{f"the scope {scope!r}": {"DB": DB, **ONE, "SCOPE": scope} for scope in ("a\nb", "x" * 513, "a\x7f")},
    **{f"the owner {owner!r}": {"DB": DB, **ONE, "OWNER": owner} for owner in ("a\tb", "é" * 257)},
    **{
        f"the leases {leases}": {"DB": DB, "LEASES": leases}
        for leases in (
            *("{", "null", "7", "{}", '"text"', "[7]", "[[]]", "[null]", "[{}]", " ", "NaN", "[1e999]"),
            '[{"scope": "release", "owner": "worker-a"}]',
            '[{"scope": "release", "token": 7}]',
            '[{"owner": "worker-a", "token": 7}]',
            '[{"scope": "release", "owner": "worker-a", "token": "7"}]',
            '[{"scope": "release", "owner": "worker-a", "token": 7.0}]',
            '[{"scope": "release", "owner": "worker-a", "token": true}]',
            '[{"scope": "release", "owner": "worker-a", "token": 0}]',
            '[{"scope": "release", "owner": "worker-a", "token": 9223372036854775808}]',
            '[{"scope": "", "owner": "worker-a", "token": 7}]',
            '[{"scope": null, "owner": "worker-a", "token": 7}]',
            '[{"scope": "a\\nb", "owner": "worker-a", "token": 7}]',
            '[{"scope": "release", "owner": ["worker-a"], "token": 7}]',
            '[{"scope": "release", "owner": "worker-a", "token": 7, "token": 8}]',
            '[{"scope": "release", "owner": "worker-a", "token": 7}, 7]',
            '[{"scope": "release", "owner": "worker-a", "token": 7}',
        )
    },
}


@pytest.mark.parametrize("how", MALFORMED)
def test_an_environment_that_is_malformed_is_refused_and_never_guessed_at(carry: Carry, how: str) -> None:
    carry(**MALFORMED[how])
    with pytest.raises(InvalidInputError) as refused:
        Lease.from_env()
    assert refused.value.field
    assert str(refused.value).startswith(f"{refused.value.field}: ")


def test_what_is_malformed_is_said_of_a_variable_that_a_person_can_find(carry: Carry) -> None:
    unclear = {}
    for how, values in MALFORMED.items():
        carry(**values)
        try:
            Lease.from_env()
        except InvalidInputError as refused:
            if PREFIX not in f"{refused} {refused.hint}":
                unclear[how] = str(refused)
    assert unclear == {}


def test_a_part_of_an_outer_lease_that_is_malformed_spoils_the_inner_one(carry: Carry) -> None:
    carry(DB=DB, LEASES='[{"scope": "a"}, {"scope": "release", "owner": "worker-a", "token": 7}]')
    with pytest.raises(InvalidInputError):
        Lease.from_env("release")


def test_more_about_a_lease_than_is_known_is_no_mistake(carry: Carry) -> None:
    carry(DB=DB, LEASES='[{"scope": "release", "owner": "worker-a", "token": 7, "slot": 0}]')
    assert Lease.from_env() == OUTER


def test_what_the_environment_carries_protects_a_write(store: StateStore, carry: Carry) -> None:
    lease = store.acquire("release", "worker-a", 30)
    carry(DB=store.database, **lease_of(lease.fence))
    assert store.put_checkpoint("deploy", 1, lease=Lease.from_env()).token == 1
    store.release(*lease.fence)
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", 2, lease=Lease.from_env())


def test_nothing_is_asked_of_the_store(carry: Carry) -> None:
    carry(DB="/nowhere/at/all.db", **lease_of(OUTER))
    assert Lease.from_env() == OUTER


@pytest.mark.parametrize("scope", [7, "", b"release", ["release"]])
def test_a_scope_that_is_no_name_is_not_found_or_refused(carry: Carry, scope: Any) -> None:
    carry(DB=DB, **lease_of(OUTER))
    with pytest.raises((NotFoundError, InvalidInputError)):
        Lease.from_env(scope)
