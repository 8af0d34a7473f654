"""Stores on disks that are read-only or full, and files whose modes forbid it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import COMMAND, WORDS, Answer, contents, process

# Without permission to write


def without_override(*command: object) -> list[str]:
    """The command such that file modes bind it, as root too."""
    words = [str(word) for word in command]
    if os.geteuid() != 0:
        return words
    dropped = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}", *words]


needs_setpriv = pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root, and no setpriv to be bound by modes"
)


@pytest.fixture
def unwritable(filled: Path) -> Iterator[Path]:
    """A store whose file and folder may only be read."""
    filled.chmod(0o400)
    filled.parent.chmod(0o500)
    yield filled
    filled.parent.chmod(0o700)


@needs_setpriv
@pytest.mark.parametrize("name", ["lease acquire", "checkpoint put", "lease release"])
def test_a_store_that_may_not_be_written_is_read_only(unwritable: Path, name: str) -> None:
    before = contents(unwritable.parent)

    answer = process(*without_override(*COMMAND, "--db", unwritable, *name.split(), *WORDS[name]))

    assert answer.status == 74
    assert answer.error()["code"] == "storage-read-only"
    assert contents(unwritable.parent) == before


@needs_setpriv
def test_a_store_that_may_not_be_read_is_unreachable(filled: Path) -> None:
    filled.chmod(0o000)

    answer = process(*without_override(*COMMAND, "--db", filled, "lease", "list"))

    assert answer.status == 74
    assert answer.error()["code"] == "storage-unreachable"


@needs_setpriv
def test_init_where_nothing_may_be_written_exits_74_and_says_why(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        answer = process(*without_override(*COMMAND, "--db", tmp_path / "agents.db", "init"))
    finally:
        tmp_path.chmod(0o700)

    assert answer.status == 74
    assert answer.error()["code"] in ("storage-read-only", "storage-unreachable")
    assert contents(tmp_path) == {}


# Mounts: read-only, and full. In a mount namespace of their own.

CAP_SYS_ADMIN = 21


def may_mount() -> bool:
    """Whether this process may mount; in CI it must, and a refusal there is a failure, not a skip."""
    if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    (capabilities,) = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return bool(int(capabilities, 16) >> CAP_SYS_ADMIN & 1) and shutil.which("unshare") is not None


needs_mounts = pytest.mark.skipif(not may_mount(), reason="only root on Linux may mount a small or read-only disk")


def on_a_read_only_mount(path: Path, name: str) -> Answer:
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    words = (*COMMAND, "--db", path, *name.split(), *WORDS[name])
    return process("unshare", "-m", "sh", "-c", script, path.parent, *words)


@needs_mounts
@pytest.mark.parametrize("name", ["lease acquire", "lease heartbeat", "lease release", "checkpoint put"])
def test_a_write_on_a_read_only_mount_says_so_and_changes_nothing(filled: Path, name: str) -> None:
    before = contents(filled.parent)

    answer = on_a_read_only_mount(filled, name)

    assert answer.status == 74
    assert answer.error()["code"] == "storage-read-only"
    assert contents(filled.parent) == before


@needs_mounts
@pytest.mark.parametrize("name", ["lease show", "status"])
def test_a_read_on_a_read_only_mount_answers_or_says_why_not(filled: Path, name: str) -> None:
    before = contents(filled.parent)

    answer = on_a_read_only_mount(filled, name)

    assert answer.status == 0 or (answer.status, answer.error()["code"]) == (74, "storage-read-only")
    assert contents(filled.parent) == before


@needs_mounts
def test_init_of_a_new_store_on_a_read_only_mount_says_so(tmp_path: Path) -> None:
    answer = on_a_read_only_mount(tmp_path / "agents.db", "init")

    assert answer.status == 74
    assert answer.error()["code"] == "storage-read-only"
    assert contents(tmp_path) == {}


# Runs inside the namespace, on a tmpfs of 512 KiB at argv[1]; argv[2] is a script that uses these names.
DISK = """
import json, os, sqlite3, subprocess, sys

disk, script = sys.argv[1:]
db = os.path.join(disk, "agents.db")
results = {}


def command(name, *words, database=db):
    done = subprocess.run(
        [sys.executable, "-m", "agent_checkpoint", "--db", database, *words], capture_output=True, text=True
    )
    results[name] = [done.returncode, done.stdout, done.stderr]


def fill_up(leave=0):
    with open(os.path.join(disk, "filler"), "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            pass
        filler.truncate(filler.tell() - leave)


def free():
    os.remove(os.path.join(disk, "filler"))


exec(script)
json.dump(results, sys.stdout)
"""


def on_a_small_disk(disk: Path, script: str) -> dict[str, Answer]:
    """Run a script on a disk of 512 KiB; the answers of its commands by their names."""
    mount = 'mount -t tmpfs -o size=512k tmpfs "$0" && exec "$@"'
    done = process("unshare", "-m", "sh", "-c", mount, disk, sys.executable, "-S", "-c", DISK, disk, script)
    return {name: Answer(*answer) for name, answer in done.value().items()}


@needs_mounts
def test_a_checkpoint_too_large_for_the_disk_is_storage_full_and_leaves_the_last_one(tmp_path: Path) -> None:
    answers = on_a_small_disk(
        tmp_path,
        """
command("init", "init")
command("acquire", "lease", "acquire", "release", "--owner", "worker-a")
command("small", "checkpoint", "put", "w", "--data", '"small"')
large = chr(34) + "x" * 120_000 + chr(34)
for number in range(4):
    command(f"large {number}", "checkpoint", "put", "w", "--data", large, "--field", "sequence")
command("get", "checkpoint", "get", "w", "--field", "sequence")
command("check", "lease", "check", "release", "--owner", "worker-a", "--token", "1")
command("events", "events", "--kind", "checkpoint.saved")
""",
    )

    large = [answer for name, answer in answers.items() if name.startswith("large")]
    saved = [answer for answer in large if answer.status == 0]
    refused = [answer for answer in large if answer.status != 0]
    assert saved
    assert refused
    for answer in refused:
        assert answer.status == 74
        assert (answer.error()["code"], answer.error()["retryable"]) == ("storage-full", True)
    assert answers["get"].out == f"{1 + len(saved)}\n"
    assert answers["check"].status == 0
    assert len(answers["events"].value()) == 1 + len(saved)


@needs_mounts
@pytest.mark.parametrize("leave", [0, 16384])
def test_on_a_disk_that_others_filled_a_write_is_storage_full_until_there_is_room(tmp_path: Path, leave: int) -> None:
    answers = on_a_small_disk(
        tmp_path,
        f"""
put = ("checkpoint", "put", "w", "--data", "1", "--lease-scope", "release", "--owner", "worker-a", "--token", "1")
command("init", "init")
command("acquire", "lease", "acquire", "release", "--owner", "worker-a", "--ttl", "3600")
fill_up(leave={leave})
command("put", *put)
free()
command("put again", *put)
command("doctor", "doctor")
""",
    )

    assert answers["put"].status == 74
    assert (answers["put"].error()["code"], answers["put"].error()["retryable"]) == ("storage-full", True)
    assert answers["put again"].value()["sequence"] == 1
    assert answers["doctor"].status == 0


@needs_mounts
def test_init_on_a_full_disk_is_storage_full_and_works_once_there_is_room(tmp_path: Path) -> None:
    answers = on_a_small_disk(
        tmp_path,
        """
fill_up()
command("full", "init")
free()
command("room", "init")
command("acquire", "lease", "acquire", "release", "--owner", "worker-a")
""",
    )

    assert answers["full"].status == 74
    assert answers["full"].error()["code"] == "storage-full"
    assert answers["room"].value()["created"] is True
    assert answers["acquire"].value()["token"] == 1


@needs_mounts
def test_a_stale_write_on_a_full_disk_is_stale_and_says_that_it_is_not_on_record(tmp_path: Path) -> None:
    answers = on_a_small_disk(
        tmp_path,
        """
command("init", "init")
command("acquire", "lease", "acquire", "release", "--owner", "worker-a")
command("release", "lease", "release", "release", "--owner", "worker-a", "--token", "1")
# Another process has the store open, so that its -wal and -shm are there.
reader = sqlite3.connect(db)
reader.execute("SELECT count(*) FROM events").fetchone()
fill_up()
stale = ("checkpoint", "put", "w", "--data", "1", "--lease-scope", "release", "--owner", "worker-a", "--token", "1")
command("put", *stale)
free()
command("put again", *stale)
command("events", "events", "--kind", "write.refused")
""",
    )

    assert answers["put"].status == 76
    assert (answers["put"].error()["reason"], answers["put"].error()["recorded"]) == ("released", False)
    assert answers["put again"].status == 76
    assert answers["put again"].error().get("recorded", True) is True
    assert len(answers["events"].value()) == 1
