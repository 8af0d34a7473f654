"""Serialisation: LangGraph's own, made strict in both directions.

What is loaded is named by an allowlist, since a stored type is a class to
import and call; pickle is never loaded. What could not be loaded again is
refused by its channel's name. What LangGraph's serializer makes into something
else (a tuple into a list, a subclass of ``dict`` into a ``dict``) it makes here too.
"""

from __future__ import annotations

import importlib.util
import inspect
from threading import local
from types import MethodType
from typing import TYPE_CHECKING, Any

import ormsgpack
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, ConfigDict, Field

from agent_checkpoint import InvalidInputError, StorageCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from langgraph.checkpoint.serde.base import SerializerProtocol
    from langgraph.checkpoint.serde.event_hooks import SerdeEvent

Typed = tuple[str, bytes]
"""A serialised value: its kind, and its bytes."""

# Of so many types it is remembered that they come back: a program may make a new one for each call.
MOST_TYPES = 1_000


class StrictSerializer(JsonPlusSerializer):
    """``JsonPlusSerializer`` that loads only what is on its allowlist, and saves only what it may load.

    A type that is not on the list raises when it is saved or loaded; LangGraph's
    own strict serializer would put a dictionary in its place. Text with half a
    surrogate pair raises when it is saved; elsewhere it becomes a question mark.
    So does an array of Python objects, which elsewhere comes back as None.
    """

    def __init__(self, allowed: Any = None) -> None:
        super().__init__(allowed_msgpack_modules=allowed)
        self.returning: set[type] = set()
        """Types that were found to come back."""

    def dumps_typed(self, obj: Any) -> Typed:
        """The value's kind and bytes.

        Raises:
            InvalidInputError: it holds what could not be loaded, as a type that is not on the allowlist.
        """
        outer, _now.serializer, _now.refusal = getattr(_now, "serializer", None), self, None
        try:
            kind, data = ("msgpack", _encode(obj)) if _is_msgpack(obj) else super().dumps_typed(obj)
        except Exception:
            if _now.refusal is not None:  # msgpack tells another story
                raise _now.refusal from None
            raise
        finally:
            _now.serializer = outer
        return kind, bytes(data)

    def with_msgpack_allowlist(self, extra_allowlist: Any) -> StrictSerializer:
        """A copy with more types on its list."""
        clone = super().with_msgpack_allowlist(extra_allowlist)
        assert isinstance(clone, StrictSerializer)
        if clone is not self:
            clone.returning = set()
        return clone

    def check_returns(self, kind: type, packed: ormsgpack.Ext) -> None:
        """Note that a type comes back, or raise ``InvalidInputError`` where it would be refused when it is loaded."""
        try:
            self.loads_typed(("msgpack", ormsgpack.packb(packed)))
        except InvalidInputError as refusal:
            _now.refusal = refusal
            raise
        if len(self.returning) >= MOST_TYPES:
            self.returning.clear()
        self.returning.add(kind)

    def loads_typed(self, data: Typed) -> Any:
        """The value back.

        Raises:
            InvalidInputError: it holds a type that is not on the allowlist.
            StorageCorruptError: it is not what this serializer saves.
        """
        outer = getattr(_now, "blocked", None)
        blocked = _now.blocked = []
        try:
            value = super().loads_typed(data)
        except Exception as error:
            raise StorageCorruptError(f"a saved value of kind {data[0]!r} cannot be loaded: {error}") from error
        finally:
            _now.blocked = outer
        if blocked:
            module, name = blocked[0]
            raise InvalidInputError(
                f"the state holds {module}.{name}, a type that is not on the allowlist of what may be loaded",
                hint=f"if you trust the database: saver.with_allowlist([({module!r}, {name!r})]), "
                "or set LANGGRAPH_STRICT_MSGPACK=true before LangGraph is imported, which derives the list "
                "from the graph's schema; serde=JsonPlusSerializer(allowed_msgpack_modules=True) allows everything",
                field="state",
                module=module,
                type=name,
            )
        return value


def checked(serde: SerializerProtocol | None) -> SerializerProtocol:
    """The serializer to use; ours where none is given.

    Raises:
        InvalidInputError: it would load pickled objects.
    """
    if serde is None:
        return StrictSerializer()
    inner = serde
    while isinstance(inner, EncryptedSerializer):
        inner = inner.serde
    if getattr(inner, "pickle_fallback", False):
        raise InvalidInputError(
            "serde: pickle_fallback is not supported: who can write to the database could run code here",
            hint="keep picklable objects out of the state, or convert them in the node",
            field="serde",
        )
    return serde


def encrypts(kind: str) -> bool:
    """Whether a value of this kind is encrypted: two of those never resemble each other."""
    return "+" in kind


def _is_msgpack(obj: Any) -> bool:
    return obj is not None and not isinstance(obj, (bytes, bytearray))


def _make_encoder() -> Callable[[Any], bytes]:
    """LangGraph's encoder, told not to replace what it cannot encode, nor to pack what cannot come back.

    The option is a constant of its module, which other savers in this process
    use: so a second, private instance of the module gets another one.
    """
    spec = importlib.util.find_spec("langgraph.checkpoint.serde.jsonplus")
    assert spec is not None
    assert spec.loader is not None
    private = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(private)
    private._option &= ~ormsgpack.OPT_REPLACE_SURROGATES  # type: ignore[attr-defined]
    private._msgpack_default = _Packer(private).pack  # type: ignore[attr-defined]
    encode: Callable[[Any], bytes] = private._msgpack_enc
    return encode


class _Packer:
    """Packs what msgpack does not know as LangGraph does, with a look at whether it would come back.

    A state is mostly messages, which are pydantic's models: LangGraph asks of
    each value what it can do, and pydantic is called with fifteen arguments.
    Where a value has pydantic's own ``model_dump``, the answer is known, and
    what that would call is called: five sixths of the time for the same bytes.
    """

    def __init__(self, private: Any) -> None:
        self._default = private._msgpack_default
        self._option = private._option
        self._tag: Any = getattr(private, "EXT_PYDANTIC_V2", None)
        self._model_dump: Any = BaseModel.model_dump
        # Its default is not that of what it calls before pydantic 2.11.
        self._by_alias = inspect.signature(BaseModel.model_dump).parameters["by_alias"].default
        if not self._is_like_theirs():
            self._model_dump = None

    def pack(self, value: Any) -> Any:
        """What stands for the value.

        Raises:
            InvalidInputError: it would not come back.
        """
        dump = getattr(value, "model_dump", None)
        if type(dump) is MethodType and dump.__func__ is self._model_dump:
            kind = value.__class__
            values = value.__pydantic_serializer__.to_python(value, by_alias=self._by_alias)
            parts = (kind.__module__, kind.__name__, values, "model_validate_json")
            packed = ormsgpack.Ext(self._tag, ormsgpack.packb(parts, self.pack, self._option))
        else:
            _refuse_pointers(value)
            packed = self._default(value)
        serializer = getattr(_now, "serializer", None)
        if serializer is not None and type(value) not in serializer.returning and isinstance(packed, ormsgpack.Ext):
            serializer.check_returns(type(value), packed)
        return packed

    def _is_like_theirs(self) -> bool:
        """Whether it makes the same bytes as LangGraph, and nobody has put a function around pydantic's."""
        if self._tag is None or self._model_dump.__globals__["__name__"] != "pydantic.main":
            return False
        try:
            probe = _Probe.model_validate({"name": "a", "inner": _Probe(name="b"), "more": b"c"})
            return ormsgpack.packb(self.pack(probe)) == ormsgpack.packb(self._default(probe))
        except Exception:
            return False  # another pydantic, or LangGraph, than any we know


def _refuse_pointers(value: Any) -> None:
    """Refuse an array of Python objects: its bytes are addresses in this process's memory."""
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        _now.refusal = InvalidInputError(
            "the state holds an array of Python objects, whose bytes are addresses in memory",
            hint="keep a list of them, as by array.tolist()",
            field="state",
        )
        raise _now.refusal


class _Probe(BaseModel):
    """A model with what packing could get wrong."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(serialization_alias="other")
    hidden: int = Field(default=1, exclude=True)
    inner: Any = None


_now = local()
"""What this thread is doing: ``serializer``, which saves; ``refusal``, why it cannot; ``blocked``, what a load met."""
_encode = _make_encoder()


def _on_event(event: SerdeEvent) -> None:
    blocked = getattr(_now, "blocked", None)
    if blocked is not None and event["kind"] in ("msgpack_blocked", "msgpack_method_blocked"):
        blocked.append((event["module"], event["name"]))


register_serde_event_listener(_on_event)
