"""Programs and torches in folders, as little of them as a search needs."""

import os
from pathlib import Path

from sandbox import write

TORCHRUN = "import sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"


def torch_in(folder: Path, version: str | None) -> None:
    """Put a torch into a folder: as little of it as there must be to be imported."""
    package = folder / "torch"
    text = "from .version import __version__\n" if version else "__version__ = 'unknown'\n"
    write(package / "__init__.py", text)
    if version:
        lines = f"from typing import Optional\n__version__ = '{version}'\ndebug = False\n"
        write(package / "version.py", lines)


def path_of(*folders: Path) -> dict[str, str]:
    return {"PATH": os.pathsep.join(map(str, folders)), "HOME": "/nonexistent"}
