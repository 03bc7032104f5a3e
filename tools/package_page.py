"""The description of the package, for a package index: README.md, without dead links.

An index shows the README alone. A link into the repository becomes the name of the file, which the
source distribution has. Hatchling calls this; see pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_END = """
The files named here are in the source distribution:
`pip download --no-deps --no-binary saferun saferun`.
"""


class PackagePage(MetadataHookInterface):
    """Makes the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the description into a package's metadata."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(r"\[([^]]+)]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", readme) + _END
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
