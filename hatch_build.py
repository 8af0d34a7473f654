"""What pip sees when the root is installed as an editable.

A standard install finds core by the URL of this tree. pip refuses that URL
beside an editable install of core, so there the bare name must do.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EditableNamesNoUrl(BuildHookInterface[Any]):
    """Drops the URLs from what an editable install of the root requires."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 -- hatchling's signature
        """Called before each build; ``version`` is "standard" or "editable"."""
        if version == "editable":
            core = self.metadata.core
            for required in (core.dependencies, *core.optional_dependencies.values()):
                required[:] = [each.partition("@")[0].strip() for each in required]
