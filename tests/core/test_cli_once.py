"""``once``: a command that is run once for a key, and its result for whoever asks again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import Effect, StateStore

from .conftest import CLEAN, COMMAND, HOLD, WATCHDOG_SECONDS, the_error

MIB = 1024 * 1024


class Said(NamedTuple):
    status: int
    out: bytes
    err: str


class Once:
    """The command, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "agents.db"
        with StateStore(self.path) as store:
            store.initialize()

    def __call__(self, *arguments: object, sh: str, prefix: tuple[object, ...] = ()) -> Said:
        """``once`` of a line of shell."""
        return self.run(*prefix, *COMMAND, "once", *arguments, "--", "sh", "-c", sh)

    def run(self, *words: object, stdout: int = subprocess.PIPE) -> Said:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder,
            env={**CLEAN, "AGENT_CHECKPOINT_DB": str(self.path)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr.decode())

    def effect(self, key: str = "key") -> Effect:
        with StateStore(self.path) as store:
            found = store.get_effect(key)
        assert found is not None
        return found

    @property
    def count(self) -> int:
        """How often the world outside was changed: by ``act``."""
        acts = self.folder / "acts"
        return len(acts.read_text().splitlines()) if acts.exists() else 0


ACT = "echo x >>acts; "


@pytest.fixture
def once(tmp_path: Path, unmeasured: None) -> Once:
    return Once(tmp_path)


def error(said: Said) -> dict[str, Any]:
    assert said.out == b""
    return the_error(said.err)


def test_a_command_is_run_once_and_its_output_printed_ever_after(once: Once) -> None:
    for _ in range(3):
        assert once("key", sh=ACT + "echo paid") == Said(0, b"paid\n", "")

    assert once.count == 1
    found = once.effect()
    assert (found.state, found.scope, found.result) == (
        "done",
        "effect/key",
        {"output": "paid\n", "truncated": False},
    )


@pytest.mark.parametrize("output", [b"", b"\0\xff\xfe\n\r\n\x80", "ключ €\n".encode(), b"no end of line"], ids=repr)
def test_the_output_comes_again_byte_for_byte(once: Once, output: bytes) -> None:
    (once.folder / "output").write_bytes(output)

    for _ in range(2):
        assert once("key", sh="cat output") == Said(0, output, "")


def test_of_a_large_output_all_is_passed_on_and_its_first_mebibyte_kept(once: Once) -> None:
    exact, large = os.urandom(MIB), os.urandom(3 * MIB + 17)
    (once.folder / "exact").write_bytes(exact)
    (once.folder / "large").write_bytes(large)

    assert once("exact", sh="cat exact") == once("exact", sh="false") == Said(0, exact, "")
    assert once("large", sh="cat large") == Said(0, large, "")
    again = once("large", sh="false")
    assert (again.status, again.out) == (0, large[:MIB])
    assert the_error(again.err)["code"] == "output-truncated"


def test_the_result_may_be_in_a_file(once: Once) -> None:
    asked = ("key", "--result-file", "receipt")
    assert once(*asked, sh=ACT + "echo talking; echo 42 >receipt").out == b"talking\n"

    (once.folder / "receipt").unlink()
    assert once(*asked, sh=ACT) == Said(0, b"42\n", "")
    assert once.count == 1


def test_a_result_file_that_is_missing_does_not_hide_that_it_happened(once: Once) -> None:
    said = once("key", "--result-file", "nowhere", sh=ACT)

    assert (said.status, error(said)["code"]) == (74, "storage")
    assert "'key' is done" in error(said)["message"]
    assert (once.effect().state, once.effect().result) == ("done", None)
    assert once("key", sh=ACT) == Said(0, b"", "")
    assert once.count == 1


@pytest.mark.parametrize(("sh", "status"), [("exit 3", 3), ("kill -9 $$", 137), ("exit 75", 75), ("exit 255", 255)])
def test_a_command_that_fails_leaves_it_unknown_and_passes_its_status(once: Once, sh: str, status: int) -> None:
    said = once("key", sh=f"{ACT} echo halfway; {sh}")
    assert (said.status, said.out) == (status, b"halfway\n")
    assert the_error(said.err)["code"] == "effect-unknown"
    assert once.effect().state == "unknown"

    again = once("key", sh=ACT)
    assert (again.status, error(again)["code"]) == (76, "effect-unknown")
    assert "agent-checkpoint effect resolve --done key (or --retry)" in error(again)["hint"]
    assert once.count == 1


def test_a_status_that_says_that_nothing_was_done_lets_the_next_one_try(once: Once) -> None:
    asked = ("key", "--not-done-status", "3,69")
    for status in (3, 69):
        assert once(*asked, sh=f"{ACT} exit {status}") == Said(status, b"", "")
        assert once.effect().state == "failed"
    assert once(*asked, sh=f"{ACT} echo paid") == Said(0, b"paid\n", "")
    assert once.count == 3


@pytest.mark.parametrize("status", [126, 127])
def test_a_script_that_misses_a_program_halfway_may_have_done_something(once: Once, status: int) -> None:
    said = once("key", sh=f"{ACT} exit {status}")

    assert said.status == status
    assert once.effect().state == "unknown"


def test_a_command_that_cannot_be_started_has_surely_done_nothing(once: Once) -> None:
    (once.folder / "plain").write_text("no program")
    for program, status, code in (
        ("./nowhere", 127, "command-not-found"),
        ("./plain", 126, "command-cannot-execute"),
    ):
        said = once.run(*COMMAND, "once", "key", "--", program)
        assert (said.status, error(said)["code"]) == (status, code)
        assert once.effect().state == "failed"
    assert once("key", sh="echo paid") == Said(0, b"paid\n", "")


def test_what_a_person_found_is_printed(once: Once) -> None:
    results = (
        ("null", b""),
        ('{"id": 7}', b'{\n  "id": 7\n}\n'),
        ('{"output": 5, "truncated": false}', b'{\n  "output": 5,\n  "truncated": false\n}\n'),
        ('{"output_base64": "*", "truncated": false}', b'{\n  "output_base64": "*",\n  "truncated": false\n}\n'),
        ('{"output": "as if", "truncated": false}', b"as if"),
    )
    for number, (result, printed) in enumerate(results):
        key = f"key-{number}"
        with StateStore(once.path) as store, store.hold("release", "worker-a") as held:
            held.effect(key).__enter__()
        resolved = once.run(*COMMAND, "effect", "resolve", key, "--done", "--result", result)
        assert resolved.status == 0
        assert once(key, sh=ACT) == Said(0, printed, "")
    assert once.count == 0


def test_the_same_key_for_another_request_is_refused(once: Once) -> None:
    assert once("key", "--request", "10 EUR", sh=ACT).status == 0
    assert once("key", "--request", "10 EUR", sh=ACT).status == 0

    said = once("key", "--request", "11 EUR", sh=ACT)
    assert (said.status, error(said)["code"]) == (76, "effect-mismatch")
    assert once.count == 1


def test_it_runs_under_a_scope_an_owner_and_a_ttl_of_one_s_choice(once: Once) -> None:
    said = once("key", "--scope", "release", "--owner", "ada", "--ttl", "9", sh=r"env | grep AGENT_CHECKPOINT_OWNER")

    assert said.out == b"AGENT_CHECKPOINT_OWNER=ada\n"
    assert (once.effect().scope, once.effect().owner) == ("release", "ada")
    with StateStore(once.path) as store:
        (acquired,) = store.events(kind="lease.acquired")
    assert acquired.detail["ttl_seconds"] == 9


def test_the_longest_key_has_a_scope_too(once: Once) -> None:
    key = "k" * 512
    for _ in range(2):
        assert once(key, sh=ACT).status == 0

    assert once.count == 1
    assert once.effect(key).scope == f"effect/{once.effect(key).idempotency_key}"


def test_nobody_waits_who_does_not_want_to(once: Once) -> None:
    with StateStore(once.path) as store, store.hold("effect/key", "worker-a"):
        for options, code in ((("--no-wait",), "lease-held"), (("--wait", "0.1"), "wait-timeout")):
            said = once("key", *options, sh=ACT)
            assert (said.status, error(said)["code"]) == (75, code)
    assert once.count == 0


def test_inside_run_it_runs_under_that_lease(once: Once) -> None:
    run = (*COMMAND, "run", "release", "--owner", "ada", "--")
    said = once("key", sh=ACT + "echo $AGENT_CHECKPOINT_SCOPE $AGENT_CHECKPOINT_TOKEN", prefix=run)

    assert said == Said(0, b"release 1\n", "")
    assert (once.effect().scope, once.effect().owner, once.effect().token) == ("release", "ada", 1)
    assert once("key", sh=ACT) == said
    with StateStore(once.path) as store:
        assert [lease.scope for lease in store.list_leases(include_expired=True)] == ["release"]


def test_under_one_lease_a_call_beside_another_is_told_so(once: Once) -> None:
    inner = " ".join([*COMMAND, "once", "key", "--", "true"])
    said = once("key", sh=inner, prefix=(*COMMAND, "run", "release", "--"))

    assert said.status == 75
    assert json.loads(said.err.split("}\n{")[0] + "}")["error"]["code"] == "effect-running"


def test_without_a_store_it_takes_init_to_make_one(once: Once) -> None:
    once.path = once.folder / "new.db"
    said = once("key", sh=ACT)
    assert (said.status, error(said)["code"]) == (66, "not-found")
    assert once("key", "--init", sh=ACT + "echo paid") == Said(0, b"paid\n", "")
    assert once.count == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("once",),
        ("once", "key"),
        ("once", "key", "--"),
        ("once", "key", "--field", "x", "--", "true"),
        *(("once", "key", "--not-done-status", wrong, "--", "true") for wrong in ("0", "256", "x", "1,-1")),
        ("once", "key", "--wait", "soon", "--", "true"),
        ("once", "key", "--ttl", "0", "--", "true"),
        ("once", "key", "--result-file=", "--", "true"),
        ("once", "a\nb", "--", "true"),
    ],
)
def test_a_mistake_runs_nothing(once: Once, arguments: tuple[str, ...]) -> None:
    said = once.run(*COMMAND, *arguments)

    assert (said.status, error(said)["code"]) == (2, "invalid-input")
    with StateStore(once.path) as store:
        assert (store.list_effects(), store.events(kind="lease.acquired")) == ([], [])


def test_with_stdout_closed_or_unread_the_command_is_run_and_its_result_kept(once: Once) -> None:
    output = f"{ACT} head -c 300000 /dev/zero"
    closed = once.run("sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "once", "closed", "--", "sh", "-c", output)
    assert (closed.status, closed.err) == (0, "")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        unread = once.run(*COMMAND, "once", "unread", "--", "sh", "-c", output, stdout=writer)
    finally:
        os.close(writer)
    assert (unread.status, unread.err) == (0, "")

    for key in ("closed", "unread"):
        assert once(key, sh=ACT) == Said(0, bytes(300_000), "")
    assert once.count == 2


@pytest.mark.parametrize(("result", "key"), [(None, "acted"), ('{"id": 7}', "resolved")])
def test_a_recorded_result_that_cannot_be_printed_fails_like_any_answer(
    once: Once, result: str | None, key: str
) -> None:
    assert once(key, sh=ACT + ("echo paid" if result is None else "exit 1")).status == (result is not None)
    if result is not None:
        once.run(*COMMAND, "effect", "resolve", key, "--done", "--result", result)
    later = (*COMMAND, "once", key, "--", "false")

    closed = once.run("sh", "-c", 'exec "$@" >&-', "sh", *later)
    assert (closed.status, error(closed)["field"]) == (2, "stdout")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert once.run(*later, stdout=writer)[::2] == (141, "")
    finally:
        os.close(writer)
    if os.path.exists("/dev/full"):
        full = once.run("sh", "-c", 'exec "$@" >/dev/full', "sh", *later)
        assert (full.status, error(full)["code"]) == (74, "storage")


# What the command leaves running

LEFT = 'sleep 99 & echo "$!" >left; echo paid'


def test_what_the_command_leaves_running_is_not_waited_for_and_ends_with_the_lease(once: Once) -> None:
    assert once("key", sh=ACT + LEFT) == Said(0, b"paid\n", "")  # a watchdog sees to it that this ends

    with pytest.raises(ProcessLookupError):
        os.kill(int((once.folder / "left").read_text()), 0)
    assert once("key", sh=ACT) == Said(0, b"paid\n", "")
    assert once.count == 1


def test_under_the_environment_s_lease_it_lives_on_with_that_lease(once: Once) -> None:
    inner = " ".join([*COMMAND, "once", "key", "--", "sh", "-c", f"'{LEFT}'"])
    said = once.run(*COMMAND, "run", "release", "--", "sh", "-c", f'{inner}; kill -0 "$(cat left)" && echo lives')

    assert said == Said(0, b"paid\nlives\n", "")
    assert once.effect().result == {"output": "paid\n", "truncated": False}
    with pytest.raises(ProcessLookupError):
        os.kill(int((once.folder / "left").read_text()), 0)


def test_of_what_writes_on_for_ever_no_more_is_taken_than_was_there_at_the_end(once: Once) -> None:
    said = once("key", sh="echo paid; yes noise &")

    assert (said.status, said.err) == (0, "")
    assert said.out.startswith(b"paid\n")
    assert once.effect().state == "done"


# A store that takes nothing when the command has ended

# Whoever sits on the write lock is left running, and ends with the lease.
LOCK = (
    f"tail -f /dev/null | '{sys.executable}' -S -c '{HOLD}' agents.db >held & until [ -s held ]; do sleep 0.01; done; "
)
# A name that a shell and our options would take for something else.
ODD = "-it's 42"
UNRECORDED = ("--busy-timeout", "0.1", "--not-done-status", "3", "--", ODD)


@pytest.mark.parametrize(
    ("status", "decision", "known", "then"),
    [(0, "--done", "exited with status 0: ", "done"), (3, "--retry", "surely did not happen", "failed")],
)
def test_what_cannot_be_recorded_is_said_with_the_command_that_records_it(
    once: Once, status: int, decision: str, known: str, then: str
) -> None:
    said = once(*UNRECORDED, sh=f"{ACT} {LOCK} echo paid; exit {status}")
    told = the_error(said.err)

    assert (said.status, said.out) == (76, b"paid\n")
    assert (told["code"], told["retryable"], told["cause"]) == ("effect-unknown", False, "storage-busy")
    assert known in told["message"]
    assert once.effect(ODD).state == "unknown"
    typed = shlex.split(told["hint"].partition(": ")[2])
    assert typed[0] == "agent-checkpoint"
    assert decision in typed
    assert once.run(*COMMAND, *typed[1:]).status == 0
    assert once.effect(ODD).state == then


def test_a_store_that_was_deleted_meanwhile_does_not_hide_that_it_happened(once: Once) -> None:
    said = once("key", sh=f"{ACT} rm agents.db*")

    first = json.loads(said.err.partition("}\n{")[0] + "}")["error"]  # the other: the lease could not be released
    assert (said.status, first["code"], first["cause"]) == (76, "effect-unknown", "not-found")


def test_what_nobody_knows_is_said_so_whether_or_not_that_can_be_recorded(once: Once) -> None:
    said = once(*UNRECORDED, sh=f"{ACT} {LOCK} exit 5")

    assert (said.status, error(said)["code"]) == (5, "effect-unknown")
    assert once.effect(ODD).state == "unknown"


def test_a_name_that_begins_with_a_dash_has_two_dashes_of_its_own(once: Once) -> None:
    inner = " ".join([*COMMAND, "once", "--request", "10", "--", "-k", "--", "echo", "--", "paid"])
    for _ in range(2):
        assert once.run(*COMMAND, "run", "--", "-s", "--", "sh", "-c", inner) == Said(0, b"-- paid\n", "")
        assert once("--", "--field", sh=ACT + "echo paid") == Said(0, b"paid\n", "")

    assert (once.effect("-k").scope, once.effect("--field").scope) == ("-s", "effect/--field")
    assert once.count == 1


def test_the_command_reads_the_caller_s_stdin(once: Once) -> None:
    line = 'echo asked | "$@"'
    assert once("key", sh="cat", prefix=("sh", "-c", line, "sh")) == Said(0, b"asked\n", "")


def test_the_folder_s_modules_do_not_take_the_place_of_ours(once: Once) -> None:
    (once.folder / "agent_checkpoint.py").write_text("raise SystemExit(99)")
    (once.folder / "json.py").write_text("raise SystemExit(99)")
    script = Path(sys.executable).with_name("agent-checkpoint")

    assert once.run(script, "once", "key", "--", "echo", "paid") == Said(0, b"paid\n", "")
