"""Many processes at once on one store, with nothing but the defaults."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import StateStore

PROCESSES = 20

# Each takes the scope, saves and lets go; the only error it may meet is that another holds it.
WORKER = """
import json, random, sys, time
from agent_checkpoint import LeaseHeldError, StateStore
path, owner, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
with StateStore(path) as store:
    created = store.initialize()
    done = []
    for number in range(rounds):
        while True:
            try:
                lease = store.acquire("release", owner, ttl_seconds=3600)
                break
            except LeaseHeldError:
                time.sleep(random.uniform(0.001, 0.05))
        saved = store.put_checkpoint("deploy", {"owner": owner, "number": number}, lease=lease)
        store.release(lease.scope, lease.owner, lease.token)
        done.append([lease.token, saved.sequence, owner, number])
print(json.dumps({"created": created, "done": done}))
"""

# Makes each store that it is told of, at once with the others; says whether it
# was the one, and which of the store's files others can read.
FOUNDER = """
import glob, os, sys
from agent_checkpoint import StateStore
os.umask(0o022)
for line in sys.stdin:
    path = line.rstrip()
    with StateStore(path) as store:
        created = store.initialize()
        for file in glob.glob(glob.escape(path) + "*"):
            try:
                mode = os.stat(file).st_mode & 0o777
            except FileNotFoundError:
                continue
            if mode != 0o600:
                print(f"{file} has mode {mode:o}", file=sys.stderr)
        print(created, flush=True)
"""


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: concurrency is tested, not the disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def start(source: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def work(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Start the workers, let them go all at once; what each answers."""
    workers = [start(WORKER, path, f"worker-{number}", rounds) for number in range(PROCESSES)]
    try:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        answers = []
        for worker in workers:
            out, errors = worker.communicate()
            assert (worker.returncode, errors) == (0, "")
            answers.append(json.loads(out))
        return answers
    finally:
        end(workers)


@pytest.mark.parametrize("rounds", [50, pytest.param(200, marks=pytest.mark.long)])
def test_twenty_processes_share_a_scope_without_a_token_or_sequence_twice(quick: Path, rounds: int) -> None:
    path = quick / "state" / "agents.db"
    answers = work(path, rounds)

    everything = range(1, PROCESSES * rounds + 1)
    done = sorted(each for answer in answers for each in answer["done"])
    assert [token for token, _, _, _ in done] == list(everything)
    assert [sequence for _, sequence, _, _ in done] == list(everything)
    assert sum(answer["created"] for answer in answers) == 1

    with StateStore(path) as store:
        # The audit log tells the same story: taken, saved, let go, in turns.
        events = store.events(limit=1_000_000)
        assert events[0].kind == "store.initialized"
        told = [(event.kind, event.token, event.sequence, event.owner) for event in events[1:]]
        assert told == [
            line
            for token, sequence, owner, _ in done
            for line in (
                ("lease.acquired", token, None, owner),
                ("checkpoint.saved", token, sequence, owner),
                ("lease.released", token, None, owner),
            )
        ]
        assert [event.id for event in events] == sorted({event.id for event in events})
        # So do the rows.
        last = store.get_lease("release", include_expired=True)
        assert last is not None
        assert (last.token, last.state, last.owner) == (len(everything), "released", done[-1][2])
        history = store.checkpoint_history("deploy")
        assert [(info.sequence, info.token, info.owner) for info in reversed(history)] == [
            (sequence, token, owner) for token, sequence, owner, _ in done
        ]
        for token, sequence, owner, number in done[:: len(done) // 50]:
            found = store.get_checkpoint("deploy", sequence=sequence)
            assert found is not None
            assert (found.token, found.data) == (token, {"owner": owner, "number": number})
        verdicts = {check.check: check.verdict for check in store.doctor()}
    assert verdicts["integrity"] == "ok"
    assert "broken" not in verdicts.values()


@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.long)])
def test_twenty_processes_make_a_store_together_and_one_of_them_made_it(tmp_path: Path, times: int) -> None:
    stores = [tmp_path / f"folder-{number}" / "deeper" / "agents.db" for number in range(times)]
    founders = [start(FOUNDER, number) for number in range(PROCESSES)]
    try:
        for path in stores:
            for founder in founders:
                assert founder.stdin is not None
                founder.stdin.write(f"{path}\n")
                founder.stdin.flush()
        answers = []
        for founder in founders:
            out, errors = founder.communicate()
            assert (founder.returncode, errors) == (0, "")
            answers.append(out.split())
    finally:
        end(founders)

    for path, created in zip(stores, zip(*answers, strict=True), strict=True):
        assert sorted(created) == ["False"] * (PROCESSES - 1) + ["True"]
        with StateStore(path) as store:
            assert [event.kind for event in store.events()].count("store.initialized") == 1
            assert store.acquire("release", "worker-a").token == 1
            assert {check.verdict for check in store.doctor()} <= {"ok", "warning"}
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
