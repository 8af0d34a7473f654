"""A checkpoint that is stored in one piece, taken apart into its channels without making objects of them.

In the files of other savers a checkpoint is one serialised dictionary. The
bytes of each channel's value are cut out of it as they are: no class is
imported, and nothing is lost on the way.
"""

from __future__ import annotations

import json
from struct import unpack_from
from typing import TYPE_CHECKING, Any, NamedTuple

import ormsgpack
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from agent_checkpoint import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from langgraph.checkpoint.serde.base import SerializerProtocol

    from agent_checkpoint_langgraph.serde import Typed

VALUES = "channel_values"
VERSIONS = "channel_versions"
# What the dictionaries of msgpack begin with: up to fifteen entries, or a count of two or four bytes.
SMALL_MAP, MAP_16, MAP_32 = 0x80, 0xDE, 0xDF
NIL = 0xC0
# For what begins with such a byte: bytes that follow it.
FIXED = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
# How the number of its bytes is written, and how many bytes come beside these.
SIZED = {
    0xC4: (">B", 0), 0xC5: (">H", 0), 0xC6: (">I", 0), 0xC7: (">B", 1), 0xC8: (">H", 1), 0xC9: (">I", 1),
    0xD9: (">B", 0), 0xDA: (">H", 0), 0xDB: (">I", 0),
}  # fmt: skip
# How the number of its entries is written, and how many values each entry is.
COUNTED = {0xDC: (">H", 1), 0xDD: (">I", 1), MAP_16: (">H", 2), MAP_32: (">I", 2)}
WIDTH = {">B": 1, ">H": 2, ">I": 4}


class Pieces(NamedTuple):
    """A checkpoint: the values of its channels, the rest of its dictionary, and what of that has to be known."""

    values: dict[str, Typed]
    body: Typed
    versions: Mapping[str, Any]
    format: Any


class Cutter:
    """Takes checkpoints apart; what comes of it, a saver with this serializer can load.

    Under an encrypting serializer everything is encrypted again, piece by
    piece. Under one that is not LangGraph's, its own loading and dumping is
    the only way there is.
    """

    def __init__(self, serde: SerializerProtocol) -> None:
        self._serde = serde
        self._sealed = serde if isinstance(serde, EncryptedSerializer) else None
        inner = serde.serde if isinstance(serde, EncryptedSerializer) else serde
        self._cuts: dict[str, Callable[[bytes], Pieces]] = {}
        if isinstance(inner, JsonPlusSerializer):
            self._cuts = {"msgpack": _cut_msgpack, "json": _cut_json}

    def pieces(self, kind: str, data: bytes) -> Pieces:
        """The pieces of a checkpoint.

        Raises:
            InvalidInputError: it cannot be read, or not with this serializer.
        """
        try:
            plain_kind, plain = self._opened(kind, data)
            cut = self._cuts.get(plain_kind)
            found = self._loaded(kind, data) if cut is None else cut(plain)
        except Exception as error:
            raise InvalidInputError(f"cannot be read as {kind!r}: {error}", field="checkpoint") from error
        if cut is None or self._sealed is None:
            return found
        sealed = {channel: self.value(*value) for channel, value in found.values.items()}
        return found._replace(values=sealed, body=self.value(*found.body))

    def value(self, kind: str, data: bytes) -> Typed:
        """A value as the saver's serializer would have it; what is encrypted stays as it is."""
        if self._sealed is None or "+" in kind:
            return kind, data
        cipher, data = self._sealed.cipher.encrypt(data)
        return f"{kind}+{cipher}", data

    @property
    def seals(self) -> bool:
        """Whether what comes of it is encrypted."""
        return self._sealed is not None

    def check(self, kind: str, data: bytes) -> None:
        """Make sure that a value can be loaded some day, without loading it where that makes objects.

        Raises:
            InvalidInputError: the serializer is not the one that it was saved with.
        """
        try:
            plain_kind, _ = self._opened(kind, data)
            if not self._cuts or plain_kind not in ("msgpack", "json", "null", "bytes", "bytearray"):
                self._serde.loads_typed((kind, data))
        except Exception as error:
            raise InvalidInputError(f"cannot be read as {kind!r}: {error}", field="checkpoint") from error

    def _opened(self, kind: str, data: bytes) -> Typed:
        plain_kind, plus, cipher = kind.partition("+")
        if not plus or not self._cuts:
            return kind, data
        if self._sealed is None:
            raise ValueError("it is encrypted, and the saver has no serializer for that")
        return plain_kind, self._sealed.cipher.decrypt(cipher, data)

    def _loaded(self, kind: str, data: bytes) -> Pieces:
        checkpoint = dict(self._serde.loads_typed((kind, data)))
        values = checkpoint.pop(VALUES, None) or {}
        return Pieces(
            {channel: _typed(*self._serde.dumps_typed(value)) for channel, value in values.items()},
            _typed(*self._serde.dumps_typed(checkpoint)),
            checkpoint.get(VERSIONS) or {},
            checkpoint.get("v") or 1,
        )


def _typed(kind: str, data: bytes) -> Typed:
    return kind, bytes(data)


def _cut_json(data: bytes) -> Pieces:
    checkpoint = json.loads(data)
    values = checkpoint.pop(VALUES, None) or {}
    return Pieces(
        {channel: ("json", json.dumps(value).encode()) for channel, value in values.items()},
        ("json", json.dumps(checkpoint).encode()),
        checkpoint.get(VERSIONS) or {},
        checkpoint.get("v") or 1,
    )


def _cut_msgpack(data: bytes) -> Pieces:
    values: dict[str, Typed] = {}
    facts: dict[str, Any] = {}
    rest: list[bytes] = []
    for key, start, begin, end in _entries(data, 0):
        if key == VALUES:
            if data[begin] != NIL:
                values = {channel: _value(data[at:to]) for channel, _, at, to in _entries(data, begin)}
            continue
        rest.append(data[start:end])
        if key in (VERSIONS, "v"):
            facts[key] = _plain(data[begin:end])
    body = ("msgpack", b"".join((_map_of(len(rest)), *rest)))
    return Pieces(values, body, facts.get(VERSIONS) or {}, facts.get("v") or 1)


def _value(data: bytes) -> Typed:
    """A value as LangGraph's serializer writes it when it stands alone."""
    first = data[0]
    if first == NIL:
        return "null", b""
    if first in (0xC4, 0xC5, 0xC6):
        return "bytes", data[1 + WIDTH[SIZED[first][0]] :]
    return "msgpack", data


def _plain(data: bytes) -> Any:
    return ormsgpack.unpackb(data, ext_hook=ormsgpack.Ext, option=ormsgpack.OPT_NON_STR_KEYS)


def _map_of(count: int) -> bytes:
    return bytes([SMALL_MAP | count]) if count < 16 else bytes([MAP_16]) + count.to_bytes(2, "big")


def _entries(data: bytes, at: int) -> Iterator[tuple[Any, int, int, int]]:
    """For each entry of a dictionary its key, and where the key, the value and what follows begin."""
    first = data[at]
    at += 1
    if first & 0xF0 == SMALL_MAP:
        count = first & 0x0F
    elif first in (MAP_16, MAP_32):
        layout, _ = COUNTED[first]
        (count,) = unpack_from(layout, data, at)
        at += WIDTH[layout]
    else:
        raise ValueError("it is no dictionary")
    for _ in range(count):
        begin = _end(data, at)
        end = _end(data, begin)
        yield _plain(data[at:begin]), at, begin, end
        at = end


def _end(data: bytes, at: int) -> int:
    """Where the value ends that begins there."""
    left = 1
    while left:
        first = data[at]
        at += 1
        left -= 1
        if first < 0x80 or first >= 0xE0 or first in (NIL, 0xC2, 0xC3):
            continue
        if first < 0x90:
            left += 2 * (first & 0x0F)
        elif first < 0xA0:
            left += first & 0x0F
        elif first < 0xC0:
            at += first & 0x1F
        elif first in FIXED:
            at += FIXED[first]
        elif first in SIZED:
            layout, beside = SIZED[first]
            at += unpack_from(layout, data, at)[0] + WIDTH[layout] + beside
        else:
            layout, each = COUNTED[first]
            left += unpack_from(layout, data, at)[0] * each
            at += WIDTH[layout]
    if at > len(data):
        raise ValueError("it ends too early")
    return at
