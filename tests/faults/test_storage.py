"""Disks that are full or read-only: an error of the right kind, nothing half-written, and all goes on after.

Each test is a program of its own, most of them in a mount namespace with a
small disk. A kernel that does not allow that skips them; not for root in CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LONG = 120.0

PRELUDE = """
import json, os, random, resource, signal, subprocess, sys
from collections import Counter
from agent_checkpoint import *

folder = sys.argv[1]
path = folder + "/agents.db"
ON_A_FULL_DISK = (StorageFullError, StorageUnreachableError)  # the second where SQLite says no more than "I/O error"

def fill(spare=0):
    "Fill the disk, but for some bytes."
    with open(folder + "/filling", "wb", buffering=0) as filling:
        try:
            while filling.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
        filling.truncate(max(0, filling.tell() // 4096 * 4096 - spare))

def free():
    os.remove(folder + "/filling")

def failed(call, *kinds):
    "The error of a call that must fail."
    try:
        answer = call()
    except kinds as error:
        return error
    raise AssertionError(f"it did not fail: {answer!r}")

def check(store):
    "What must be true of every store, whatever happened to it."
    tokens, sequences = {}, {}
    for event in store.events(limit=1_000_000):
        if event.kind == "lease.acquired":
            assert event.token == tokens.get(event.scope, 0) + 1, event
            tokens[event.scope] = event.token
        if event.kind == "checkpoint.saved":
            assert event.sequence == sequences.get(event.workflow, 0) + 1, event
            sequences[event.workflow] = event.sequence
    for workflow, last in sequences.items():
        history = [info.sequence for info in store.checkpoint_history(workflow)]
        assert history == list(range(last, 0, -1)), (workflow, history)
        assert all(store.get_checkpoint(workflow, sequence=number).data is not None for number in history)
    for lease in store.list_leases(include_expired=True):
        assert lease.token == tokens[lease.scope]
    verdicts = {check.check: check.verdict for check in store.doctor()}
    assert verdicts["integrity"] == "ok", verdicts
    assert "broken" not in verdicts.values(), verdicts
    return tokens, sequences

def in_another_process(source):
    return subprocess.run([sys.executable, "-c", source, path], capture_output=True, text=True)
"""


def cannot(why: str) -> None:
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0 else pytest.skip)(why)


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """The start of a command that runs the rest of it with a disk of 3 MB at ``tmp_path/disk``."""
    if shutil.which("unshare") is None:
        cannot("no unshare here")
    (tmp_path / "disk").mkdir()
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    shell = 'set -e; mount -t tmpfs -o size=3m tmpfs "$0"; exec "$@"'
    prefix = ["unshare", *as_root, "--mount", "--fork", "sh", "-c", shell, str(tmp_path / "disk")]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        cannot(f"this kernel does not allow it: {tried.stderr.strip()}")
    return prefix


def play(folder: Path, program: str, prefix: list[str] | tuple[()] = ()) -> None:
    """Run the program to its end; what it asserts must be true."""
    command = [*prefix, sys.executable, "-c", PRELUDE + program, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


# A full disk


def test_on_a_full_disk_each_call_is_done_or_refused_and_nothing_in_between(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        """
choice = random.Random(11)
with StateStore(path) as store:
    store.initialize()
    granted, saved, errors = Counter(), Counter(), 0
    leases = {}
    with store.read():  # while somebody reads, the log cannot begin anew: it must grow
        fill(spare=400_000)
        for number in range(400):
            scope = choice.choice(("alpha", "beta", "gamma"))
            try:
                if scope not in leases:
                    leases[scope] = store.acquire(scope, "worker", ttl_seconds=3600)
                    granted[scope] += 1
                    assert leases[scope].token == granted[scope]
                elif choice.random() < 0.3:
                    store.release(*leases[scope].fence)
                    del leases[scope]
                else:
                    data = {"filling": "x" * choice.randrange(9000)}
                    sequence = store.put_checkpoint(f"work-{scope}", data, lease=leases[scope]).sequence
                    saved[f"work-{scope}"] += 1
                    assert sequence == saved[f"work-{scope}"]
            except StorageFullError as full:
                assert full.retryable
                errors += 1
    assert errors > 50, errors
    assert saved.total() > 5, saved

    assert check(store) == (granted, saved)
    free()
    for scope in ("alpha", "beta", "gamma"):
        lease = leases.get(scope) or store.acquire(scope, "worker", ttl_seconds=3600)
        assert lease.token == (granted[scope] if scope in leases else granted[scope] + 1)
        assert store.put_checkpoint(f"work-{scope}", {}, lease=lease).sequence == saved[f"work-{scope}"] + 1
    check(store)
""",
        small_disk,
    )


def test_a_stale_worker_is_told_so_on_a_full_disk_too(small_disk: list[str], tmp_path: Path) -> None:
    play(
        tmp_path / "disk",
        """
with StateStore(path) as store:
    store.initialize()
    stale = store.acquire("release", "worker-a", ttl_seconds=3600)
    store.release(*stale.fence)
    store.acquire("release", "worker-b", ttl_seconds=3600)
    with store.read():
        fill(spare=20_000)
        calls = (
            lambda: store.put_checkpoint("deploy", {}, lease=stale),
            lambda: store.heartbeat(*stale.fence),
            lambda: store.release(*stale.fence),
            lambda: store.transaction(component="tests", action="test.write", fence=stale).__enter__(),
        )
        recorded = []
        for number in range(400):
            error = failed(calls[number % len(calls)], StaleLeaseError)
            assert error.reason == "superseded"
            recorded.append(error.recorded)
        assert True in recorded
        assert recorded[-4:] == [False] * 4  # every call of them
        (outcome,) = store.write_all([FencedWrite("tests", "test.write", fence=stale)])
        assert isinstance(outcome.error, StaleLeaseError)
        assert not outcome.error.recorded
    free()
    assert failed(calls[0], StaleLeaseError).recorded
    assert store.get_checkpoint("deploy") is None
    refused = sum(each.times for each in store.status().refusals)
    assert recorded.count(True) + 1 <= refused <= len(recorded) + 3
    check(store)
""",
        small_disk,
    )


def test_a_checkpoint_larger_than_the_space_left_is_refused_whole(small_disk: list[str], tmp_path: Path) -> None:
    play(
        tmp_path / "disk",
        """
with StateStore(path) as store:
    store.initialize()
    lease = store.acquire("release", "worker-a", ttl_seconds=3600)
    assert store.put_checkpoint("deploy", {"number": 1}, lease=lease).sequence == 1
    for _ in range(3):
        failed(lambda: store.put_checkpoint("deploy", {"large": "x" * 6_000_000}, lease=lease), StorageFullError)
        assert store.get_checkpoint("deploy").data == {"number": 1}
    # What did not fit left no trace, and what fits is written.
    assert store.put_checkpoint("deploy", {"number": 2}, lease=lease).sequence == 2
    assert check(store) == ({"release": 1}, {"deploy": 2})
    assert store.release(*lease.fence).token == 1
    assert store.acquire("release", "worker-b").token == 2
""",
        small_disk,
    )


def test_a_store_opened_on_a_full_disk_says_so_and_opens_when_there_is_space(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        """
with StateStore(path) as store:
    store.initialize()
    store.put_checkpoint("deploy", {"number": 1})
fill()
with StateStore(path) as store:
    for call in (
        lambda: store.put_checkpoint("deploy", {"number": 2}),
        lambda: store.acquire("release", "worker-a"),
    ):
        failed(call, *ON_A_FULL_DISK)
    free()
    assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2
    assert store.acquire("release", "worker-a").token == 1
    check(store)
""",
        small_disk,
    )


def test_a_store_cannot_be_made_on_a_full_disk_and_can_be_made_there_later(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        """
for spare in range(0, 120_000, 8_000):
    fill(spare)
    try:
        with StateStore(path) as store:
            store.initialize()
    except ON_A_FULL_DISK:
        pass
    free()
    with StateStore(path) as store:
        store.initialize()
        assert store.acquire("release", "worker-a").token == 1
        check(store)
        assert [event.kind for event in store.events()] == ["store.initialized", "lease.acquired"]
    for name in os.listdir(folder):
        os.remove(folder + "/" + name)
""",
        small_disk,
    )


GROUP = """
class Listener:
    heard = []
    @hookimpl
    def event_recorded(self, event):
        self.heard.append((event.id, event.kind, event.detail))

open(folder + "/0001_notes.sql", "w").write("CREATE TABLE tests_notes (note TEXT NOT NULL, filling BLOB);")

def note(text, size=0):
    def body(part):
        part.run("INSERT INTO tests_notes VALUES (?, ?)", (text, None))
        part.event("test.noted", {"note": text})
        for _ in range(size // 100_000):
            part.run("INSERT INTO tests_notes VALUES (?, ?)", (text + " filling", bytes(100_000)))
        return text
    return FencedWrite("tests", "test.note", body, lease)

store = StateStore(path, plugins=[Listener()])
store.initialize()
store.migrate("tests", {"sqlite": [folder + "/0001_notes.sql"]})
stale = store.acquire("release", "worker-a", ttl_seconds=3600)
store.release(*stale.fence)
lease = store.acquire("release", "worker-b", ttl_seconds=3600)

def notes():
    with store.read() as reader:
        return [text for (text,) in reader.rows("SELECT note FROM tests_notes ORDER BY rowid")]

def noted():
    return [event.detail["note"] for event in store.events(limit=1000, kind="test.noted")]

def heard_all():
    events = [(event.id, event.kind, event.detail) for event in store.events(limit=1000)]
    return Listener.heard == events
"""


def test_a_write_that_fills_the_disk_leaves_its_neighbours_in_the_group_alone(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        GROUP
        + """
outcomes = store.write_all(
    [
        note("first"),
        FencedWrite("tests", "test.note", note("stale").body, stale),
        note("too large", 6_000_000),
        note("last"),
    ]
)
assert [outcome.answer for outcome in outcomes] == ["first", None, None, "last"]
assert [type(outcome.error).__name__ for outcome in outcomes] == [
    "NoneType", "StaleLeaseError", "StorageFullError", "NoneType"
]
assert notes() == ["first", "last"]
assert noted() == ["first", "last"]
assert heard_all()
check(store)
store.close()
""",
        small_disk,
    )


def test_a_body_that_swallows_the_error_writes_nothing_outside_the_transaction(
    small_disk: list[str], tmp_path: Path
) -> None:
    # SQLite has ended the transaction: what came after would be committed by itself.
    play(
        tmp_path / "disk",
        GROUP
        + """
def swallow(part):
    try:
        note("too large", 6_000_000).body(part)
    except StorageError:
        pass
    for _ in range(3):
        try:
            part.run("INSERT INTO tests_notes VALUES ('outside', NULL)")
        except StorageError:
            pass
    part.event("test.noted", {"note": "outside"})
    return "swallowed"

outcomes = store.write_all([note("first"), FencedWrite("tests", "test.note", swallow, lease), note("last")])
assert [outcome.answer for outcome in outcomes] == ["first", None, "last"]
assert isinstance(outcomes[1].error, StorageError), outcomes[1]
assert notes() == noted() == ["first", "last"]

try:
    with store.transaction(component="tests", action="test.note", fence=lease) as part:
        swallow(part)
    raise AssertionError("it was committed")
except StorageError:
    pass
assert notes() == noted() == ["first", "last"]
assert heard_all()
check(store)
store.close()
""",
        small_disk,
    )


def test_a_group_on_a_full_disk_is_refused_write_by_write(small_disk: list[str], tmp_path: Path) -> None:
    play(
        tmp_path / "disk",
        GROUP
        + """
with store.read():
    fill()
    done = []
    for number in range(30):
        outcomes = store.write_all([note(f"{number}-{place}") for place in range(3)])
        done += [outcome.answer for outcome in outcomes if outcome.error is None]
        assert all(isinstance(outcome.error, (StorageFullError, type(None))) for outcome in outcomes), outcomes
    assert len(done) < 60, done
assert notes() == noted() == done
free()
outcomes = store.write_all([note("a"), note("b")])
assert [outcome.answer for outcome in outcomes] == ["a", "b"]
assert notes() == noted() == [*done, "a", "b"]
assert heard_all()
check(store)
store.close()
""",
        small_disk,
    )


# A limit on the size of files


def test_at_the_file_size_limit_each_call_is_done_or_refused_and_all_goes_on_above_it(tmp_path: Path) -> None:
    # SQLite calls it an I/O error: a commit that met it is then of unknown outcome, which reading settles.
    play(
        tmp_path,
        """
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

with StateStore(path) as store:
    store.initialize()
    stale = store.acquire("release", "worker-a", ttl_seconds=3600)
    store.release(*stale.fence)
    lease = store.acquire("release", "worker-b", ttl_seconds=3600)
    saved, failures, unknown = 0, 0, 0
    with store.read():
        limit(os.stat(path + "-wal").st_size + 60_000)
        for number in range(60):
            try:
                found = store.put_checkpoint("deploy", {"number": number, "filling": "x" * 3000}, lease=lease)
                saved += 1
                assert found.sequence == saved
            except (StorageFullError, StorageUnreachableError):
                failures += 1
            except OutcomeUnknownError:
                failures += 1
                known = len(store.checkpoint_history("deploy"))
                assert known in (saved, saved + 1)
                saved = known
        assert 0 < saved < 60
        assert failures
        recorded = [failed(lambda: store.heartbeat(*stale.fence), StaleLeaseError).recorded for _ in range(60)]
        assert recorded[-1] is False
        (outcome,) = store.write_all([FencedWrite("tests", "test.write", fence=stale)])
        assert isinstance(outcome.error, StaleLeaseError), outcome.error
    limit(resource.RLIM_INFINITY)
    assert store.put_checkpoint("deploy", {}, lease=lease).sequence == saved + 1
    assert check(store) == ({"release": 2}, {"deploy": saved + 1})
    store.release(*lease.fence)
    assert store.acquire("release", "worker-c").token == 3
""",
    )


# A disk that is read-only


def test_on_a_disk_made_read_only_a_write_says_so_and_all_goes_on_once_it_is_not(
    small_disk: list[str], tmp_path: Path
) -> None:
    # A process that was killed left its log behind, so the store can be read.
    play(
        tmp_path / "disk",
        """
left = in_another_process('''
import os, signal, sys
from agent_checkpoint import StateStore
store = StateStore(sys.argv[1])
store.initialize()
stale = store.acquire("release", "worker-a", ttl_seconds=3600)
store.release(*stale.fence)
lease = store.acquire("release", "worker-b", ttl_seconds=3600)
store.put_checkpoint("deploy", {"number": 1}, lease=lease)
os.kill(os.getpid(), signal.SIGKILL)
''')
assert left.returncode == -signal.SIGKILL, left.stderr
assert os.stat(path + "-wal").st_size > 0
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)

lease, stale = Fence("release", "worker-b", 2), Fence("release", "worker-a", 1)
with StateStore(path) as store:
    assert store.get_checkpoint("deploy").data == {"number": 1}
    assert store.check_lease(*lease).token == 2
    for call in (
        lambda: store.put_checkpoint("deploy", {"number": 2}, lease=lease),
        lambda: store.heartbeat(*lease),
        lambda: store.acquire("lint", "worker-c"),
        lambda: store.force_release("release", reason="test"),
    ):
        assert not failed(call, StorageReadOnlyError).retryable
    # Nothing can be decided without the write lock; that a stale worker is refused is what counts.
    failed(lambda: store.put_checkpoint("deploy", {"number": 2}, lease=stale), StorageReadOnlyError, StaleLeaseError)
    failed(lambda: store.check_lease(*stale), StaleLeaseError)
    assert store.get_checkpoint("deploy").data == {"number": 1}

subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
with StateStore(path) as store:
    assert store.put_checkpoint("deploy", {"number": 2}, lease=lease).sequence == 2
    store.release(*lease)
    assert store.acquire("release", "worker-c").token == 3
    check(store)
""",
        small_disk,
    )


def test_a_store_that_was_open_before_the_disk_was_made_read_only_goes_on_after(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        """
store = StateStore(path)
store.initialize()
store.put_checkpoint("deploy", {"number": 1})
# Files that are open for writing keep a disk from being made read-only, unless it is seen through another mount.
view = folder + "-view"
os.mkdir(view)
subprocess.run(["mount", "--bind", folder, view], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
with StateStore(view + "/agents.db") as seen:
    assert seen.get_checkpoint("deploy").data == {"number": 1}
    failed(lambda: seen.put_checkpoint("deploy", {"number": 2}), StorageReadOnlyError)
assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2
with StateStore(view + "/agents.db") as seen:
    assert seen.get_checkpoint("deploy").data == {"number": 2}
check(store)
store.close()
""",
        small_disk,
    )


def test_a_store_at_rest_on_a_read_only_disk_is_refused_and_stays_as_it_is(
    small_disk: list[str], tmp_path: Path
) -> None:
    play(
        tmp_path / "disk",
        """
with StateStore(path) as store:
    store.initialize()
    store.put_checkpoint("deploy", {"number": 1})
before = {name: os.stat(folder + "/" + name).st_mtime_ns for name in os.listdir(folder)}
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
with StateStore(path) as store:
    failed(lambda: store.put_checkpoint("deploy", {"number": 2}), StorageReadOnlyError, StorageUnreachableError)
    failed(store.initialize, StorageReadOnlyError, StorageUnreachableError)
with StateStore(folder + "/new/agents.db") as store:
    failed(store.initialize, StorageReadOnlyError, StorageUnreachableError)
assert {name: os.stat(folder + "/" + name).st_mtime_ns for name in os.listdir(folder)} == before
subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
with StateStore(path) as store:
    assert store.put_checkpoint("deploy", {"number": 2}).sequence == 2
    check(store)
""",
        small_disk,
    )


# A refusal that cannot be recorded, for whatever reason


def test_a_refusal_that_the_database_will_not_record_is_a_refusal_all_the_same(tmp_path: Path) -> None:
    play(
        tmp_path,
        """
import sqlite3
with StateStore(path) as store:
    store.initialize()
    stale = store.acquire("release", "worker-a", ttl_seconds=3600)
    store.release(*stale.fence)
    broken = sqlite3.connect(path)
    broken.execute("CREATE TRIGGER broken BEFORE INSERT ON refusals BEGIN SELECT RAISE(ABORT, 'on purpose'); END")
    broken.close()
    for call in (
        lambda: store.put_checkpoint("deploy", {}, lease=stale),
        lambda: store.heartbeat(*stale.fence),
        lambda: store.release(*stale.fence),
        lambda: store.transaction(component="tests", action="test.write", fence=stale).__enter__(),
    ):
        error = failed(call, StaleLeaseError)
        assert error.recorded is False
        assert error.facts["recorded"] is False
    outcomes = store.write_all([FencedWrite("tests", "test.write", fence=stale), FencedWrite("tests", "test.write")])
    assert isinstance(outcomes[0].error, StaleLeaseError), outcomes
    assert outcomes[0].error.recorded is False
    assert outcomes[1].error is None
    assert store.put_checkpoint("lint", {}).sequence == 1
""",
    )
