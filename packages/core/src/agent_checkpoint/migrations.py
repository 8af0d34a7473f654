"""Bringing the tables of core and of adapters up to date, in core's one path."""

from __future__ import annotations

import os
import re

from agent_checkpoint import names
from agent_checkpoint.database import ORDINARY, Terms
from agent_checkpoint.errors import schema_version_error
from agent_checkpoint.ledger import components
from agent_checkpoint.records import Happened
from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent_checkpoint.change import Change, Changes

CORE = "core"
MIGRATING = Terms(migrating=True)
_NUMBERED = r"([0-9]{4})_[a-z0-9_]+\.sql"


def migrate(
    changes: Changes, dialect: str, component: str, files: Mapping[str, Sequence[str | os.PathLike[str]]]
) -> int:
    """Run the migrations that a component's tables have not seen; the version they were at.

    Raises:
        NewerSchemaError: the tables are of a later version than ``files`` knows.
        InvalidInputError: no files for this dialect, or their numbers have a gap.
    """
    names.name("component", component)
    scripts = _scripts(dialect, files)

    def decide(change: Change) -> int:
        return _run(change, component, scripts)

    return changes.run((f"component:{component}",), decide, terms=MIGRATING if component == CORE else ORDINARY)  # type: ignore[no-any-return]


def migrate_in(
    change: Change, dialect: str, component: str, files: Mapping[str, Sequence[str | os.PathLike[str]]]
) -> int:
    """The same as a part of a change."""
    return _run(change, component, _scripts(dialect, files))


def _scripts(dialect: str, files: Mapping[str, Sequence[str | os.PathLike[str]]]) -> list[str]:
    if dialect not in files:
        names.invalid("files", f"must name the migrations for {dialect}, not only for {', '.join(files)}")
    return read(files[dialect])


def _run(change: Change, component: str, scripts: Sequence[str]) -> int:
    found = components.version(change.transaction, component)
    if found > len(scripts):
        raise schema_version_error(component, found, len(scripts))
    for script in scripts[found:]:
        change.transaction.script(script)
    if found < len(scripts):
        components.set_version(change.transaction, component, len(scripts))
        kind = "store.initialized" if component == CORE and found == 0 else "store.migrated"
        detail = {
            "component": component,
            "from_version": found,
            "to_version": len(scripts),
            "package": __version__,
        }
        change.happened.append(Happened(kind, detail=detail))
    return found


def read(files: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The scripts in order; the files must be numbered 0001_…, 0002_…, without a gap."""
    ordered = sorted((os.fspath(file) for file in files), key=os.path.basename)
    for number, file in enumerate(ordered, start=1):
        match = re.fullmatch(_NUMBERED, os.path.basename(file))
        if match is None or int(match[1]) != number:
            names.invalid(
                "files", f"must be 0001_name.sql, 0002_name.sql, … without a gap, not {os.path.basename(file)!r}"
            )
    scripts = []
    for file in ordered:
        with open(file, encoding="utf-8") as source:
            scripts.append(source.read())
    return scripts
