"""JSON in and out: what a payload may hold, and how it is stored.

Whatever passes ``encode`` comes back from ``decode`` as it went in: stored text
is ASCII-escaped JSON, integers are exact, reals are doubles, keys are unique.
Tuples are taken as arrays and come back as lists.
"""

from __future__ import annotations

import json
import re
from math import isfinite

from agent_checkpoint.names import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_BYTES = 16 * 1024 * 1024
MAX_METADATA_BYTES = 64 * 1024
MAX_DEPTH = 200
MAX_DIGITS = 4_000  # below CPython's own limit for int <-> str conversion, 4,300
_TOO_BIG = 10**MAX_DIGITS
_SURE_BITS = _TOO_BIG.bit_length() - 1

dump = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


class _Bad(Exception):  # noqa: N818 -- never leaves this module
    """A rule is broken at the path being collected, innermost part first."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self.path: list[str] = []


class Encoded(dict[str, object]):
    """An object with its stored text, so that it is encoded once."""

    text = "{}"


def encode(field: str, value: object, max_bytes: int = MAX_BYTES) -> str:
    """The stored text of a JSON value.

    Raises:
        InvalidInputError: the value breaks a rule; the error names the path in it.
    """
    try:
        _check(value, MAX_DEPTH)
    except _Bad as bad:
        _refuse(field, bad)
    except RecursionError:
        invalid(field, "must not nest deeper than the caller's recursion limit allows")
    stored = dump(value)
    if len(stored) > max_bytes:
        invalid(field, f"must be at most {max_bytes} bytes of JSON, not {len(stored)}")
    return stored


def encode_object(field: str, value: object, max_bytes: int = MAX_BYTES) -> str:
    """The stored text of a JSON object; None is the empty object."""
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        invalid(field, f"must be a JSON object, not {type(value).__name__}")
    return encode(field, value, max_bytes) if value else "{}"


def decode(stored: str) -> Any:
    """The value of a stored text."""
    return json.loads(stored)


def parse(field: str, source: str | bytes) -> Any:
    """The value of JSON text from outside, under the rules of a payload.

    Raises:
        InvalidInputError: not JSON, or JSON that would not come back as it went in.
    """
    if isinstance(source, bytes):
        try:
            source = source.decode()
        except UnicodeDecodeError as error:
            invalid(field, f"must be UTF-8 (byte {error.start} is not)")
    if source.startswith("\ufeff"):
        invalid(field, "must not start with a byte order mark")
    try:
        value = json.loads(
            source,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_double,
            parse_int=_exact,
        )
    except _Bad as bad:
        _refuse(field, bad)
    except RecursionError:
        invalid(field, f"must not nest deeper than {MAX_DEPTH} levels")
    except ValueError as error:
        invalid(field, f"must be JSON: {error}")
    return value


def _check(value: object, depth: int) -> None:
    kind = type(value)
    if kind is str:
        _check_text(value)  # type: ignore[arg-type]
    elif kind is bool or value is None:
        return
    elif kind is dict or kind is list or kind is tuple:
        _check_container(value, depth)
    elif kind is int:
        assert isinstance(value, int)
        if value.bit_length() > _SURE_BITS and abs(value) >= _TOO_BIG:
            raise _Bad(f"must have at most {MAX_DIGITS} digits")
    elif kind is float:
        assert isinstance(value, float)
        if not isfinite(value):
            raise _Bad("must be a finite number, JSON has no NaN or Infinity")
    elif isinstance(value, (str, int, float, dict, list, tuple)):
        # An enum or a subclass would come back as another type.
        raise _Bad(f"must be a plain JSON value, not {kind.__name__}")
    else:
        raise _Bad(f"must be a JSON value, not {kind.__name__}")


def _check_text(text: str) -> None:
    """Two surrogates that make a pair would come back as one character; one alone comes back."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        if re.search("[\ud800-\udbff][\udc00-\udfff]", text):
            raise _Bad("must not spell a character as a pair of surrogates") from None


def _check_container(value: Any, depth: int) -> None:
    if depth == 0:
        raise _Bad(f"must not nest deeper than {MAX_DEPTH} levels")
    items = value.items() if type(value) is dict else enumerate(value)
    for key, part in items:
        try:
            if type(value) is dict and type(key) is not str:
                raise _Bad(f"must have a string as key, not {type(key).__name__}")
            if type(key) is str:
                _check_text(key)
            _check(part, depth - 1)
        except _Bad as bad:
            bad.path.append(str(key))
            raise


def _refuse(field: str, bad: _Bad) -> NoReturn:
    path = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in reversed(bad.path))
    shown = path if len(path) <= 200 else path[:200] + "…"
    invalid(field, f"{bad.rule} (at {shown})" if path else bad.rule, path=shown)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Bad(f"must not repeat the key {key!r:.80} in one object")
            seen.add(key)
    return value


def _no_constant(constant: str) -> NoReturn:
    raise _Bad(f"must be a finite number, not {constant}")


def _double(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise _Bad(f"must fit a double, {digits:.40} does not")
    return value


def _exact(digits: str) -> int:
    if len(digits) > MAX_DIGITS + digits.startswith("-"):
        raise _Bad(f"must have at most {MAX_DIGITS} digits")
    return int(digits)
