"""Checkpoints on their way from one store to another."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_checkpoint import InvalidInputError, NotFoundError, StateStore, StorageCorruptError
from agent_checkpoint.archive import Chain
from agent_checkpoint.testing import FakeClock

from .conftest import Cli

# Not in the order of its keys, and with what other encodings lose.
DATA = {"stage": "built", "a": [1.5, -0.0, 10**300, "naïve\u2028\U0001f600", None, True], "": {"deep": {}}}


@pytest.fixture
def other(tmp_path: Path, clock: FakeClock) -> Iterator[StateStore]:
    with StateStore(tmp_path / "other.db", clock=clock) as opened:
        opened.initialize()
        yield opened


@pytest.fixture
def filled_store(store: StateStore) -> StateStore:
    """A protected workflow whose first checkpoint was pruned, and an unprotected one."""
    lease = store.acquire("release", "worker-a")
    for number in range(4):
        store.put_checkpoint("deploy", {**DATA, "number": number}, lease=lease)
    store.prune_checkpoints(3, workflow="deploy")
    store.put_checkpoint("notes", "x")
    return store


@pytest.fixture
def lines(filled_store: StateStore) -> list[str]:
    return list(filled_store.export_checkpoints())


def every(store: StateStore) -> list[object]:
    return [
        store.get_checkpoint(info.workflow, sequence=each.sequence)
        for info in sorted(store.list_checkpoints())
        for each in store.checkpoint_history(info.workflow)
    ]


def rechained(values: list[dict[str, object]]) -> list[str]:
    """Lines that hang together, whatever is in them."""
    chain = Chain()
    return [chain.line(value) for value in values]


def values(lines: list[str]) -> list[dict[str, object]]:
    return [{name: value for name, value in json.loads(line).items() if name != "sha256"} for line in lines]


# Out and in


def test_everything_arrives_as_it_was(filled_store: StateStore, lines: list[str], other: StateStore) -> None:
    imported = other.import_checkpoints(lines)
    assert {each.workflow: each[1:] for each in imported} == {"deploy": (3, 2, 4), "notes": (1, 1, 1)}
    assert every(other) == every(filled_store)
    assert {event.workflow for event in other.events(kind="checkpoint.imported")} == {"deploy", "notes"}


def test_sequences_go_on_and_what_was_protected_stays_so(lines: list[str], other: StateStore) -> None:
    other.import_checkpoints(lines)
    with pytest.raises(RuntimeError, match="release"):
        other.put_checkpoint("deploy", {})
    lease = other.acquire("release", "worker-b")
    assert other.put_checkpoint("deploy", {}, lease=lease).sequence == 5
    assert other.put_checkpoint("notes", {}).sequence == 2


def test_one_workflow_goes_alone(filled_store: StateStore, other: StateStore) -> None:
    other.import_checkpoints(filled_store.export_checkpoints("notes"))
    assert [info.workflow for info in other.list_checkpoints()] == ["notes"]


def test_more_than_a_page_goes(store: StateStore, other: StateStore) -> None:
    for number in range(120):
        store.put_checkpoint("deploy", number)
    other.import_checkpoints(store.export_checkpoints())
    assert every(other) == every(store)


def test_an_empty_store_exports_nothing_and_nothing_is_imported(store: StateStore, other: StateStore) -> None:
    assert other.import_checkpoints(store.export_checkpoints()) == []


def test_the_same_import_can_be_done_again(lines: list[str], other: StateStore) -> None:
    first = other.import_checkpoints(lines)
    other.put_checkpoint("notes", "later")
    before = every(other)
    assert other.import_checkpoints(lines) == first
    assert every(other) == before


def test_an_import_that_was_killed_half_way_is_finished(lines: list[str], other: StateStore) -> None:
    kept = [value for value in values(lines) if value.get("workflow") != "notes"]
    kept[-1]["checkpoints"] = len(kept) - 2
    other.import_checkpoints(rechained(kept))
    other.import_checkpoints(lines)
    assert {info.workflow for info in other.list_checkpoints()} == {"deploy", "notes"}


def test_a_workflow_with_checkpoints_of_its_own_refuses_all(lines: list[str], other: StateStore) -> None:
    other.put_checkpoint("notes", "another")
    before = every(other)
    with pytest.raises(InvalidInputError, match="'notes' has checkpoints of its own"):
        other.import_checkpoints(lines)
    assert every(other) == before


def test_an_unknown_workflow_is_not_found_before_a_line_is_asked_for(store: StateStore) -> None:
    with pytest.raises(NotFoundError):
        store.export_checkpoints("nothing")


# What is not as it was exported


def changed(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[2].replace("built", "BUILT"), *lines[3:]]


def rehashed(lines: list[str]) -> list[str]:
    """A line of another export in place of one."""
    return [*lines[:2], rechained(values(changed(lines)))[2], *lines[3:]]


def twice(lines: list[str]) -> list[str]:
    whole = values(lines)
    return rechained([*whole[:2], whole[1], *whole[2:-1], {"checkpoints": len(whole) - 1}])


@pytest.mark.parametrize(
    "spoil",
    [
        changed,
        rehashed,
        twice,
        lambda lines: lines[:-1],
        lambda lines: lines[1:],
        lambda lines: [*lines[:1], *lines[2:]],
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [],
        lambda lines: ["[]\n"],
        lambda lines: ["{}\n"],
        lambda lines: ["not JSON\n"],
        lambda lines: ["[" * 100_000],
        lambda lines: rechained([{"format": "of something else"}, {"checkpoints": 0}]),
        lambda lines: rechained([*values(lines)[:1], {"workflow": "half"}, {"checkpoints": 1}]),
    ],
)
def test_lines_that_are_not_as_they_were_exported_are_refused_whole(
    lines: list[str], other: StateStore, spoil: Callable[[list[str]], list[str]]
) -> None:
    with pytest.raises(StorageCorruptError, match="nothing was written") as refused:
        other.import_checkpoints(spoil(lines))
    assert refused.value.hint.startswith("export it again")
    assert other.list_checkpoints() == []


@pytest.mark.parametrize(("column", "value"), [("workflow", ""), ("sequence", 0), ("saved_at_ns", True), ("token", -1)])
def test_values_that_no_store_would_have_written_are_refused(
    lines: list[str], other: StateStore, column: str, value: object
) -> None:
    whole = values(lines)
    whole[1][column] = value
    with pytest.raises(InvalidInputError, match=column.removesuffix("_ns")):
        other.import_checkpoints(rechained(whole))
    assert other.list_checkpoints() == []


# The commands


def test_the_commands_go_through_a_pipe(cli: Cli, other: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("checkpoint", "put", "deploy", "--data", '{"b": 1, "a": 2}')
    exported = cli("export")
    assert (exported.status, exported.err) == (0, "")
    monkeypatch.setattr("sys.stdin", io.StringIO(exported.out))
    answer = cli("--db", other.database, "import", "-")
    assert [each["workflow"] for each in answer.value()] == ["deploy"]
    found = other.get_checkpoint("deploy")
    assert found is not None
    assert found.data == {"a": 2, "b": 1}


def test_the_commands_say_what_is_wrong(cli: Cli, bare_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "export.jsonl"
    file.write_bytes(b"\xff\xfe")
    assert cli("import", file).error()["code"] == "storage-corrupt"
    assert cli("import", tmp_path / "nowhere").error()["code"] == "invalid-input"
    assert cli("import", tmp_path).error()["code"] == "invalid-input"
    assert cli("export", "--workflow", "nothing").error()["code"] == "not-found"
    assert cli("export", "--format", "text").error()["code"] == "invalid-input"
    assert bare_cli("--db", tmp_path / "none.db", "export").error()["code"] == "not-found"
