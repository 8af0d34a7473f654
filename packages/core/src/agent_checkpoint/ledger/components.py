"""Which version each component's tables are at. The table itself comes with the empty store."""

from __future__ import annotations

from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Reader, Transaction

VERSION = """
SELECT version FROM components
WHERE component = ?
"""

SET_VERSION = """
INSERT INTO components (component, version, package, changed_at)
VALUES (?, ?, ?, ?)
ON CONFLICT (component) DO UPDATE SET
version = excluded.version, package = excluded.package, changed_at = excluded.changed_at
"""

# A store that was moved away says where to, in place of a version of the
# package, and whose seal it is, in place of a version.
SEAL = """
INSERT INTO components (component, version, package, changed_at)
VALUES ('sealed', ?, ?, ?)
"""

MARK_SEAL = """
UPDATE components SET version = ?
WHERE component = 'sealed'
"""

UNSEAL = """
DELETE FROM components
WHERE component = 'sealed' AND version = ?
"""

# What is at that place, by its own word: a name may lead elsewhere later.
NOTE_WHERE = """
INSERT INTO components (component, version, package, changed_at)
VALUES ('sealed-where', 0, ?, ?)
"""

FORGET_WHERE = """
DELETE FROM components
WHERE component = 'sealed-where'
"""

MOVED_WHERE = """
SELECT package FROM components
WHERE component = 'sealed-where'
"""

SEALED = """
SELECT package FROM components
WHERE component = 'sealed'
"""

ALL = """
SELECT component, version, package FROM components
WHERE component NOT IN ('sealed', 'sealed-where')
ORDER BY component
"""


def version(reader: Reader, component: str) -> int:
    """The version of a component's tables; 0 when it has none."""
    found = reader.rows(VERSION, (component,))
    return int(found[0][0]) if found else 0


def set_version(transaction: Transaction, component: str, number: int) -> None:
    """Note that a component's tables are at this version now."""
    transaction.run(SET_VERSION, (component, number, __version__, transaction.moment.wall_ns))


def moved_to(reader: Reader) -> str | None:
    """Where the store was moved to; None when it was not."""
    found = reader.rows(SEALED)
    return found[0][0] if found else None


def moved_where(reader: Reader) -> str | None:
    """What was at that place, by its own word; None when it was not moved, or by an earlier version."""
    found = reader.rows(MOVED_WHERE)
    return found[0][0] if found else None


def seal(transaction: Transaction, place: str, where: str, mark: int) -> None:
    """Note that the store was moved, and by whom."""
    transaction.run(SEAL, (mark, place, transaction.moment.wall_ns))
    transaction.run(NOTE_WHERE, (where, transaction.moment.wall_ns))


def mark_seal(transaction: Transaction, mark: int) -> None:
    """Take over a seal: only who has this mark may take it back."""
    transaction.run(MARK_SEAL, (mark,))


def unseal(transaction: Transaction, mark: int) -> bool:
    """Take the seal back, if it has this mark; whether it had."""
    taken_back = transaction.run(UNSEAL, (mark,)) > 0
    if taken_back:
        transaction.run(FORGET_WHERE)
    return taken_back


def everyone(reader: Reader) -> list[tuple[str, int, str]]:
    """Every component with its version and the package version that brought it there."""
    return [(component, number, package) for component, number, package in reader.rows(ALL)]
