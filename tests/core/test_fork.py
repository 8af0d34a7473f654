"""After ``fork`` a store is used by parent and child, each with connections of its own.

Each test is a program of its own: what happens when a forked interpreter ends
is a part of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forking import play, reported, saved

from agent_checkpoint import StateStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
    return path


def test_parent_and_child_go_on_with_the_same_store(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
pid = os.fork()
for _ in range(20):
    put(store, "child" if pid == 0 else "parent")
if pid:
    say(child=ended(pid))
    put(store, "parent")
""",
    )
    assert {"child": 0} in said
    assert len(reported(said)) == 42
    assert saved(path) == reported(said)


def test_parent_and_child_and_grandchild_are_never_granted_the_same_token(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
store.release(*store.acquire("release", "parent").fence)
first = os.fork()
second = os.fork()
for _ in range(10):
    while True:
        try:
            lease = store.acquire("release", "worker", ttl_seconds=3600)
            break
        except Exception as error:
            assert error.code == "lease-held", error
            time.sleep(0.002)
    say(token=lease.token)
    store.release(*lease.fence)
if second:
    ended(second)
    if first:
        ended(first)
""",
    )
    assert sorted(line["token"] for line in said) == list(range(2, 42))


@pytest.mark.parametrize("way", ["store.close()", "os._exit(0)", "sys.exit()"])
def test_what_a_child_writes_after_its_parent_has_gone_is_kept(path: Path, way: str) -> None:
    # SQLite remembers the parent's locks for the file and would take none in
    # the child: the next one to close the store would remove the log that the
    # child still writes to.
    said = play(
        path,
        f"""
store = StateStore(path)
put(store, "parent")
gone, started = Signal(), Signal()
if os.fork():
    started.wait()
    {way}
    if {way!r} == "store.close()":
        gone.tell()
        os.wait()
        visit()
else:
    put(store, "child")
    started.tell()
    gone.wait()
    visit()
    for _ in range(3):
        put(store, "child")
    visit()
    put(store, "child")
""",
    )
    assert len(reported(said)) >= 8
    assert saved(path) == reported(said)


def test_a_child_that_never_used_the_store_may_outlive_its_parent_too(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
gone = Signal()
if os.fork():
    os._exit(0)
gone.wait()
put(store, "child")
visit()
put(store, "child")
visit()
""",
    )
    assert len(reported(said)) == 5
    assert saved(path) == reported(said)


def test_a_child_may_open_the_file_that_its_parent_had_open_by_itself(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
gone = Signal()
if os.fork():
    os._exit(0)
gone.wait()
with StateStore(path) as another:
    put(another, "child")
    visit()
    put(another, "child")
visit()
""",
    )
    assert len(reported(said)) == 5
    assert saved(path) == reported(said)


@pytest.mark.parametrize("way", ["sys.exit()", "os._exit(0)", "store.close()"])
def test_a_child_that_ends_does_not_disturb_a_transaction_of_its_parent(path: Path, way: str) -> None:
    said = play(
        path,
        f"""
store = StateStore(path)
inside, go_on = threading.Event(), threading.Event()
def write():
    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened")
        inside.set()
        go_on.wait()
        part.event("test.happened")
thread = threading.Thread(target=write)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    {way}
    os._exit(0)
say(child=ended(pid), meanwhile=elsewhere(TRY))
go_on.set()
thread.join()
say(events=len(store.events(kind="test.happened")))
visit()
""",
    )
    assert said == [{"child": 0, "meanwhile": "busy"}, {"events": 2}, {"by": "visitor", "sequence": 1}]


def test_a_child_forked_beside_a_writing_thread_is_not_shut_out_for_ever(path: Path) -> None:
    # It may be told that it was forked at a wrong moment; it is not told "busy"
    # once nobody writes, and nothing that it reports is lost.
    said = play(
        path,
        """
store = StateStore(path, busy_timeout_seconds=1)
inside, go_on = threading.Event(), threading.Event()
def write():
    with store.transaction(component="tests", action="test.write"):
        inside.set()
        go_on.wait()
thread = threading.Thread(target=write)
thread.start()
inside.wait()
free = Signal()
pid = os.fork()
if pid == 0:
    free.wait()
    try:
        put(store, "child")
        visit()
        put(store, "child")
    except ReentrancyError:
        say(error="ReentrancyError")
    os._exit(0)
go_on.set()
thread.join()
store.close()
free.tell()
say(child=ended(pid))
""",
    )
    assert {"child": 0} in said
    assert len(reported(said)) == 3 or {"error": "ReentrancyError"} in said
    assert saved(path) == reported(said)


def test_a_transaction_is_its_parent_s_to_end(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
try:
    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened", {"by": "parent"})
        pid = os.fork()
        if pid == 0:
            part.event("test.happened", {"by": "child"})
        else:
            say(child=ended(pid), meanwhile=elsewhere(TRY))
except ReentrancyError as error:
    assert pid == 0
    say(error=str(error))
    sys.exit(7)
say(events=[event.detail["by"] for event in store.events(kind="test.happened")])
visit()
""",
    )
    assert said == [
        {"error": "this process was forked inside a store transaction, which is its parent's to end"},
        {"child": 7, "meanwhile": "busy"},
        {"events": ["parent"]},
        {"by": "visitor", "sequence": 1},
    ]


def test_a_child_cannot_use_the_transaction_that_it_was_forked_in(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
with store.transaction(component="tests", action="test.write") as part:
    part.run("CREATE TABLE test_notes (note TEXT)")
    pid = os.fork()
    if pid == 0:
        for use in (
            lambda: part.run("INSERT INTO test_notes VALUES ('child')"),
            lambda: part.rows("SELECT * FROM test_notes"),
            lambda: part.executemany("INSERT INTO test_notes VALUES (?)", [("child",)]),
        ):
            try:
                say(used=str(use()))
            except ReentrancyError:
                say(error="ReentrancyError")
        os._exit(0)
    ended(pid)
    part.run("INSERT INTO test_notes VALUES ('parent')")
with store.read() as reader:
    say(notes=reader.rows("SELECT note FROM test_notes"))
""",
    )
    assert said == [{"error": "ReentrancyError"}] * 3 + [{"notes": [["parent"]]}]


def test_a_child_that_fails_inside_a_transaction_leaves_it_to_its_parent(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
child = False
try:
    with store.transaction(component="tests", action="test.write") as part:
        part.event("test.happened")
        pid = os.fork()
        if pid == 0:
            child = True
            raise ValueError("a child's own")
        say(child=ended(pid), meanwhile=elsewhere(TRY))
except (ReentrancyError, ValueError) as error:
    assert child
    os._exit(3)
say(events=len(store.events(kind="test.happened")))
""",
    )
    assert said == [{"child": 3, "meanwhile": "busy"}, {"events": 1}]


def test_a_child_forked_inside_a_read_does_not_go_on_with_its_parent_s_connection(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
gone = Signal()
try:
    with store.read() as reader:
        pid = os.fork()
        if pid:
            say(rows=reader.rows("SELECT COUNT(*) FROM checkpoints")[0][0])
            os._exit(0)
        gone.wait()
except ReentrancyError:
    pass
try:
    put(store, "child")
    visit()
    put(store, "child")
    visit()
except ReentrancyError:
    say(error="ReentrancyError")
""",
    )
    assert {"rows": 1} in said
    assert len(reported(said)) == 5 or {"error": "ReentrancyError"} in said
    assert saved(path) == reported(said)


def test_a_gate_that_the_parent_waits_for_is_a_new_one_in_the_child(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path, busy_timeout_seconds=20)
put(store, "parent")
holder = subprocess.Popen(
    [sys.executable, "-c", '''
import sys
from agent_checkpoint.sqlite.gate import gate_at
gate = gate_at(sys.argv[1])
print(gate.enter(60), flush=True)
sys.stdin.readline()
gate.leave()
''', path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert holder.stdout.readline() == "True\\n"
waiting = threading.Thread(target=put, args=(store, "parent"))
waiting.start()
inode = f":{os.stat(path + '-gate').st_ino} "
while not any("->" in line and inode in line for line in open("/proc/locks")):
    time.sleep(0.001)
free = Signal()
pid = os.fork()
if pid == 0:
    free.wait()
    for _ in range(5):
        put(store, "child")
    os._exit(0)
holder.communicate("\\n")
waiting.join()
free.tell()
say(child=ended(pid))
put(store, "parent")
""",
    )
    assert {"child": 0} in said
    assert len(reported(said)) == 8
    assert saved(path) == reported(said)


def test_children_forked_again_and_again_beside_busy_threads_lose_nothing(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
over = threading.Event()
def write(name):
    while not over.is_set():
        put(store, name)
threads = [threading.Thread(target=write, args=(f"thread-{number}",)) for number in range(3)]
for thread in threads:
    thread.start()
children = []
for number in range(15):
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(5):
                put(store, f"child-{number}")
        except ReentrancyError:
            say(error="ReentrancyError")
        except StorageError as error:
            say(error=str(error))
        os._exit(0)
    children.append(pid)
say(children=[ended(pid) for pid in children])
over.set()
for thread in threads:
    thread.join()
""",
    )
    assert {"children": [0] * 15} in said
    assert {line["error"] for line in said if "error" in line} <= {"ReentrancyError"}
    assert saved(path) == reported(said)


def test_multiprocessing_children_share_a_store_that_was_open_before(path: Path) -> None:
    said = play(
        path,
        """
import multiprocessing
store = StateStore(path)
put(store, "parent")
def work(number):
    put(store, f"worker-{number}")
    return number
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert sorted(pool.map(work, range(40), chunksize=1)) == list(range(40))
    pool.close()
    pool.join()
put(store, "parent")
""",
    )
    assert len(reported(said)) == 42
    assert saved(path) == reported(said)


def test_a_child_leaks_no_descriptor_of_its_own(path: Path) -> None:
    said = play(
        path,
        """
def on_the_store():
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            pass
    return sum(target.startswith(path) for target in found)

store = StateStore(path)
put(store, "parent")
pid = os.fork()
if pid == 0:
    put(store, "child")
    put(store, "child")
    before = on_the_store()
    for _ in range(100):
        put(store, "child")
    say(grown=on_the_store() - before)
    os._exit(0)
say(child=ended(pid))
""",
    )
    assert {"child": 0} in said
    assert {"grown": 0} in said
