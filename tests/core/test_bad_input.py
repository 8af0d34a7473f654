"""Values that break a rule: exit 2, one JSON error that names the field, nothing written."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_checkpoint import StateStore
from agent_checkpoint.cli import main

WATCHDOG_SECONDS = 60
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("AGENT_CHECKPOINT_")}
COMMAND = (sys.executable, "-m", "agent_checkpoint")
MIB = 1024 * 1024

TTLS = [
    *("0", "-1", "nan", "inf", "-inf", "Infinity", "1e12", "1e9999", "true", "６０", "٦٠", ""),
    *(" 60", "60 ", "60s", "6 0", "1_000", "0x10", "1e", "0.099", "2592000.001"),
]
NAMES = {
    "empty": "",
    "600 bytes": "x" * 600,
    "513 bytes": "x" * 513,
    "514 bytes in 257 characters": "é" * 257,
    "line feed": "a\nb",
    "tab": "a\tb",
    "escape": "\x1b[31mred",
    "delete": "a\x7f",
    "C1 control": "a\x85b",
    "lone surrogate, as argv carries a byte that is not UTF-8": "a\udcffb",
}
INTEGERS = [
    "0",
    "-1",
    "9223372036854775808",
    "9" * 40,
    "9" * 41,
    "x",
    "",
    "1.0",
    "1e0",
    "0x1",
    "１",
    "true",
    " 1",
    "1 ",
]
DATA = {
    "nothing": "",
    "white space": "  ",
    "a bare word": "tests-passed",
    "single quotes": "{'stage': 1}",
    "a cut object": '{"stage":',
    "two values": "1 2",
    "a trailing comma": "[1,]",
    "a comment": "1 // one",
    "NaN": "NaN",
    "NaN inside": '{"a": [1, {"b": NaN}]}',
    "Infinity inside": "[Infinity]",
    "-Infinity inside": "[-Infinity]",
    "1e999": "1e999",
    "-1e999 inside": '{"a": -1e999}',
    "4,001 digits": "1" * 4001,
    "-4,001 digits": "-" + "1" * 4001,
    "5,000 digits": "[" + "1" * 5000 + "]",
    "depth 201": "[" * 201 + "]" * 201,
    "depth 10,000": "[" * 10_000 + "]" * 10_000,
    "depth 10,000 of objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "a repeated key": '{"a": 1, "a": 2}',
    "a repeated key inside": '[{"b": {"a": 1, "c": 2, "\\u0061": 1}}]',
    "a byte order mark": "\ufeff1",
    "a byte that is not UTF-8": '"\udcff"',
}
FILES = {
    "not JSON": b"stage = 1",
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf1",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "bytes that are not UTF-8": b'"\xff\xfe"',
    "a surrogate as UTF-8": b'"\xed\xa0\x80"',
    "a null byte": b"1\0",
    "depth 10,000": b"[" * 10_000 + b"]" * 10_000,
}
# What these files hold: before, a unit and how often, after.
LARGE_FILES = {
    "17 MiB": (b'"', b"a", 17 * MIB, b'"'),
    "18 MiB when escaped": (b'"', "é".encode(), 3 * MIB, b'"'),
    "65 MiB, nearly all of it white space": (b"", b" ", 65 * MIB, b"1"),
}
METADATA = {
    "not JSON": "nope",
    "an array": "[]",
    "a number": "1",
    "NaN inside": '{"a": NaN}',
    "a repeated key": '{"a": 1, "a": 2}',
    "more than 64 KiB": json.dumps({"a": "x" * 65536}),
    "depth 10,000": '{"a":' + "[" * 10_000 + "]" * 10_000 + "}",
}


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    def error(self) -> dict[str, Any]:
        """The one JSON error on stderr of a command that printed nothing else."""
        assert self.out == ""
        (name,) = whole = json.loads(self.err)
        assert name == "error"
        return dict(whole[name])


Cli = Callable[..., Answer]


class Seeded:
    """A store with one live lease and one protected checkpoint, and an eye on every commit to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with StateStore(path) as store:
            store.initialize()
            lease = store.acquire("release", "worker-a", ttl_seconds=3600)
            store.put_checkpoint("deploy-v2", {"stage": "built"}, lease=lease)
        self.eye = sqlite3.connect(path)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever happens inside must leave the events and everything else as they are."""
        before = self._commits(), self._events()
        yield
        assert (self._commits(), self._events()) == before, "something was written"

    def _commits(self) -> int:
        """A number that changes with every commit of another connection, in any process."""
        return int(self.eye.execute("PRAGMA data_version").fetchone()[0])

    def _events(self) -> int:
        return int(self.eye.execute("SELECT count(*) FROM events").fetchone()[0])


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    seeded = Seeded(tmp_path_factory.mktemp("seeded") / "agents.db")
    yield seeded
    seeded.eye.close()


@pytest.fixture
def cli(seeded: Seeded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command in this process; it must leave the store as it was."""
    for name in set(os.environ) - set(ENVIRONMENT):
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Answer:
        with seeded.untouched():
            status = main(["--db", str(seeded.path), *arguments])
        return Answer(status, *capsys.readouterr())

    return run


def assert_invalid(answer: Answer, field: str) -> None:
    error = answer.error()
    assert (answer.status, error["code"], error["retryable"]) == (2, "invalid-input", False)
    assert error["field"] == field
    assert error["message"].startswith(f"{field}: ")


FENCE = ("--owner", "worker-a", "--token", "1")


@pytest.mark.parametrize("ttl", TTLS)
@pytest.mark.parametrize("words", [("acquire", "new", "--owner", "a"), ("heartbeat", "release", *FENCE)])
def test_a_ttl_that_is_no_length_of_a_lease_is_refused(cli: Cli, words: tuple[str, ...], ttl: str) -> None:
    assert_invalid(cli("lease", *words, f"--ttl={ttl}"), "ttl_seconds")


@pytest.mark.parametrize("ttl", ["0", "-1", "1e12"])
def test_a_ttl_may_stand_behind_a_space_too(cli: Cli, ttl: str) -> None:
    assert_invalid(cli("lease", "acquire", "new", "--owner", "a", "--ttl", ttl), "ttl_seconds")


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
@pytest.mark.parametrize(
    ("field", "before", "after"),
    [
        ("scope", ("lease", "acquire"), ("--owner", "a")),
        ("owner", ("lease", "acquire", "new", "--owner"), ()),
        ("scope", ("lease", "heartbeat"), FENCE),
        ("owner", ("lease", "heartbeat", "release", "--token", "1", "--owner"), ()),
        ("scope", ("lease", "release"), FENCE),
        ("owner", ("lease", "release", "release", "--token", "1", "--owner"), ()),
        ("scope", ("lease", "check"), FENCE),
        ("scope", ("lease", "show"), ()),
        ("scope", ("lease", "force-release"), ("--reason", "gone")),
        ("reason", ("lease", "force-release", "release", "--reason"), ()),
        ("workflow", ("checkpoint", "put", "--data", "1"), ()),
        ("scope", ("checkpoint", "put", "deploy-v2", "--data", "1", *FENCE, "--lease-scope"), ()),
        ("workflow", ("checkpoint", "get"), ()),
        ("workflow", ("checkpoint", "history"), ()),
        ("workflow", ("checkpoint", "diff"), ()),
        ("workflow", ("checkpoint", "prune", "--keep-last", "1"), ()),
        ("scope", ("events", "--scope"), ()),
        ("workflow", ("events", "--workflow"), ()),
        ("kind", ("events", "--kind"), ()),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else part,
)
def test_a_name_that_breaks_the_rule_is_refused(
    cli: Cli, field: str, before: tuple[str, ...], after: tuple[str, ...], name: str
) -> None:
    assert_invalid(cli(*before, name, *after), field)


@pytest.mark.parametrize("token", INTEGERS)
@pytest.mark.parametrize(
    "words",
    [
        ("lease", "heartbeat", "release", "--owner", "worker-a"),
        ("lease", "release", "release", "--owner", "worker-a"),
        ("lease", "check", "release", "--owner", "worker-a"),
        ("lease", "force-release", "release", "--reason", "gone"),
        ("checkpoint", "put", "deploy-v2", "--data", "1", "--lease-scope", "release", "--owner", "worker-a"),
    ],
    ids=lambda words: words[1],
)
def test_a_token_that_is_none_is_refused(cli: Cli, words: tuple[str, ...], token: str) -> None:
    assert_invalid(cli(*words, f"--token={token}"), "token")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("sequence", ("checkpoint", "get", "deploy-v2", "--sequence=0")),
        ("sequence", ("checkpoint", "get", "deploy-v2", "--sequence=x")),
        ("expected_sequence", ("checkpoint", "put", "deploy-v2", "--data=1", "--if-sequence=-1")),
        ("expected_sequence", ("checkpoint", "put", "deploy-v2", "--data=1", "--if-sequence=x")),
        ("expected_sequence", ("checkpoint", "put", "deploy-v2", "--data=1", "--if-sequence=9223372036854775808")),
        ("keep_last", ("checkpoint", "prune", "--keep-last=0")),
        ("keep_last", ("checkpoint", "prune", "--keep-last=-1")),
        ("keep_last", ("checkpoint", "prune", "--keep-last=all")),
        ("a", ("checkpoint", "diff", "deploy-v2", "x")),
        ("b", ("checkpoint", "diff", "deploy-v2", "1", "x")),
        ("limit", ("events", "--limit=0")),
        ("limit", ("events", "--limit=-5")),
        ("limit", ("events", "--limit=all")),
        ("limit", ("events", "--limit=10000000")),
        ("after", ("events", "--after=yesterday")),
        ("after", ("events", "--after=")),
        ("after", ("events", "--after=0-0-99999999999999999999")),
        ("after", ("events", "--after=0-0-１")),
        ("after", ("events", "--after=0-0-1\n")),
        ("busy_timeout_seconds", ("events", "--busy-timeout=-1")),
        ("busy_timeout_seconds", ("events", "--busy-timeout=nan")),
        ("busy_timeout_seconds", ("events", "--busy-timeout=86401")),
        ("busy_timeout_seconds", ("events", "--busy-timeout=soon")),
    ],
    ids=" ".join,
)
def test_a_number_or_cursor_that_is_none_is_refused(cli: Cli, field: str, words: tuple[str, ...]) -> None:
    assert_invalid(cli(*words), field)


@pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())
def test_data_that_is_not_json_within_the_limits_is_refused(cli: Cli, data: str) -> None:
    assert_invalid(cli("checkpoint", "put", "new", f"--data={data}"), "data")


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_file_that_is_not_json_within_the_limits_is_refused(cli: Cli, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(content)

    assert_invalid(cli("checkpoint", "put", "new", "--data", f"@{file}"), "data")


@pytest.mark.parametrize(("before", "unit", "times", "after"), LARGE_FILES.values(), ids=LARGE_FILES.keys())
def test_a_file_that_is_too_large_is_refused(
    cli: Cli, tmp_path: Path, before: bytes, unit: bytes, times: int, after: bytes
) -> None:
    file = tmp_path / "state.json"
    file.write_bytes(before + unit * times + after)

    answer = cli("checkpoint", "put", "new", "--data", f"@{file}")

    assert_invalid(answer, "data")
    assert str(16 * MIB) in answer.error()["message"]


def test_a_file_that_is_missing_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    answer = cli("checkpoint", "put", "new", "--data", f"@{tmp_path / 'missing'}")

    assert_invalid(answer, "data")
    assert "missing" in answer.error()["message"]


def test_a_folder_is_no_file_of_data(cli: Cli, tmp_path: Path) -> None:
    assert_invalid(cli("checkpoint", "put", "new", "--data", f"@{tmp_path}"), "data")


def test_an_at_sign_alone_names_no_file(cli: Cli) -> None:
    assert_invalid(cli("checkpoint", "put", "new", "--data", "@"), "data")


@pytest.mark.parametrize("metadata", METADATA.values(), ids=METADATA.keys())
def test_metadata_that_is_no_json_object_within_the_limits_is_refused(cli: Cli, metadata: str) -> None:
    assert_invalid(cli("lease", "acquire", "new", "--owner", "a", f"--metadata={metadata}"), "metadata")


@pytest.mark.parametrize(
    ("missing", "given"),
    [
        ("lease_scope", ("--owner", "worker-a", "--token", "1")),
        ("lease_scope", ("--owner", "worker-a")),
        ("lease_scope", ("--token", "1")),
        ("owner", ("--lease-scope", "release", "--token", "1")),
        ("owner", ("--lease-scope", "release")),
        ("token", ("--lease-scope", "release", "--owner", "worker-a")),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else part,
)
def test_part_of_a_fence_is_never_an_unprotected_write(cli: Cli, missing: str, given: tuple[str, ...]) -> None:
    assert_invalid(cli("checkpoint", "put", "new", "--data", "1", *given), missing)


@pytest.mark.parametrize("word", ["heartbeat", "release", "check"])
@pytest.mark.parametrize(
    ("missing", "given"), [("token", ("--owner", "worker-a")), ("owner", ("--token", "1")), ("owner", ())]
)
def test_owner_and_token_go_together(cli: Cli, word: str, missing: str, given: tuple[str, ...]) -> None:
    assert_invalid(cli("lease", word, "release", *given), missing)


@pytest.mark.parametrize(
    "words",
    [
        ("lease", "acquire", "new", "--owner", "a", "--default", "none"),
        ("lease", "release", "release", *FENCE, "--default", "none"),
        ("checkpoint", "put", "new", "--data", "1", "--default", "none"),
        ("checkpoint", "prune", "--keep-last", "1", "--default", "none"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_default_without_field_is_refused_before_anything_is_done(cli: Cli, words: tuple[str, ...]) -> None:
    answer = cli(*words)

    assert answer.status == 2
    assert answer.error()["field"] == "default"


@pytest.mark.parametrize(
    "database",
    ["", ":memory:", "nosuch://localhost/agents"],
)
def test_a_database_that_names_no_file_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(["--db", database, "init"])

    assert_invalid(Answer(status, *capsys.readouterr()), "database")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_value_makes_no_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main(["--db", str(tmp_path / "new" / "agents.db"), "lease", "acquire", "", "--owner", "a"])

    assert_invalid(Answer(status, *capsys.readouterr()), "scope")
    assert list(tmp_path.iterdir()) == []


def process(seeded: Seeded, *command: str | bytes | Path, stdin: bytes = b"") -> Answer:
    """The command as a process of its own; it must leave the store as it was."""
    with seeded.untouched():
        done = subprocess.run(
            command, env=ENVIRONMENT, input=stdin, capture_output=True, timeout=WATCHDOG_SECONDS, check=False
        )
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("ttl_seconds", ("lease", "acquire", "new", "--owner", "a", "--ttl", "-1")),
        ("ttl_seconds", ("lease", "acquire", "new", "--owner", "a", "--ttl", "６０")),
        ("scope", ("lease", "acquire", "", "--owner", "a")),
        ("scope", ("lease", "acquire", b"caf\xe9", "--owner", "a")),
        ("owner", ("lease", "acquire", "new", "--owner", b"\xff")),
        ("token", ("lease", "heartbeat", "release", "--owner", "worker-a", "--token", "0")),
        ("data", ("checkpoint", "put", "new", "--data", "NaN")),
        ("data", ("checkpoint", "put", "new", "--data", "[" * 10_000 + "]" * 10_000)),
        ("data", ("checkpoint", "put", "new", "--data", b'"\xff"')),
        ("data", ("checkpoint", "put", "new", "--data", "@missing")),
    ],
)
def test_a_process_refuses_bad_values_alike(seeded: Seeded, field: str, arguments: tuple[str | bytes, ...]) -> None:
    assert_invalid(process(seeded, *COMMAND, "--db", seeded.path, *arguments), field)


@pytest.mark.parametrize(
    "content", [b'"' + b"a" * (17 * MIB) + b'"', FILES["a byte order mark"], b""], ids=["17 MiB", "BOM", "empty"]
)
def test_bad_data_on_stdin_is_refused(seeded: Seeded, content: bytes) -> None:
    answer = process(seeded, *COMMAND, "--db", seeded.path, "checkpoint", "put", "new", "--data", "-", stdin=content)

    assert_invalid(answer, "data")


def test_a_closed_stdin_is_refused_as_data(seeded: Seeded) -> None:
    line = 'exec "$0" -m agent_checkpoint --db "$1" checkpoint put new --data - <&-'

    assert_invalid(process(seeded, "sh", "-c", line, sys.executable, seeded.path), "data")


def test_values_at_the_limits_are_accepted(capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path) -> None:
    """The rules refuse what lies beyond them, and nothing else."""
    largest = tmp_path / "largest.json"
    largest.write_bytes(b'  "' + b"a" * (16 * MIB - 2) + b'"\n')
    for arguments in (
        ("init",),
        ("lease", "acquire", "x" * 512, "--owner", "é" * 256, "--ttl", "0.1"),
        ("lease", "acquire", "longest", "--owner", "a b", "--ttl", "2592000"),
        ("lease", "acquire", "metadata", "--owner", "a", "--metadata", json.dumps({"a": "x" * (65536 - 8)})),
        ("checkpoint", "put", "largest", "--data", f"@{largest}", "--field", "sequence"),
        ("checkpoint", "put", "deepest", "--data", "[" * 200 + "]" * 200, "--field", "sequence"),
        ("checkpoint", "put", "digits", "--data", "-" + "9" * 4000, "--field", "sequence"),
        ("events", "--limit", "1000000", "--field", "0.id"),
        ("checkpoint", "list", "--busy-timeout", "0", "--field", "0.sequence"),
        ("checkpoint", "list", "--busy-timeout", "86400", "--field", "0.sequence"),
    ):
        assert main(["--db", str(path), *arguments]) == 0, capsys.readouterr().err
