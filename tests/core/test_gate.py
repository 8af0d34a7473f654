"""The gate: a fair queue of threads and processes, which nobody has to get through."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.watching import wait_until

from agent_checkpoint import ReentrancyError, StateStore, StorageReadOnlyError, StorageUnreachableError
from agent_checkpoint.sqlite import gate as gates
from agent_checkpoint.sqlite.gate import Gate, gate_at, leave_unused

# Longer than anything here takes: only a hang reaches it.
LONG = 30.0

# A process that does to a gate what it is told, a line an order, a line an answer.
OTHER = """
import sys
from agent_checkpoint.sqlite.gate import gate_at
gates = [gate_at(path) for path in sys.argv[1:]]
for line in sys.stdin:
    order, which, patience = line.split()
    gate = gates[int(which)]
    print(gate.leave() if order == "leave" else gate.enter(float(patience)), flush=True)
"""


class Other:
    """Another process, with gates of its own for the same databases."""

    def __init__(self, *databases: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, *map(str, databases)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, order: str, which: int = 0, patience: float = LONG) -> None:
        assert self.process.stdin is not None
        print(order, which, patience, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def enter(self, which: int = 0, patience: float = LONG) -> bool:
        self.tell("enter", which, patience)
        return self.answer() == "True"

    def leave(self, which: int = 0) -> None:
        self.tell("leave", which)
        assert self.answer() == "None"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def opened(database: Path) -> Gate:
    """The gate of a database file, which need not be one."""
    database.touch(0o600)
    found = gate_at(str(database))
    assert found is not None
    return found


@pytest.fixture
def sidecar(path: Path) -> Path:
    return path.with_name("agents.db-gate")


@pytest.fixture
def gate(path: Path) -> Iterator[Gate]:
    found = opened(path)
    yield found
    leave_unused(found)


@pytest.fixture
def other(path: Path, gate: Gate) -> Iterator[Other]:
    process = Other(path)
    yield process
    process.end()


def waits_in_the_kernel(path: Path, how_many: int = 1) -> bool:
    """Whether so many processes are blocked on the lock of a file (proc(5): "->" marks a waiter)."""
    inode = f":{path.stat().st_ino} "
    return sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()) >= how_many


class HandlerError(Exception):
    """What the handler of a signal raises."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A signal whose handler raises, as Ctrl-C does, while the block waits."""

    def interrupt(*_: object) -> None:
        raise HandlerError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(HandlerError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Threads


def test_threads_get_their_turns_in_the_order_in_which_they_came(gate: Gate) -> None:
    turns: list[int] = []
    assert gate.enter(LONG)

    def take_a_turn(number: int) -> None:
        assert gate.enter(LONG)
        turns.append(number)
        gate.leave()

    threads = []
    for number in range(8):
        threads.append(threading.Thread(target=take_a_turn, args=(number,)))
        threads[-1].start()
        wait_until(lambda: len(gate._queue) == len(threads))
    gate.leave()
    for thread in threads:
        thread.join(LONG)

    assert turns == list(range(8))


def test_a_thread_that_lost_its_patience_goes_around_and_leaves_the_queue_in_order(gate: Gate) -> None:
    answers: list[bool] = []
    assert gate.enter(LONG)
    impatient = threading.Thread(target=lambda: answers.append(gate.enter(0.01)))
    impatient.start()
    impatient.join(LONG)
    assert answers == [False]

    gate.leave()
    assert gate.enter(0)
    gate.leave()


def test_only_one_thread_at_a_time_is_inside(gate: Gate) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(200):
            assert gate.enter(LONG)
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            gate.leave()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)

    assert most == [1] * 1600


def test_a_thread_that_is_inside_cannot_enter_again(gate: Gate) -> None:
    assert gate.enter(LONG)
    with pytest.raises(ReentrancyError):
        gate.enter(LONG)
    gate.leave()

    assert gate.enter(LONG)
    gate.leave()


def test_a_process_has_one_descriptor_for_a_sidecar_until_nobody_needs_it(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    gate = opened(path)

    assert all(gate_at(str(path)) is gate for _ in range(20))
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for _ in range(20):
        leave_unused(gate)
    assert gate.enter(0)
    gate.leave()
    leave_unused(gate)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_gate_that_nobody_needs_keeps_whoever_is_inside(path: Path) -> None:
    gate = opened(path)
    other = Other(path)
    try:
        assert gate.enter(LONG)
        leave_unused(gate)
        assert not other.enter(patience=0)
        gate.leave()
        wait_until(lambda: other.enter(patience=1))
    finally:
        other.end()


def test_a_gate_that_was_closed_while_somebody_came_in_is_not_entered(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, inside, allocate = opened(path), threading.get_ident(), gates.allocate_lock
    assert gate.enter(0)

    def end_the_gate() -> object:
        """Somebody was seen inside; before there is a place in the queue they leave, and nobody needs the gate."""
        gate.leave(inside)
        leave_unused(gate)
        # To unlock this one could drop SQLite's own locks.
        taken = os.open(path, os.O_RDWR)
        if taken != gate.descriptor:
            os.dup2(taken, gate.descriptor)
            os.close(taken)
        return allocate()

    monkeypatch.setattr(gates, "allocate_lock", end_the_gate)
    entered: list[bool] = []
    comes = threading.Thread(target=lambda: entered.append(gate.enter(LONG)))
    comes.start()
    comes.join(LONG)
    os.close(gate.descriptor)

    assert gate.key not in gates._gates
    assert entered == [False]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660])
def test_a_sidecar_is_for_those_whom_the_database_is_for(path: Path, sidecar: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    before = os.umask(0o022)
    try:
        leave_unused(opened(path))
    finally:
        os.umask(before)
    assert sidecar.stat().st_mode & 0o777 & ~mode == 0


# Collects garbage in the middle of opening a gate, where Python may do so by itself.
COLLECTED = """
import gc, os, sys
from agent_checkpoint import StateStore
gc.disable()
folder = sys.argv[1]
for number in range(2):
    with StateStore(f"{folder}/{number}.db") as store:
        store.initialize()
forgotten = StateStore(f"{folder}/0.db")
forgotten.acquire("release", "worker-a")
forgotten.myself = forgotten
del forgotten
def collect(frame, event, called):
    if event == "c_call" and frame.f_code.co_name == "gate_at" and called is os.fstat:
        gc.collect()
with StateStore(f"{folder}/1.db") as store:
    sys.setprofile(collect)
    print(store.acquire("release", "worker-a").token)
"""


def test_a_store_that_is_collected_while_another_is_opened_hangs_nobody(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTED, str(tmp_path)], capture_output=True, text=True, timeout=LONG
    )
    assert (ended.stdout, ended.stderr) == ("1\n", "")


# Processes


def test_a_gate_keeps_another_process_out_until_it_is_left(gate: Gate, other: Other) -> None:
    assert gate.enter(LONG)
    assert not other.enter(patience=0)

    gate.leave()
    wait_until(lambda: other.enter(patience=1))
    assert not gate.enter(0.01)


def test_a_gate_is_handed_to_the_process_that_waits(gate: Gate, other: Other, sidecar: Path) -> None:
    assert gate.enter(LONG)
    other.tell("enter")
    wait_until(lambda: waits_in_the_kernel(sidecar))

    gate.leave()
    assert other.answer() == "True"


def test_a_thread_waits_until_the_other_process_leaves(gate: Gate, other: Other, sidecar: Path) -> None:
    assert other.enter()
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(gate.enter(LONG)))
    waiting.start()
    wait_until(lambda: waits_in_the_kernel(sidecar))
    assert answers == []

    other.leave()
    waiting.join(LONG)
    assert answers == [True]
    assert not other.enter(patience=0)


def test_a_process_that_never_pauses_lets_a_waiting_one_in(gate: Gate, other: Other, sidecar: Path) -> None:
    assert gate.enter(LONG)
    other.tell("enter")
    wait_until(lambda: waits_in_the_kernel(sidecar))
    gate.leave()

    turns = 0
    while gate.enter(0.001):
        gate.leave()
        turns += 1
        assert turns < 100_000, "the waiting process never had its turn"
    assert other.answer() == "True"


def test_a_gate_whose_holder_dies_is_free(gate: Gate, other: Other) -> None:
    assert other.enter()
    other.end()

    assert gate.enter(LONG)
    gate.leave()


def test_having_gone_around_once_a_process_goes_around_at_once(gate: Gate, other: Other) -> None:
    assert other.enter()
    os.kill(other.process.pid, signal.SIGSTOP)
    assert not gate.enter(0.1)

    # With any patience for each of them, these would never end.
    assert not any(gate.enter(3600) for _ in range(1000))


def test_a_process_that_can_have_no_more_threads_goes_around(gate: Gate, other: Other) -> None:
    other.enter()
    before = threading.stack_size(2**47)  # as much as there are addresses: no thread can be started
    try:
        assert gate.enter(LONG) is False
    finally:
        threading.stack_size(before)
    other.leave()
    assert gate.enter(LONG) is True
    gate.leave()


def test_a_lock_that_came_too_late_is_passed_on(gate: Gate, other: Other) -> None:
    assert other.enter()
    assert not gate.enter(0.05)
    other.leave()

    # Nobody waits for it here any more: the other process gets it back, again and again.
    for _ in range(20):
        assert other.enter()
        other.leave()
    wait_until(lambda: gate.enter(0))
    gate.leave()


def test_a_gate_works_as_before_once_the_holder_has_left(gate: Gate, other: Other) -> None:
    for _ in range(5):
        assert other.enter()
        assert not gate.enter(0.02)
        other.leave()
        wait_until(lambda: gate.enter(0))
        assert not other.enter(patience=0)
        gate.leave()
        wait_until(lambda: other.enter(patience=1))
        other.leave()


def test_whoever_has_gone_around_queues_again_once_the_holder_goes_on(gate: Gate, other: Other) -> None:
    # Else it would contend with those inside at SQLite's lock, where it may starve.
    assert other.enter()
    os.kill(other.process.pid, signal.SIGSTOP)
    assert not gate.enter(0.1)
    assert not gate.enter(0.1)
    os.kill(other.process.pid, signal.SIGCONT)

    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(gate.enter(LONG)))
    waiting.start()
    waiting.join(0.1)
    assert answers == []
    other.leave()
    waiting.join(LONG)
    assert answers == [True]
    assert not other.enter(patience=0)


def test_two_stores_in_two_processes_waiting_crosswise_are_no_deadlock(tmp_path: Path) -> None:
    # The kernel looks for cycles between processes and answers EDEADLK.
    databases = tmp_path / "a.db", tmp_path / "b.db"
    ours = [opened(database) for database in databases]
    other = Other(*databases)
    try:
        assert ours[0].enter(LONG)
        assert other.enter(1)
        other.tell("enter", 0)  # the other holds B and waits for A
        wait_until(lambda: waits_in_the_kernel(tmp_path / "a.db-gate"))
        answers: list[bool] = []
        crosswise = threading.Thread(target=lambda: answers.append(ours[1].enter(LONG)))
        crosswise.start()  # we hold A and wait for B
        wait_until(lambda: ours[1]._helper is not None and ours[1]._helper.waiting)

        ours[0].leave()
        assert other.answer() == "True"
        other.leave(1)
        crosswise.join(LONG)
        assert answers == [True]
    finally:
        other.end()
        for gate in ours:
            leave_unused(gate)


# Interruptions: a handler that raises, then a program that goes on


def test_an_interrupted_wait_for_another_process_leaves_the_gate_usable(gate: Gate, other: Other) -> None:
    assert other.enter()
    with interrupted_after(0.1):
        gate.enter(LONG)
    other.leave()

    wait_until(lambda: other.enter(patience=1))  # the lock is not left with us, who do not want it
    other.leave()
    wait_until(lambda: gate.enter(0.01))
    assert not other.enter(patience=0)
    gate.leave()


def test_an_interrupted_wait_for_another_thread_leaves_the_gate_usable(gate: Gate) -> None:
    go_on = threading.Event()
    is_in = threading.Event()

    def sit() -> None:
        assert gate.enter(LONG)
        is_in.set()
        go_on.wait(LONG)
        gate.leave()

    sitting = threading.Thread(target=sit)
    sitting.start()
    assert is_in.wait(LONG)
    with interrupted_after(0.1):
        gate.enter(LONG)
    go_on.set()
    sitting.join(LONG)

    assert gate.enter(0.01)
    gate.leave()


# Stores


def test_a_store_call_inside_a_transaction_of_the_same_thread_is_an_error_not_a_hang(store: StateStore) -> None:
    with store.transaction(component="tests", action="test.write"), pytest.raises(ReentrancyError):
        store.acquire("release", "worker-a")

    assert store.acquire("release", "worker-a").token == 1


def test_another_store_object_on_the_same_file_does_not_get_around_that(store: StateStore, path: Path) -> None:
    with (
        StateStore(path) as again,
        store.transaction(component="tests", action="test.write"),
        pytest.raises(ReentrancyError),
    ):
        again.acquire("release", "worker-a")


def test_a_call_inside_a_transaction_is_an_error_without_a_gate_too(path: Path) -> None:
    with StateStore(path, busy_timeout_seconds=0.2) as store:
        store.initialize()
    path.with_name("agents.db-gate").unlink(missing_ok=True)
    path.with_name("agents.db-gate").symlink_to(path.with_name("elsewhere"))

    with (
        StateStore(path, busy_timeout_seconds=0.2) as store,
        store.transaction(component="tests", action="test.write"),
        pytest.raises(ReentrancyError),
    ):
        store.acquire("release", "worker-a")


def test_a_transaction_may_use_another_store(store: StateStore, tmp_path: Path) -> None:
    with StateStore(tmp_path / "other.db") as another:
        another.initialize()
        with store.transaction(component="tests", action="test.write"):
            assert another.acquire("release", "worker-a").token == 1


def test_a_call_of_another_thread_waits_for_the_transaction(store: StateStore) -> None:
    tokens: list[int] = []
    with store.transaction(component="tests", action="test.write"):
        waiting = threading.Thread(target=lambda: tokens.append(store.acquire("release", "worker-b").token))
        waiting.start()
        waiting.join(0.05)
        assert tokens == []
    waiting.join(LONG)

    assert tokens == [1]


def test_a_transaction_that_raised_leaves_the_gate(store: StateStore) -> None:
    for _ in range(3):
        with (
            pytest.raises(ZeroDivisionError),
            store.transaction(component="tests", action="test.write"),
        ):
            _ = 1 / 0

    assert store.acquire("release", "worker-a").token == 1


def test_a_sidecar_that_is_a_link_is_not_followed(path: Path) -> None:
    with StateStore(path) as store:
        store.initialize()
    sidecar, target = path.with_name("agents.db-gate"), path.with_name("precious")
    sidecar.unlink()
    sidecar.symlink_to(target)

    with StateStore(path) as store:
        assert store.acquire("release", "worker-a").token == 1
    assert sidecar.is_symlink()
    assert not target.exists()


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_sidecar_that_is_no_file_is_left_alone(path: Path, kind: str) -> None:
    with StateStore(path) as store:
        store.initialize()
    sidecar = path.with_name("agents.db-gate")
    sidecar.unlink()
    if kind == "folder":
        sidecar.mkdir()
    else:
        os.mkfifo(sidecar)

    with StateStore(path) as store:
        assert store.acquire("release", "worker-a").token == 1


# A folder that cannot be written: root may do everything, so its power is dropped first.
IN_A_READ_ONLY_FOLDER = """
import os, sys
from agent_checkpoint import StateStore, StorageError
with StateStore(sys.argv[1], busy_timeout_seconds=1) as store:
    try:
        print(store.acquire("release", "worker-b").token)
    except StorageError as error:
        print(type(error).__name__)
"""


def in_a_read_only_folder(path: Path) -> str:
    command = [sys.executable, "-c", IN_A_READ_ONLY_FOLDER, str(path)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("root, and no setpriv to be less")
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    os.chmod(path.parent, 0o500)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    finally:
        os.chmod(path.parent, 0o700)


def test_in_a_read_only_folder_an_open_store_works_without_a_gate(tmp_path: Path) -> None:
    path = tmp_path / "state" / "agents.db"
    with StateStore(path) as store:
        store.initialize()
        assert store.acquire("lint", "worker-a").token == 1
        path.with_name("agents.db-gate").unlink()

        assert in_a_read_only_folder(path) == "1"
        assert not path.with_name("agents.db-gate").exists()


def test_in_a_read_only_folder_a_closed_store_says_so_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state" / "agents.db"
    with StateStore(path) as store:
        store.initialize()

    assert in_a_read_only_folder(path) in (StorageReadOnlyError.__name__, StorageUnreachableError.__name__)
    with StateStore(path) as store:
        assert store.acquire("release", "worker-a").token == 1
