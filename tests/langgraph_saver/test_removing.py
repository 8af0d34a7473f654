"""Deleting, pruning and copying: what is left, who may do it, and that the space comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_checkpoint import InvalidInputError, LeaseHeldError, StaleLeaseError
from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import Line, at, ids, raised, rows, values
from .graphs import chain, saying, thread
from .test_values import size, text

STATES = [[text(400) for _ in range(count)] for count in (1,)]
for _ in range(11):
    STATES.append([*STATES[-1], text(400)])


def grown(saver: AgentCheckpointSaver, thread_id: str = "thread-1", **metadata: Any) -> Line:
    """A thread whose one channel grows, so that each value is the difference to the one before it."""
    line = Line(saver, thread_id)
    for state in STATES:
        line.put({"messages": state, "same": STATES[0]}, **metadata)
    return line


def states(saver: AgentCheckpointSaver, thread_id: str = "thread-1") -> list[Any]:
    """What a thread has, oldest first."""
    return [values(each)["messages"] for each in saver.list(at(thread_id))][::-1]


def kinds(saver: AgentCheckpointSaver) -> list[str]:
    return [event.kind for event in saver.store.events(limit=10_000)]


# Whether the thread has a lease, and who writes


@pytest.fixture
def was_leased(saver: AgentCheckpointSaver) -> Any:
    """A thread that was run under a lease which is over; the config of that run."""
    with saver.lease("thread-1", owner="worker-a") as lease:
        config = lease.config(at())
        Line(saver).put({"messages": STATES[0]})
    return config


def test_a_thread_that_was_never_leased_stays_free_after_it_was_deleted(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    saver.delete_thread("thread-1")
    assert saver.store.list_leases(include_expired=True) == []

    grown(saver)
    assert states(saver) == STATES


def test_who_comes_late_to_a_deleted_thread_is_refused(saver: AgentCheckpointSaver, was_leased: Any) -> None:
    saver.delete_thread("thread-1")

    late = Line(saver)
    for head in (at(), was_leased):
        late.head = head
        with pytest.raises(StaleLeaseError):
            late.put({"messages": STATES[0]})
        with pytest.raises(StaleLeaseError):
            saver.put_writes({"configurable": {**head["configurable"], "checkpoint_id": "id-0001"}}, [("n", 1)], "task")
    assert list(saver.list(None)) == []
    assert saver.list_threads() == []


def test_a_deleted_thread_can_be_leased_anew(saver: AgentCheckpointSaver, was_leased: Any) -> None:
    saver.delete_thread("thread-1")
    with saver.lease("thread-1", owner="worker-b"):
        grown(saver)

    assert states(saver) == STATES


def test_deleting_leaves_its_own_lease_behind_nobody(saver: AgentCheckpointSaver, was_leased: Any) -> None:
    saver.delete_thread("thread-1")

    assert saver.store.list_leases() == []
    assert kinds(saver)[-3:] == ["lease.acquired", "langgraph.thread-deleted", "lease.released"]


REMOVALS = {
    "delete_thread": lambda saver: saver.delete_thread("thread-1"),
    "prune": lambda saver: saver.prune(["thread-1"]),
    "prune by deleting": lambda saver: saver.prune(["thread-1"], strategy="delete"),
    "delete_for_runs": lambda saver: saver.delete_for_runs(["run-1"]),
    "copy_thread": lambda saver: saver.copy_thread("other", "thread-1"),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=list(REMOVALS))
def test_a_thread_that_another_one_runs_is_not_touched(saver: AgentCheckpointSaver, remove: Any) -> None:
    grown(saver, run_id="run-1")
    grown(saver, "other")
    with saver.lease("thread-1", owner="worker-a", in_context=False):
        error = raised(LeaseHeldError, lambda: remove(saver))

    assert error.owner == "worker-a"
    assert states(saver) == STATES


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=list(REMOVALS))
def test_who_runs_a_thread_removes_under_its_lease_and_keeps_it(saver: AgentCheckpointSaver, remove: Any) -> None:
    grown(saver, run_id="run-1")
    grown(saver, "other")
    with saver.lease("thread-1", owner="worker-a") as lease:
        remove(saver)
        lease.check()
        Line(saver).put({"messages": STATES[-1]}, "id-more")

    assert states(saver)[-1] == STATES[-1]


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=list(REMOVALS))
def test_removing_takes_a_thread_whose_lease_is_over(saver: AgentCheckpointSaver, remove: Any) -> None:
    grown(saver, "other")
    with saver.lease("thread-1", owner="worker-a"):
        grown(saver, run_id="run-1")
    remove(saver)

    with pytest.raises(StaleLeaseError):
        Line(saver).put({"messages": STATES[0]}, "id-late")
    assert saver.store.list_leases() == []


def test_where_a_lease_is_required_none_is_needed_to_remove(url_or_path: Path | str) -> None:
    with AgentCheckpointSaver.from_conn_string(url_or_path, fencing="required") as saver:
        with pytest.raises(StaleLeaseError):
            Line(saver).put({"messages": STATES[0]})
        with saver.lease("thread-1", owner="worker-a"):
            grown(saver)
        saver.prune(["thread-1"], keep_last=2)
        assert states(saver) == STATES[-2:]
        saver.delete_thread("thread-1")
        saver.delete_thread("never there")

        assert saver.list_threads() == []


def test_where_leases_are_off_everybody_writes(url_or_path: Path | str) -> None:
    with AgentCheckpointSaver.from_conn_string(url_or_path, fencing="off") as saver:
        with saver.lease("thread-1", owner="worker-a", in_context=False):
            graph = chain(saver, saying("one"))
            graph.invoke({"seen": ["start"]}, thread())
            graph.update_state(thread(), {"seen": ["more"]})
            saver.prune(["thread-1"])
            assert graph.get_state(thread()).values["seen"] == ["start", "one", "more"]
            saver.delete_thread("thread-1")

        assert saver.list_threads() == []


# What is left


def test_deleting_takes_everything_of_one_thread_and_nothing_of_others(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    Line(saver, namespace="inner").put({"n": 1})
    saver.put_writes(at(checkpoint_id="not yet"), [("n", 1)], "task")
    saver.put_writes(grown(saver, "thread-10").head, [("n", 1)], "task")
    saver.delete_thread("thread-1")

    assert states(saver, "thread-10") == STATES
    assert [each.thread_id for each in saver.list_threads()] == ["thread-10"]
    Line(saver).put({"n": 2}, "not yet")
    found = saver.get_tuple(at())
    assert found is not None
    assert found.pending_writes == []


def test_deleting_is_idempotent(saver: AgentCheckpointSaver) -> None:
    saver.delete_thread("never there")
    saver.delete_for_runs(["never there"])
    saver.prune(["never there"])
    saver.copy_thread("never there", "neither")

    assert saver.list_threads() == []
    assert not [kind for kind in kinds(saver) if kind.startswith(("langgraph", "lease"))]


@pytest.mark.parametrize("keep_last", range(1, len(STATES) + 2))
def test_pruning_keeps_the_last_ones_as_they_were(saver: AgentCheckpointSaver, keep_last: int) -> None:
    line = grown(saver)
    saver.put_writes(line.head, [("n", 1)], "task")
    saver.prune(["thread-1"], keep_last=keep_last)

    assert states(saver) == STATES[-keep_last:]
    found = saver.get_tuple(at())
    assert found is not None
    assert found.pending_writes == [("task", "n", 1)]
    line.put({"messages": [*STATES[-1], "more"]})
    assert states(saver)[-1] == [*STATES[-1], "more"]


def test_pruning_again_and_again_keeps_a_growing_thread_right(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    messages: list[str] = []
    for _ in range(30):
        messages.append(text(300))
        line.put({"messages": messages})
        saver.prune(["thread-1"])
        assert states(saver) == [messages]


def test_pruning_keeps_the_last_ones_of_each_namespace(saver: AgentCheckpointSaver) -> None:
    for namespace in ("", "inner:1"):
        Line(saver, namespace=namespace).put_many(3)
    saver.prune(["thread-1"], keep_last=2)

    everywhere = {"configurable": {"thread_id": "thread-1"}}
    assert ids(saver.list(everywhere)) == ["id-0003", "id-0002"] * 2


def test_more_are_pruned_than_go_into_one_transaction(saver: AgentCheckpointSaver) -> None:
    Line(saver).put_many(450)
    saver.prune(["thread-1"], keep_last=3)

    assert ids(saver.list(at())) == ["id-0450", "id-0449", "id-0448"]


def test_pruning_goes_by_the_order_of_saving(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    for name in ("id-5", "id-9", "id-1"):
        line.put({"n": name}, name)
    saver.prune(["thread-1"])

    assert ids(saver.list(at())) == ["id-1"]


def test_pruning_several_threads_leaves_the_others(saver: AgentCheckpointSaver) -> None:
    for name in ("a", "b", "c"):
        grown(saver, name)
    saver.prune(["a", "b"])

    assert [len(states(saver, name)) for name in ("a", "b", "c")] == [1, 1, len(STATES)]


@pytest.mark.parametrize("fork_from", [1, 6, 11])
def test_a_fork_survives_the_pruning_of_what_it_was_forked_from(saver: AgentCheckpointSaver, fork_from: int) -> None:
    grown(saver)
    forked = [*STATES[fork_from - 1], "forked"]
    line = Line(saver)
    line.put({"messages": forked}, "id-fork", on=at(checkpoint_id=f"id-{fork_from:04}"))
    saver.prune(["thread-1"])

    assert states(saver) == [forked]


def test_a_parent_that_was_pruned_is_still_named(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    saver.prune(["thread-1"])

    (found,) = saver.list(at())
    assert found.parent_config == at(checkpoint_id=f"id-{len(STATES) - 1:04}")
    assert saver.get_tuple(found.parent_config) is None


@pytest.mark.parametrize(
    "ask",
    [
        {"strategy": "newest"},
        {"strategy": "delete", "keep_last": 2},
        *({"keep_last": keep_last} for keep_last in (0, -1, True, 1.5, "2")),
    ],
    ids=str,
)
def test_pruning_by_another_rule_is_refused(saver: AgentCheckpointSaver, ask: dict[str, Any]) -> None:
    grown(saver)
    with pytest.raises(InvalidInputError):
        saver.prune(["thread-1"], **ask)

    assert states(saver) == STATES


@pytest.mark.parametrize("run", range(3))
def test_what_a_run_saved_goes_and_what_others_saved_stays(saver: AgentCheckpointSaver, run: int) -> None:
    for name in ("a", "b"):
        line = Line(saver, name)
        for number, state in enumerate(STATES):
            line.put({"messages": state}, run_id=f"run-{number % 3}")
    saver.delete_for_runs([f"run-{run}"])

    left = [state for number, state in enumerate(STATES) if number % 3 != run]
    assert [states(saver, name) for name in ("a", "b")] == [left, left]


def test_a_run_is_found_by_the_id_of_a_graph_run(saver: AgentCheckpointSaver) -> None:
    graph = chain(saver, saying("one"))
    for run in ("run-1", "run-2"):
        graph.invoke({"seen": [run]}, {"configurable": {"thread_id": "thread-1"}, "metadata": {"run_id": run}})
    saver.delete_for_runs(["run-2"])

    assert {each.metadata["run_id"] for each in saver.list(thread())} == {"run-1"}  # type: ignore[typeddict-item]


# Copies


def test_a_copy_is_the_same_and_stands_alone(saver: AgentCheckpointSaver) -> None:
    saver.put_writes(grown(saver).head, [("n", 1)], "task")
    Line(saver, namespace="inner").put({"n": 1})
    original = [_without_thread(each) for each in saver.list({"configurable": {"thread_id": "thread-1"}})]
    saver.copy_thread("thread-1", "copy")
    saver.delete_thread("thread-1")

    copied = [_without_thread(each) for each in saver.list({"configurable": {"thread_id": "copy"}})]
    by_id = [sorted(found, key=lambda each: str(each[0])) for found in (original, copied)]
    assert by_id[0] == by_id[1]


def _without_thread(found: Any) -> Any:
    address = {key: value for key, value in found.config["configurable"].items() if key != "thread_id"}
    parent = found.parent_config and found.parent_config["configurable"]["checkpoint_id"]
    return address, found.checkpoint, found.metadata, parent, found.pending_writes


def test_a_copy_may_be_made_again(saver: AgentCheckpointSaver) -> None:
    line = grown(saver)
    saver.copy_thread("thread-1", "copy")
    line.put({"messages": ["more"]})
    saver.copy_thread("thread-1", "copy")

    assert states(saver, "copy") == [*STATES, ["more"]]
    assert states(saver) == [*STATES, ["more"]]


def test_a_copy_may_be_made_again_with_writes_that_came_before_their_checkpoint(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    saver.put_writes(at(checkpoint_id="not yet"), [("n", 1)], "task")
    for _ in range(2):
        saver.copy_thread("thread-1", "copy")
    Line(saver, "copy").put({"messages": ["late"]}, "not yet")

    found = saver.get_tuple(at("copy"))
    assert found is not None
    assert found.pending_writes == [("task", "n", 1)]


def test_a_copy_into_a_thread_leaves_what_it_has_besides(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    line = Line(saver, "target")
    line.put({"messages": ["target's own"]}, "id-own")
    line.put({"messages": ["replaced"]}, "id-0003")
    saver.copy_thread("thread-1", "target")

    found = {
        each.config["configurable"]["checkpoint_id"]: values(each)["messages"] for each in saver.list(at("target"))
    }
    assert found.pop("id-own") == ["target's own"]
    assert found == {f"id-{number + 1:04}": state for number, state in enumerate(STATES)}


def test_a_copy_of_itself_is_refused(saver: AgentCheckpointSaver) -> None:
    grown(saver)
    with pytest.raises(InvalidInputError):
        saver.copy_thread("thread-1", "thread-1")

    assert states(saver) == STATES


def test_a_copy_is_free_though_its_original_was_leased(saver: AgentCheckpointSaver, was_leased: Any) -> None:
    saver.copy_thread("thread-1", "copy")
    Line(saver, "copy").put({"messages": STATES[1]}, "id-more")

    assert states(saver, "copy") == [STATES[0], STATES[1]]


# Space


@pytest.mark.parametrize("remove", ["delete_thread", "prune", "delete_for_runs"])
def test_the_file_shrinks(saver: AgentCheckpointSaver, path: Path, remove: str) -> None:
    line = Line(saver)
    for number in range(60):
        line.put({"big": text(20_000), "n": number}, run_id="run-1")
    full = size(path)
    assert full > 1_000_000
    {
        "delete_thread": lambda: saver.delete_thread("thread-1"),
        "prune": lambda: saver.prune(["thread-1"]),
        "delete_for_runs": lambda: saver.delete_for_runs(["run-1"]),
    }[remove]()

    assert size(path) < full / 4


TABLES = "SELECT name FROM sqlite_master WHERE name LIKE 'langgraph%' AND type = 'table'"


def test_nothing_is_left_in_the_tables_of_a_thread_that_is_deleted(saver: AgentCheckpointSaver, path: Path) -> None:
    line = grown(saver)
    saver.put_writes(line.head, [("n", 1)], "task")
    saver.prune(["thread-1"], keep_last=3)
    saver.delete_thread("thread-1")

    names = [name for (name,) in rows(path, TABLES)]
    assert len(names) > 3
    assert [name for name in names if rows(path, f"SELECT 1 FROM {name}")] == []
