"""Is the store sound? What the database says of itself, and what surrounds it."""

from __future__ import annotations

import os

from agent_checkpoint import plugins as plugin_rules
from agent_checkpoint import retention
from agent_checkpoint.errors import StorageError
from agent_checkpoint.ledger import components, soundness
from agent_checkpoint.records import Check
from agent_checkpoint.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_checkpoint.database import Database
    from agent_checkpoint.plugins import Plugins


# Damaged rows that are named; there may be more.
SHOWN = 5


def examine(database: Database, plugins: Plugins) -> list[Check]:
    """Every check, in the order in which a person would ask."""
    return [
        Check("package_version", "ok", __version__, "agent-checkpoint-core"),
        *database.health(),
        _schema(database),
        _sums(database),
        _growth(database),
        _plugins(plugins),
    ]


def _schema(database: Database) -> Check:
    try:
        with database.read() as reader:
            found, moved = components.everyone(reader), components.moved_to(reader)
    except StorageError as error:
        return Check("schema", "broken", None, f"{error}; {error.hint}")
    if moved is not None:
        return Check("schema", "warning", None, f"the store was moved to {moved}, and takes no write any more")
    versions = {component: version for component, version, _ in found}
    return Check("schema", "ok", versions, "the tables are of the version that this package writes")


def _sums(database: Database) -> Check:
    """Every row of core's tables, read in pages: nobody waits for it."""
    looked = soundness.examine(database)
    value = {"rows": looked.rows, "without": looked.without, "damaged": looked.damaged[:SHOWN]}
    if looked.damaged:
        message = f"{'; '.join(looked.damaged[:SHOWN])}: keep the file and its -wal, restore from a backup"
        return Check("sums", "broken", value, message)
    if looked.without:
        message = f"{looked.without} rows are from before rows had sums, and get one when they are written again"
        return Check("sums", "ok", value, message)
    return Check("sums", "ok", value, "every row is as it was written")


def _growth(database: Database) -> Check:
    try:
        with database.read() as reader:
            grown = retention.growth(reader)
    except StorageError as error:
        return Check("growth", "broken", None, str(error))
    return Check("growth", "ok", grown, "'prune --apply-policy' removes what the policy does not keep")


def _plugins(plugins: Plugins) -> Check:
    report = plugins.report()
    broken = [each["plugin"] for each in report if "error" in each]
    if broken:
        message = f"{', '.join(broken)} cannot be loaded: every protected write is refused until that is mended"
        return Check("plugins", "broken", report, message)
    wanted = {part.strip() for part in os.environ.get(plugin_rules.RESTRICT, "").split(",")} - {"", "off"}
    missing = sorted(wanted - {each["plugin"] for each in report})
    if missing:
        return Check("plugins", "warning", report, f"{plugin_rules.RESTRICT} names {', '.join(missing)}: not installed")
    return Check("plugins", "ok", report, "")
