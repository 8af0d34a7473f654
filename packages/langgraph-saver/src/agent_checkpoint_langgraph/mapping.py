"""From LangGraph's configs, checkpoints and metadata to what is stored, and back.

Everything is serialised here, at the time of the call: afterwards the caller
may change its state, while the write waits for its turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, get_checkpoint_metadata

from agent_checkpoint import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import Checkpoint, CheckpointMetadata
    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint_langgraph.serde import Typed

COMPONENT = "langgraph"
# Before this format, what a task sent was stored with the writes of the parent.
PENDING_SENDS_FORMAT = 4
# Keys of config and metadata that look like credentials: these stay out of the database.
SECRET_WORDS = frozenset(
    [
        "secret",
        "secrets",
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "token",
        "auth",
        "authorization",
        "bearer",
        "credential",
        "credentials",
        "jwt",
        "apikey",
        "apikeys",
    ]
)
KEYS_OF = frozenset(
    [
        "api",
        "secret",
        "private",
        "access",
        "signing",
        "encryption",
        "auth",
        "service",
        "openai",
        "anthropic",
        "google",
        "azure",
        "aws",
        "langsmith",
        "langchain",
    ]
)
# What LangGraph itself puts into metadata is never a secret.
OWN_KEYS = frozenset(("source", "step", "parents", "run_id", "thread_id", "writes", "counters_since_delta_snapshot"))
# What no scope may be longer than, or have in it.
MAX_SCOPE_BYTES = 512
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
BIGGEST = 2**63 - 1
# How deep metadata is looked into, and how much of what JSON cannot hold is shown.
DEEPEST = 50
MOST_SHOWN = 10_000


def looks_secret(key: str) -> bool:
    """Whether a key of config or metadata is named like a credential: ``openai_api_key``, ``authToken``, …"""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    *before, last = re.findall(r"[a-z]+", spaced) or [""]
    return last in SECRET_WORDS or (last in ("key", "keys") and bool(before) and before[-1] in KEYS_OF)


class Address(NamedTuple):
    """Which thread, which namespace of it, which checkpoint (None: the latest)."""

    thread_id: str
    namespace: str
    checkpoint_id: str | None

    @property
    def scope(self) -> str:
        """The scope that guards the thread."""
        return scope_of(self.thread_id)

    def config(self, checkpoint_id: str | None = None) -> RunnableConfig:
        """The config of a checkpoint in this namespace."""
        return {
            "configurable": {
                "thread_id": self.thread_id,
                "checkpoint_ns": self.namespace,
                "checkpoint_id": checkpoint_id or self.checkpoint_id,
            }
        }


def thread_name(thread_id: Any) -> str:
    """A thread id of any type as the text that it is stored by.

    Raises:
        InvalidInputError: there is none, or its text cannot be stored.
    """
    if thread_id is None:
        raise InvalidInputError(
            "thread_id: is missing",
            hint='name the thread: {"configurable": {"thread_id": "…"}}',
            field="thread_id",
        )
    return storable("thread_id", str(thread_id))


def scope_of(thread_id: Any) -> str:
    """The scope of a thread: ``langgraph/<thread_id>``, or by a digest where that is no name of a scope."""
    name = thread_name(thread_id)
    scope = f"langgraph/{name}"
    if len(scope.encode()) > MAX_SCOPE_BYTES or CONTROL.search(name):
        return f"langgraph/sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return scope


def address(config: RunnableConfig) -> Address:
    """What a config points at.

    Raises:
        InvalidInputError: it names no thread, or not by text that can be stored.
    """
    configurable = config.get("configurable") or {}
    checkpoint_id = configurable.get("checkpoint_id")
    return Address(
        thread_name(configurable.get("thread_id")),
        storable("checkpoint_ns", str(configurable.get("checkpoint_ns") or "")),
        None if not checkpoint_id else storable("checkpoint_id", str(checkpoint_id)),
    )


class Saving(NamedTuple):
    """A checkpoint, ready to be stored.

    ``spare`` is what the unchanged channels hold that are not known to be in the
    store; ``values`` what any of them holds, should the parent be gone meanwhile.
    """

    address: Address
    checkpoint_id: str
    format: int
    source: str | None
    step: int | None
    run_id: str | None
    metadata: Typed
    body: Typed
    versions: Mapping[str, Any]
    changed: dict[str, Typed]
    dropped: frozenset[str]
    spare: Mapping[str, Typed]
    values: Mapping[str, Any]


def saving(
    serde: SerializerProtocol,
    is_secret: Callable[[str], bool],
    config: RunnableConfig,
    checkpoint: Checkpoint,
    metadata: CheckpointMetadata,
    new_versions: Mapping[str, Any],
    known_versions: Mapping[str, Any],
) -> Saving:
    """A checkpoint with all in it serialised that its parent does not have in these ``known_versions``.

    Raises:
        InvalidInputError: a value cannot be serialised; it names the channel.
    """
    body = {key: value for key, value in checkpoint.items() if key != "channel_values"}
    values = checkpoint.get("channel_values") or {}
    versions = dict(checkpoint.get("channel_versions") or {})
    changed = {
        storable("channel", channel): serialized(serde, channel, value)
        for channel, value in values.items()
        # What has no version belongs to this checkpoint alone.
        if channel in new_versions or channel not in versions
    }
    meta = without_secrets(dict(get_checkpoint_metadata(config, metadata)), is_secret)
    return Saving(
        address(config),
        storable("checkpoint id", str(checkpoint["id"])),
        checkpoint.get("v") or 1,
        text_column(meta.get("source")),
        integer_column(meta.get("step")),
        text_column(meta.get("run_id")),
        metadata_typed(serde, meta),
        serialized(serde, "checkpoint", body),
        versions,
        changed,
        frozenset(channel for channel in new_versions if channel not in values),
        {
            channel: serialized(serde, channel, value)
            for channel, value in values.items()
            if channel not in changed and known_versions.get(channel) != versions[channel]
        },
        values,
    )


class TaskWrite(NamedTuple):
    """One write of a task; a special one (error, interrupt, …) has a negative ``idx``, and its last value counts."""

    idx: int
    channel: str
    value: Typed


def task_writes(serde: SerializerProtocol, writes: Sequence[tuple[str, Any]]) -> list[TaskWrite]:
    """The writes of a task, serialised.

    Raises:
        InvalidInputError: a value cannot be serialised; it names the channel.
    """
    return [
        TaskWrite(WRITES_IDX_MAP.get(channel, index), storable("channel", channel), serialized(serde, channel, value))
        for index, (channel, value) in enumerate(writes)
    ]


def serialized(serde: SerializerProtocol, channel: str, value: Any) -> Typed:
    """The value of a channel as bytes.

    Raises:
        InvalidInputError: it cannot be serialised.
    """
    try:
        kind, data = serde.dumps_typed(value)
    except Exception as error:
        raise InvalidInputError(
            f"channel {channel!r} cannot be saved: {error}",
            hint=getattr(error, "hint", "")
            or "keep in the state what msgpack can hold: text without half surrogate pairs, integers of 64 bits, …",
            field=f"channel_values.{channel}",
            channel=channel,
        ) from error
    return kind, bytes(data)


def without_secrets(metadata: dict[Any, Any], is_secret: Callable[[str], bool], depth: int = 0) -> dict[Any, Any]:
    """Metadata without the keys that are secret, at any depth; LangGraph's own keys stay."""
    kept = {}
    for key, value in metadata.items():
        if depth == 0 and isinstance(key, str) and key in OWN_KEYS:
            kept[key] = value
        elif not (isinstance(key, str) and is_secret(key)):
            inside = type(value) is dict and depth < DEEPEST
            kept[key] = without_secrets(value, is_secret, depth + 1) if inside else value
    return kept


def metadata_typed(serde: SerializerProtocol, metadata: Mapping[str, Any]) -> Typed:
    """Metadata as JSON where that loses nothing, else serialised; what cannot be, is kept as its ``repr``.

    A run never fails for its metadata.
    """
    with suppress(ValueError):  # an integer of more digits than Python prints
        if _is_plain(metadata):
            return "json", json.dumps(metadata).encode("ascii")
    with suppress(Exception):
        typed = serde.dumps_typed(dict(metadata))
        serde.loads_typed(typed)  # what cannot come back would fail whoever looks at it later
        return typed
    return "json", json.dumps(_Shown().of(dict(metadata))).encode("ascii")


def metadata_value(serde: SerializerProtocol, kind: str, data: bytes) -> dict[str, Any]:
    """The metadata back."""
    value: dict[str, Any] = json.loads(data) if kind == "json" else serde.loads_typed((kind, data))
    return value


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if kind in (str, int, bool, float, type(None)):
        return True
    if depth > DEEPEST:
        return False
    if kind is dict:
        return all(type(key) is str and _is_plain(each, depth + 1) for key, each in value.items())
    return kind is list and all(_is_plain(each, depth + 1) for each in value)


class _Shown:
    """Metadata with text in place of what JSON cannot hold; so much of it as anybody wants to see."""

    def __init__(self) -> None:
        self._left = MOST_SHOWN

    def of(self, value: Any, depth: int = 0) -> Any:
        """The same, shown."""
        kind = type(value)
        self._left -= 1
        if self._left < 0:
            return "…"
        if kind in (str, bool, float, type(None)) or (kind is int and -BIGGEST <= value <= BIGGEST):
            return value
        if depth < DEEPEST and kind is dict:
            return {_text_of(str, key): self.of(each, depth + 1) for key, each in value.items()}
        if depth < DEEPEST and kind in (list, tuple, set, frozenset):
            return [self.of(each, depth + 1) for each in value]
        return _text_of(repr, value)


def _text_of(show: Callable[[Any], str], value: Any) -> str:
    try:
        return str(show(value))
    except Exception:
        return f"<{type(value).__name__}>"


def storable(field: str, text: str) -> str:
    """Text that every database can store.

    Raises:
        InvalidInputError: it has NUL or half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidInputError(f"{field}: must be text without NUL or half surrogate pairs", field=field)
    return text


def text_column(value: Any) -> str | None:
    """What can be looked up in a column of text."""
    if type(value) is not str:
        return str(value) if type(value).__name__ == "UUID" else None
    try:
        return storable("", value)
    except InvalidInputError:
        return None


def integer_column(value: Any) -> int | None:
    """What can be looked up in a column of numbers."""
    return value if type(value) is int and -BIGGEST <= value <= BIGGEST else None
