"""Each system call of each command that changes files fails in turn; then the files are looked at.

The exit status is one of the table, stderr one JSON error and no traceback,
what has its final name is whole, the store is what was answered, and the same
command works on it afterwards.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tests.faults.disks import tracing, truth
from tests.faults.disks.staging import new_folder
from tests.faults.disks.tracing import Ended, Failing
from tests.faults.disks.truth import Broken, Call, Mark, Truth, must
from tests.faults.disks.world import events_in
from tests.faults.engine import Report

from agent_checkpoint import Event, StateStore
from agent_checkpoint.archive import verify

EXITS = (0, 2, 66, 74, 75, 76, 77)
DAY = 86_400.0
OWNER = ("--owner", "worker-a", "--token", "1")
DATA = json.dumps({"filling": "x" * 50_000})


class Command(NamedTuple):
    """A command, on which of the prepared stores, what it must leave, and the file that it makes."""

    name: str
    words: tuple[str, ...]
    marks: tuple[Mark, ...] = ()
    base: str = "held"
    file: str = ""
    status: int = 0


COMMANDS = (
    Command("init", ("--db", "{}/new/agents.db", "init"), (Mark("store.initialized"),), "empty"),
    Command("acquire", ("lease", "acquire", "lint", "--owner", "b"), (Mark("lease.acquired", "lint", "b"),)),
    Command("heartbeat", ("lease", "heartbeat", "release", *OWNER), (Mark("lease.heartbeat", "release"),)),
    Command("release", ("lease", "release", "release", *OWNER), (Mark("lease.released", "release"),)),
    Command(
        "put",
        ("checkpoint", "put", "deploy", "--data", DATA, "--lease-scope", "release", *OWNER),
        (Mark("checkpoint.saved", "release", "worker-a", 1),),
    ),
    Command(
        "stale put",
        ("checkpoint", "put", "deploy", "--data", "1", "--lease-scope", "release", *OWNER),
        (Mark("write.refused", "release", "worker-a", 1),),
        "free",
        status=76,
    ),
    Command("prune", ("checkpoint", "prune", "--keep-last", "1"), (Mark("checkpoint.pruned"),)),
    Command(
        "archive",
        ("events", "archive", "--before", "2999-01-01", "--to", "{}/old.jsonl"),
        (Mark("events.archived"),),
        file="old.jsonl",
    ),
    Command("backup", ("backup", "{}/made.backup"), file="made.backup"),
    Command("restore", ("restore", "{}/kept.backup"), base="free"),
    Command("export", ("export",)),
    Command("import", ("import", "{}/exported"), (Mark("checkpoint.imported"),), "other"),
)


class Base(NamedTuple):
    """A prepared store: its files, and what is in it."""

    files: dict[str, bytes]
    truth: Truth


def bases() -> dict[str, Base]:
    """Stores for the commands: none, one with a live lease, one without, one without checkpoints."""
    found = {"empty": Base({}, Truth())}
    with new_folder() as folder, StateStore(folder / "agents.db") as store:
        store.initialize()
        found["other"] = _base(folder, store)
        lease = store.acquire("release", "worker-a", ttl_seconds=DAY)
        for number in range(3):
            store.put_checkpoint("deploy", {"number": number, "filling": "x" * 5_000}, lease=lease)
        with store.effect("key", lease=lease) as effect:
            effect.done("result of key")
        found["held"] = _base(folder, store)
        store.release(*lease.fence)
        store.backup(folder / "kept.backup")
        store.release(*store.acquire("lint", "worker-b").fence)
        found["free"] = _base(folder, store)
        exported = "".join(store.export_checkpoints("deploy")).encode()
    found["other"].files["exported"] = exported
    return found


def _base(folder: Path, store: StateStore) -> Base:
    names = ("agents.db", "agents.db-wal", "kept.backup")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    return Base(files, as_it_is(store))


def as_it_is(store: StateStore) -> Truth:
    """The truth of a store that nobody doubts."""
    calls = []
    for event in truth.whole(store):
        key = event.detail.get("key")
        mark = Mark(event.kind, event.scope, event.owner, event.token, event.sequence, key)
        saved = store.get_checkpoint(str(event.workflow), sequence=event.sequence) if event.sequence else None
        calls.append(Call([mark], saved and saved.data, "done"))
    return Truth(calls)


class Runs(NamedTuple):
    """A command with its prepared store, and the calls that it makes."""

    command: Command
    base: Base
    calls: list[Failing]

    def points(self) -> list[Point]:
        """Every way in which one of its calls may fail."""
        return [
            Point(self, call, error, stays)
            for call in self.calls
            for error in call.errors()
            for stays in (False, True)
            if not stays or call.name in tracing.OF_DISKS
        ]


class Point(NamedTuple):
    """A call of a command that fails, how, and whether the disk stays ill after it."""

    runs: Runs
    failing: Failing
    error: str
    stays: bool


def prepare() -> list[Runs]:
    """Run each command once with nothing in its way."""
    prepared, found = bases(), []
    for command in COMMANDS:
        base = prepared[command.base]
        with placed(base) as folder:
            ended = tracing.run(folder, words(command))
            must(ended.status == command.status, f"{command.name}: {ended.err}")
            found.append(Runs(command, base, tracing.calls(folder, ended)))
    return found


def words(command: Command) -> list[str]:
    """The command's words, for a store at its folder's usual place."""
    return [*([] if "--db" in command.words else ["--db", "{}/agents.db"]), *command.words]


@contextmanager
def placed(base: Base) -> Iterator[Path]:
    """A folder with the files of a prepared store."""
    with new_folder() as above:
        folder = above / "disk"
        folder.mkdir()
        for name, content in base.files.items():
            (folder / name).write_bytes(content)
        yield folder


def play(point: Point, report: Report) -> None:
    """Let one call of a command fail, and note what is wrong then."""
    runs, failing, error, stays = point
    with placed(runs.base) as folder:
        ended = tracing.run(folder, words(runs.command), failing.injections(error, stays))
        injected = ended.injected()
        if injected is None or not tracing.is_in(folder, injected):
            return  # another call than was meant: the start of Python was another one
        try:
            _look(folder, runs, ended, injected, stays)
        except Exception as wrong:  # whatever it is: here nothing but an answer may come
            what = "" if isinstance(wrong, Broken) else f"{type(wrong).__name__}: "
            place = failing.line.split(" ", 1)[1].split(" = ")[0][:120]
            how = f"{error} from there on" if stays else error
            report.violations.append(f"{runs.command.name}, {how} of {place}, exit {ended.status}: {what}{wrong}")
    report.operations += 2
    report.faults["disk-full" if error == "ENOSPC" else "io-error"] += 1


def _look(folder: Path, runs: Runs, ended: Ended, injected: str, stays: bool) -> None:
    command, base = runs.command, runs.base
    must(ended.status in EXITS, f"no exit of the table; {ended.err[-500:]}")
    code = error_of(ended) if ended.status else ""
    if command.name == "export" and ended.status == 0:
        must(ended.out.endswith("}\n") and '{"checkpoints":3,' in ended.out, "half an export")
    known = base.truth.copy()
    told = Call(list(command.marks), json.loads(DATA) if command.name == "put" else None)
    certain = ended.status == command.status
    lost = code == "storage-outcome-unknown" or "stdout" in injected or command.name == "archive" or ended.status == 76
    if told.marks and (certain or lost):
        told.state = "done" if certain and ended.status == 0 else "unknown"
        known.calls.append(told)
    if "unlink" not in injected and not stays:
        left = [file.name for file in folder.iterdir() if ".partial" in file.name]
        must(not left, f"{left} is left")
    _files(folder, command, ended, base, stays)
    _store(folder, command, known, ended, ended.status == 0 or lost)
    again = tracing.run(folder, words(command))
    done = command.file and (folder / command.file).exists() and again.status == 2
    happened = lost or ended.status == 0 or done
    must(again.status == command.status or happened, f"again: exit {again.status}, {again.err[-300:]}")


def error_of(ended: Ended) -> str:
    """The code of the one JSON error that is all of stderr."""
    must("Traceback" not in ended.err, f"a traceback: {ended.err[-500:]}")
    try:
        (name,) = found = json.loads(ended.err)
        return str(found[name]["code"])
    except (ValueError, KeyError, TypeError):
        raise Broken(f"no JSON error: {ended.err[-500:]!r}") from None


def _files(folder: Path, command: Command, ended: Ended, base: Base, stays: bool) -> None:
    """What has its final name is whole."""
    file = folder / command.file
    if not command.file or not file.exists():
        must(not command.file or ended.status != 0, "the file is not there")
        return
    if command.name == "archive":
        must(verify(str(file)).events == len(base.truth.calls) - 1, "half an archive")
    elif file.stat().st_size or not stays:  # it cannot even be removed then
        with _opened(folder, file) as copy:
            truth.check(copy, base.truth)


def _store(folder: Path, command: Command, known: Truth, ended: Ended, perhaps: bool) -> None:
    path = folder / ("new/agents.db" if command.name == "init" else "agents.db")
    if command.name == "init" and ended.status != 0:
        return  # made by the next try
    file = folder / command.file
    archived = events_in(file) if command.name == "archive" and file.exists() else []
    with StateStore(path) as store:
        log = truth.whole(store, archived)
        if log[-1].kind == "store.restored":
            must(perhaps, "restored, though it failed")
            _restored(store, log, known)
        elif command.name == "import":
            _imported(store, log, known)
        else:
            must(command.name != "restore" or ended.status != 0, "nothing was restored")
            truth.check(store, known, archived)
        number = store.put_checkpoint("afterwards", 1).sequence
        must(number == 1, f"sequence {number} of a new workflow")


def _restored(store: StateStore, log: list[Event], known: Truth) -> None:
    """All or nothing of what was kept: its log, and a mark behind it."""
    kept = Truth([call for call in known.calls if call.marks[0].scope != "lint"])  # which came after the backup
    kept.calls.append(Call([Mark("store.restored")], None, "done"))
    truth.compare(log, kept)
    history = [info.sequence for info in store.checkpoint_history("deploy")]
    must(history == [3, 2, 1], f"restored {history}")


def _imported(store: StateStore, log: list[Event], known: Truth) -> None:
    """All of the checkpoints or none, as the log says."""
    truth.compare(log, known)
    found = {info.sequence for info in store.checkpoint_history("deploy")}
    there = [store.get_checkpoint("deploy", sequence=sequence) for sequence in found]
    must(found == ({1, 2, 3} if log[-1].kind == "checkpoint.imported" else set()), f"imported {found}")
    must(all(each and each.data["number"] == each.sequence - 1 for each in there), "another checkpoint")


@contextmanager
def _opened(folder: Path, file: Path) -> Iterator[StateStore]:
    """A copy of a file as a store, so that the file stays as it is."""
    copy = folder.parent / "opened.db"
    shutil.copyfile(file, copy)
    try:
        with StateStore(copy) as store:
            yield store
    finally:
        with suppress(FileNotFoundError):
            copy.unlink()
