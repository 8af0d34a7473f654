"""A fork at the worst moment: interrupted, without descriptors, beside threads that import or are inside SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forking import play, reported, saved

from agent_checkpoint import StateStore

# In C, as what the kernel delivers while it forks: Python sees it at the first line that it comes to.
STRUCK = """
import ctypes, functools, gc, json, os, signal, subprocess, sys, threading, time, warnings
struck = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGINT)
"""

# A child in which SQLite is not to be used any more: what measures it would do that at its end.
KILLED = "import signal; os.kill(os.getpid(), signal.SIGKILL)"

# The child of a process that was forked inside a read, once the parent has gone, with a visitor in between.
ORPHAN = """
gone = Signal()
with store.read():
    pid = os.fork()
if pid == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gone.wait()
    try:
        with StateStore(path) as mine:
            for _ in range(3):
                put(mine, "child")
                visit()
    except ReentrancyError:
        say(refused=True)
    os._exit(0)
store.close()
os.close(gone.writing)
say(child=ended(pid))
visit()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "agents.db"
    with StateStore(path) as store:
        store.initialize()
    return path


def test_a_child_that_is_interrupted_at_its_first_line_is_refused_its_parent_s_file(path: Path) -> None:
    said = play(
        path,
        "import signal\nstore = StateStore(path)\n" + ORPHAN,
        before=STRUCK + "os.register_at_fork(after_in_child=struck)\n",
        noise="_catch_up",
    )

    assert {"refused": True} in said
    assert {"child": 0} in said
    assert saved(path) == reported(said)


def test_a_parent_that_is_interrupted_while_it_forks_goes_on(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
put(store, "parent")
try:
    if os.fork() == 0:
        os._exit(0)
except KeyboardInterrupt:
    say(interrupted=True)
signal.signal(signal.SIGINT, signal.SIG_IGN)
thread = threading.Thread(target=put, args=(store, "thread"))
thread.start()
thread.join()
pid = os.fork()
if pid == 0:
    put(store, "child")
    os._exit(0)
say(child=ended(pid))
put(store, "parent")
""",
        # The hooks before a fork are called from the last one to the first one.
        before=STRUCK + "os.register_at_fork(before=struck)\n",
    )

    assert {"interrupted": True} in said
    assert {"child": 0} in said
    assert len(reported(said)) == 4
    assert saved(path) == reported(said)


def test_a_child_without_a_descriptor_left_is_refused_its_parent_s_file(path: Path) -> None:
    said = play(
        path,
        """
import resource, signal
store = StateStore(path)
put(store, "parent")
full = []
def fill():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, limit), limit))
    try:
        while True:
            full.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
def empty():
    while full:
        os.close(full.pop())
# Full while it forks, and no longer.
os.register_at_fork(before=fill, after_in_parent=empty, after_in_child=empty)
assert "ctypes" not in sys.modules
"""
        + ORPHAN.replace("gone = Signal()", "gone = Signal()\nimport subprocess, select"),
        before="import sys",
    )

    assert {"refused": True} in said
    assert saved(path) == reported(said)


def test_garbage_that_is_collected_in_the_child_keeps_nothing_from_being_refused(path: Path) -> None:
    said = play(
        path,
        """
import gc, signal
class Reading:
    "A read in a cycle of garbage, which nobody has left."
    def __init__(self, store):
        self.me, self.store = self, store
        self.block = store.read()
        self.block.__enter__()
gc.disable()
gc.set_threshold(1)
for _ in range(5):
    Reading(StateStore(path))
store = StateStore(path)
"""
        + ORPHAN,
        before="import gc, os\nos.register_at_fork(after_in_child=gc.enable)\n",
    )

    assert {"refused": True} in said
    assert saved(path) == reported(said)


def test_a_fork_waits_for_what_another_thread_imports(path: Path, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(
        """
import time
from agent_checkpoint import forks
begun.set()
while not forks.coming:
    time.sleep(0.001)
""".replace("begun.set()", "import __main__\n__main__.begun.set()")
    )
    said = play(
        path,
        f"""
sys.path.insert(0, {str(tmp_path)!r})
begun = threading.Event()
thread = threading.Thread(target=lambda: __import__("slow_module"))
thread.start()
begun.wait()
pid = os.fork()
if pid == 0:
    import slow_module
    put(StateStore(path), "child")
    os._exit(0)
thread.join()
import slow_module
say(child=ended(pid))
""",
    )

    assert said[-1] == {"child": 0}
    assert saved(path) == reported(said)


def test_children_of_a_process_whose_thread_writes_for_the_first_time_hang_nowhere(path: Path) -> None:
    said = play(
        path,
        """
over = threading.Event()
store = StateStore(path)
def write():
    global store
    while not over.is_set():
        store = StateStore(path)
        put(store, "thread")
thread = threading.Thread(target=write)
thread.start()
children = []
for _ in range(30):
    pid = os.fork()
    if pid == 0:
        try:
            put(store, "child")
        except ReentrancyError:
            pass
        os._exit(0)
    children.append(pid)
say(children=[ended(pid) for pid in children])
over.set()
thread.join()
""",
    )

    assert {"children": [0] * 30} in said
    assert saved(path) == reported(said)


def test_a_handler_may_fork_while_its_thread_waits_to_fork(path: Path) -> None:
    said = play(
        path,
        """
import signal
from agent_checkpoint import forks
store = StateStore(path)
put(store, "parent")
inside, forked = threading.Event(), threading.Event()
def fork_in_a_fork():
    with store.read():
        inside.set()
        while not forks.coming:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        forked.wait()
def respawn(*_):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    say(respawned=ended(pid))
    forked.set()
signal.signal(signal.SIGALRM, respawn)
thread = threading.Thread(target=fork_in_a_fork)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    try:
        put(store, "child")
    except ReentrancyError:
        pass  # its patience was over when the handler came back
    os._exit(0)
thread.join()
say(child=ended(pid))
put(store, "parent")
""",
    )

    assert {"respawned": 0} in said
    assert {"child": 0} in said
    assert saved(path) == reported(said)


def test_a_read_is_not_gone_on_with_in_a_child_nor_after_its_end(path: Path) -> None:
    said = play(
        path,
        """
store = StateStore(path)
SQL = "SELECT COUNT(*) FROM checkpoints"
with store.read() as reader:
    pid = os.fork()
    if pid == 0:
        try:
            reader.rows(SQL)
        except ReentrancyError:
            say(child="ReentrancyError")
        store.read().__exit__(None, None, None)
    else:
        say(ended=ended(pid), rows=reader.rows(SQL))
if pid:
    try:
        reader.rows(SQL)
    except StorageError as error:
        say(error=str(error))
""",
    )

    assert said[0] == {"child": "ReentrancyError"}
    assert said[1] == {"ended": 0, "rows": [[0]]}
    assert "the read has ended" in said[2]["error"]


@pytest.mark.parametrize(("where", "answer"), [("sqlite", "ReentrancyError"), ("block", "fine")])
def test_beside_a_thread_inside_sqlite_a_child_may_use_no_store_at_all(path: Path, where: str, answer: str) -> None:
    said = play(
        path,
        f"""
from agent_checkpoint import forks
forks.PATIENCE = 0.05
other = path + ".other"
with StateStore(other) as another:
    another.initialize()
LONG = (
    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 100000000) "
    "SELECT MAX(n) FROM numbers"
)
store = StateStore(path)
inside, over = threading.Event(), threading.Event()
def read():
    with store.read() as reader:
        inside.set()
        if {where!r} == "block":
            over.wait()
        else:
            reader.rows(LONG)
thread = threading.Thread(target=read, daemon=True)
thread.start()
inside.wait()
while {where!r} == "sqlite" and "transactions.py" not in sys._current_frames()[thread.ident].f_code.co_filename:
    time.sleep(0.001)
pid = os.fork()
if pid == 0:
    try:
        with StateStore(other) as mine:
            mine.put_checkpoint("deploy", 1)
        say(child="fine")
    except ReentrancyError as error:
        say(child="ReentrancyError")
    {KILLED}
over.set()
assert ended(pid) == -9
os._exit(0)  # the long statement is in nobody's way
""",
    )

    assert said == [{"child": answer}]


def test_a_hook_of_somebody_else_may_wait_for_a_thread_that_imports(path: Path) -> None:
    # Nothing that an import needs is held while others' hooks run.
    said = play(
        path,
        """
pid = os.fork()
if pid == 0:
    put(StateStore(path), "child")
    os._exit(0)
say(child=ended(pid))
""",
        before="""
import os, threading
forking = threading.Event()
def work():
    forking.wait()
    import colorsys
worker = threading.Thread(target=work)
worker.start()
# The first to be registered is the last to be called.
os.register_at_fork(before=lambda: (forking.set(), worker.join()))
""",
    )

    assert said[-1] == {"child": 0}
    assert saved(path) == reported(said)


def test_an_import_that_goes_on_for_ever_keeps_only_one_fork_waiting(path: Path, tmp_path: Path) -> None:
    (tmp_path / "endless_module.py").write_text("import __main__\n__main__.begun.set()\n__main__.over.wait()\n")
    said = play(
        path,
        f"""
from agent_checkpoint import forks
forks.PATIENCE = 0.05
pauses = []
forks.sleep = lambda seconds: (pauses.append(seconds), time.sleep(seconds))
sys.path.insert(0, {str(tmp_path)!r})
begun, over = threading.Event(), threading.Event()
threading.Thread(target=lambda: __import__("endless_module")).start()
begun.wait()
for _ in range(2):
    pauses.clear()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    say(child=ended(pid), waited=bool(pauses))
over.set()
""",
    )

    assert said == [{"child": 0, "waited": True}, {"child": 0, "waited": False}]


def test_a_fork_that_is_interrupted_while_it_waits_still_refuses_the_child(path: Path) -> None:
    said = play(
        path,
        """
import signal
from agent_checkpoint import forks
forks.PATIENCE = 30
other = path + ".other"
with StateStore(other) as another:
    another.initialize()
LONG = (
    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 100000000) "
    "SELECT MAX(n) FROM numbers"
)
store = StateStore(path)
inside = threading.Event()
def read():
    with store.read() as reader:
        inside.set()
        reader.rows(LONG)
def interrupt():
    while not forks.coming:
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
for work in (read, interrupt):
    threading.Thread(target=work, daemon=True).start()
inside.wait()
pid = os.fork()
if pid == 0:
    try:
        with StateStore(other) as mine:
            mine.put_checkpoint("deploy", 1)
        say(child="fine")
    except ReentrancyError as error:
        say(child="ReentrancyError")
    """
        + KILLED
        + """
assert ended(pid) == -9
os._exit(0)
""",
        noise="KeyboardInterrupt",
    )

    assert said == [{"child": "ReentrancyError"}]


def test_a_hook_that_runs_before_ours_in_the_child_is_refused_its_parent_s_file(path: Path) -> None:
    said = play(
        path,
        """
import signal
store = StateStore(path)
gone = Signal()
def hook():
    gone.wait()
    try:
        with StateStore(path) as mine:
            for _ in range(3):
                put(mine, "child")
                visit()
    except ReentrancyError:
        say(refused=True)
    os._exit(0)
with store.read():
    pid = os.fork()
store.close()
os.close(gone.writing)
say(child=ended(pid))
visit()
""",
        before="import os\nos.register_at_fork(after_in_child=lambda: hook())\n",
    )

    assert {"refused": True} in said
    assert {"child": 0} in said
    assert saved(path) == reported(said)
