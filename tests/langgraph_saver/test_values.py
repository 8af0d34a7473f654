"""Values: what goes in comes out or is refused by its channel's name, and is stored once."""

from __future__ import annotations

import asyncio
import math
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from agent_checkpoint import InvalidInputError
from agent_checkpoint_langgraph import AgentCheckpointSaver, StrictSerializer

from .conftest import Line, at, checkpoint, ids, raised, values
from .graphs import chain

SURROGATE = "\ud800"
# Text that does not compress and that differs from step to step.
RANDOM = random.Random(5)


def text(size: int) -> str:
    return "".join(RANDOM.choices("abcdefghijklmnopqrstuvwxyz0123456789 ", k=size))


KEPT: dict[str, Any] = {
    "infinity": math.inf,
    "less than everything": [-math.inf, -0.0, 5e-324],
    "NUL": "a\0b",
    "NUL in a key": {"a\0": "\0"},
    "64 bits": [2**64 - 1, -(2**63)],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "only bytes": b"\xff",
    "nothing": None,
    "empty": ["", [], {}, ()],
    "keys of any type": {1: "a", None: "b", 2.5: "c"},
    "set": {1, 2},
    "emoji": "🙂\U0010ffff",
    "message": [HumanMessage("hi\0", id="1"), AIMessage("🙂", id="2")],
}
REFUSED: dict[str, Callable[[], Any]] = {
    "65 bits": lambda: 2**64,
    "65 bits, negative": lambda: -(2**63) - 1,
    "65 bits, nested": lambda: {"a": [1, {"b": 2**70}]},
    "half a surrogate pair": lambda: SURROGATE,
    "half a surrogate pair, nested": lambda: {"a": [SURROGATE]},
    "half a surrogate pair, as a key": lambda: {SURROGATE: 1},
    "half a surrogate pair, in a message": lambda: [HumanMessage(f"hi {SURROGATE}", id="1")],
    "half a surrogate pair, in a message's blocks": lambda: [AIMessage([{"type": "text", "text": SURROGATE}], id="1")],
    "half a surrogate pair, in a tuple": lambda: (SURROGATE,),
    "half a surrogate pair, in a set": lambda: {SURROGATE},
    "half a surrogate pair, in what a message carries": lambda: AIMessage("", additional_kwargs={"a": SURROGATE}),
    "array of Python objects": lambda: pytest.importorskip("numpy").array([1, None]),
    "object": object,
    "lambda": lambda: lambda: None,
}


@pytest.mark.parametrize("value", KEPT.values(), ids=list(KEPT))
def test_a_value_comes_back_as_it_was(saver: AgentCheckpointSaver, value: Any) -> None:
    line = Line(saver)
    config = line.put({"n": value})
    saver.put_writes(config, [("n", value)], "task")

    found = saver.get_tuple(at())
    assert values(found) == {"n": _listed(value)}
    assert found is not None
    assert found.pending_writes == [("task", "n", _listed(value))]


def _listed(value: Any) -> Any:
    """Tuples inside of lists are lists to msgpack."""
    return [list(each) if isinstance(each, tuple) else each for each in value] if isinstance(value, list) else value


def test_what_is_no_number_stays_that(saver: AgentCheckpointSaver) -> None:
    Line(saver).put({"n": math.nan, "m": [math.nan]})

    found = values(saver.get_tuple(at()))
    assert math.isnan(found["n"])
    assert math.isnan(found["m"][0])


@pytest.mark.parametrize("make", REFUSED.values(), ids=list(REFUSED))
def test_a_value_that_cannot_be_kept_is_refused_by_its_channel(
    saver: AgentCheckpointSaver, make: Callable[[], Any]
) -> None:
    line = Line(saver)
    config = line.put({"bad": "good"})

    for call in (
        lambda: line.put({"fine": 1, "bad": make()}),
        lambda: saver.put_writes(config, [("fine", 1), ("bad", make())], "task"),
    ):
        error = raised(InvalidInputError, call)
        assert error.channel == "bad"
        assert "'bad'" in str(error)

    line.put({"bad": "good again"}, on=config)
    assert values(saver.get_tuple(at())) == {"bad": "good again"}
    assert saver.get_tuple(config).pending_writes == []  # type: ignore[union-attr]


@pytest.mark.parametrize("make", REFUSED.values(), ids=list(REFUSED))
def test_a_run_that_cannot_be_saved_fails_and_its_thread_goes_on(
    saver: AgentCheckpointSaver, make: Callable[[], Any]
) -> None:
    answers = iter([make(), "good"])
    graph = chain(saver, lambda state: {"answer": next(answers)})
    config = {"configurable": {"thread_id": "thread-1"}}

    assert raised(InvalidInputError, lambda: graph.invoke({"seen": ["start"]}, config)).channel == "answer"
    assert graph.invoke(None, config)["answer"] == "good"


def test_a_channel_must_have_a_name_that_can_be_stored(saver: AgentCheckpointSaver) -> None:
    for name in ("a\0", SURROGATE):
        with pytest.raises(InvalidInputError):
            Line(saver).put({name: 1})

    assert list(saver.list(None)) == []


def test_a_value_is_what_it_was_when_it_was_saved(saver: AgentCheckpointSaver) -> None:
    value = ["early"]
    Line(saver).put({"n": value})
    value.append("late")

    assert values(saver.get_tuple(at())) == {"n": ["early"]}


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced as new", "not announced"])
def test_an_awaited_value_is_what_it_was_when_it_was_saved(
    saver: AgentCheckpointSaver, path: Path, is_announced: bool
) -> None:
    value = ["early"]
    made = checkpoint("id-1", {"n": value}, "1.x")
    new = made["channel_versions"] if is_announced else {}

    async def go() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # nothing is saved while somebody else writes
            # So many that the checkpoint's turn comes after their commit.
            before = [saver.aput_writes(at("other", "id-0"), [("n", 0)], str(number)) for number in range(64)]
            save = saver.aput(at(checkpoint_id="unknown"), made, {"source": "loop", "step": 1, "parents": {}}, new)
            saves = asyncio.gather(*before, save)
            await asyncio.sleep(0)
            value.append("late")
            other.execute("COMMIT")
            await saves

    saver.setup()
    asyncio.run(go())
    assert values(saver.get_tuple(at())) == {"n": ["early"]}


def test_a_checkpoint_that_is_saved_again_has_what_it_has_now(saver: AgentCheckpointSaver) -> None:
    Line(saver).put({"n": 1, "gone": 2})
    Line(saver).put({"n": 3})

    assert [values(each) for each in saver.list(at())] == [{"n": 3}]


def test_a_value_that_was_not_announced_is_taken_where_the_parent_has_another_version(
    saver: AgentCheckpointSaver,
) -> None:
    head = Line(saver).put({"n": 1, "other": "of the parent"})
    made = checkpoint("id-9", {"n": 2, "other": "as it came"}, "9.x")
    saver.put(head, made, {"source": "fork", "step": 9, "parents": {}}, {"n": "9.x"})

    assert values(saver.get_tuple(at())) == {"n": 2, "other": "as it came"}


# Stored once, as what differs


def size(path: Path) -> int:
    """Of the file, once all is in it."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    return path.stat().st_size


def test_a_value_that_does_not_change_is_stored_once(saver: AgentCheckpointSaver, path: Path) -> None:
    big = text(100_000)
    line = Line(saver)
    for number in range(30):
        line.put({"big": big, "n": number})

    assert all(each.checkpoint["channel_values"]["big"] == big for each in saver.list(at()))
    assert size(path) < 500_000


def test_a_growing_list_costs_its_growth(saver: AgentCheckpointSaver, path: Path) -> None:
    messages: list[str] = []
    line = Line(saver)
    for _ in range(200):
        messages.append(text(1000))
        line.put({"messages": messages})

    found = [each.checkpoint["channel_values"]["messages"] for each in saver.list(at())]
    assert found == [messages[:count] for count in range(200, 0, -1)]
    assert size(path) < 1_500_000


def test_a_list_that_is_trimmed_at_its_front_costs_little(saver: AgentCheckpointSaver, path: Path) -> None:
    messages: list[str] = []
    states = []
    line = Line(saver)
    for _ in range(120):
        messages = [*messages[-40:], text(1000)]
        states.append(messages)
        line.put({"messages": messages})

    assert [each.checkpoint["channel_values"]["messages"] for each in saver.list(at())] == states[::-1]
    assert size(path) < 2_000_000


def edits(count: int) -> list[dict[str, Any]]:
    """States of a channel, each made of the one before it as programs do."""
    state: dict[str, Any] = {f"key-{number}": text(200) for number in range(20)}
    made = []
    for _ in range(count):
        state = dict(state)
        kind = RANDOM.randrange(5)
        key = RANDOM.choice(sorted(state)) if state else ""
        if kind == 0 and state:
            del state[key]
        elif kind == 1:
            state[f"key-{RANDOM.randrange(100)}"] = text(RANDOM.randrange(400))
        elif kind == 2:
            state = {key: text(50), **state}
        elif kind == 3:
            state[key] = [text(10), {"deep": state.get(key)}]
        else:
            state = dict(sorted(state.items(), key=lambda item: RANDOM.random()))
        made.append(state)
    return made


def test_edits_of_every_kind_are_given_back(saver: AgentCheckpointSaver) -> None:
    states = edits(80)
    line = Line(saver)
    for state in states:
        line.put({"state": state})

    assert [values(each)["state"] for each in saver.list(at())] == states[::-1]


def test_a_fork_from_an_old_checkpoint_builds_on_that(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    base = [text(500) for _ in range(20)]
    configs = [line.put({"messages": base[: 5 + number]}) for number in range(10)]
    forks = {
        line.put({"messages": [*base[: 5 + number], "forked"]}, on=config)["configurable"]["checkpoint_id"]: number
        for number, config in enumerate(configs)
    }

    for name, number in forks.items():
        assert values(saver.get_tuple(at(checkpoint_id=name)))["messages"] == [*base[: 5 + number], "forked"]
    assert values(saver.get_tuple(configs[3]))["messages"] == base[:8]


def test_savers_in_turn_on_one_thread_give_back_what_each_saved(
    saver: AgentCheckpointSaver, url_or_path: Path | str
) -> None:
    states: list[list[str]] = [[text(300) for _ in range(5)]]
    with AgentCheckpointSaver.from_conn_string(url_or_path, synchronous="normal") as other:
        line, others = Line(saver), Line(other)
        for number in range(40):
            mine, theirs = (line, others) if RANDOM.random() < 0.5 else (others, line)
            states.append([*states[-1][RANDOM.randrange(2) :], text(300)])
            theirs.head = mine.put({"messages": states[-1]}, f"id-{number:04}")

        found = [[values(each)["messages"] for each in each_saver.list(at())] for each_saver in (saver, other)]
    assert found == [states[:0:-1]] * 2


def test_a_parent_that_another_saver_deleted_is_built_on_no_more(
    saver: AgentCheckpointSaver, url_or_path: Path | str
) -> None:
    line = Line(saver)
    base = [text(500) for _ in range(10)]
    head = line.put({"messages": base})
    with AgentCheckpointSaver.from_conn_string(url_or_path, synchronous="normal") as other:
        other.delete_thread("thread-1")
        Line(other).put({"messages": ["another"]})  # takes the same id
        line.put({"messages": [*base, "more"]}, on=head)

    assert [values(each)["messages"] for each in saver.list(at())] == [[*base, "more"], ["another"]]


def test_a_parent_that_another_saver_saved_anew_is_built_on_as_it_is(
    saver: AgentCheckpointSaver, url_or_path: Path | str
) -> None:
    line = Line(saver)
    head = line.put({"messages": [text(500)], "kept": "mine"})
    with AgentCheckpointSaver.from_conn_string(url_or_path, synchronous="normal") as other:
        Line(other).put({"messages": ["another"], "kept": "theirs"})
    made = checkpoint("id-9", {"messages": ["new"], "kept": "as it came"}, "9.x")
    made["channel_versions"]["kept"] = saver.get_tuple(head).checkpoint["channel_versions"]["kept"]  # type: ignore[union-attr]
    saver.put(head, made, {"source": "loop", "step": 9, "parents": {}}, {"messages": "9.x"})

    assert values(saver.get_tuple(at()))["kept"] == "theirs"


def test_awaited_saves_of_one_line_give_back_what_each_saved(saver: AgentCheckpointSaver) -> None:
    base = [text(300) for _ in range(60)]

    async def go() -> None:
        saves, parent = [], at()
        for number in range(1, 60):  # all given before the first one is saved
            made = checkpoint(f"id-{number:04}", {"messages": base[:number], "same": base}, f"{number}.x")
            saves.append(saver.aput(parent, made, {"source": "loop", "step": number}, made["channel_versions"]))
            parent = at(checkpoint_id=made["id"])
        await asyncio.gather(*saves)

    asyncio.run(go())
    assert [values(each)["messages"] for each in saver.list(at())] == [base[:number] for number in range(59, 0, -1)]


def test_a_channel_that_was_emptied_stays_empty(saver: AgentCheckpointSaver) -> None:
    line = Line(saver)
    head = line.put({"n": 1, "gone": "soon"})
    made = checkpoint("id-9", {"n": 2}, "9.x")
    made["channel_versions"]["gone"] = "9.x"
    saver.put(head, made, {"source": "loop", "step": 9, "parents": {}}, {"n": "9.x", "gone": "9.x"})
    later = checkpoint("id-99", {"n": 3}, "10.x")
    later["channel_versions"]["gone"] = "9.x"
    saver.put(at(checkpoint_id="id-9"), later, {"source": "loop", "step": 10, "parents": {}}, {"n": "10.x"})

    assert [values(each) for each in saver.list(at())] == [{"n": 3}, {"n": 2}, {"n": 1, "gone": "soon"}]


# Encrypted


class Rotation:
    """A cipher that anyone can break; each text is encrypted differently, or all in the same way."""

    def __init__(self, step: int = 1) -> None:
        self._salt = 0
        self._step = step

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        self._salt += self._step
        salt = self._salt.to_bytes(4, "big")
        return "rotation", salt + bytes(
            byte ^ (number * 31 + self._salt) & 255 for number, byte in enumerate(plaintext)
        )

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        salt = int.from_bytes(ciphertext[:4], "big")
        return bytes(byte ^ (number * 31 + salt) & 255 for number, byte in enumerate(ciphertext[4:]))


def test_an_encrypted_state_comes_back_and_is_not_in_the_file(path: Path) -> None:
    serde = EncryptedSerializer(Rotation(), StrictSerializer())
    messages: list[str] = []
    with AgentCheckpointSaver.from_conn_string(path, serde=serde) as saver:
        line = Line(saver)
        for number in range(10):
            messages = [*messages, f"{number} in plain text"]
            saver.put_writes(line.put({"messages": messages}), [("messages", ["in plain text"])], "task")
        found = [values(each)["messages"] for each in saver.list(at())]
        assert saver.get_tuple(at()).pending_writes == [("task", "messages", ["in plain text"])]  # type: ignore[union-attr]
        assert size(path)

    assert found == [messages[:count] for count in range(10, 0, -1)]
    assert b"plain text" not in path.read_bytes()


def test_an_encrypted_value_depends_on_no_other(url_or_path: Path | str) -> None:
    serde = EncryptedSerializer(Rotation(step=0), StrictSerializer())
    with AgentCheckpointSaver.from_conn_string(url_or_path, serde=serde) as saver:
        same = text(2000)
        line = Line(saver)
        for number in range(5):
            line.put({"messages": [same] * (number + 1)})
        with saver.store.read() as reader:
            assert reader.rows("SELECT count(*) FROM langgraph_values WHERE base IS NOT NULL") == [(0,)]
        saver.prune(["thread-1"])
        assert ids(saver.list(at())) == ["id-0005"]
