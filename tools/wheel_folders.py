"""Build hook of the wheel: maps folders to packages, but not in an editable installation."""

from __future__ import annotations

from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class FolderMapping(BuildHookInterface[BuilderConfig]):
    """Includes the folders of the table `folders` under the names of their packages.

    An editable installation finds the packages by the path of the repository. Copies of them would
    be imported in their place, and be out of date after the next change.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders to a wheel that is not editable."""
        if version == "standard":
            build_data["force_include"].update(self.config["folders"])
