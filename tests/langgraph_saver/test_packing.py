"""Models are packed as LangGraph packs them, byte for byte, the quick way as well as the first time."""

from __future__ import annotations

import gc
import sys
import uuid
import warnings
import weakref
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from functools import wraps
from typing import Any, Generic, TypeVar

import ormsgpack
import pytest
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import (
    AliasGenerator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretStr,
    SerializeAsAny,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)
from pydantic.alias_generators import to_camel

from agent_checkpoint_langgraph.serde import MOST_TYPES, StrictSerializer

T = TypeVar("T")


class Color(Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    y: float = 1.5


class Point3(Point):
    z: int = 3


class Holder(BaseModel):
    point: Point
    any_point: SerializeAsAny[Point]
    points: list[Point]
    anything: Any = None
    by_name: dict[str, Point] = Field(default_factory=dict)


class Configured(BaseModel):
    model_config = ConfigDict(
        extra="allow", alias_generator=AliasGenerator(alias=to_camel), populate_by_name=True, serialize_by_alias=True
    )
    some_name: str
    hidden: int = Field(default=1, exclude=True)
    _private: int = PrivateAttr(default=2)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def doubled(self) -> str:
        return self.some_name * 2

    @field_serializer("some_name")
    def shout(self, value: str) -> str:
        return value.upper()


class Wrapped(BaseModel):
    inner: int

    @model_serializer(mode="wrap")
    def wrap(self, handler: Any) -> dict[str, Any]:
        return {**handler(self), "wrapped": True}


class Own(BaseModel):
    """Dumps something else the second time."""

    inner: int

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {"inner": self.inner + 1, "times": options}


class Numbers(RootModel[list[int]]):
    pass


class Box(BaseModel, Generic[T]):
    content: T


class Rich(BaseModel):
    when: datetime
    id: uuid.UUID
    color: Color
    price: Decimal
    secret: SecretStr
    raw: bytes
    members: set[int]


VALUES: list[Any] = [
    HumanMessage(content="hello", id="1"),
    HumanMessage(content=[{"type": "text", "text": "a"}, "b"], additional_kwargs={"at": datetime(2026, 1, 1)}),
    AIMessage(content="", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}]),
    AIMessageChunk(content="part", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
    ToolMessage(content="done", tool_call_id="c", artifact={"raw": b"\0\1", "point": Point(x=1)}),
    SystemMessage(content="be brief"),
    FunctionMessage(content="3", name="f"),
    RemoveMessage(id="1"),
    Document(page_content="text", metadata={"page": 3}),
    Point(x=1),
    Point3(x=1),
    Holder(point=Point3(x=1), any_point=Point3(x=2), points=[Point(x=3), Point3(x=4)], anything=Color.RED),
    Holder(point=Point(x=1), any_point=Point(x=2), points=[], anything=HumanMessage("in"), by_name={"a": Point(x=1)}),
    Configured(some_name="a", more=[1, Point(x=2)]),  # type: ignore[call-arg]
    Wrapped(inner=1),
    Own(inner=1),
    Numbers([1, 2]),
    Box[int](content=1),
    Box[Point](content=Point(x=1)),
    Rich(
        when=datetime(2026, 1, 2, tzinfo=timezone.utc),
        id=uuid.UUID(int=7),
        color=Color.RED,
        price=Decimal("1.5"),
        secret=SecretStr("hidden"),
        raw=b"\xff",
        members={1, 2},
    ),
]


@pytest.fixture
def ours() -> StrictSerializer:
    return StrictSerializer(True)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_model_has_the_same_bytes_every_time(ours: StrictSerializer, value: Any) -> None:
    theirs = JsonPlusSerializer()
    for _ in range(3):
        assert ours.dumps_typed(value) == theirs.dumps_typed(value)
        assert ours.dumps_typed([value, {"in": value}]) == theirs.dumps_typed([value, {"in": value}])


def test_another_value_of_a_known_type_has_the_same_bytes(ours: StrictSerializer) -> None:
    theirs = JsonPlusSerializer()
    ours.dumps_typed(Holder(point=Point(x=1), any_point=Point(x=1), points=[]))
    for value in (
        Holder(point=Point3(x=1), any_point=Point3(x=2), points=[Point3(x=4)], anything={Color.RED: [Own(inner=2)]}),
        Holder.model_construct(point="no point", any_point=Point(x=1), points=[], by_name={}),  # never validated
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydantic's, of the one that was never validated
            assert ours.dumps_typed(value) == theirs.dumps_typed(value)


def test_a_model_that_cannot_be_dumped_fails_as_the_first_time(ours: StrictSerializer) -> None:
    class Failing(BaseModel):
        inner: int

        @field_serializer("inner")
        def fail(self, value: int) -> int:
            return 1 // value

    assert ours.dumps_typed(Failing(inner=1)) == JsonPlusSerializer().dumps_typed(Failing(inner=1))
    for serializer in (ours, JsonPlusSerializer()):
        with pytest.raises(ormsgpack.MsgpackEncodeError, match="Failing"):
            serializer.dumps_typed(Failing(inner=0))


def test_half_a_surrogate_pair_in_a_message_is_refused_the_quick_way_too(ours: StrictSerializer) -> None:
    ours.dumps_typed(HumanMessage(content="fine"))
    with pytest.raises(ormsgpack.MsgpackEncodeError, match="HumanMessage"):
        ours.dumps_typed(HumanMessage(content="\ud800"))


def test_a_model_that_was_built_anew_is_packed_as_it_is_now(ours: StrictSerializer) -> None:
    class Late(BaseModel):
        inner: Point

    later = JsonPlusSerializer()
    assert ours.dumps_typed(Late(inner=Point3(x=1))) == later.dumps_typed(Late(inner=Point3(x=1)))
    Late.model_fields["inner"].annotation = SerializeAsAny[Point]  # type: ignore[assignment]
    Late.model_rebuild(force=True)
    packed = ours.dumps_typed(Late(inner=Point3(x=1)))
    assert packed == later.dumps_typed(Late(inner=Point3(x=1)))
    assert b"z" in packed[1]


def test_types_that_are_made_by_the_thousand_are_not_all_kept(ours: StrictSerializer) -> None:
    seen = []
    for number in range(2 * MOST_TYPES):
        kind = create_model(f"Made{number}", __module__=__name__, inner=(int, 1))
        globals()[kind.__name__] = kind
        try:
            assert ours.dumps_typed(kind()) == JsonPlusSerializer().dumps_typed(kind())
        finally:
            del globals()[kind.__name__]
        seen.append(weakref.ref(kind))
    gc.collect()
    assert sum(each() is not None for each in seen) <= MOST_TYPES + 1


def test_a_message_is_packed_without_a_call_of_model_dump(ours: StrictSerializer) -> None:
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)
    try:
        ours.dumps_typed([HumanMessage(content="a"), Own(inner=1)])
    finally:
        sys.setprofile(None)
    assert BaseModel.model_dump.__code__ not in called
    assert Own.model_dump.__code__ in called


def test_names_are_dumped_as_the_first_value_did_not_show(ours: StrictSerializer) -> None:
    class Out(BaseModel):
        note: str = Field(default="default", serialization_alias="outNote")

    ours.dumps_typed(ToolMessage(content="", tool_call_id="c"))
    for value in (
        ToolMessage(content="", tool_call_id="c", artifact=Out(note="kept")),
        Holder.model_construct(a=Out()),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert ours.dumps_typed(value) == JsonPlusSerializer().dumps_typed(value)


def redacting(dump: Any) -> Any:
    @wraps(dump)
    def model_dump(self: BaseModel, **options: Any) -> dict[str, Any]:
        return {**dump(self, **options), "inner": "***"}

    return model_dump


def test_whatever_is_put_in_the_place_of_model_dump_is_called(
    ours: StrictSerializer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrapped(BaseModel):
        inner: int
        model_dump = redacting(BaseModel.model_dump)

    class Later(BaseModel):
        inner: int

    theirs = JsonPlusSerializer()
    for value in (Wrapped(inner=4111), Wrapped(inner=4112)):
        assert ours.dumps_typed(value) == theirs.dumps_typed(value)
        assert b"***" in ours.dumps_typed(value)[1]

    ours.dumps_typed(Later(inner=1))
    alone = Later(inner=2)
    object.__setattr__(alone, "model_dump", lambda: {"inner": "***"})
    assert b"***" in ours.dumps_typed(alone)[1]
    Later.model_dump = redacting(BaseModel.model_dump)  # type: ignore[method-assign]
    assert b"***" in ours.dumps_typed(Later(inner=3))[1]
    monkeypatch.setattr(BaseModel, "model_dump", redacting(BaseModel.model_dump))
    assert b"***" in ours.dumps_typed(Point(x=1))[1]


def test_a_serializer_that_runs_once_is_run_once(ours: StrictSerializer) -> None:
    class Once(BaseModel):
        inner: list[int]

        @field_serializer("inner")
        def take(self, value: list[int]) -> int:
            return value.pop()

    assert b"\x07" in ours.dumps_typed(Once(inner=[7]))[1]
