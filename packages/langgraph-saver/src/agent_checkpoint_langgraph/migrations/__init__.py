"""The saver's tables, for each database: what ``migrate-store`` makes them with elsewhere."""

from __future__ import annotations

from pathlib import Path


def migrations() -> dict[str, list[str]]:
    """The migration files by dialect, in their order."""
    files: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parent.glob("*/*.sql")):
        files.setdefault(file.parent.name, []).append(str(file))
    return files
