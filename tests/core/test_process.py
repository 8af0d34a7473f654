"""Is that process dead? Asked of real processes wherever the kernel lets us make them."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_checkpoint import InvalidInputError
from agent_checkpoint.process import LOOKS, ProcessTable, describe
from agent_checkpoint.testing import FakeProcesses

# The boot is what a table is told it is: here always known, in namespaces too.
BOOT = "boot-1"
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
NOBODY = 65534

# Says who it is, then answers for each identity it is given on a line of its own.
ASKED = """
import json, os, sys
from agent_checkpoint.process import ProcessTable
table = ProcessTable(sys.argv[1])
if len(sys.argv) > 2:
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
print(table.identify(), flush=True)
for line in sys.stdin:
    print(json.dumps(table.alive(json.loads(line))), flush=True)
"""

# Its first thread ends; the other one says who it is, and goes on until it is told.
HEADLESS = """
import ctypes, os, sys, threading
from agent_checkpoint.process import ProcessTable

def live():
    with open(f"/proc/{os.getpid()}/stat", "rb") as stat:
        while stat.read().rpartition(b")")[2].split()[0] != b"Z":
            stat.seek(0)
    print(ProcessTable(sys.argv[1]).identify(), flush=True)
    sys.stdin.readline()
    os._exit(0)

threading.Thread(target=live).start()
ctypes.CDLL(None).pthread_exit(None)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="proof of death needs Linux")


def cannot(why: str) -> None:
    (pytest.fail if os.environ.get("CI") and sys.platform == "linux" and os.geteuid() == 0 else pytest.skip)(why)


def inside(*flags: str, shell: str = ":") -> list[str]:
    """The start of a command that runs the rest of it in namespaces of its own, prepared by a line of shell."""
    if shutil.which("unshare") is None:
        cannot("no unshare here")
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # The shell stays, so that nobody in there is the namespace's init, whose end would end all.
    prefix = ["unshare", *as_root, *flags, "--fork", "--kill-child", "sh", "-c", f'set -e; {shell}; "$@"; exit', "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        cannot(f"this kernel does not allow {' '.join(flags)}, {shell}: {tried.stderr.strip()}")
    return prefix


class Other:
    """Another process: who it says it is, and what it answers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.identity = self.told()
        # As its own pid namespace counts; elsewhere it may be another's.
        self.pid: int = json.loads(self.identity)["pid"]

    def told(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LONG)[0], "no answer"
        line = self.process.stdout.readline().strip()
        assert line, "it has ended: its stderr says why"
        return line

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def asked(self, identity: str) -> bool | None:
        self.tell(json.dumps(identity))
        return {"true": True, "false": False, "null": None}[self.told()]

    def end(self) -> None:
        """Kill and reap it, for good."""
        self.process.kill()
        self.process.wait()


Start = Callable[..., Other]


@pytest.fixture
def start(unmeasured: None) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, source: str = ASKED, prefix: list[str] | tuple[()] = ()) -> Other:
        command = [*prefix, sys.executable, "-c", source, BOOT, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return Other(started[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def table() -> ProcessTable:
    return ProcessTable(BOOT)


@pytest.fixture
def processes() -> FakeProcesses:
    return FakeProcesses()


def has_ended(process: subprocess.Popen[Any]) -> None:
    """Return once it is a zombie; it stays one."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def changed(identity: str, **facts: Any) -> str:
    return json.dumps({**json.loads(identity), **facts})


# Who it is.


def test_an_identity_is_ascii_json_with_what_the_kernel_tells(table: ProcessTable) -> None:
    identity = table.identify()
    assert identity.isascii()
    facts = json.loads(identity)
    assert list(facts) == ["boot", "pid", "start_ticks", "pid_namespace", "time_namespace"]
    assert (facts["boot"], facts["pid"]) == (BOOT, os.getpid())
    if sys.platform == "linux":
        assert facts["start_ticks"] > 0
        assert facts["pid_namespace"] == os.stat("/proc/self/ns/pid").st_ino
        assert facts["time_namespace"] == os.stat("/proc/self/ns/time").st_ino
    else:
        assert [facts[name] for name in ("start_ticks", "pid_namespace", "time_namespace")] == [None] * 3


def test_a_process_and_others_agree_on_who_it_is(table: ProcessTable, start: Start) -> None:
    other = start()
    assert table.identify(other.pid) == other.identity
    assert table.identify(os.getpid()) == table.identify() == ProcessTable(BOOT).identify()


def test_what_else_is_told_of_it_is_kept(table: ProcessTable) -> None:
    told: dict[str, Any] = {"supervised": True, "command": ["caf\u00e9", "\udc80", "\u2028"]}
    for identity in (table.identify(**told), table.identify(os.getpid(), **told)):
        assert identity.isascii()
        assert json.loads(identity) == {**json.loads(table.identify()), **told}


def test_what_else_is_told_cannot_make_it_another(table: ProcessTable) -> None:
    for pid in (None, os.getpid()):
        identity = table.identify(pid, boot="boot-2", start_ticks=1)
        assert json.loads(identity) == json.loads(table.identify())


@pytest.mark.parametrize("pid", [0, -1, True, 2**31, 10**30, 1.0, "1"])
def test_what_is_no_process_id_is_refused(table: ProcessTable, pid: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^pid: ") as refused:
        table.identify(pid)
    assert refused.value.field == "pid"


@linux
def test_a_process_that_has_ended_is_refused(table: ProcessTable, start: Start) -> None:
    other = start()
    other.process.kill()
    has_ended(other.process)
    for _ in ("a zombie", "nothing"):
        with pytest.raises(InvalidInputError, match=f"^pid: there is no process {other.pid}$"):
            table.identify(other.pid)
        other.process.wait()


def test_what_is_remembered_of_this_process_is_not_looked_up_again(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = table.identify()
    monkeypatch.setattr(table, "stat", None)
    monkeypatch.setattr(table, "namespaces", None)
    assert table.identify() == identity


@linux
def test_a_forked_child_is_somebody_else(start: Start) -> None:
    source = """
import os, sys
from agent_checkpoint.process import ProcessTable
table = ProcessTable(sys.argv[1])
table.identify()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, table.identify().encode() + b"\\n")
    os._exit(0)
os.close(writing)
mine, childs = table.identify(), os.read(reading, 10_000).decode().strip()
assert mine != childs
assert table.alive(childs) is not None
os.waitpid(child, 0)
assert (table.alive(mine), table.alive(childs)) == (True, False)
print(childs, flush=True)
"""
    other = start(source=source)
    assert other.pid != other.process.pid


@linux
def test_a_forked_child_with_its_parents_number_is_somebody_else(start: Start) -> None:
    # The first process of a container makes a container: both are number 1.
    source = """
import ctypes, os, sys
from agent_checkpoint.process import ProcessTable
table = ProcessTable(sys.argv[1])
mine = table.identify()
assert os.getpid() == 1 and table.alive(mine) is True
CLONE_NEWPID = 0x20000000
assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
child = os.fork()
if child == 0:
    assert os.getpid() == 1
    assert table.alive(mine) is None
    assert table.identify() != mine
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(table.identify(), flush=True)
"""
    prefix = inside("--pid", "--mount-proc")
    shell = prefix.index("sh")
    other = start(source=source, prefix=prefix[:shell])
    assert other.pid == 1


# Is it dead?


@linux
def test_a_process_lives_until_it_is_killed_reaped_or_not(table: ProcessTable, start: Start) -> None:
    other = start()
    assert table.alive(other.identity) is True
    other.process.send_signal(signal.SIGSTOP)
    assert table.alive(other.identity) is True
    other.process.kill()
    has_ended(other.process)
    os.kill(other.process.pid, 0)  # to kill, a zombie is there
    assert table.stat(other.pid) == ("Z", 1, json.loads(other.identity)["start_ticks"])
    assert table.alive(other.identity) is False
    other.process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(other.process.pid, 0)
    assert table.alive(other.identity) is False


@linux
def test_a_process_is_alive_to_itself(table: ProcessTable) -> None:
    assert table.alive(table.identify()) is True
    assert table.alive(table.identify(supervised=True)) is True


@linux
def test_a_process_whose_first_thread_has_ended_lives_until_its_last_ends(table: ProcessTable, start: Start) -> None:
    headless = start(source=HEADLESS)
    state, threads, _ = table.stat(headless.pid) or ("", 0, 0)
    assert (state, threads) == ("Z", 2)
    assert table.identify(headless.pid) == headless.identity
    assert table.alive(headless.identity) is True

    headless.tell("end")
    has_ended(headless.process)
    assert table.alive(headless.identity) is False
    headless.process.wait()
    assert table.alive(headless.identity) is False


@linux
def test_a_process_stays_the_same_when_it_executes_another_program(table: ProcessTable, start: Start) -> None:
    source = """
import os, sys
from agent_checkpoint.process import ProcessTable
before = ProcessTable(sys.argv[1]).identify()
os.execv(sys.executable, [sys.executable, "-c", f"import time; print({before!r}, flush=True); time.sleep(600)"])
"""
    other = start(source=source)
    assert table.alive(other.identity) is True
    assert table.identify(other.pid) == other.identity


@linux
@pytest.mark.parametrize("letter", ["Z", "X"])
def test_a_process_that_is_seen_without_a_thread_is_looked_at_again(table: ProcessTable, letter: str) -> None:
    # When a thread that is not the first one calls exec it takes the first one's place: whoever
    # reads /proc just then sees the first, removed, with no thread. (Seen, once in 5,000 looks.)
    identity = table.identify()
    started = json.loads(identity)["start_ticks"]
    shown = [(letter, 0, started)]

    class Removed(ProcessTable):
        def stat(self, pid: int) -> tuple[str, int, int] | None:
            return shown.pop(0) if shown else super().stat(pid)

    removed = Removed(BOOT)
    assert removed.alive(identity) is True
    assert not shown
    shown.append((letter, 0, started))
    assert removed.identify(os.getpid()) == identity
    shown.extend([(letter, 0, started)] * LOOKS)
    assert removed.alive(identity) is None


@linux
def test_a_process_that_is_reaped_while_it_is_looked_at_is_dead(table: ProcessTable, start: Start) -> None:
    other = start()

    class Late(ProcessTable):
        def stat(self, pid: int) -> tuple[str, int, int] | None:
            other.end()
            return super().stat(pid)

    assert Late(BOOT).alive(other.identity) is False


@linux
def test_a_process_of_another_user_is_seen(table: ProcessTable, start: Start) -> None:
    if os.geteuid() != 0:
        cannot("only root can be somebody else")
    nobody, other = start(str(NOBODY)), start()
    me = table.identify()
    assert nobody.asked(me) is True
    assert nobody.asked(other.identity) is True
    assert nobody.asked(changed(me, start_ticks=1)) is False
    other.process.kill()
    has_ended(other.process)
    assert nobody.asked(other.identity) is False
    other.process.wait()
    assert nobody.asked(other.identity) is False
    assert table.alive(nobody.identity) is True


@linux
def test_of_a_supervised_process_no_death_is_proven(table: ProcessTable, start: Start) -> None:
    other = start()
    supervised = table.identify(other.pid, supervised=True)
    assert table.alive(supervised) is True
    assert table.alive(changed(supervised, start_ticks=1)) is None
    other.process.kill()
    has_ended(other.process)
    assert table.alive(supervised) is None
    other.process.wait()
    assert table.alive(supervised) is None
    assert table.alive(changed(supervised, supervised=False)) is False


@linux
def test_a_recycled_pid_is_somebody_else(table: ProcessTable) -> None:
    ticks = json.loads(table.identify())["start_ticks"]
    assert table.alive(changed(table.identify(), start_ticks=ticks - 1)) is False
    assert table.alive(changed(table.identify(), start_ticks=ticks + 1)) is False


@linux
def test_a_pid_that_is_really_recycled_is_somebody_else(start: Start) -> None:
    source = """
import os, sys, time
from agent_checkpoint.process import ProcessTable

def fork():
    if (child := os.fork()) == 0:
        time.sleep(600)
    return child

table = ProcessTable(sys.argv[1])
first = fork()
before = table.identify(first)
os.kill(first, 9)
os.waitpid(first, 0)
assert table.alive(before) is False
time.sleep(0.02)  # the kernel counts starts in hundredths of a second
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(first - 1))
assert fork() == first
assert table.alive(before) is False
assert table.alive(table.identify(first)) is True
print(table.identify(), flush=True)
"""
    start(source=source, prefix=inside("--pid", "--mount-proc", shell="test -w /proc/sys/kernel/ns_last_pid"))


# Where nothing can be known.


@linux
def test_after_a_reboot_nothing_is_proven(start: Start) -> None:
    other = start()
    assert ProcessTable("boot-2").alive(other.identity) is None
    other.end()
    assert ProcessTable("boot-2").alive(other.identity) is None
    assert ProcessTable(BOOT).alive(other.identity) is False


def test_in_an_unknown_boot_nothing_is_proven() -> None:
    unknown = ProcessTable("")
    assert unknown.alive(unknown.identify()) is None
    assert unknown.alive(changed(unknown.identify(), start_ticks=1)) is None


OTHER_NAMESPACES = {
    "another pid namespace": ("--pid", "--mount-proc"),
    "another time namespace": ("--time",),
    "another time namespace, ahead": ("--time", "--boottime", "1000000"),
    "both": ("--pid", "--mount-proc", "--time"),
}


@linux
@pytest.mark.parametrize("flags", OTHER_NAMESPACES.values(), ids=OTHER_NAMESPACES)
def test_nothing_is_known_across_namespaces(table: ProcessTable, start: Start, flags: tuple[str, ...]) -> None:
    prefix = inside(*flags)
    contained, neighbour, outside = start(prefix=prefix), start(prefix=prefix), start()
    assert json.loads(contained.identity)["start_ticks"] is not None
    assert contained.asked(contained.identity) is True
    assert contained.asked(changed(contained.identity, start_ticks=1)) is False

    for identity in (table.identify(), outside.identity, changed(outside.identity, start_ticks=1), neighbour.identity):
        assert contained.asked(identity) is None
    assert table.alive(contained.identity) is None
    assert table.alive(changed(contained.identity, start_ticks=1)) is None
    outside.end()
    assert contained.asked(outside.identity) is None
    contained.end()
    assert table.alive(contained.identity) is None


@linux
def test_a_process_of_an_inner_namespace_is_known_by_the_pid_it_has_here(table: ProcessTable, start: Start) -> None:
    contained = start(prefix=inside("--pid", "--mount-proc"))
    # Of unshare: the shell, of the shell: Python.
    pid = contained.process.pid
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    identity = table.identify(pid)
    assert table.alive(identity) is True
    os.kill(pid, signal.SIGKILL)
    contained.process.wait()
    assert table.alive(identity) is False


@linux
def test_where_there_is_no_proc_nothing_is_known(table: ProcessTable, start: Start) -> None:
    blind = start(prefix=inside("--mount", shell="mount -t tmpfs tmpfs /proc"))
    assert list(json.loads(blind.identity).values()) == [BOOT, blind.pid, None, None, None]
    for identity in (blind.identity, table.identify(), changed(table.identify(), start_ticks=1)):
        assert blind.asked(identity) is None
    assert table.alive(blind.identity) is None


@linux
def test_where_proc_is_of_an_outer_namespace_nothing_is_known(table: ProcessTable, start: Start) -> None:
    prefix = inside("--pid")
    contained, neighbour = start(prefix=prefix), start(prefix=prefix)
    assert list(json.loads(contained.identity).values()) == [BOOT, contained.pid, None, None, None]
    for identity in (contained.identity, neighbour.identity, table.identify(), changed(table.identify(), pid=2)):
        assert contained.asked(identity) is None
    assert table.alive(contained.identity) is None
    # Two processes that do not know their namespaces may be in different ones.
    assert contained.asked(changed(neighbour.identity, pid=30_000)) is None
    # What proc shows under a number is another process, in whatever namespace it is said to be.
    pid_namespace = os.stat(f"/proc/{contained.process.pid}/ns/pid_for_children").st_ino
    told = changed(table.identify(), pid=contained.pid, pid_namespace=pid_namespace, start_ticks=1)
    assert contained.asked(told) is None


@linux
def test_where_proc_is_of_an_outer_namespace_other_processes_are_refused_only_when_they_are_missing(
    start: Start,
) -> None:
    source = """
import os, sys
from agent_checkpoint import InvalidInputError
from agent_checkpoint.process import ProcessTable
table = ProcessTable(sys.argv[1])
assert '"start_ticks":null' in table.identify(1)
try:
    table.identify(int(os.readlink("/proc/self")) + 1_000)
except InvalidInputError:
    print(table.identify(), flush=True)
"""
    start(source=source, prefix=inside("--pid"))


@linux
def test_an_outer_proc_that_knows_us_by_our_own_number_is_not_taken_for_ours(start: Start) -> None:
    # Children are forked until one has the same number here and outside.
    source = """
import os, sys
from agent_checkpoint.process import ProcessTable

for _ in range(2_000):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        outer = os.readlink("/proc/self")
        if outer == str(os.getpid()):
            os.write(writing, ProcessTable(sys.argv[1]).identify().encode() + b"\\n")
        os.write(writing, outer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    *told, outer = os.read(reading, 10_000).decode().split()
    os.close(reading)
    if told:
        print(*told, flush=True)
        break
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(outer)
"""
    twin = start(source=source, prefix=inside("--pid", shell="test -w /proc/sys/kernel/ns_last_pid"))
    assert json.loads(twin.identity)["pid_namespace"] is None


@linux
def test_where_the_kernel_tells_no_pids_of_inner_namespaces_proc_is_ours_if_it_names_us(
    start: Start, tmp_path: Path
) -> None:
    # As before Linux 4.1.
    status = tmp_path / "status"
    status.write_text("Name:\tpython\n")
    source = f"""
import os, subprocess, sys
from agent_checkpoint.process import ProcessTable
shown = os.readlink("/proc/self")
subprocess.run(["mount", "--bind", {str(status)!r}, f"/proc/{{shown}}/status"], check=True)
print(ProcessTable(sys.argv[1]).identify(), flush=True)
"""
    ours, outer = (start(source=source, prefix=inside("--mount", "--pid", *more)) for more in (["--mount-proc"], []))
    assert json.loads(ours.identity)["pid_namespace"] is not None
    assert json.loads(outer.identity)["pid_namespace"] is None


@linux
def test_where_proc_is_changed_after_the_first_look_no_death_is_proven(start: Start) -> None:
    # As a process that enters a container's root: number 1 of the container is shown there.
    source = """
import os, subprocess, sys
from agent_checkpoint.process import ProcessTable
table = ProcessTable(sys.argv[1])
first = table.identify(1)
assert table.alive(first) is True
container = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "mount -t proc proc /proc; echo; sleep 600"]
running = subprocess.Popen(container, stdout=subprocess.PIPE)
running.stdout.readline()
assert table.stat(1) is not None
assert table.alive(first) is None
print(table.identify(), flush=True)
running.kill()
"""
    start(source=source, prefix=inside("--mount", "--pid", "--mount-proc"))


@linux
def test_a_process_that_proc_does_not_show_is_unknown_until_its_pid_is_free(table: ProcessTable, start: Start) -> None:
    hidden = start()
    looking = start(prefix=inside("--mount", shell=f"mount -t tmpfs tmpfs /proc/{hidden.pid}"))
    assert table.alive(hidden.identity) is True
    assert looking.asked(hidden.identity) is None
    assert looking.asked(table.identify()) is True
    hidden.end()
    assert looking.asked(hidden.identity) is False


@linux
def test_where_proc_hides_other_users_they_are_unknown_until_their_pids_are_free(start: Start) -> None:
    # One of two users looks for the other, in a namespace whose proc is mounted with hidepid=2.
    source = f"""
import os, subprocess, sys
from agent_checkpoint.process import ProcessTable

def be_nobody():
    os.setgroups([])
    os.setgid({NOBODY})  # hidepid hides nothing from group 0
    os.setuid({NOBODY})

table = ProcessTable(sys.argv[1])
other = subprocess.Popen(["sleep", "600"])
own, identity, anyone = table.identify(), table.identify(other.pid), table.identify(other.pid).replace('"start', '"x')
if (child := os.fork()) == 0:
    be_nobody()
    assert not os.path.exists(f"/proc/{{other.pid}}")
    assert table.exists(other.pid) is True
    assert table.alive(identity) is table.alive(own) is table.alive(anyone) is None
    assert table.alive(table.identify()) is True
    assert '"start_ticks":null' in table.identify(other.pid)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
other.kill()
other.wait()
if (child := os.fork()) == 0:
    be_nobody()
    assert table.alive(identity) is table.alive(anyone) is False
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(own, flush=True)
"""
    if os.geteuid() != 0:
        cannot("only root can be somebody else")
    start(source=source, prefix=inside("--mount", "--pid", shell="mount -t proc -o hidepid=2 proc /proc"))


# What is written may be damaged.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text() | JSON.map(json.dumps))
def test_a_text_that_is_no_identity_is_unknown(text: str) -> None:
    assert ProcessTable(BOOT).alive(text) is None


@pytest.mark.parametrize("text", ["", "null", "1", "[" * 100_000, '{"pid":', '{"pid": ' + "9" * 5_000 + "}", "\ud800"])
def test_a_damaged_text_is_unknown(table: ProcessTable, text: str) -> None:
    assert table.alive(text) is None


@given(
    st.sampled_from(["boot", "pid", "pid_namespace", "start_ticks"]), JSON.filter(lambda value: type(value) is not int)
)
def test_an_identity_with_one_damaged_fact_is_never_proven_dead(name: str, value: Any) -> None:
    table = ProcessTable(BOOT)
    assert table.alive(changed(table.identify(), **{name: value})) is None


@given(st.dictionaries(st.sampled_from(["pid", "start_ticks"]), st.integers() | st.integers(max_value=0), min_size=1))
def test_no_number_makes_it_fail(facts: dict[str, int]) -> None:
    table = ProcessTable(BOOT)
    answer = table.alive(changed(table.identify(), **facts))
    if not 0 < facts.get("pid", 1) < 2**31 or facts.get("start_ticks", 0) < 0:
        assert answer is None


@linux
@pytest.mark.parametrize("name", [b"x) Z 1 (y", b"(", b")", b"a b\nc", b"\xff\xfe", b"", b") X 0 0 0 0 "])
def test_the_name_of_a_command_may_be_anything(table: ProcessTable, start: Start, name: bytes) -> None:
    source = """
import ctypes, os, sys
from agent_checkpoint.process import ProcessTable
PR_SET_NAME = 15
assert ctypes.CDLL(None).prctl(PR_SET_NAME, bytes.fromhex(sys.argv[2]), 0, 0, 0) == 0
print(ProcessTable(sys.argv[1]).identify(), flush=True)
sys.stdin.readline()
"""
    other = start(name.hex(), source=source)
    assert table.alive(other.identity) is True
    assert describe(other.pid) == {"pid": other.pid, "command": name.decode(errors="replace"), "stopped": False}
    other.process.kill()
    has_ended(other.process)
    assert table.alive(other.identity) is False
    other.process.wait()
    assert describe(other.pid) == {"pid": other.pid, "command": None, "stopped": None}


# Processes for tests.


def test_processes_of_tests_live_until_they_are_killed(processes: FakeProcesses) -> None:
    worker = processes.start(41)
    assert processes.identify(41) == worker != processes.identify()
    assert processes.alive(worker) is True
    processes.kill(41)
    assert processes.alive(worker) is False
    assert processes.alive(processes.identify()) is True
    with pytest.raises(InvalidInputError):
        processes.identify(41)


def test_processes_of_tests_are_recycled(processes: FakeProcesses) -> None:
    before = processes.start(41)
    after = processes.recycle(41)
    assert (processes.alive(before), processes.alive(after)) == (False, True)


def test_processes_of_tests_are_hidden(processes: FakeProcesses) -> None:
    worker = processes.start(41)
    processes.hide(41)
    assert processes.alive(worker) is None
    processes.kill(41)
    assert processes.alive(worker) is False


def test_processes_of_tests_reboot(processes: FakeProcesses) -> None:
    worker = processes.start(41)
    processes.boot = "boot-2"
    assert processes.alive(worker) is None
    assert processes.alive(processes.identify()) is True


def test_a_test_acts_as_any_of_its_processes(processes: FakeProcesses) -> None:
    worker = processes.start(41)
    processes.pid = 41
    assert processes.identify() == worker
    assert json.loads(processes.identify(supervised=True))["pid"] == 41
