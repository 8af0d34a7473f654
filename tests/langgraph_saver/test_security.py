"""Who can write to the file runs no code in those who read it."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ormsgpack
import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from agent_checkpoint import AgentCheckpointError, InvalidInputError
from agent_checkpoint_langgraph import AgentCheckpointSaver, StrictSerializer

from .conftest import Line, at, raised, rewrite, values
from .test_values import Rotation

MODULE = "module_of_an_attacker"
REFUSALS = (AgentCheckpointError, NotImplementedError, ValueError)


class Opened:
    """What pickle would make a file of."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@dataclass
class Mine:
    """A type of the user's own."""

    number: int


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported."""
    sprung = tmp_path / "sprung"
    folder = tmp_path / "modules"
    folder.mkdir()
    source = (
        f"open({str(sprung)!r}, 'w').close()\nclass Thing:\n    def __init__(self, *a, **k): ...\n    make = __init__\n"
    )
    (folder / f"{MODULE}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    yield sprung
    sys.modules.pop(MODULE, None)


def extension(code: int) -> bytes:
    """A value of a type of the attacker's, in each of the ways in which LangGraph stores types."""
    arguments: dict[int, Any] = {0: 1, 1: [1], 2: {"a": 1}, 3: 1, 4: {"a": 1}, 5: {"a": 1}}
    packed = ormsgpack.packb([MODULE, "Thing", arguments[code], "make"])
    return ormsgpack.packb(ormsgpack.Ext(code, packed))


def nested(code: int) -> bytes:
    return b"\x92\x01" + extension(code)


def in_a_snapshot(code: int) -> bytes:
    return ormsgpack.packb(ormsgpack.Ext(7, extension(code)))


PLACES = {
    "state": "UPDATE langgraph_values SET kind = ?, data = ?, base = NULL WHERE channel = 'n'",
    "writes": "UPDATE langgraph_writes SET kind = ?, data = ?",
    "body": "UPDATE langgraph_checkpoints SET kind = ?, data = ?",
    "metadata": "UPDATE langgraph_checkpoints SET metadata_kind = ?, metadata = ?",
}


@pytest.fixture
def plant(saver: AgentCheckpointSaver, path: Path) -> Callable[[str, str, bytes], Any]:
    """Put bytes of a kind in a place of the file; the config to read it by."""
    config = Line(saver).put({"n": 1})
    saver.put_writes(config, [("n", 1)], "task")
    saver.close()

    def put(place: str, kind: str, data: bytes) -> Any:
        assert rewrite(path, PLACES[place], kind, data) == 1
        return config

    return put


Plant = Callable[[str, str, bytes], Any]


@pytest.mark.parametrize("place", ["state", "writes", "body"])
@pytest.mark.parametrize("wrapped", [extension, nested, in_a_snapshot], ids=lambda made: made.__name__)
@pytest.mark.parametrize("code", range(6))
def test_a_type_that_is_not_on_the_list_is_named_and_not_imported(
    plant: Plant, path: Path, trap: Path, code: int, wrapped: Callable[[int], bytes], place: str
) -> None:
    config = plant(place, "msgpack", wrapped(code))

    with AgentCheckpointSaver.from_conn_string(path) as saver:
        error = raised(InvalidInputError, lambda: saver.get_tuple(config))
        assert raised(InvalidInputError, lambda: list(saver.list(at()))).module == MODULE

    assert (error.module, error.type) == (MODULE, "Thing")
    assert not trap.exists()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("code", range(6))
def test_metadata_imports_nothing(plant: Plant, path: Path, trap: Path, code: int) -> None:
    config = plant("metadata", "msgpack", b"\x81\xa1a" + extension(code))

    with AgentCheckpointSaver.from_conn_string(path) as saver:
        for read in (partial(saver.get_tuple, config), lambda: list(saver.list(at(), filter={"a": 1}))):
            with suppress(*REFUSALS):
                read()

    assert not trap.exists()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("version", [1, 2])
def test_a_type_in_json_is_not_imported(plant: Plant, path: Path, trap: Path, version: int, place: str) -> None:
    thing = {"lc": version, "type": "constructor", "id": [MODULE, "Thing"], "kwargs": {"a": 1}, "args": []}
    config = plant(place, "json", json.dumps({"a": thing}).encode())

    with AgentCheckpointSaver.from_conn_string(path) as saver, suppress(*REFUSALS):
        saver.get_tuple(config)

    assert not trap.exists()


def test_a_secret_in_json_reads_no_environment(plant: Plant, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_SECRET", "of this machine")
    config = plant("state", "json", json.dumps({"lc": 1, "type": "secret", "id": ["THE_SECRET"]}).encode())

    with AgentCheckpointSaver.from_conn_string(path) as saver:
        assert "of this machine" not in repr(saver.get_tuple(config))


SERDES = {
    "ours": None,
    "permissive": JsonPlusSerializer(allowed_msgpack_modules=True),
    "encrypting": EncryptedSerializer(Rotation()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("serde", SERDES.values(), ids=list(SERDES))
def test_pickle_is_never_loaded(plant: Plant, path: Path, tmp_path: Path, serde: Any, place: str) -> None:
    sprung = tmp_path / "sprung"
    data, kind = pickle.dumps({"a": Opened(sprung)}), "pickle"
    if isinstance(serde, EncryptedSerializer):
        name, data = serde.cipher.encrypt(data)
        kind = f"pickle+{name}"
    config = plant(place, kind, data)

    with AgentCheckpointSaver.from_conn_string(path, serde=serde) as saver:
        for read in (partial(saver.get_tuple, config), lambda: list(saver.list(at(), filter={"step": 1}))):
            with suppress(*REFUSALS) if place == "metadata" else pytest.raises(REFUSALS, match="pickle"):
                read()

    assert not sprung.exists()


FALLBACK = JsonPlusSerializer(pickle_fallback=True)


@pytest.mark.parametrize(
    "serde",
    [
        FALLBACK,
        EncryptedSerializer(Rotation(), FALLBACK),
        EncryptedSerializer(Rotation(), EncryptedSerializer(Rotation(), FALLBACK)),
    ],
    ids=["plain", "encrypted", "encrypted twice"],
)
def test_a_serializer_that_falls_back_to_pickle_is_refused(path: Path, serde: Any) -> None:
    error = raised(InvalidInputError, lambda: AgentCheckpointSaver.from_conn_string(path, serde=serde))

    assert error.field == "serde"
    assert not path.exists()


# Types that are allowed


def test_a_type_of_the_users_own_is_loaded_where_it_is_allowed(saver: AgentCheckpointSaver) -> None:
    with pytest.raises(InvalidInputError, match=r"'n' cannot be saved: .*Mine.*allowlist") as refused:
        Line(saver).put({"n": Mine(5)})
    assert "with_allowlist" in refused.value.hint
    assert saver.get_tuple(at()) is None

    allowing = saver.with_allowlist([(Mine.__module__, Mine.__qualname__)])
    Line(allowing).put({"n": Mine(5)})
    assert values(allowing.get_tuple(at())) == {"n": Mine(5)}
    with pytest.raises(InvalidInputError, match="Mine"):
        saver.get_tuple(at())


def test_a_saver_with_an_allowlist_is_the_same_saver(saver: AgentCheckpointSaver) -> None:
    allowing = saver.with_allowlist([(Mine.__module__, Mine.__qualname__)])
    assert isinstance(allowing, AgentCheckpointSaver)
    head = Line(allowing).put({"n": [Mine(1)] * 50})
    Line(allowing).put({"n": [Mine(1)] * 51}, "id-2", on=head)

    assert allowing.store is saver.store
    assert values(allowing.get_tuple(at())) == {"n": [Mine(1)] * 51}
    allowing.delete_thread("thread-1")
    assert saver.get_tuple(at()) is None


def test_a_type_is_allowed_by_a_serializer_too(path: Path) -> None:
    for serde in (
        StrictSerializer([(Mine.__module__, Mine.__qualname__)]),
        JsonPlusSerializer(allowed_msgpack_modules=True),
        EncryptedSerializer(Rotation(), StrictSerializer([(Mine.__module__, Mine.__qualname__)])),
    ):
        with AgentCheckpointSaver.from_conn_string(path, serde=serde) as saver:
            saver.delete_thread("thread-1")
            Line(saver).put({"n": Mine(5)})
            assert values(saver.get_tuple(at())) == {"n": Mine(5)}


def test_a_thread_whose_state_is_refused_can_be_deleted_and_copied(saver: AgentCheckpointSaver) -> None:
    line = Line(saver.with_allowlist([(Mine.__module__, Mine.__qualname__)]))
    for number in range(3):
        line.put({"n": Mine(number)})
    saver.copy_thread("thread-1", "copy")
    saver.prune(["copy"])
    saver.delete_thread("thread-1")

    assert [(each.thread_id, each.checkpoints) for each in saver.list_threads()] == [("copy", 1)]
