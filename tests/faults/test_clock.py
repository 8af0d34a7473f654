"""Clocks that step, boots that end, namespaces that lie: nothing is stolen, nothing blocks for ever."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import LeaseHeldError, StaleLeaseError, StateStore
from agent_checkpoint.clock import Clock
from agent_checkpoint.testing import FakeClock

HOUR = 3600.0


def kinds(store: StateStore) -> list[str]:
    return [event.kind for event in store.events(scope="release")]


# Steps of the wall clock


@pytest.mark.parametrize("step", [-HOUR, HOUR, -30 * HOUR, 30 * HOUR])
def test_a_step_of_the_wall_clock_loses_no_live_lease(store: StateStore, clock: FakeClock, step: float) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.step_wall(step)

    assert store.check_lease(*lease.fence).remaining_seconds == 30
    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == 30
    assert store.put_checkpoint("deploy", {}, lease=lease).sequence == 1
    assert store.heartbeat(*lease.fence).token == lease.token
    clock.step_wall(-2 * step)
    store.release(*lease.fence)
    assert kinds(store) == ["lease.acquired", "checkpoint.saved", "lease.heartbeat", "lease.released"]


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_step_of_the_wall_clock_revives_no_expired_lease(store: StateStore, clock: FakeClock, step: float) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.advance(30)
    clock.step_wall(step)

    for call in (store.check_lease, store.heartbeat, store.release):
        with pytest.raises(StaleLeaseError) as stale:
            call(*lease.fence)
        assert stale.value.reason == "expired"
    with pytest.raises(StaleLeaseError):
        store.put_checkpoint("deploy", {}, lease=lease)
    assert store.get_lease("release") is None
    assert store.acquire("release", "worker-b").token == 2


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_wall_clock_does_a_lease_lives_for_its_ttl_after_its_last_heartbeat(
    store: StateStore, clock: FakeClock, seed: int
) -> None:
    choice = random.Random(seed)
    lease, left = store.acquire("release", "worker", ttl_seconds=10), 10.0
    for _ in range(150):
        act = choice.choice(("step", "wait", "heartbeat", "acquire"))
        if act == "step":
            clock.step_wall(choice.uniform(-HOUR, HOUR))
        elif act == "wait":
            seconds = choice.choice((0.5, 2.0, 4.5, 10.0))
            clock.advance(seconds)
            left = max(0.0, left - seconds)
        elif left > 0:
            with pytest.raises(LeaseHeldError):
                store.acquire("release", "contender")
            if act == "heartbeat":
                store.heartbeat(*lease.fence)
                left = 10.0
        else:
            with pytest.raises(StaleLeaseError):
                store.heartbeat(*lease.fence)
            token = lease.token
            lease, left = store.acquire("release", "worker", ttl_seconds=10), 10.0
            assert lease.token == token + 1
        found = store.get_lease("release")
        assert (0.0 if found is None else found.remaining_seconds) == pytest.approx(left)


# Boots


def test_a_lease_of_an_earlier_boot_has_ended_at_once(store: StateStore, clock: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=HOUR)
    clock.reboot(domain="boot-2")

    with pytest.raises(StaleLeaseError) as stale:
        store.heartbeat(*lease.fence)
    assert stale.value.reason == "expired"
    assert store.acquire("release", "worker-b").token == 2
    (expired,) = store.events(kind="lease.expired")
    assert (expired.token, expired.detail) == (1, {"reason": "reboot"})


def test_a_boot_that_looks_like_the_one_before_is_told_by_its_ticks(store: StateStore, clock: FakeClock) -> None:
    # A boot id that is the same, on a clock that has begun anew: a grant in the future.
    store.acquire("release", "worker-a", ttl_seconds=HOUR)
    clock.reboot(domain=clock.domain)

    assert store.acquire("release", "worker-b").token == 2
    assert store.events(kind="lease.expired")[0].detail == {"reason": "reboot"}


def test_a_grant_a_moment_in_the_future_is_of_this_boot(store: StateStore, clock: FakeClock) -> None:
    store.acquire("release", "worker-a", ttl_seconds=30)
    clock.now_ticks_ns -= 900_000_000

    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == 30


def test_a_second_store_object_on_the_same_clock_agrees(store: StateStore, clock: FakeClock, path: Path) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    clock.step_wall(-HOUR)
    with StateStore(path, clock=clock) as again:
        assert again.check_lease(*lease.fence).token == 1
        clock.advance(30)
        assert again.acquire("release", "worker-b").token == 2


# An unknown clock domain: the wall clock decides, and never blocks for longer than a ttl


@pytest.fixture
def unknown(clock: FakeClock) -> FakeClock:
    clock.domain = ""
    return clock


def test_in_an_unknown_domain_a_lease_lives_for_its_ttl(store: StateStore, unknown: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    unknown.advance(29)
    assert store.check_lease(*lease.fence).remaining_seconds == 1
    with pytest.raises(LeaseHeldError):
        store.acquire("release", "worker-b")

    unknown.advance(1)
    assert store.acquire("release", "worker-b").token == 2
    assert store.events(kind="lease.expired")[0].detail == {"reason": "ttl"}


def test_in_an_unknown_domain_a_reboot_ends_nothing_early(store: StateStore, unknown: FakeClock) -> None:
    store.acquire("release", "worker-a", ttl_seconds=HOUR)
    unknown.reboot(domain="", down_seconds=60)

    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == HOUR - 60


@pytest.mark.parametrize("step", [-HOUR, -1000 * HOUR])
def test_a_wall_clock_stepped_back_is_clamped_and_blocks_for_one_ttl_at_most(
    store: StateStore, unknown: FakeClock, step: float
) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    unknown.step_wall(step)
    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == 30
    assert kinds(store) == ["lease.acquired", "lease.clamped"]
    assert store.check_lease(*lease.fence).token == 1  # nothing was stolen

    unknown.advance(29)
    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == 1
    assert kinds(store) == ["lease.acquired", "lease.clamped"]  # once
    unknown.advance(1)
    assert store.acquire("release", "worker-b").token == 2


def test_in_an_unknown_domain_a_heartbeat_makes_good_a_stepped_clock(store: StateStore, unknown: FakeClock) -> None:
    lease = store.acquire("release", "worker-a", ttl_seconds=30)
    unknown.step_wall(-HOUR)
    store.heartbeat(*lease.fence)

    with pytest.raises(LeaseHeldError) as held:
        store.acquire("release", "worker-b")
    assert held.value.retry_after == 30
    assert "lease.clamped" not in kinds(store)


def test_a_lease_of_a_known_domain_is_not_stolen_by_an_unknown_one_nor_the_other_way_round(
    store: StateStore, clock: FakeClock, path: Path
) -> None:
    inside = FakeClock(domain="", ticks_ns=clock.now_ticks_ns + 10**15)
    with StateStore(path, clock=inside) as contained:
        outer = store.acquire("release", "outside", ttl_seconds=30)
        with pytest.raises(LeaseHeldError):
            contained.acquire("release", "inside")
        assert contained.check_lease(*outer.fence).token == 1
        store.release(*outer.fence)

        inner = contained.acquire("release", "inside", ttl_seconds=30)
        with pytest.raises(LeaseHeldError):
            store.acquire("release", "outside")
        assert store.check_lease(*inner.fence).token == 2


# Real namespaces. Where a kernel does not let us, a test is skipped; not for root in CI.

HOLDER = """
import sys
from agent_checkpoint import StateStore
from agent_checkpoint.clock import Clock
with StateStore(sys.argv[1]) as store:
    lease = store.acquire("release", "holder", ttl_seconds=float(sys.argv[2]))
    print(repr(Clock().domain), lease.token)
"""

CONTENDER = """
import json, sys
from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint.clock import Clock
with StateStore(sys.argv[1], clock=eval(sys.argv[2]) if len(sys.argv) > 2 else None) as store:
    try:
        answer = store.acquire("release", "contender", ttl_seconds=60).token
    except LeaseHeldError as error:
        answer = error.owner
    print(json.dumps({"domain": store._clock.domain, "answer": answer}))
"""

SHADOWED = "/proc/sys/kernel/random/boot_id"
# How a process is put where its clock cannot be trusted: flags of unshare, a line of shell.
PLACES = {
    "another time namespace": (["--time"], ":"),
    "another time namespace, ahead": (["--time", "--monotonic", "1000000", "--boottime", "1000000"], ":"),
    "another time namespace, behind": (["--time", "--monotonic", "-20", "--boottime", "-20"], ":"),
    "a file over the boot id": (["--mount"], f'mount --bind "$FAKE" {SHADOWED}'),
    "a file of proc over the boot id": (["--mount"], f"mount --bind /proc/sys/kernel/random/uuid {SHADOWED}"),
    "a tmpfs over its folder": (
        ["--mount"],
        'mount -t tmpfs tmpfs /proc/sys/kernel/random && cp "$FAKE" /proc/sys/kernel/random/boot_id',
    ),
}


def cannot(why: str) -> None:
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0 else pytest.skip)(why)


def inside(flags: list[str], shell: str, folder: Path) -> list[str]:
    """The start of a command that runs the rest of it in namespaces of its own, prepared by a line of shell."""
    if shutil.which("unshare") is None:
        cannot("no unshare here")
    fake = folder / "boot_id"
    fake.write_text("00000000-1111-2222-3333-444444444444\n")
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    prefix = ["unshare", *as_root, *flags, "--fork", "sh", "-c", f'set -e; FAKE="$0"; {shell}; exec "$@"', str(fake)]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        cannot(f"this kernel does not allow {' '.join(flags)}: {tried.stderr.strip()}")
    return prefix


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return inside(*PLACES[request.param], tmp_path)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
    return path


def contend(path: Path, prefix: list[str] | tuple[()] = (), clock: str | None = None) -> dict[str, Any]:
    arguments = [str(path)] if clock is None else [str(path), clock]
    out = subprocess.check_output([*prefix, sys.executable, "-c", CONTENDER, *arguments], text=True)
    return dict(json.loads(out))


def test_this_machine_knows_its_boot() -> None:
    assert len(Clock().domain) == 36
    assert Clock().domain == Clock().domain


def test_where_the_clock_cannot_be_trusted_the_domain_is_unknown(place: list[str]) -> None:
    source = "from agent_checkpoint.clock import Clock; print(repr(Clock().domain))"
    assert subprocess.check_output([*place, sys.executable, "-c", source], text=True) == "''\n"


def test_a_live_lease_granted_outside_is_refused_inside(place: list[str], real: Path) -> None:
    with StateStore(real) as store:
        lease = store.acquire("release", "holder", ttl_seconds=HOUR)
        assert contend(real, place) == {"domain": "", "answer": "holder"}
        assert store.check_lease(*lease.fence).token == 1


def test_a_live_lease_granted_inside_is_refused_outside(place: list[str], real: Path) -> None:
    held = subprocess.check_output([*place, sys.executable, "-c", HOLDER, str(real), "3600"], text=True)
    assert held == "'' 1\n"
    assert contend(real) == {"domain": Clock().domain, "answer": "holder"}
    assert contend(real, place)["answer"] == "holder"  # nor by another process inside


def test_an_expired_lease_granted_inside_is_free_outside_and_the_other_way_round(place: list[str], real: Path) -> None:
    # The shortest ttl there is: it ends while the next process starts.
    subprocess.check_output([*place, sys.executable, "-c", HOLDER, str(real), "0.1"], text=True)
    while (found := contend(real))["answer"] == "holder":
        pass
    assert found["answer"] == 2

    with StateStore(real) as store:
        store.force_release("release", reason="test")
        store.acquire("release", "holder", ttl_seconds=0.1)
    while (found := contend(real, place))["answer"] == "holder":
        pass
    assert found["answer"] == 4


def test_an_ordinary_container_keeps_the_domain(tmp_path: Path) -> None:
    # As container engines do: /proc/sys read-only over itself, a pid namespace with its own /proc.
    shell = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
    prefix = inside(["--mount", "--pid", "--mount-proc"], shell, tmp_path)
    source = "from agent_checkpoint.clock import Clock; print(Clock().domain)"
    assert subprocess.check_output([*prefix, sys.executable, "-c", source], text=True).strip() == Clock().domain


def test_where_several_kernels_may_share_the_file_a_lease_of_another_boot_lives_for_its_ttl(tmp_path: Path) -> None:
    # ramfs is on no list: neither refused nor known to belong to one kernel.
    shared = tmp_path / "shared"
    shared.mkdir()
    prefix = inside(["--mount"], f"mount -t ramfs ramfs '{shared}'", tmp_path)
    source = """
import sys
from agent_checkpoint import LeaseHeldError, StateStore
from agent_checkpoint.testing import FakeClock
path = sys.argv[1]
clock = FakeClock()
with StateStore(path, clock=clock) as store:
    store.initialize()
    store.acquire("release", "holder", ttl_seconds=600)
clock.reboot(domain="boot-2", down_seconds=30)
with StateStore(path, clock=clock) as store:
    try:
        store.acquire("release", "contender")
    except LeaseHeldError as error:
        print(error.owner, error.retry_after)
    clock.step_wall(-3600)
    try:
        store.acquire("release", "contender")
    except LeaseHeldError as error:
        print(error.owner, error.retry_after)
    clock.advance(600)
    print(store.acquire("release", "contender").token)
    print([event.kind for event in store.events(scope="release")])
"""
    out = subprocess.check_output([*prefix, sys.executable, "-c", source, str(shared / "agents.db")], text=True)
    assert out.splitlines() == [
        "holder 570.0",
        "holder 600.0",
        "2",
        "['lease.acquired', 'lease.clamped', 'lease.expired', 'lease.acquired']",
    ]


# A wall clock that is faked under the whole process, where libfaketime is installed


@pytest.mark.skipif(shutil.which("faketime") is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("offset", ["+1h", "-1h"])
def test_a_process_with_a_faked_wall_clock_steals_nothing(real: Path, offset: str) -> None:
    faked = ["env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", offset]
    with StateStore(real) as store:
        lease = store.acquire("release", "holder", ttl_seconds=600)
        assert contend(real, faked)["answer"] == "holder"
        assert store.check_lease(*lease.fence).token == 1
        store.release(*lease.fence)
    subprocess.check_output([*faked, sys.executable, "-c", HOLDER, str(real), "600"], text=True)
    assert contend(real)["answer"] == "holder"
    assert contend(real, faked)["answer"] == "holder"
