"""A worker that is frozen while it runs a thread, superseded, and woken: it stops, and nothing of it lands.

The workers are real processes (``zombie_worker.py``); each scenario has files of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import StateGraph
from tests.watching import wait_until

from agent_checkpoint import LeaseHeldError, StaleLeaseError
from agent_checkpoint.testing import Frozen, ZombieOutcome, freeze, pause_here
from agent_checkpoint_langgraph import AgentCheckpointSaver, current_lease, leased

from .conftest import DATABASES, fresh_url
from .zombie_worker import BETWEEN, STEPS, THREAD, Workers

SCOPE = f"langgraph/{THREAD}"
CONFIG: Any = {"configurable": {"thread_id": THREAD, "checkpoint_ns": ""}}
EFFECTS = {"book": 1, "pay": 1}
A, B = "worker-a", "worker-b"
ANYWHERE = "anywhere"
# A busy machine may keep a worker from its heartbeats for most of it.
TTL_SECONDS = 1.0
# Longer than anything here takes: only a hang reaches it.
LONG = 60.0
ROOT = Path(__file__).parents[2]

needs_python_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="LangGraph's async tasks do")
WAYS = [
    ("graph", "sync"),
    ("graph", "async"),
    ("tasks", "sync"),
    pytest.param("tasks", "async", marks=needs_python_3_11),
]
MODES = ["sync", "async"]
DURABILITIES = ["sync", "async", "exit"]


def state_of(pid: int) -> str:
    """Z: ended, and not collected by the one that forked it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    errors = tmp_path_factory.mktemp("workers") / "errors.txt"
    with pytest.MonkeyPatch.context() as patch:
        # As in tests/faults: who is frozen and killed tells no coverage.
        patch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        started = Workers(errors)
    yield started
    started.end()
    # LangChain logs what a callback handler raises.
    refusal = "Error in LeaseGuard.on_chain_start callback: StaleLeaseError("
    assert [line for line in errors.read_text().splitlines() if not line.startswith(refusal)] == []


class Note(NamedTuple):
    worker: str
    what: str
    detail: Any
    at: int


class Story(NamedTuple):
    """What happened to the two workers."""

    notes: list[Note]
    history: list[CheckpointTuple]
    log: list[str]
    refused: set[tuple[str | None, str | None, int | None]]

    @property
    def ends(self) -> dict[str, str]:
        return {note.worker: note.detail for note in self.notes if note.what == "ended"}

    @property
    def effects(self) -> Counter[str]:
        return Counter(note.detail for note in self.notes if note.what == "effect")

    @property
    def forks(self) -> int:
        """How many checkpoints more than one has as its parent, or that are a second beginning."""
        parents = Counter(
            each.parent_config["configurable"]["checkpoint_id"] if each.parent_config else None for each in self.history
        )
        return sum(count - 1 for count in parents.values())

    @property
    def started_late(self) -> list[Note]:
        """What A started after the grant of B was visible."""
        granted = max(note.at for note in self.notes if (note.what, note.worker) == ("granted", B))
        return [note for note in self.notes if (note.what, note.worker) == ("started", A) and note.at > granted]


class Scene:
    """A thread, and the two workers that meet there."""

    def __init__(self, workers: Workers, folder: Path, setting: dict[str, Any]) -> None:
        folder.mkdir()
        self._workers = workers
        self._folder = folder
        self._place = setting["place"]
        self._is_file = setting.get("database") != "postgresql"
        self._store = str(folder / "agents.db") if self._is_file else fresh_url()
        self._is_stock = setting.get("saver") == "stock"
        self._setting = {"saver": "ours", **setting, "folder": str(folder), "store": self._store}
        self._setting.pop("database", None)

    def play(self) -> Story:
        """A is frozen in a step, B takes over and ends, A wakes up and ends by itself."""
        first = self._start(worker=A, ttl_seconds=TTL_SECONDS)
        self._wait_for_place()
        frozen = self._freeze(first)
        successor = "unleased" if self._is_stock else "lease"
        second = self._start(worker=B, form=successor, place=None, ttl_seconds=30, wait_seconds=LONG)
        wait_until(lambda: state_of(second) == "Z")
        (self._folder / "go-on").touch()
        frozen.thaw()
        wait_until(lambda: state_of(first) == "Z")
        return self._story()

    def _wait_for_place(self) -> None:
        if self._place == ANYWHERE:
            wait_until(lambda: self._has("granted"))
            time.sleep(random.uniform(0, 6 * self._setting["step_seconds"]))  # the moment is meant to be any
            return
        wait_until(lambda: self._has("inside") or self._has("ended"))
        assert not self._has("ended"), self._notes()
        if self._place == "report":
            wait_until(lambda: self._has_saved("pay"))

    def _start(self, **more: Any) -> int:
        return self._workers.start(**{**self._setting, **more})

    def _notes(self) -> list[Note]:
        with suppress(FileNotFoundError):
            return [Note(**json.loads(line)) for line in (self._folder / "notes.jsonl").read_text().splitlines()]
        return []

    def _has(self, what: str) -> bool:
        return any(note.what == what for note in self._notes())

    def _freeze(self, pid: int) -> Frozen:
        """Not while it has a file's write lock, as for a heartbeat: nobody could take over (see tests/faults)."""
        while True:
            try:
                frozen = freeze(pid)
            except ProcessLookupError:
                return Frozen()  # it is through already
            if not self._is_file:
                return frozen
            with closing(sqlite3.connect(self._store, timeout=0, isolation_level=None)) as database:
                try:
                    database.execute("BEGIN IMMEDIATE")
                    return frozen
                except sqlite3.OperationalError:
                    frozen.thaw()

    def _story(self) -> Story:
        with self._saver() as saver:
            log, history = log_of(saver), list(saver.list(CONFIG))
            return Story(self._notes(), history, log, set() if self._is_stock else refusals(saver))

    def _has_saved(self, step: str) -> bool:
        """Whether what A did in a step is in the thread: LangGraph saves it in the background."""
        with self._saver() as saver:
            writes = [write for each in saver.list(CONFIG) for write in each.pending_writes or ()]
        return any(f"{A}:{step}" in str(value) for _, _, value in writes)

    def _saver(self) -> Any:
        stock_or_ours: Any = SqliteSaver if self._is_stock else AgentCheckpointSaver
        return stock_or_ours.from_conn_string(self._store)


def refusals(saver: AgentCheckpointSaver) -> set[Any]:
    """Scope, owner and token of each; with those that a server may not tell yet, as others are writing still."""
    with saver.store.read() as reader:
        return set(reader.rows("SELECT scope, owner, token FROM events WHERE kind = 'write.refused'"))


def log_of(saver: BaseCheckpointSaver[Any]) -> list[str]:
    """The log in the state of the thread: a channel of the graph, or what the entrypoint returned."""
    latest = saver.get_tuple(CONFIG)
    assert latest is not None
    values = latest.checkpoint["channel_values"]
    return list((values.get("__end__") or values).get("log", ()))


def play_all(workers: Workers, folder: Path, settings: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Story]]:
    """Several scenes, all at once; each with its name."""
    names = ["-".join(map(str, setting.values())) for setting in settings]
    with ThreadPoolExecutor(len(settings)) as pool:
        stories = [
            pool.submit(Scene(workers, folder / name, setting).play)
            for name, setting in zip(names, settings, strict=True)
        ]
    for name, story in zip(names, stories, strict=True):
        yield name, story.result()


def places(kind: str, durability: str) -> list[str]:
    """Where A is frozen: before its effects; after them, where they are saved by then; between two tasks."""
    after = [] if durability == "exit" else ["report"]
    return ["plan", "book", *after, *([BETWEEN] if kind == "tasks" else [])]


def each_of(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    """The settings that differ in these."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


@pytest.mark.parametrize("all_places", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_a_leased_worker_that_was_frozen_and_superseded_stops_and_nothing_of_it_lands(
    workers: Workers, tmp_path: Path, kind: str, mode: str, durability: str, all_places: bool
) -> None:
    common = {"kind": [kind], "mode": [mode], "durability": [durability]}
    found = places(kind, durability)
    if not all_places:  # one half in this mode, the other half in the other
        found = found[(DURABILITIES.index(durability) + MODES.index(mode)) % 2 :: 2]
    settings = each_of(**common, form=["lease"], place=found)
    settings += each_of(**common, form=["leased"], place=["plan"])
    for name, story in play_all(workers, tmp_path, settings):
        assert_superseded(name, story)


@pytest.mark.skipif("postgresql" not in DATABASES, reason="its package is not installed")
@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_so_does_one_whose_store_is_on_a_server(workers: Workers, tmp_path: Path, kind: str, mode: str) -> None:
    settings = each_of(
        database=["postgresql"], kind=[kind], mode=[mode], durability=DURABILITIES, form=["lease"], place=["book"]
    )
    for name, story in play_all(workers, tmp_path, settings):
        assert_superseded(name, story)


def assert_superseded(name: str, story: Story) -> None:
    """A was refused and did nothing more; B did the rest."""
    assert story.ends == {A: "StaleLeaseError", B: "finished"}, (name, story.notes)
    assert story.started_late == [], name
    assert story.effects == EFFECTS, name
    assert story.forks == 0, name
    assert [entry.partition(":")[2] for entry in story.log] == STEPS, name
    assert story.log[-1] == f"{B}:report", name
    assert story.refused == {(SCOPE, A, 1)}, name


@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_with_the_stock_saver_both_workers_report_success_and_the_effects_happen_twice(
    workers: Workers, tmp_path: Path, kind: str, mode: str
) -> None:
    settings = each_of(
        kind=[kind], mode=[mode], durability=DURABILITIES, saver=["stock"], form=["unleased"], place=["plan"]
    )
    for name, story in play_all(workers, tmp_path, settings):
        assert story.ends == {A: "finished", B: "finished"}, (name, story.notes)
        assert story.effects == {"book": 2, "pay": 2}, name
        assert story.forks > 0, name
        assert story.log[-1] == f"{A}:report", name


@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_an_unleased_worker_frozen_before_a_lease_and_woken_after_its_release_is_refused(
    workers: Workers, tmp_path: Path, kind: str, mode: str
) -> None:
    settings = each_of(kind=[kind], mode=[mode], durability=DURABILITIES, form=["unleased"], place=["plan"])
    for name, story in play_all(workers, tmp_path, settings):
        assert story.ends == {A: "StaleLeaseError", B: "finished"}, (name, story.notes)
        assert story.forks == 0, name
        assert story.log == [f"{B}:{step}" for step in STEPS], name
        if kind == "graph":  # no callback handler watches the tasks of a run without a lease
            assert story.started_late == [], name
            assert story.effects == EFFECTS, name
        assert story.refused == {(SCOPE, None, None)}, name


@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "mode"), WAYS)
def test_a_leased_worker_frozen_at_any_moment_leaves_one_history(
    workers: Workers, tmp_path: Path, kind: str, mode: str, times: int
) -> None:
    for number in range(times):
        settings = each_of(
            kind=[kind], mode=[mode], durability=DURABILITIES, form=["lease"], place=[ANYWHERE], step_seconds=[0.03]
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, story in play_all(workers, folder, settings):
            assert story.ends[B] == "finished", (name, story.notes)
            # A may have been through already; else it must not say so.
            done = story.log == [f"{A}:{step}" for step in STEPS]
            assert story.ends[A] == "StaleLeaseError" or done, (name, story.notes)
            assert [entry.partition(":")[2] for entry in story.log] == STEPS, name
            assert story.forks == 0, name
            # One that was checked right before the freeze begins after it.
            assert len(story.started_late) <= 1, (name, story.notes)


# A lease that is taken away, or waited for, in one process


class Graph:
    """A graph of two nodes; the run called first waits inside of its first node until it is told to go on."""

    def __init__(self, saver: AgentCheckpointSaver) -> None:
        self.journal: list[str] = []
        self.inside, self.go_on = Event(), Event()
        builder = StateGraph(dict)
        builder.add_node("plan", self._plan)
        builder.add_node("book", self._book)
        builder.set_entry_point("plan")
        builder.add_edge("plan", "book")
        self.compiled = builder.compile(checkpointer=saver)

    def _plan(self, state: dict[str, str]) -> None:
        self.journal.append(f"{state['run']}: plan")
        if state["run"] == "first":
            self.inside.set()
            assert self.go_on.wait(LONG)

    def _book(self, state: dict[str, str]) -> None:
        self.journal.append(f"{state['run']}: book")

    def run(self, name: str, **options: Any) -> Any:
        return leased(self.compiled, owner=name, **options).invoke({"run": name}, CONFIG)


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with AgentCheckpointSaver.from_conn_string(tmp_path / "agents.db") as saver:
        yield Graph(saver)


@pytest.fixture
def running(graph: Graph) -> Iterator[Future[Any]]:
    """A leased run of the graph, inside its first node."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(graph.run, "first")
        assert graph.inside.wait(LONG)
        yield first
        graph.go_on.set()


def test_a_run_whose_lease_is_released_by_force_stops_before_its_next_node(graph: Graph, running: Future[Any]) -> None:
    graph.compiled.checkpointer.store.force_release(SCOPE, reason="it hangs")
    graph.go_on.set()

    with pytest.raises(StaleLeaseError):
        running.result(LONG)
    assert graph.journal == ["first: plan"]
    assert graph.run("second") == {"run": "second"}


def test_a_run_that_is_interrupted_stops_before_its_next_node(graph: Graph, running: Future[Any]) -> None:
    assert graph.run("second", multitask_strategy="interrupt") == {"run": "second"}
    graph.go_on.set()

    with pytest.raises(StaleLeaseError):
        running.result(LONG)
    assert graph.journal == ["first: plan", "second: plan", "second: book"]
    assert graph.compiled.get_state(CONFIG).values == {"run": "second"}


def test_a_run_that_is_enqueued_waits_for_the_one_before_it(graph: Graph, running: Future[Any]) -> None:
    store = graph.compiled.checkpointer.store
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(graph.run, "second", multitask_strategy="enqueue")
        wait_until(lambda: second.done() or store.status().queues)
        assert not second.done()
        assert graph.journal == ["first: plan"]
        graph.go_on.set()
        assert (running.result(LONG), second.result(LONG)) == ({"run": "first"}, {"run": "second"})
    assert graph.journal == ["first: plan", "first: book", "second: plan", "second: book"]


def test_a_second_run_is_rejected_unless_it_says_otherwise(graph: Graph, running: Future[Any]) -> None:
    with pytest.raises(LeaseHeldError) as held:
        graph.run("second")
    assert (held.value.owner, held.value.token) == ("first", 1)

    graph.go_on.set()
    assert running.result(LONG) == {"run": "first"}
    assert graph.journal == ["first: plan", "first: book"]


# With the tools that users have


def trip(path: Path, publish: Callable[[], object], book: Callable[[], object]) -> None:
    """A graph of two nodes; the second one publishes."""

    def booked(state: dict[str, str]) -> dict[str, str]:
        book()
        return {"booked": "yes"}

    def published(state: dict[str, str]) -> dict[str, str]:
        lease = current_lease()
        assert lease is not None
        lease.check()
        publish()
        return {"published": "yes"}

    with AgentCheckpointSaver.from_conn_string(path) as saver:
        builder = StateGraph(dict)
        builder.add_node("book", booked)
        builder.add_node("publish", published)
        builder.set_entry_point("book")
        builder.add_edge("book", "publish")
        graph: Any = builder.compile(checkpointer=saver)
        leased(graph, owner=A).invoke({}, CONFIG)


def test_the_fixture_shows_that_a_leased_graph_is_refused(zombie: Callable[..., ZombieOutcome], tmp_path: Path) -> None:
    path, public = tmp_path / "agents.db", tmp_path / "public.txt"

    outcome = zombie(
        lambda: trip(path, public.touch, pause_here),
        db=path,
        scope=SCOPE,
        freeze_when="paused",
        successor=lambda: trip(path, (tmp_path / "theirs.txt").touch, lambda: None),
        acts=public.exists,
    )

    outcome.assert_refused()
    assert isinstance(outcome.exception, StaleLeaseError)
    assert (tmp_path / "theirs.txt").exists()
    assert not public.exists()


# The example


def test_the_example_shows_the_fault_of_the_stock_saver_and_that_it_is_refused_here(
    tmp_path: Path, unmeasured: None
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/langgraph_zombie.py")],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split(r" {3,}", line) for line in done.stdout.splitlines()]
    assert rows == [
        ["", "SqliteSaver", "AgentCheckpointSaver"],
        ["worker A, frozen and woken", "reports success", "was refused (StaleLeaseError)"],
        ["worker B, which took over", "reports success", "reports success"],
        ["the customer was charged", "2 times", "once"],
        ["the final state", "quoted by A, charged by A", "quoted by B, charged by B"],
    ]
    assert list(tmp_path.iterdir()) == []  # it cleans up
