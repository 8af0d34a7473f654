"""An archive of the audit log, killed and damaged: no event is lost, and no damage stays unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from tests import dying

from agent_checkpoint import Event, StateStore
from agent_checkpoint.archive import verify
from agent_checkpoint.errors import StorageCorruptError

SECONDS = 60
# More than one page of a file, and more than one slice of a removal.
MANY = 2_100
EVER = datetime.max.replace(tzinfo=timezone.utc)
ARCHIVE = """
    from datetime import datetime, timezone
    from agent_checkpoint import StateStore
    with StateStore(words[0], synchronous="normal") as store:
        store.archive_events(datetime.max.replace(tzinfo=timezone.utc), words[1])
"""


def opened(path: Path) -> StateStore:
    """By the real clock. It may lose the last commits in a power cut, which no test makes."""
    return StateStore(path, synchronous="normal")


def whole(store: StateStore) -> list[Event]:
    return store.events(100_000, after="start")


def ids(*files: Path) -> list[int]:
    """The events of archives, each of which is as it was written."""
    found: list[int] = []
    for file in files:
        archived = verify(str(file))
        lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        found += [line["id"] for line in lines if "id" in line]
        assert len(lines) == archived.events + 2
    return found


# Killed


@pytest.fixture
def full(tmp_path: Path) -> bytes:
    """A store with many events, to be copied."""
    path = tmp_path / "full.db"
    with opened(path) as store:
        store.initialize()
        with store.transaction(component="test", action="test.fill") as part:
            for number in range(MANY):
                part.event("test.filled", {"number": number})
        store.put_checkpoint("deploy", 1)
    return path.read_bytes()


def test_whenever_it_is_killed_each_event_is_in_the_log_or_in_the_file(
    tmp_path: Path, full: bytes, request: pytest.FixtureRequest
) -> None:
    def prepared(number: int) -> tuple[Path, Path]:
        path = tmp_path / f"{number}.db"
        path.write_bytes(full)
        return path, tmp_path / f"{number}.jsonl"

    path, file = prepared(0)
    steps = dying.run(ARCHIVE, (path, file))
    assert steps
    all_ids = list(range(1, MANY + 3))
    in_file = 0
    for step in dying.spread(steps, 400 if request.config.getoption("--long") else 12):
        path, file = prepared(step)
        assert dying.run(ARCHIVE, (path, file), step) is None
        archived = ids(file) if file.exists() else []
        in_file += bool(archived)
        with opened(path) as store:
            log = whole(store)
            assert sorted({*archived, *(event.id for event in log if event.id in all_ids)}) == all_ids, step
            assert store.events(1, after="0-0-7")[0].id == max(8, log[0].id)
            assert store.put_checkpoint("deploy", 2).sequence == 2
            again = store.archive_events(EVER, f"{file}.again")
            assert (
                sorted({*ids(file, Path(again.file))} if archived else ids(Path(again.file)))[: MANY + 1]
                == all_ids[:-1]
            )
    assert in_file


def test_the_file_is_on_disk_before_it_has_its_name_and_its_name_before_anything_is_removed(
    tmp_path: Path, full: bytes
) -> None:
    path = tmp_path / "agents.db"
    path.write_bytes(full)
    script = """
import glob, os, sqlite3, sys
from datetime import datetime, timezone
from agent_checkpoint import StateStore

path, file = sys.argv[1:]

def watch(frame, event, called):
    if event == "c_return" and called.__name__ in ("fsync", "link"):
        sys.setprofile(None)
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as beside:
            (count,) = beside.execute("SELECT COUNT(*) FROM events").fetchone()
        beside.close()
        sizes = [os.path.getsize(name) for name in glob.glob(file + "*")]
        print(called.__name__, os.path.exists(file), count, max(sizes))
        sys.setprofile(watch)

with StateStore(path) as store:
    before = len(store.events(100_000))
    print("begin", False, before, 0)
    sys.setprofile(watch)
    store.archive_events(datetime.max.replace(tzinfo=timezone.utc), file)
    sys.setprofile(None)
"""
    done = subprocess.run([sys.executable, "-c", script, path, tmp_path / "file"], capture_output=True, text=True)
    assert done.stderr == ""
    told = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    steps, sizes = [step for step, _ in told], [int(size) for _, size in told]
    count = MANY + 2
    assert steps[0] == f"begin False {count}"
    assert set(steps[1:-2]) == {f"fsync False {count}"}  # now and then, and at the end
    assert steps[-2:] == [f"link True {count}", f"fsync True {count}"]
    assert sizes[-3] == (tmp_path / "file").stat().st_size


# Beside writers

WRITER = """
import sys
from agent_checkpoint import StateStore
with StateStore(sys.argv[1], synchronous="normal") as store:
    print("ready", flush=True)
    for number in range(int(sys.argv[3])):
        store.put_checkpoint(sys.argv[2], number)
"""
READER = """
import sys
from agent_checkpoint import StateStore
last, cursor, seen = int(sys.argv[2]), sys.argv[3], []
with StateStore(sys.argv[1]) as store:
    while len(seen) < last:
        found = [event for event in store.events(50, after=cursor)]
        cursor = found[-1].cursor if found else cursor
        seen += [event.id for event in found if event.kind == "checkpoint.saved"]
print(*seen)
"""


def test_writers_and_readers_go_on_while_it_is_made(tmp_path: Path, full: bytes) -> None:
    path, puts = tmp_path / "agents.db", 150
    path.write_bytes(full)
    with opened(path) as store:
        cursor = store.events(1)[-1].cursor
        names = ("one", "two")
        words = [[sys.executable, "-c", WRITER, str(path), name, str(puts)] for name in names]
        words.append([sys.executable, "-c", READER, str(path), str(len(names) * puts), cursor])
        running = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in words]
        for each in running[:-1]:
            assert each.stdout
            assert each.stdout.readline() == "ready\n"
        before = store.events(1, after="start")[0].at
        store.archive_events(max(before, datetime.now(timezone.utc)), tmp_path / "file.jsonl")
        out = [each.communicate(timeout=SECONDS)[0] for each in running]
        log = [event.id for event in whole(store)]

    assert [each.returncode for each in running] == [0, 0, 0]
    assert len(out[-1].split()) == len(names) * puts
    assert sorted({*ids(tmp_path / "file.jsonl"), *log}) == list(range(1, MANY + 2 + len(names) * puts + 2))


# Damaged


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small archive, with letters of every kind."""
    with opened(tmp_path / "agents.db") as store:
        store.initialize()
        store.acquire('Ünï ☃ \U0001f600 \\ "', "worker-a", metadata={"n": 1.5, "deep": [None, {"a": -0.0}]})
        store.put_checkpoint("deploy", 1)
        store.archive_events(EVER, tmp_path / "file.jsonl")
    assert verify(str(tmp_path / "file.jsonl")).events == 2
    return tmp_path / "file.jsonl"


def is_found(file: Path, damaged: bytes) -> bool:
    file.write_bytes(damaged)
    try:
        verify(str(file))
    except StorageCorruptError:
        return True
    return False


def changed(sound: bytes) -> Iterator[tuple[int, bytes]]:
    """The file with one byte changed, each in several ways: a bit, the case of a letter, a blank, nothing there."""
    for place, byte in enumerate(sound):
        for other in {byte ^ 1, byte ^ 0x20, 0x20, 0, 0xFF} - {byte}:
            yield place, sound[:place] + bytes([other]) + sound[place + 1 :]


def test_every_changed_byte_is_found(file: Path) -> None:
    sound = file.read_bytes()
    assert [place for place, damaged in changed(sound) if not is_found(file, damaged)] == []


def test_every_byte_that_is_missing_or_too_much_is_found(file: Path) -> None:
    sound = file.read_bytes()
    for place in range(len(sound)):
        assert is_found(file, sound[:place] + sound[place + 1 :]), place
        assert is_found(file, sound[:place] + b" " + sound[place:]), place
        assert is_found(file, sound[:place] + b"\n" + sound[place:]), place


def test_a_file_that_ends_early_is_found_wherever_it_ends(file: Path) -> None:
    sound = file.read_bytes()
    assert [length for length in range(len(sound)) if not is_found(file, sound[:length])] == []


def test_a_file_whose_end_was_not_written_before_the_power_went_is_found(file: Path) -> None:
    sound = file.read_bytes()
    for length in range(len(sound)):
        assert is_found(file, sound[:length] + bytes(len(sound) - length)), length


def test_lines_that_are_missing_swapped_doubled_or_appended_are_found(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        assert is_found(file, b"".join(lines[:place] + lines[place + 1 :])), place
        assert is_found(file, b"".join([*lines[:place], line, *lines[place:]])), place
        assert is_found(file, b"".join([*lines, line])), place
    for place in range(len(lines) - 1):
        swapped = [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]]
        assert is_found(file, b"".join(swapped)), place


@pytest.mark.parametrize(
    "text", ["", "\n", "[]\n", "[" * 100_000, '{"a":' * 100_000, "null\n", '"x"\n', "1\n", "\ufeff"]
)
def test_what_is_no_archive_is_found(file: Path, text: str) -> None:
    assert is_found(file, text.encode())
