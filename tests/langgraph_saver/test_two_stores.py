"""A lease, and what is remembered, belong to one store: to that file, not to another one of its name or its threads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent_checkpoint import InvalidInputError, StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver, leased

from .conftest import Line, at, ids, raised, values
from .graphs import chain, saying, thread

SIDECARS = ("", "-wal", "-shm")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[AgentCheckpointSaver]:
    """A saver on another file."""
    with AgentCheckpointSaver.from_conn_string(tmp_path / "other.db", synchronous="normal") as opened:
        yield opened


def tokens(saver: AgentCheckpointSaver) -> list[int]:
    return [event.token for event in saver.store.events(kind="lease.acquired", after="start") if event.token]


# Two at once


def test_a_lease_of_one_store_is_none_of_another(saver: AgentCheckpointSaver, other: AgentCheckpointSaver) -> None:
    with saver.lease("thread-1") as lease:
        for config in (None, lease.config()):
            assert saver.find_lease(config, "thread-1") is lease
            assert other.find_lease(config, "thread-1") is None


@pytest.mark.parametrize("is_carried", [True, False], ids=["in the config", "in the context"])
def test_a_lease_of_the_same_owner_and_token_passes_no_other_stores_fence(
    saver: AgentCheckpointSaver, other: AgentCheckpointSaver, is_carried: bool
) -> None:
    theirs = other.lease("thread-1", owner="worker-a", in_context=False)
    ours = saver.lease("thread-1", owner="worker-a", in_context=not is_carried)
    with theirs as true, ours as foreign:
        assert foreign.fence == true.fence
        late = Line(other)
        late.head = foreign.config(at()) if is_carried else at()
        with pytest.raises(StaleLeaseError):
            late.put({"n": 1})

    assert list(other.list(None)) == []


def test_a_block_of_another_store_ends_no_lease_of_this_one(
    saver: AgentCheckpointSaver, other: AgentCheckpointSaver
) -> None:
    with saver.lease("thread-1") as lease:
        with other.lease("thread-1"):
            pass

        assert saver.find_lease(None, "thread-1") is lease


def test_a_leased_graph_takes_the_lease_of_its_own_store(
    saver: AgentCheckpointSaver, other: AgentCheckpointSaver
) -> None:
    inner = leased(chain(other, saying("inner")))
    graph = leased(chain(saver, lambda state: inner.invoke({"seen": ["visit"]}, thread())))
    assert graph.invoke({"seen": []}, thread())["seen"] == ["visit", "inner"]
    with saver.lease("thread-1"):
        inner.invoke({"seen": []}, thread())

    assert tokens(saver) == [1, 2]
    assert tokens(other) == [1, 2]
    assert saver.store.list_leases() == other.store.list_leases() == []


def test_a_lease_of_another_store_cannot_be_bound(saver: AgentCheckpointSaver, other: AgentCheckpointSaver) -> None:
    with saver.lease("thread-1") as lease:
        error = raised(InvalidInputError, lambda: other.bind(lease))
        saver.bind(lease)

    assert error.field == "lease"
    assert saver.store.database in str(error)


# One in the place of the other


def delete(path: Path) -> None:
    for suffix in SIDECARS:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def test_a_save_lands_in_no_thread_that_has_its_place_in_a_new_file(path: Path, saver: AgentCheckpointSaver) -> None:
    mine = Line(saver, "mine")
    mine.put({"text": "mine" * 100})
    delete(path)
    with AgentCheckpointSaver.from_conn_string(path) as anew:
        Line(anew, "theirs").put({"text": "theirs" * 100})
        mine.put({"text": "mine" * 100 + "more"})

        for each in (anew, saver):
            assert ids(each.list(at("theirs"))) == ["id-0001"]
            assert values(each.get_tuple(at("theirs"))) == {"text": "theirs" * 100}
            assert ids(each.list(at("mine"))) == ["id-0002"]
            assert values(each.get_tuple(at("mine"))) == {"text": "mine" * 100 + "more"}


def test_nor_in_another_namespace_of_its_thread(path: Path, saver: AgentCheckpointSaver) -> None:
    mine = Line(saver)
    mine.put({"text": "mine" * 100})
    delete(path)
    with AgentCheckpointSaver.from_conn_string(path) as anew:
        Line(anew, namespace="inner").put({"text": "inner"}, "id-0001")
        mine.put({"text": "mine" * 100 + "more"})

        assert ids(anew.list(at(namespace="inner"))) == ["id-0001"]
        assert values(anew.get_tuple(at())) == {"text": "mine" * 100 + "more"}


def put_back(path: Path, backup: Path) -> None:
    for suffix in SIDECARS[1:]:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    backup.replace(path)


def test_after_a_backup_was_put_back_nothing_of_what_was_lost_is_read(
    path: Path, tmp_path: Path, saver: AgentCheckpointSaver
) -> None:
    line = Line(saver)
    first = line.put({"text": "one" * 200})
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    line.put({"text": "lost work" * 50})
    put_back(path, backup)
    with AgentCheckpointSaver.from_conn_string(path) as another:
        Line(another).put({"text": "gone on" * 20}, "id-other", on=first)
        for each in (saver, another):
            assert [values(found) for found in each.list(at())] == [{"text": "gone on" * 20}, {"text": "one" * 200}]
            assert values(each.get_tuple(at())) == {"text": "gone on" * 20}

        line.put({"text": "gone on" * 20 + "and on"}, "id-next", on=at(checkpoint_id="id-other"))
        assert values(another.get_tuple(at())) == {"text": "gone on" * 20 + "and on"}
