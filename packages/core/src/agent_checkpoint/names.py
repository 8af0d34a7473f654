"""The limits of names and numbers; every error names the field and the rule."""

from __future__ import annotations

from agent_checkpoint.errors import InvalidInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

MAX_NAME_BYTES = 512
MAX_TOKEN = 2**63 - 1
MIN_TTL_NS = 100_000_000  # 0.1 s
MAX_TTL_NS = 30 * 86_400 * 1_000_000_000  # 30 days
NS = 1_000_000_000
INFINITY = float("inf")


class Nothing:
    """What an argument is that was not given, where None is a value."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Any = Nothing()


def invalid(field: str, rule: str, **facts: Any) -> NoReturn:
    """Raise ``InvalidInputError``: ``field`` breaks ``rule``."""
    raise InvalidInputError(f"{field}: {rule}", field=field, rule=rule, **facts)


def name(field: str, value: object) -> str:
    """A scope, owner or workflow: 1-512 UTF-8 bytes without control characters."""
    # The cheap proof for nearly every name; the rest is looked at closely.
    if type(value) is str and value.isascii() and value.isprintable() and 1 <= len(value) <= MAX_NAME_BYTES:
        return value
    if not isinstance(value, str):
        invalid(field, f"must be a string, not {type(value).__name__}")
    for character in value:
        if character < " " or "\x7f" <= character <= "\x9f":
            invalid(field, f"must not contain control characters (U+{ord(character):04X})")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        invalid(field, "must be valid Unicode, without lone surrogates")
    if not 1 <= size <= MAX_NAME_BYTES:
        invalid(field, f"must be 1 to {MAX_NAME_BYTES} UTF-8 bytes long, not {size}")
    return str(value)


def text(field: str, value: object) -> str:
    """A sentence for the record, such as a reason: the same rule as for names."""
    return name(field, value)


def path(field: str, value: object) -> str:
    """Where a file is, or is to be: whatever an operating system could take as a path."""
    if type(value) is not str or not value or "\0" in value:
        invalid(field, "must be a path, without a NUL")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        invalid(field, "must be valid Unicode, without lone surrogates")
    return value


def integer(field: str, value: object, least: int, most: int = MAX_TOKEN) -> int:
    """A whole number from ``least`` to ``most``; booleans are not numbers."""
    if type(value) is not int:
        invalid(field, f"must be an integer, not {type(value).__name__}")
    if not least <= value <= most:
        invalid(field, f"must be from {least} to {most}")
    return value


def ttl_ns(value: object) -> int:
    """A lease's length, given in seconds, as nanoseconds rounded up."""
    seconds = real("ttl_seconds", value)
    # Compared before the conversion: 1e300 seconds is a refusal, not a slow bignum.
    if not MIN_TTL_NS <= seconds * NS <= MAX_TTL_NS:
        invalid("ttl_seconds", f"must be from {MIN_TTL_NS / NS:g} to {MAX_TTL_NS // NS} seconds (30 days)")
    return -int(-seconds * NS // 1)


def real(field: str, value: object) -> float:
    """A finite number of seconds; booleans are not numbers."""
    if type(value) is not int and type(value) is not float:
        invalid(field, f"must be a number, not {type(value).__name__}")
    if value != value or value == INFINITY or value == -INFINITY:
        invalid(field, "must be a finite number")
    return value


def wait_seconds(value: object) -> float:
    """How long to wait: 0 or more seconds, infinity for ever."""
    if value == INFINITY:
        return INFINITY
    try:
        seconds = float(real("wait_seconds", value))
    except OverflowError:
        invalid("wait_seconds", "must be a number of seconds that is not that large, or infinity")
    if seconds < 0:
        invalid("wait_seconds", "must be 0 or more seconds, or infinity (in the shell: forever)")
    return seconds


def flag(field: str, value: object) -> bool:
    """True or False, nothing that merely acts like it."""
    if type(value) is not bool:
        invalid(field, f"must be True or False, not {type(value).__name__}")
    return value


def aware(field: str, value: object) -> None:
    """A time that means the same everywhere: a datetime with a time zone."""
    if getattr(value, "tzinfo", None) is None or not hasattr(value, "timestamp"):
        invalid(field, f"must be a datetime with a time zone, not {value!r:.60}")
