"""Files of LangGraph's own SQLite saver, and how they are compared with what was imported of them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.sqlite import SqliteSaver

from agent_checkpoint_langgraph import AgentCheckpointSaver

from .conftest import Line, rewrite


@contextmanager
def stock(path: Path, serde: Any = None) -> Iterator[SqliteSaver]:
    """LangGraph's saver on a file."""
    with closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        yield SqliteSaver(connection, serde=serde)


def filled(path: Path, *threads: str, count: int = 3, **values: Any) -> Path:
    """A file with a line of so many checkpoints in each thread."""
    with stock(path) as saver:
        for thread_id in threads:
            line = Line(saver, thread_id)
            for number in range(count):
                config = line.put({"n": number, **values}, checkpoint_id=f"{thread_id}-{number:04}")
                saver.put_writes(config, [("n", number), ("n", "second")], "task", "~path")
    return path


def place(found: CheckpointTuple) -> tuple[str, str, str]:
    configurable = found.config["configurable"]
    return configurable["thread_id"], configurable["checkpoint_ns"], configurable["checkpoint_id"]


def everything(saver: Any) -> list[CheckpointTuple]:
    """Every tuple that a saver has, by thread and id."""
    return sorted(saver.list(None), key=place)


def assert_same(old: Path, saver: AgentCheckpointSaver, serde: Any = None) -> None:
    """Everything that the file has is in the saver, and nothing else; each thread in the same order."""
    with stock(old, serde) as theirs:
        assert everything(saver) == everything(theirs)
        for thread_id in {place(found)[0] for found in theirs.list(None)}:
            config: Any = {"configurable": {"thread_id": thread_id}}
            assert [place(each) for each in saver.list(config)] == [place(each) for each in theirs.list(config)]


def relabelled(old: Path, kind: str, data: bytes, thread_id: str, checkpoint_id: str) -> None:
    """The file with other bytes for one of its checkpoints."""
    changed = rewrite(
        old,
        "UPDATE checkpoints SET type = ?, checkpoint = ? WHERE thread_id = ? AND checkpoint_id = ?",
        kind,
        data,
        thread_id,
        checkpoint_id,
    )
    assert changed == 1


class XorCipher:
    """Hides what it is given, each time differently; it protects nothing."""

    def __init__(self, key: int = 7) -> None:
        self._key = key

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        nonce = os.urandom(1)[0]
        return "xor", bytes([nonce, self._check(plaintext)]) + self._turned(plaintext, nonce)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "xor"
        plaintext = self._turned(ciphertext[2:], ciphertext[0])
        if self._check(plaintext) != ciphertext[1]:
            raise ValueError("wrong key")
        return plaintext

    def _turned(self, data: bytes, nonce: int) -> bytes:
        return bytes(byte ^ nonce ^ self._key for byte in data)

    def _check(self, data: bytes) -> int:
        return (sum(data) + self._key) % 256


def encrypting(key: int = 7) -> EncryptedSerializer:
    return EncryptedSerializer(XorCipher(key))
