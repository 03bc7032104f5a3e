"""The description of the package, for a package index: README.md, without dead links.

An index shows the README alone. A link into the repository becomes the name of the file, which the
source distribution has, and the pictures are left out. Once the project has an address it stands in
ADDRESS: links and pictures lead there then, `[project.urls]` are set, and

    python tools/package_page.py

writes the README's badges and its line to install. Hatchling calls this; see pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = ""  # "https://github.com/OWNER/saferun"

_ROOT = Path(__file__).resolve().parent.parent
_INSTALL = re.compile(r"(<!-- install: .*? -->\n).*?(<!-- end of install -->\n)", re.DOTALL)
_PICTURES = re.compile(r"<!-- pictures: .*?<!-- end of pictures -->\n", re.DOTALL)
_LINK = re.compile(r"\[([^]]+)]\((?!https?:)([^)]+)\)")
_NO_TORCH = "it brings no torch: the torchrun on your PATH decides"
_END = """
The files named here are in the source distribution:
`pip download --no-deps --no-binary saferun saferun`.
"""


class PackagePage(MetadataHookInterface):
    """Makes the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the description and the addresses into a package's metadata."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": page(readme, ADDRESS)}
        if ADDRESS:
            metadata["urls"] = urls(ADDRESS)


def page(readme: str, address: str) -> str:
    """Return the README as an index shows it.

    Args:
        readme: the file's text.
        address: the project's; "" where it has none.
    """
    if address:
        text = _LINK.sub(rf"[\1]({address}/blob/main/\2)", readme)
        return re.sub(r'(srcset|src)="(?!https?:)', rf'\1="{address}/raw/main/', text)
    return _LINK.sub(r"\1 (`\2`)", _PICTURES.sub("", readme)) + _END


def urls(address: str) -> dict[str, str]:
    """Return what `[project.urls]` would have."""
    return {
        "Homepage": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def with_address(readme: str, address: str) -> str:
    """Return the README with the line that installs the package, and its badges.

    Args:
        readme: the file's text.
        address: the project's; "" where it has none: a clone is installed then.
    """
    text = f"    pip install .        # in a clone; {_NO_TORCH}\n"
    if address:
        badge = f"[![tests]({address}/actions/workflows/test.yml/badge.svg)]({address}/actions)"
        text = f"{badge}\n\n    pip install git+{address}    # {_NO_TORCH}\n"
    return _INSTALL.sub(lambda found: f"{found[1]}{text}{found[2]}", readme)


if __name__ == "__main__":
    path = _ROOT / "README.md"
    path.write_text(with_address(path.read_text(encoding="utf-8"), ADDRESS), encoding="utf-8")
