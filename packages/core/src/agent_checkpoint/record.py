"""What a record is: a named tuple declared as a class, cheap to define and to make.

To type checkers it is ``typing.NamedTuple``. At run time it is built here:
importing ``typing`` would cost a fifth of the command's start-up, and
``collections.namedtuple`` compiles code for each of its classes, which for all
of ours would cost another tenth.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter

__all__ = ["Record"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple as Record
else:
    try:
        from _collections import _tuplegetter as _getter
    except ImportError:  # another Python than CPython

        def _getter(place, doc):
            return property(itemgetter(place), doc=doc)

    _new = tuple.__new__

    class _Values(tuple):
        """The methods of every record, as those of a named tuple."""

        __slots__ = ()

        def __new__(cls, *values, **named):
            fields = cls._fields
            if len(values) != len(fields) or named:
                given = {**cls._field_defaults, **dict(zip(fields, values, strict=False)), **named}
                if (
                    len(values) > len(fields)
                    or given.keys() != set(fields)
                    or named.keys() & set(fields[: len(values)])
                ):
                    raise TypeError(f"{cls.__name__} takes {', '.join(fields)}")
                values = [given[field] for field in fields]
            return _new(cls, values)

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changes):
            made = type(self)._make(map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"{type(self).__name__} takes {', '.join(self._fields)}")
            return made

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            inner = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({inner})"

    class _RecordType(type):
        """Turns the annotations of a class body into the fields of a tuple."""

        def __new__(mcls, name, bases, body):
            if not bases:
                return super().__new__(mcls, name, bases, body)
            fields = tuple(body.pop("__annotations__", ()))
            defaults = {field: body.pop(field) for field in fields if field in body}
            getters = {field: _getter(place, "") for place, field in enumerate(fields)}
            known = {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            made = type(name, (_Values,), {**getters, **known, **body})
            # From a sequence of the right length, without a Python call: for rows of a
            # database, and where each write of a store makes one.
            made._make = partial(_new, made)
            return made

    class Record(metaclass=_RecordType):
        """Base of every record: annotated names become the fields of a named tuple."""
