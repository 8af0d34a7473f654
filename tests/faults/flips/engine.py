"""Damaged files: a store answers as if nothing had happened, or says that its file is damaged.

A rich store is copied, damaged and asked everything, over and over, each time in
a process of its own that may crash. What its log (``-wal``) says is cut by SQLite
at the first damaged frame: the answers then are those of an earlier commit, all
of the same one, as after a power cut, and are counted apart.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults import variants
from tests.faults.engine import Budget, Report, Tell
from tests.faults.flips.asking import DOCTOR, Answers, ask
from tests.faults.flips.rich import Rich, build

# Seconds after which an answer is not waited for any more.
WATCHDOG_SECONDS = 60.0
# Damages that one process is asked about; one of so many is asked what takes long, too.
BATCH, THOROUGH_EVERY = 8, 5
PAGE, SECTOR = 4096, 512
LOG_HEADER, FRAME_HEADER = 32, 24


class Damage(NamedTuple):
    """What was done: the kind, the file ("" or "-wal"), where, and the bytes of both files."""

    kind: str
    file: str
    place: int
    database: bytes
    log: bytes

    def __str__(self) -> str:
        return f"{self.kind} at byte {self.place} of the {'log' if self.file else 'database'}"


class Right(NamedTuple):
    """The right answers, and those of each earlier commit, of a store with a log."""

    now: Answers
    earlier: list[Answers]


def run(budget: Budget, tell: Tell, variant: str | None = None) -> Report:
    """Damage and ask until the time is over."""
    report, found = Report(), Counter[str]()
    with tempfile.TemporaryDirectory(dir=_fast_place()) as folder, variants.broken(variant):
        rich = build()
        rights = {"": _right(folder, rich.rest, b""), "-wal": _right(folder, rich.killed, rich.log)}
        while budget.goes_on(report):
            damages = [_damage(budget.random, rich) for _ in range(BATCH)]
            for damage, answers in zip(damages, _asked(folder, damages), strict=True):
                right = rights["-wal" if damage.log else ""]
                _judge(damage, answers, right, report, found)
            tell(report)
    kinds = sorted({key.rpartition(" ")[0] for key in found})
    report.notes += [f"{kind}: " + ", ".join(_counts(found, kind)) for kind in kinds]
    return report


def _counts(found: Counter[str], kind: str) -> Iterator[str]:
    for verdict in ("noticed", "right", "earlier", "WRONG"):
        yield f"{found[f'{kind} {verdict}']} {verdict}"


def _damage(chance: random.Random, rich: Rich) -> Damage:
    """Something that disks, kernels and people do to a file."""
    place = chance.random()
    database, log, file = (
        (rich.rest, b"", "") if place < 0.7 else (rich.killed, rich.log, "-wal" if place > 0.85 else "")
    )
    kind = chance.choices([*KINDS], [weight for weight, _ in KINDS.values()])[0]
    content = bytearray(log if file else database)
    at = KINDS[kind][1](chance, content)
    return Damage(kind, file, at, bytes(database if file else content), bytes(content if file else log))


def _bit(chance: random.Random, content: bytearray) -> int:
    at = _used(chance, content)
    content[at] ^= 1 << chance.randrange(8)
    return at


def _byte(chance: random.Random, content: bytearray) -> int:
    at = _used(chance, content)
    content[at] = (content[at] + chance.randrange(1, 256)) % 256
    return at


def _used(chance: random.Random, content: bytearray) -> int:
    """A byte that is not within a long run of zeros: those are unused mostly."""
    while True:
        at = chance.randrange(len(content))
        if any(content[max(0, at - 8) : at + 8]):
            return at


def _zero(chance: random.Random, content: bytearray) -> int:
    at = chance.randrange(0, len(content), SECTOR)
    size = chance.choice((SECTOR, PAGE))
    content[at : at + size] = bytes(min(size, len(content) - at))
    return at


def _swap(chance: random.Random, content: bytearray) -> int:
    size = chance.choice((SECTOR, PAGE))
    if len(content) < 2 * size:
        return _zero(chance, content)
    one, other = (chance.randrange(0, len(content) - size + 1, size) for _ in range(2))
    content[one : one + size], content[other : other + size] = (
        content[other : other + size],
        content[one : one + size],
    )
    return one


def _splice(chance: random.Random, content: bytearray) -> int:
    """A page in the place of another one too."""
    if len(content) < 2 * PAGE:
        return _zero(chance, content)
    one, other = (chance.randrange(0, len(content) - PAGE + 1, PAGE) for _ in range(2))
    content[one : one + PAGE] = content[other : other + PAGE]
    return one


def _truncate(chance: random.Random, content: bytearray) -> int:
    at = chance.choice((chance.randrange(len(content)), chance.randrange(0, len(content), SECTOR)))
    del content[at:]
    return at


KINDS: dict[str, tuple[int, Callable[[random.Random, bytearray], int]]] = {
    "flipped-bit": (10, _bit),
    "flipped-byte": (6, _byte),
    "zeroed": (1, _zero),
    "swapped": (1, _swap),
    "spliced": (1, _splice),
    "truncated": (1, _truncate),
}
# What is never taken for right. Of whole pages and sectors, which bring sums along that are
# right elsewhere or are of the past, it is told how often.
SINGLE = ("flipped-bit", "flipped-byte")


def _right(folder: str, database: bytes, log: bytes) -> Right:
    """What is right, and what was at each commit that is in the log."""
    ends = list(_commits(log))
    states = [Damage("", "", 0, database, log[:end]) for end in [0, *ends][:-1]] if log else []
    asked = _asked(folder, [Damage("", "", 0, database, log), *states], True)
    for answers in asked:
        assert isinstance(answers, dict), answers
        wrong = {name: answer for name, answer in answers.items() if answer[0] == "!" or answer.startswith("crash")}
        assert not wrong, wrong
    return Right(asked[0], asked[1:])  # type: ignore[arg-type]


def _commits(log: bytes) -> Iterator[int]:
    """Where the frames end that are the last of a commit."""
    if len(log) < LOG_HEADER:
        return
    salts = log[16:24]
    for start in range(LOG_HEADER, len(log) - FRAME_HEADER - PAGE + 1, FRAME_HEADER + PAGE):
        _, size, found = struct.unpack(">II8s", log[start : start + 16])
        if found != salts:
            return
        if size:
            yield start + FRAME_HEADER + PAGE


def _judge(damage: Damage, answers: Answers | str, right: Right, report: Report, found: Counter[str]) -> None:
    report.faults[damage.kind] += 1
    kind = damage.kind + (" in the log" if damage.file else "")
    if isinstance(answers, str):
        report.violations.append(f"{damage}: {answers}")
        found[f"{kind} WRONG"] += 1
        return
    report.operations += len(answers)
    # What is damaged in the log ends it there; nothing excuses damage in the database.
    possible = (right.now, *right.earlier) if damage.file else (right.now,)
    wrong = min((_wrong(answers, each) for each in possible), key=len)
    sound = right.now[DOCTOR]
    if wrong:
        verdict = "WRONG"
        if damage.kind in SINGLE or any("crash" in each for each in wrong):
            report.violations.append(f"{damage}: {'; '.join(wrong[:5])}")
    elif any(answer[0] == "!" for answer in answers.values()) or answers.get(DOCTOR, sound) != sound:
        verdict = "noticed"
    else:
        verdict = "right" if not _wrong(answers, right.now) else "earlier"
    found[f"{kind} {verdict}"] += 1


def _wrong(answers: Answers, right: Answers) -> list[str]:
    """The answers that are neither right nor say that the file is damaged."""
    return [
        f"{name} {answer if answer.startswith('crash') else ''}".rstrip()
        for name, answer in answers.items()
        if answer[0] != "!" and answer != right[name] and not (name == DOCTOR and not answer.startswith("crash"))
    ]


def _asked(folder: str, damages: list[Damage], thoroughly: bool | None = None) -> list[Answers | str]:
    """The answers of each damaged store, or how the process ended that asked."""
    answers: list[Answers | str] = []
    while len(answers) < len(damages):
        answers += _in_a_child(folder, damages[len(answers) :], len(answers), thoroughly)
    return answers


def _in_a_child(folder: str, damages: list[Damage], first: int, thoroughly: bool | None) -> list[Answers | str]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            for number, damage in enumerate(damages, start=first):
                whole = number % THOROUGH_EVERY == 0 if thoroughly is None else thoroughly
                _send(writing, pickle.dumps(_one(folder, damage, whole)))
        finally:
            os._exit(0)
    os.close(writing)
    answers: list[Answers | str] = []
    try:
        while (sent := _receive(reading)) is not None:
            answers.append(pickle.loads(sent))
    except TimeoutError:
        answers.append("hangs")
        os.kill(child, signal.SIGKILL)
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    if len(answers) < len(damages) and not (answers and answers[-1] == "hangs"):
        answers.append(f"the interpreter died: wait status {status}")
    return answers


def _one(folder: str, damage: Damage, thoroughly: bool) -> Answers | str:
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        path = place / "state.db"
        path.write_bytes(damage.database)
        if damage.log:
            Path(f"{path}-wal").write_bytes(damage.log)
        return ask(path, thoroughly)
    except Exception as error:
        return f"crash {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _send(pipe: int, message: bytes) -> None:
    message = struct.pack(">I", len(message)) + message
    while message:
        message = message[os.write(pipe, message) :]


def _receive(pipe: int) -> bytes | None:
    """The next message; None at the end."""
    until = time.monotonic() + WATCHDOG_SECONDS
    size = _read(pipe, 4, until)
    return None if size is None else _read(pipe, struct.unpack(">I", size)[0], until)


def _read(pipe: int, size: int, until: float) -> bytes | None:
    got = b""
    while len(got) < size:
        if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(pipe, size - len(got))
        if not part:
            return None
        got += part
    return got


def _fast_place() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None
